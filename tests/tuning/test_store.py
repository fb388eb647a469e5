"""The state file: what is written is there after a kill, and what is damaged or foreign is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.calibration.equalization import Factor
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadState, OutputError
from qdqtune.search.costs.decisions import UnitPrice
from qdqtune.search.costs.priors import Prices
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning import records as kinds
from qdqtune.tuning.records import (
    ComparisonRecord,
    LayersRecord,
    MetricRecord,
    NoiseRecord,
    Outcome,
    RangesRecord,
    Record,
    StoredPlacement,
    parsed,
    plain,
)
from qdqtune.tuning.store import Store, line_of, read_journal
from qdqtune.types import Accuracy, Edge, Failure, Layer, Measurement, Placement
from runs import room_for, rows

RUN = {"mode": "region", "quant_type": "int8", "input_shapes": {"x": [1, 3]}, "model": "0123abcd"}
RECORDS: tuple[Record, ...] = (
    RangesRecord(ranges=Ranges({"x": Range(-1e-05, 0.1 + 0.2)})),
    NoiseRecord(of="0.1", alone={"a": 1e-05, "b": 2.5e-05, "c": 1e22, "d": 5e-324, '"\\ 3e5, "crc": "0"}': 1.0}),
    NoiseRecord(of='a "quoted" \\ name: 3e5, "crc": "0"}', alone={"größe\n/x/1e-05:0": -7.0}),
)
MORE = MetricRecord(of="more", value=1.0)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.yaml"


def fill(path: Path) -> bytes:
    with Store(path, RUN) as store:
        for record in RECORDS:
            store.put(record)
    return path.read_bytes()


def found(path: Path) -> tuple[Record, ...]:
    with Store(path, RUN) as store:
        return store.of(Record)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_records_are_found_again_in_their_order(path: Path) -> None:
    fill(path)
    assert found(path) == RECORDS
    with Store(path, RUN) as store:
        assert len(store) == 3
        assert store.get(NoiseRecord, RECORDS[2].of) == RECORDS[2]
        assert store.get(NoiseRecord) is None
        assert store.get(RangesRecord, "0.1") is None


def test_a_later_run_appends_and_touches_nothing_before(path: Path) -> None:
    before = fill(path)
    with Store(path, RUN) as store:
        store.put(MORE)
    assert path.read_bytes().startswith(before)
    assert found(path) == (*RECORDS, MORE)


def test_the_file_is_yaml_with_the_same_values(path: Path) -> None:
    fill(path)
    head, *rest = yaml.safe_load(path.read_text())
    assert head["fingerprint"] == RUN
    assert [{name: v for name, v in row.items() if name != "crc"} for row in rest] == rows(path)[1:]


def test_every_line_is_json_for_other_readers(path: Path) -> None:
    fill(path)
    lines = [json.loads(line.removeprefix("- ")) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "ranges", "noise", "noise"]


def test_a_record_that_is_cut_off_anywhere_is_dropped_and_written_anew(path: Path) -> None:
    whole = fill(path)
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    kept = RECORDS[:2]
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert found(path) == kept
        assert path.read_bytes() == whole[:start]
        with Store(path, RUN) as store:
            store.put(RECORDS[2])
        assert path.read_bytes() == whole


def test_a_first_record_that_is_cut_off_anywhere_begins_a_new_run(path: Path) -> None:
    whole = fill(path)
    for end in range(whole.index(b"\n")):
        path.write_bytes(whole[:end])
        assert found(path) == ()


def test_a_flipped_byte_anywhere_is_refused(path: Path) -> None:
    whole = fill(path)
    for place in range(len(whole) - 1):  # without its last line break the last record is one that was cut off
        flipped = whole[place] ^ (0x01, 0x20, 0x80)[place % 3]
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(BadState, match="damaged") as refusal:
            Store(path, RUN)
        assert len(str(refusal.value).splitlines()) == 1
        assert "`restart`" in str(refusal.value)


def test_the_damaged_line_is_named_and_the_file_left_as_it_is(path: Path) -> None:
    lines = fill(path).splitlines(keepends=True)
    damaged = b"".join([*lines[:2], lines[2].replace(b'"a": 1.0e-05', b'"a": 1.0e-04'), *lines[3:]])
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
        ({"quant_type": "fp8", "model": "ffff"}, "made with quant type int8, now it is fp8"),
        ({"input_shapes": {"x": [2, 3]}}, r"made with input shapes x \[1, 3\], now it is \[2, 3\]"),
        ({"input_shapes": {"x": [1, 3], "z": [4]}}, r"made with input shapes z unset, now it is \[4\]"),
        ({"engine": {"clock": "fast"}}, "made with engine unset, now it is"),
    ],
)
def test_another_fingerprint_is_refused_with_the_first_difference_named(path: Path, change: Any, message: str) -> None:
    before = fill(path)
    with pytest.raises(BadState, match=message) as refusal:
        Store(path, msgspec.defstruct("Asked", list(asked := RUN | change))(**asked))
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
        store.put(MORE)
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
    assert found(path) == ()


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
            store.put(MORE)
        assert store.get(MetricRecord, "more") is None
        assert path.read_bytes() == whole
        store.put(MORE)
    assert found(path) == (*RECORDS, MORE)


def test_values_that_json_lacks_are_never_written(path: Path) -> None:
    whole = fill(path)
    with Store(path, RUN) as store, pytest.raises(ValueError):
        store.put(MetricRecord(value=float("inf")))
    assert path.read_bytes() == whole


def again(record: Record) -> Record:
    """A record as it comes back from the file."""
    line = line_of(plain(record))
    return parsed(line[2 : line.rindex(b', "crc"')] + b"}")


@given(
    st.frozensets(
        st.builds(Edge, st.text(), st.text(), st.integers(0, 9)) | st.builds(Edge, st.text(), st.just(""), st.just(0))
    )
)
def test_placements_survive(edges: frozenset[Edge]) -> None:
    record = again(kinds.PricesRecord(prices=NO_PRICES, found=StoredPlacement.of(Placement(edges))))
    assert isinstance(record, kinds.PricesRecord)
    assert record.found is not None
    assert record.found.placement == Placement(edges)


@given(st.dictionaries(st.text(), st.tuples(finite, finite).map(sorted)), st.dictionaries(st.text(), st.tuples(finite)))
def test_ranges_survive_bit_by_bit(ends: dict[str, list[float]], weights: dict[str, tuple[float, ...]]) -> None:
    factors = (Factor(Edge("w", "layer", 1), (2, 1), (-3, 2)),)
    ranges = Ranges({t: Range(*e) for t, e in ends.items()}, weights, factors=factors)
    record = again(RangesRecord(ranges=ranges))
    assert isinstance(record, RangesRecord)
    assert {t: (bits(r.low), bits(r.high)) for t, r in record.ranges.activations.items()} == {
        t: (bits(r.low), bits(r.high)) for t, r in ranges.activations.items()
    }
    assert record.ranges == ranges


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=50))
def test_samples_survive_bit_by_bit(rounds: list[tuple[float, float]]) -> None:
    measured = Measurement(*zip(*rounds, strict=True))
    record = again(ComparisonRecord(result=Outcome.of(measured), files=("a", "b")))
    assert isinstance(record, ComparisonRecord)
    assert isinstance(found := record.result.result, Measurement)
    assert [*map(bits, found.a), *map(bits, found.b)] == [*map(bits, measured.a), *map(bits, measured.b)]


def test_samples_pass_through_the_file_bit_by_bit(path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (tuple(10.0 ** rng.integers(-7, 2, 200) * rng.choice([1, rng.random()], 200)) for _ in range(2))
    record = ComparisonRecord(of="1", result=Outcome.of(Measurement(a, b)), files=("a", "b"))
    with Store(path, RUN) as store:
        store.put(record)
    samples = yaml.safe_load(path.read_text())[1]["result"]["samples"]
    assert (samples["a"], samples["b"]) == (list(a), list(b))
    assert found(path) == (record,)


@given(
    st.builds(
        Failure, st.sampled_from(["build", "run", "timeout", "crash", "output", "resources"]), st.text(), st.text()
    )
)
def test_failures_survive(failure: Failure) -> None:
    assert again(LayersRecord(failure=failure)) == LayersRecord(failure=failure)


NO_PRICES = Prices((("k", "MatMul", "float", "", 0.5),), (("a", "b", 8.0, 0.1),), (("k", (1, 2), 0.5),), False)
MEASURED = Outcome(samples=Measurement((1.0, 2.0), (2.0, 1.0), (Measurement((1.0, 1.0), (1.0, 1.0)),)))
LAYERS = (Layer("a", ("n", "m"), "int8", 0.5, "compute"), Layer("b", (), "", None, "unknown"))
STORED = StoredPlacement((Edge("x", "a", 0), Edge("y")), ((Edge("w", "b", 1), "w4b32a"),))
EVERY: tuple[Record, ...] = (
    *RECORDS,
    MORE,
    kinds.TrialRecord(
        of=kinds.job_of(STORED.placement.digest, "0"),
        origin="cut", against="0", placement=STORED, result=MEASURED, check=MEASURED, layers=LAYERS,
        predicted=0.5, accuracy=Accuracy(20.5, 18.0, 23.0, 0.5, 1.0, 3),
    ),
    MetricRecord(failure=Failure("run", "no")),
    LayersRecord(of="p", layers=LAYERS),
    kinds.RepeatabilityRecord(accuracy=Accuracy()),
    kinds.RewriteRecord(of="hardswish:float", result=MEASURED, builds=2),
    kinds.RewritesRecord(found=kinds.Found((kinds.Tried("h", "float", Ratio(0.5, None, 0.6), True),), 2, ("n",))),
    kinds.BatchRecord(width=4, learning=2),
    kinds.PricesRecord(prices=NO_PRICES, found=STORED),
    kinds.WeightNoiseRecord(of="0.1", stored=(("w", "w8", 1e-05),), failure=Failure("run", "no", "log")),
    kinds.PredictionRecord(of="p", accuracy=Accuracy(20.5)),
    ComparisonRecord(of="proof:p:0", result=Outcome(failure=Failure("build", "no")), files=("a", "b")),
    kinds.PointRecord(of="p", accuracy=Accuracy(None, agreement=0.5), layers=LAYERS),
    kinds.PartRecord(of="k", layers=LAYERS),
    kinds.SchemeRecord(of="k:p", result=MEASURED, layers=LAYERS),
    kinds.WeightFormatsRecord(shares={"1x2x3 1": {"w8": 0.5}}),
    kinds.AnswerRecord(
        of="q", shipped="tuned", placement=STORED, ratio=Ratio(0.5, 0.4, None), notes=("n",),
        summary="s", files={"f": "d"},
        trials=(kinds.AnsweredTrial(
            of="t", origin="cut", predicted=0.5, accepted=True, holds=None, metric=None, pattern="", wants_layers=True
        ),),
        units=(UnitPrice(("n",), ("MatMul",), 1.0, 0.5, 0.1, 0.1, 0.0, 0.2, True, None, True, stored_ms={"w8": 0.1}),),
        groups=(kinds.GroupOutcome(("n",), ("MatMul",), 1, None, 1.0, None, None, False, "slower alone"),),
    ),
    kinds.ConversationRecord(
        baseline_ms=1.0, best=kinds.TimedPlacement(STORED, None), measured={"p": None}, patterns={"d": ()}
    ),
)  # fmt: skip
"""Records of every kind, with as much as they can hold."""


def test_records_of_every_kind_come_back_as_they_were() -> None:
    assert {type(record) for record in EVERY} == set(Record.__subclasses__()) - {kinds.HeadRecord}
    assert tuple(map(again, EVERY)) == EVERY


VALUES: tuple[Any, ...] = (None, "x", -1, 2**70, 1.5, -1.5, 1e308, True, [], {}, [[1]], {"a": 1})


def changed(value: Any) -> Iterator[Any]:
    """A JSON value with any one of the values in it replaced or, in a map or a list, left out."""
    yield from VALUES
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, inner in items:
        others = {k: v for k, v in value.items() if k != place} if isinstance(value, dict) else None
        yield others if others is not None else [*value[:place], *value[place + 1 :]]
        for new in changed(inner):
            yield {**value, place: new} if isinstance(value, dict) else [*value[:place], new, *value[place + 1 :]]


@pytest.mark.parametrize("record", EVERY, ids=lambda record: type(record).__name__)
def test_a_record_with_another_value_anywhere_is_refused_or_serves(record: Record) -> None:
    """What msgspec lets pass has its types, and what is made of it for the search can be made."""
    refused = 0
    for values in changed(json.loads(json.dumps(plain(record)))):
        try:
            made = parsed(json.dumps(values).encode())
        except ValueError:
            refused += 1
            continue
        assert again(made) == made
        for name in ("placement", "found"):
            if isinstance(stored := getattr(made, name, None), StoredPlacement):
                assert isinstance(stored.placement, Placement)
        if isinstance(outcome := getattr(made, "result", None), Outcome):
            assert isinstance(outcome.result, Measurement | Failure)
    assert refused > 10


def test_the_order_of_a_set_makes_no_other_run(path: Path) -> None:
    """In every process the names in a set come in another order."""
    names = [f"Op{n}" for n in range(20)]
    with Store(path, {"rounds": Plan(), "ops": frozenset(names)}):
        pass
    with Store(path, {"rounds": Plan(), "ops": sorted(names)}) as store:
        assert len(store) == 0
    journal = read_journal(path)
    assert journal is not None
    assert journal.head.fingerprint["ops"] == sorted(names)
