"""The state file: what is written is there after a kill, and what is damaged or foreign is refused."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import (
    BadOption,
    BadState,
    BaselineFailed,
    Cancelled,
    EngineRefused,
    Failure,
    OutputError,
    rewording,
)
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.records import RangesRecord
from qdqtune.tuning.store import Caveat, Store, read_journal
from qdqtune.types import Measurement
from refusals import refusal
from runs import room_for

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
        return {key: store.get(key, kinds.get(key.partition(":")[0], float)) for key in store.journal.lines}


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


def test_a_value_is_computed_once(path: Path) -> None:
    asked = []

    def compute() -> float:
        asked.append(1)
        return 2.5

    for _ in range(2):
        with Store(path, RUN) as store:
            assert [store.memo("x", float, compute) for _ in range(2)] == [2.5] * 2
    assert len(asked) == 1


@pytest.mark.parametrize(("stage", "sessions"), [("build", 1), ("output", 1), ("timeout", 3), ("crash", 3)])
def test_a_failure_takes_the_place_of_a_value_for_this_session_only_if_it_may_pass(
    path: Path, stage: Any, sessions: int
) -> None:
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
def test_what_was_found_in_a_hurry_or_lacks_something_is_computed_anew_by_the_next_session(
    path: Path, caveat: Caveat
) -> None:
    with Store(path, RUN) as store:
        assert [store.memo("x", float, lambda: value, caveat) for value in (1.0, 2.0)] == [1.0] * 2  # noqa: B023
    with Store(path, RUN) as store:
        assert store.hurried("x", float) == (1.0 if caveat.is_hurried else None)
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
            assert not store.journal.lines


def test_a_flipped_byte_anywhere_is_refused(path: Path) -> None:
    whole = fill(path)
    for place in range(len(whole) - 1):  # without its last line break the last record is one that was cut off
        flipped = whole[place] ^ (0x01, 0x20, 0x80)[place % 3]
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(BadState, match=r"damaged|no state file") as refused:
            Store(path, RUN)
        assert len(str(refused.value).splitlines()) == 1


def test_the_damaged_line_is_named_and_the_file_left_as_it_is(path: Path) -> None:
    lines = fill(path).splitlines(keepends=True)
    damaged = b"".join([*lines[:2], lines[2].replace(b'"a": 1e-05', b'"a": 1e-04'), *lines[3:]])
    path.write_bytes(damaged)
    with pytest.raises(BadState, match="line 3 is damaged"):
        Store(path, RUN)
    assert path.read_bytes() == damaged
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(BadState, match="no state file of this version"):
        Store(path, RUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_type": "fp8", "model": "ffff"}, "made with another model"),
        ({"quant_type": "fp8"}, "made with quant type int8, now it is fp8"),
        ({"input_shapes": {"x": [2, 3]}}, r"made with input shapes x \[1, 3\], now it is \[2, 3\]"),
        ({"input_shapes": {"x": [1, 3], "z": [4]}}, r"made with input shapes z unset, now it is \[4\]"),
        ({"mode": None}, "made with mode region, now it is unset"),
    ],
)
def test_another_fingerprint_is_refused_with_the_first_difference_named(path: Path, change: Any, message: str) -> None:
    before = fill(path)
    with pytest.raises(BadState, match=message) as refused:
        Store(path, msgspec.defstruct("Asked", list(asked := RUN | change))(**asked))
    assert len(str(refused.value).splitlines()) == 1
    assert path.read_bytes() == before
    assert found(path) == RECORDS, "what was refused holds no lock"


def ended_by(error: BaseException, path: Path, records: dict[str, Any]) -> None:
    with Store(path, RUN) as store:
        for key, value in records.items():
            store.put(key, value)
        raise error


@pytest.mark.parametrize("error", [BadOption("wrong"), BaselineFailed("wrong")])
def test_a_run_that_its_input_ends_before_the_first_candidate_leaves_the_file_to_the_corrected_command(
    path: Path, error: Exception
) -> None:
    with pytest.raises(type(error)):
        ended_by(error, path, FIRST)
    with Store(path, RUN | {"model": "ffff"}) as store:
        assert not store.journal.lines


@pytest.mark.parametrize(
    ("error", "records"), [(Cancelled("stopped"), {}), (KeyboardInterrupt(), {}), (BadOption("wrong"), RECORDS)]
)
def test_an_interrupted_run_and_one_with_candidates_keep_their_file(
    path: Path, error: BaseException, records: dict[str, Any]
) -> None:
    with pytest.raises(type(error)):
        ended_by(error, path, records)
    assert found(path) == records
    with pytest.raises(BadState, match="with another model"):
        Store(path, RUN | {"model": "ffff"})


def test_restart_forgets_other_runs_and_damage(path: Path) -> None:
    path.write_bytes(fill(path)[:-40] + b"rubbish\n")
    with Store(path, RUN | {"model": "ffff"}, restart=True) as store:
        assert not store.journal.lines
        store.put(*MORE)
    with pytest.raises(BadState, match="with another model"):
        Store(path, RUN)


@pytest.mark.parametrize("content", [b"my notes", b"\x08\x09model", b"{}\n", b"a\nb\n"])
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


def test_an_unwritable_place_is_an_output_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "state.yaml"):
        with pytest.raises(OutputError, match="cannot write"):
            Store(place, RUN)


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


def test_the_order_of_a_set_makes_no_other_run(path: Path) -> None:
    """In every process the names in a set come in another order."""
    names = [f"Op{n}" for n in range(20)]
    with Store(path, {"rounds": Plan(), "ops": frozenset(names)}):
        pass
    with Store(path, {"rounds": Plan(), "ops": sorted(names)}) as store:
        assert not store.journal.lines
    journal = read_journal(path)
    assert journal is not None
    assert journal.fingerprint["ops"] == sorted(names)


def test_what_the_machine_ends_keeps_its_file(path: Path) -> None:
    with pytest.raises(BaselineFailed) as ended, rewording("it failed", BaselineFailed):
        raise EngineRefused(Failure("crash", "killed"))
    with pytest.raises(BaselineFailed):
        ended_by(ended.value, path, FIRST)
    assert found(path) == FIRST


def test_a_store_forgets_what_was_measured_and_keeps_what_the_run_is(path: Path) -> None:
    fill(path)
    with Store(path, RUN) as store:
        store.forget()
        assert not store.journal.lines
        store.put("ranges", RECORDS["ranges"])
    assert found(path) == FIRST
