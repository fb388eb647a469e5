"""The state file: what is written is there after a kill, and what is damaged or foreign is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadState, OutputError
from qdqtune.graph.equalization import Factor
from qdqtune.tuning.store import (
    Store,
    pack_placement,
    pack_ranges,
    pack_result,
    unpack_placement,
    unpack_ranges,
    unpack_result,
)
from qdqtune.types import Edge, Failure, Measurement, Placement
from runs import room_for

DATA = Path(__file__).parents[1] / "data"
RUN = {"mode": "region", "quant type": "int8", "input shapes": {"x": [1, 3]}, "model": "0123abcd"}
RECORDS: dict[str, dict[str, Any]] = {
    "ranges": {"activations": {"x": [-1e-05, 0.1 + 0.2]}, "weights": {}},
    "job:1": {"origin": "compute", "samples": [1e-05, 2.5e-05, 1e22, 5e-324], "sqnr_db": None, "accepted": True},
    "job:2": {"origin": 'a "quoted" \\ name: 3e5, "crc": "0"}', "tensor": "größe\n/x/1e-05:0", "count": -7},
}
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.yaml"


def fill(path: Path) -> bytes:
    with Store(path, RUN) as store:
        for key, record in RECORDS.items():
            store.put(key, record)
    return path.read_bytes()


def found(path: Path) -> dict[str, Any]:
    with Store(path, RUN) as store:
        return {r["key"]: {k: v for k, v in r.items() if k != "key"} for r in store.records()}


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_records_are_found_again_in_their_order(path: Path) -> None:
    fill(path)
    assert found(path) == RECORDS
    assert list(found(path)) == list(RECORDS)
    with Store(path, RUN) as store:
        assert len(store) == 3
        assert store.get("job:2") == {"key": "job:2", **RECORDS["job:2"]}
        assert store.get("job:3") is None


def test_a_later_run_appends_and_touches_nothing_before(path: Path) -> None:
    before = fill(path)
    with Store(path, RUN) as store:
        store.put("job:3", {"more": 1})
    assert path.read_bytes().startswith(before)
    assert found(path) == RECORDS | {"job:3": {"more": 1}}


def test_the_file_is_yaml_with_the_same_values(path: Path) -> None:
    fill(path)
    head, *rest = yaml.safe_load(path.read_text())
    assert head["fingerprint"] == RUN
    assert {r["key"]: {k: v for k, v in r.items() if k not in ("key", "crc")} for r in rest} == RECORDS


def test_every_line_is_json_for_other_readers(path: Path) -> None:
    fill(path)
    lines = [json.loads(line.removeprefix("- ")) for line in path.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["run", *RECORDS]


def test_a_record_that_is_cut_off_anywhere_is_dropped_and_written_anew(path: Path) -> None:
    whole = fill(path)
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    kept = {k: v for k, v in RECORDS.items() if k != "job:2"}
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert found(path) == kept
        assert path.read_bytes() == whole[:start]
        with Store(path, RUN) as store:
            store.put("job:2", RECORDS["job:2"])
        assert path.read_bytes() == whole


def test_a_first_record_that_is_cut_off_anywhere_begins_a_new_run(path: Path) -> None:
    whole = fill(path)
    for end in range(whole.index(b"\n")):
        path.write_bytes(whole[:end])
        assert found(path) == {}


def test_a_flipped_byte_anywhere_is_refused(path: Path) -> None:
    whole = fill(path)
    for place in range(len(whole) - 1):  # without its last line break the last record is one that was cut off
        flipped = whole[place] ^ (0x01, 0x20, 0x80)[place % 3]
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(BadState, match="damaged") as refusal:
            Store(path, RUN)
        assert len(str(refusal.value).splitlines()) == 1
        assert "--restart" in str(refusal.value)


def test_the_damaged_line_is_named_and_the_file_left_as_it_is(path: Path) -> None:
    lines = fill(path).splitlines(keepends=True)
    damaged = b"".join([*lines[:2], lines[2].replace(b"compute", b"commute"), *lines[3:]])
    path.write_bytes(damaged)
    with pytest.raises(BadState, match="line 3 is damaged"):
        Store(path, RUN)
    assert path.read_bytes() == damaged


def test_a_file_without_its_first_record_is_refused(path: Path) -> None:
    path.write_bytes(fill(path).split(b"\n", 1)[1])
    with pytest.raises(BadState, match="no state file of this version"):
        Store(path, RUN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "ffff"}, "made with another model, or the file has changed since then: use the same"),
        ({"quant type": "fp8", "model": "ffff"}, "made with quant type int8, now it is fp8"),
        ({"input shapes": {"x": [2, 3]}}, r"made with input shapes \{'x': \[1, 3\]\}, now it is \{'x': \[2, 3\]\}"),
        ({"input shapes": {"x": [1, 3], "z": [4]}}, r"made with input shapes \{\}, now it is \{'z': \[4\]\}"),
        ({"engine clock": "fast"}, "made with engine clock unset, now it is fast"),
    ],
)
def test_another_fingerprint_is_refused_with_the_first_difference_named(path: Path, change: Any, message: str) -> None:
    before = fill(path)
    with pytest.raises(BadState, match=message) as refusal:
        Store(path, RUN | change)
    assert len(str(refusal.value).splitlines()) == 1
    assert path.read_bytes() == before


def test_a_fingerprint_that_has_lost_an_entry_is_refused(path: Path) -> None:
    fill(path)
    with pytest.raises(BadState, match="made with mode region, now it is unset"):
        Store(path, {k: v for k, v in RUN.items() if k != "mode"})


def test_restart_forgets_other_runs_and_damage(path: Path) -> None:
    path.write_bytes(fill(path)[:-40] + b"rubbish\n")
    with Store(path, RUN | {"model": "ffff"}, restart=True) as store:
        assert len(store) == 0
        store.put("job:1", {})
    with pytest.raises(BadState, match="with another model"):
        Store(path, RUN)


@pytest.mark.parametrize("content", [b"my notes", b"{}", b"name: value", b"\x08\x09model", b"- {}\n", b"a\nb\n"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(path: Path, content: bytes, restart: bool) -> None:
    path.write_bytes(content)
    with pytest.raises(BadState):
        Store(path, RUN, restart=restart)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0, 1, 5, 15, 30])
def test_restart_takes_a_state_file_that_was_cut_off_anywhere(path: Path, kept: int) -> None:
    path.write_bytes(fill(path)[:kept])
    with Store(path, RUN, restart=True) as store:
        assert len(store) == 0


def test_an_empty_file_begins_a_run(path: Path) -> None:
    path.touch()
    assert found(path) == {}


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


def test_a_store_that_was_refused_holds_no_lock(path: Path) -> None:
    fill(path)
    with pytest.raises(BadState):
        Store(path, RUN | {"model": "ffff"})
    assert found(path) == RECORDS


def test_an_unwritable_place_is_an_output_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "state.yaml"):
        with pytest.raises(OutputError, match="cannot write"):
            Store(place, RUN)


def test_a_full_disk_is_an_output_error_and_leaves_whole_records(path: Path) -> None:
    whole = fill(path)
    with Store(path, RUN) as store:
        with room_for(len(whole) + 20), pytest.raises(OutputError, match=r"cannot write .*state\.yaml"):
            store.put("job:3", {"more": 1})
        assert store.get("job:3") is None
        assert path.read_bytes() == whole
        store.put("job:3", {"more": 2})
    assert found(path) == RECORDS | {"job:3": {"more": 2}}


def test_values_that_json_lacks_are_never_written(path: Path) -> None:
    whole = fill(path)
    with Store(path, RUN) as store, pytest.raises(ValueError):
        store.put("job:3", {"latency": float("inf")})
    assert path.read_bytes() == whole


@given(
    st.frozensets(
        st.builds(Edge, st.text(), st.text(), st.integers(0, 9)) | st.builds(Edge, st.text(), st.just(""), st.just(0))
    )
)
def test_placements_survive(edges: frozenset[Edge]) -> None:
    packed = json.loads(json.dumps(pack_placement(Placement(edges))))
    assert unpack_placement(packed) == Placement(edges)


@given(st.dictionaries(st.text(), st.tuples(finite, finite).map(sorted)), st.dictionaries(st.text(), st.tuples(finite)))
def test_ranges_survive_bit_by_bit(ends: dict[str, list[float]], weights: dict[str, tuple[float, ...]]) -> None:
    factors = (Factor(Edge("w", "layer", 1), (2, 1), (-3, 2)),)
    ranges = Ranges({t: Range(*e) for t, e in ends.items()}, weights, factors=factors)
    again = unpack_ranges(json.loads(json.dumps(pack_ranges(ranges))))
    assert {t: (bits(r.low), bits(r.high)) for t, r in again.activations.items()} == {
        t: (bits(r.low), bits(r.high)) for t, r in ranges.activations.items()
    }
    assert again == ranges


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=50))
def test_samples_survive_bit_by_bit(rounds: list[tuple[float, float]]) -> None:
    measured = Measurement(*zip(*rounds, strict=True))
    again = unpack_result(json.loads(json.dumps(pack_result(measured))))
    assert isinstance(again, Measurement)
    assert [*map(bits, again.a), *map(bits, again.b)] == [*map(bits, measured.a), *map(bits, measured.b)]


def test_samples_pass_through_the_file_bit_by_bit(path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (tuple(10.0 ** rng.integers(-7, 2, 200) * rng.choice([1, rng.random()], 200)) for _ in range(2))
    with Store(path, RUN) as store:
        store.put("job:1", pack_result(Measurement(a, b)))
    again = yaml.safe_load(path.read_text())[1]["samples"]
    assert (again["a"], again["b"]) == (list(a), list(b))
    with Store(path, RUN) as store:
        record = store.get("job:1")
        assert record is not None
        assert unpack_result(record) == Measurement(a, b)


@given(
    st.builds(
        Failure, st.sampled_from(["build", "run", "timeout", "crash", "output", "resources"]), st.text(), st.text()
    )
)
def test_failures_survive(failure: Failure) -> None:
    assert unpack_result(json.loads(json.dumps(pack_result(failure)))) == failure


def test_a_state_file_of_version_1_still_loads(path: Path) -> None:
    path.write_bytes((DATA / "state_v1.yaml").read_bytes())
    head = yaml.safe_load(path.read_text())[0]
    with Store(path, head["fingerprint"]) as store:
        records = list(store.records())
        ranges = unpack_ranges(records[0])
        trials = [r for r in records if r["key"].startswith("trial:")]
        results = [unpack_result(r["result"]) for r in trials]
        placements = [unpack_placement(r["placement"]) for r in trials]
    assert ranges.activations["x"].low < 0 < ranges.activations["x"].high
    assert {type(r) for r in results} == {Measurement, Failure}
    assert all(len(p) for p in placements)
    assert any(r["check"] is not None and r["sqnr_db"] > 20 for r in trials)
    assert any(r["key"].startswith("proof:") for r in records)
