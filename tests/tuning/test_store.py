"""The state file: what is written is there after a kill, and what is damaged or foreign is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_lines import is_refused
from conftest import Call
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import (
    BadOption,
    BadState,
    EngineRefused,
    Failure,
    OutputError,
    QdqtuneError,
)
from qdqtune.numerics.scores import Score, Scores
from qdqtune.search.costs.profiles import SchemeResult
from qdqtune.system.checks import LIST, Stamps
from qdqtune.tuning import store as kinds
from qdqtune.tuning.folder import OutputFolder
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Caveat, Line, RangesRecord, Store, plain
from qdqtune.types import (
    Accuracy,
    CostsByRule,
    Edge,
    Layer,
    Measurement,
    Placement,
    Proposal,
    Times,
    Trial,
    WeightFormat,
)
from refusals import refusal
from runs import contents, mixed, room_for, settings, write
from workers import in_process

RUN = {"mode": "region", "quant_type": "int8", "input_shapes": {"x": [1, 3]}, "model": "0123abcd"}

RECORDS = {
    "ranges": RangesRecord(ranges=Ranges({"x": Range(-1e-05, 0.1 + 0.2)})),
    "noise:0.1": {"a": 1e-05, "b": 2.5e-05, "c": 1e22, "d": 5e-324, '"\\ 3e5, "crc": "0"}': 1.0},
    'noise:a "quoted" \\ name: 3e5, "crc": "0"}': {"größe\n/x/1e-05:0": -7.0},
}
FIRST = {"ranges": RECORDS["ranges"]}
MORE = "more", 1.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.yaml"


def fill(path: Path) -> bytes:
    with Store(path, RUN) as store:
        for key, value in RECORDS.items():
            store.put(key, value)
    return path.read_bytes()


def found(path: Path) -> dict[str, Any]:
    with Store(path, RUN) as store:
        kinds = {"ranges": RangesRecord, "noise": dict[str, float], "measured": Measurement}
        return {key: store.get(key, kinds.get(key.partition(":")[0], float)) for key in store.lines}


def test_values_are_found_again_in_their_order_and_every_line_is_json(path: Path) -> None:
    fill(path)
    assert list(found(path).items()) == list(RECORDS.items())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["run", *RECORDS]
    assert lines[0]["fingerprint"] == RUN
    with Store(path, RUN) as store:
        assert store.get("noise", float) is None
        assert list(store.values("noise:", dict[str, float])) == [key[6:] for key in RECORDS if key != "ranges"]
        with pytest.raises(BadState, match="line 2 is damaged: restore the file"):
            store.get("ranges", float)


@pytest.mark.parametrize(("stage", "sessions"), [("build", 1), ("output", 1), ("timeout", 3), ("crash", 3)])
def test_a_failure_takes_the_place_of_a_value_for_this_session_only_if_it_may_pass(path, stage, sessions):
    asked = []

    def compute() -> float:
        asked.append(1)
        raise EngineRefused(Failure(stage, "no"))

    for _ in range(3):
        with Store(path, RUN) as store:
            for _ in range(2):
                assert refusal(lambda: store.memo("x", float, compute)) == Failure(stage, "no")
    assert len(asked) == sessions


@pytest.mark.parametrize("caveat", [Caveat(is_hurried=True), Caveat(is_lost=True)])
def test_what_was_found_in_a_hurry_or_lacks_something_is_computed_anew_by_the_next_session(path, caveat):
    with Store(path, RUN) as store:
        assert [store.memo("x", float, lambda: value, caveat) for value in (1.0, 2.0)] == [1.0] * 2  # noqa: B023
    with Store(path, RUN) as store:
        assert store.get("x", float) is None
        assert store.memo("x", float, lambda: 3.0) == 3.0
    with Store(path, RUN) as store:
        assert store.get("x", float) == 3.0


def test_a_record_that_is_cut_off_anywhere_is_dropped_and_written_anew(path: Path) -> None:
    whole = fill(path)
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    kept = dict(list(RECORDS.items())[:2])
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert found(path) == kept
        assert path.read_bytes() == whole[:start]
        with Store(path, RUN) as store:
            store.put(*list(RECORDS.items())[2])
        assert path.read_bytes() == whole


def test_a_first_record_that_is_cut_off_anywhere_begins_a_new_run(path: Path) -> None:
    whole = fill(path)
    for end, restart in product(range(whole.index(b"\n")), (False, True)):
        path.write_bytes(whole[:end])
        with Store(path, RUN, restart=restart) as store:
            assert not store.lines


def test_a_flipped_byte_anywhere_is_refused(path: Path) -> None:
    whole = fill(path)
    for place in range(len(whole) - 1):  # without its last line break the last record is one that was cut off
        flipped = whole[place] ^ (0x01, 0x20, 0x80)[place % 3]
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(BadState, match=r"damaged|no state file") as refused:
            Store(path, RUN)
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_type": "fp8", "model": "ffff"}, "made with another model"),
        ({"quant_type": "fp8"}, "made with `quant_type` int8, now it is fp8"),
        ({"input_shapes": {"x": [2, 3]}}, r"made with input shapes x \[1, 3\], now it is \[2, 3\]"),
        ({"input_shapes": {"x": [1, 3], "z": [4]}}, r"made with input shapes z unset, now it is \[4\]"),
        ({"mode": None}, "made with `mode` region, now it is unset"),
    ],
)
def test_another_fingerprint_is_refused_with_the_first_difference_named(path: Path, change: Any, message: str) -> None:
    before = fill(path)
    with pytest.raises(BadState, match=message) as refused:
        Store(path, msgspec.defstruct("Asked", list(asked := RUN | change))(**asked))
    assert len(str(refused.value).splitlines()) == 1
    assert path.read_bytes() == before
    assert found(path) == RECORDS, "what was refused holds no lock"


@pytest.mark.parametrize("records", [{}, FIRST])
def test_a_file_without_a_candidate_serves_the_corrected_command(path: Path, records: dict[str, Any]) -> None:
    with Store(path, RUN) as store:
        for key, value in records.items():
            store.put(key, value)
    assert found(path) == records, "the same command goes on"
    with Store(path, RUN | {"model": "ffff"}) as store:
        assert not store.lines
        store.put(*MORE)
    with pytest.raises(BadState, match="with another model"):
        Store(path, RUN)


def test_a_file_without_a_candidate_does_not_serve_another_model(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"

    def opened(content: bytes, **changes: str) -> Store:
        model.write_bytes(content)
        return Store(path, RUN | changes, given=Stamps.of([model]))

    with opened(b"one") as store:
        store.put("ranges", RECORDS["ranges"])
    with pytest.raises(BadState, match="with another model"):
        opened(b"other", model="ffff")
    with opened(b"the same with its weights elsewhere", quant_type="fp8") as store:
        assert not store.lines
        store.put("ranges", RECORDS["ranges"])
    with opened(b"the same with its weights elsewhere", model="of another precision") as store:
        assert not store.lines
    with opened(b"other", model="ffff"):  # as nothing was measured
        pass


def test_restart_forgets_other_runs_and_damage(path: Path) -> None:
    path.write_bytes(fill(path)[:-40] + b"rubbish\n")
    with Store(path, RUN | {"model": "ffff"}, restart=True) as store:
        assert not store.lines
        store.put(*MORE)
    with pytest.raises(BadState, match="with another model"):
        Store(path, RUN)


@pytest.mark.parametrize("content", [b"my notes", b"{}\n"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(path: Path, content: bytes, restart: bool) -> None:
    path.write_bytes(content)
    with pytest.raises(BadState):
        Store(path, RUN, restart=restart)
    assert path.read_bytes() == content


def test_a_file_in_use_is_refused_until_it_is_free(path: Path) -> None:
    fill(path)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        other.stdout.readline()
        for restart in (False, True):
            with pytest.raises(BadState, match="in use by another run"):
                Store(path, RUN, restart=restart)
        other.communicate(b"\n")
    assert found(path) == RECORDS


def test_a_full_disk_is_an_output_error_and_leaves_whole_records(path: Path) -> None:
    whole = fill(path)
    with Store(path, RUN) as store:
        with pytest.raises(ValueError, match="JSON"):
            store.put("more", float("inf"))
        with room_for(len(whole) + 20), pytest.raises(OutputError, match=r"cannot write .*state\.yaml"):
            store.put(*MORE)
        assert store.get("more", float) is None
        assert path.read_bytes() == whole
        store.put(*MORE)
    assert found(path) == RECORDS | dict([MORE])


# Values of a state file: each comes back as it was, bit by bit, and another value anywhere is refused or serves
def again(value: Any) -> Any:
    """A value as it comes back from the file."""
    return Line("key", json.loads(json.dumps(plain(value)))).read(type(value))


MEASURED = Measurement((1.0, 2.0), (2.0, 1.0), (Measurement((1.0, 1.0), (1.0, 1.0)),))
LAYERS = (Layer("a", ("n", "m"), "int8", 0.5, "compute"), Layer("b", (), "", None, "unknown"))
PLACEMENT = Placement.of((Edge("x", "a", 0), Edge("y")), ((Edge("w", "b", 1), WeightFormat.named("w4b32a")),))
EVERY: tuple[Any, ...] = (
    MEASURED,
    Failure("run", "no", "log"),
    Score(0.5, (1.0, 0.0), "top1"),
    RangesRecord(ranges=Ranges({"x": Range(-1e-05, 0.1 + 0.2)}), hurried=("few",)),
    Trial(
        0, Proposal("cut", PLACEMENT, predicted=0.5), Placement(), MEASURED, layers=LAYERS,
        accuracy=Accuracy(20.5, 18.0, 23.0, 0.5, 1.0, 3),
    ),
    Trial(0, Proposal("cut", PLACEMENT), Placement(), Failure("run", "no", "log")),
    Trial(0, Proposal("cut", PLACEMENT), Placement(), CostsByRule(1.0, 2.0)),
    kinds.FloatRecord(
        seconds=0.1, turn_seconds=0.2, build_seconds=1.5, start_seconds=0.0, kinds=("f", "i"),
        scores=Scores({"y": 1}, {"y": 10}, {}, "none"),
    ),
    Times((((1.0, 2.0),), ((2.0, 1.0),)), (0.5, 0.5)),
    SchemeResult("full", PLACEMENT, MEASURED, LAYERS),
    kinds.ConversationRecord(
        baseline_ms=1.0, best=PLACEMENT, best_ms=None, measured={"p": None}, patterns=({"digest": "d", "schemes": []},)
    ),
)  # fmt: skip
"""Values of every kind, with as much as they can hold."""


def test_values_of_every_kind_come_back_as_they_were() -> None:
    returned = tuple(map(again, EVERY))
    assert tuple(map(type, returned)) == tuple(map(type, EVERY))
    ordered = partial(plain, order="deterministic")  # equal sets may come in another order
    assert tuple(map(ordered, returned)) == tuple(map(ordered, EVERY))


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (MEASURED, {"a": [], "b": []}),
        (MEASURED, {"a": [1.0], "b": [1.0, 2.0]}),
        (MEASURED, {"b": [0.0, 1.0]}),
        (MEASURED, {"parts": [plain(Measurement((1.0,), (1.0,)))]}),
        (MEASURED, {"a": ["x", 1.0]}),
        (Accuracy(20.0), {"top1": 1.5}),
        (CostsByRule(1.0, 2.0), {"a": 0.0}),
    ],
)
def test_values_that_no_run_writes_are_refused(value: Any, change: dict[str, Any]) -> None:
    with pytest.raises(BadState, match="is damaged"):
        Line("key", plain(value) | change).read(type(value))


# The folder of a run: it is locked, no name in it leads out of it, and what is not of our making stays
Finished = Callable[[str], Path]
LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic": lambda victim, name: name.symlink_to(victim),
    "to nothing": lambda victim, name: name.symlink_to(victim.with_name("nothing")),
    "to itself": lambda _, name: name.symlink_to(name),
    "relative": lambda victim, name: name.symlink_to(os.path.relpath(victim, name.parent)),
    "hard": lambda victim, name: os.link(victim, name),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The folder of a finished run in a mode, its model beside it."""
    made: dict[str, Path] = {}

    def ran(mode: str) -> Path:
        if mode not in made:
            home = tmp_path_factory.mktemp(mode)
            with in_process():
                tune(asked(write(mixed(), home), mode))
            made[mode] = home
        return made[mode]

    return ran


def asked(model: Path, mode: str) -> Settings:
    if mode == "front":
        return settings(model, mode="cut", builds=14, front=True, min_sqnr=None)
    return settings(model, mode=mode, builds=6)


@pytest.mark.parametrize("mode", ["front", "region", "subgraph"])  # a run of cut mode writes no other names
def test_no_name_of_a_run_leads_out_of_its_folder(mode, finished, tmp_path, request):
    """Each kind of file and each folder that a run writes is a link to a file elsewhere, or lies behind one. Names of a
    kind differ in numbers and digests, and the first stands for all: all are checked in one loop."""
    home, count = shutil.copytree(finished(mode), tmp_path / "home"), 0
    model, victims, aside = home / "model.onnx", tmp_path / "victims", tmp_path / "aside"
    (victims / "folder").mkdir(parents=True)
    names = [path.relative_to(home / "out") for path in sorted((home / "out").rglob("*"))]
    kinds = {re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", str(name)): name for name in reversed(names)}
    for name in kinds.values():
        for kind, link in LINKS.items():
            # Other files are replaced, and a second name keeps the old content.
            is_appended = name.parts[0] == "logs" or name.name in (LIST, "autotuner_state.yaml")
            if kind == "hard" and not ((home / "out" / name).is_file() and is_appended):
                continue
            place = home / "out" / name
            (victims / "file").write_text("mine")
            for inner in place.rglob("*"):
                (victims / "folder" / inner.name).write_text("mine")
            before = contents(victims)
            target = victims / ("folder" if place.is_dir() else "file")
            place.rename(aside)
            link(target, place)
            with pytest.raises(QdqtuneError) as error, OutputFolder(asked(model, mode)):
                pass
            assert error.value.exit_code == 2
            assert "\n" not in str(error.value)
            assert contents(victims) == before, (name, kind)
            assert not (victims / "nothing").exists()
            place.unlink()
            aside.rename(place)
            count += 1
    request.node.add_report_section("call", "links", f"tune --mode {mode}: {count} links, all refused and untouched")


@pytest.mark.usefixtures("workers")
def test_what_ends_a_run_does_not_write_through_links(finished: Finished, tmp_path: Path, call: Call) -> None:
    """`report` in a folder that came from elsewhere."""
    shutil.copytree(finished("front"), tmp_path / "home")
    out, victim = tmp_path / "home" / "out", tmp_path / "victim"
    for kind in ("symbolic", "to nothing"):
        victim.write_text("mine")
        (out / "report.html").unlink(missing_ok=True)
        LINKS[kind](victim, out / "report.html")
        is_refused(call, tmp_path, "", "report", out)
        assert victim.read_text() == "mine"
        (out / "report.html").unlink()
    assert not [path for path in tmp_path.iterdir() if path.name == "nothing"]


@pytest.mark.usefixtures("workers")
def test_parts_of_an_earlier_run_go(model: Path) -> None:
    tune(settings(model, builds=4, mode="subgraph"))
    parts = model.parent / "out" / "subgraphs"
    shutil.copy(parts / "group_001.onnx", parts / "group_009.onnx")
    with (parts.parent / LIST).open("a") as listed:
        listed.write("subgraphs/group_009.onnx\nsubgraphs/../../model.onnx\n")
    tune(settings(model, builds=4, mode="subgraph"))
    assert not (parts / "group_009.onnx").exists()
    assert model.exists()


def test_a_folder_has_one_run_at_a_time(model: Path) -> None:
    with OutputFolder(settings(model)), pytest.raises(BadState, match="in use by another run"):
        OutputFolder(settings(model, state_file=model.parent / "other.yaml"))
    OutputFolder(settings(model)).__exit__()


def test_a_run_that_ends_before_it_has_written_anything_leaves_nothing(tmp_path: Path) -> None:
    model = write(mixed(), tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for out in ("mine", "new/folder"):
        with pytest.raises(BadState), OutputFolder(settings(model, output_dir=tmp_path / out)):
            raise BadState("refused")
    assert sorted(tmp_path.rglob("*")) == before
    with OutputFolder(settings(model, output_dir=tmp_path / "new")):
        (tmp_path / "new" / "logs" / "worker.log").write_text("what the engine has said")
    assert (tmp_path / "new" / LIST).exists()


@pytest.mark.parametrize("end", [10, -3])
def test_a_list_whose_writer_was_killed_is_gone_on_with(model: Path, end: int) -> None:
    told = settings(model)
    with OutputFolder(told) as folder:
        (folder.path / "baseline.onnx").touch()
        expected = (folder.path / LIST).read_bytes()
    (told.output_dir / LIST).write_bytes(expected[:end])
    if end < 0:
        with OutputFolder(told):
            pass
        assert (told.output_dir / LIST).read_bytes() == expected
    else:
        with pytest.raises(BadOption, match=r"baseline\.onnx was there before, and is not of"):
            OutputFolder(told)


@pytest.mark.usefixtures("workers")
def test_a_list_that_is_not_ours_is_left_alone(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    (out / LIST).write_text("mine\n")
    with pytest.raises(Exception, match="is not of qdqtune's making"):
        tune(settings(model))
    assert (out / LIST).read_text() == "mine\n"
