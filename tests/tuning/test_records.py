"""Records: each comes back as it was, bit by bit, and another value anywhere is refused or serves."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import Failure
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning import records as kinds
from qdqtune.tuning.records import (
    ComparisonRecord,
    LayersRecord,
    MetricRecord,
    Outcome,
    RangesRecord,
    Record,
    StoredPlacement,
    parsed,
    plain,
)
from qdqtune.tuning.store import line_of
from qdqtune.types import Accuracy, Edge, Layer, Measurement, Placement
from state_records import MORE, RECORDS

finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


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
    stored = StoredPlacement.of(Placement(edges))
    record = again(
        kinds.TrialRecord(
            of=kinds.job_of(Placement(edges).digest, "0"), origin="cut", against="0", placement=stored, result=TIMED
        )
    )
    assert isinstance(record, kinds.TrialRecord)
    assert record.placement.placement == Placement(edges)


@given(st.dictionaries(st.text(), st.tuples(finite, finite).map(sorted)), st.dictionaries(st.text(), st.tuples(finite)))
def test_ranges_survive_bit_by_bit(ends: dict[str, list[float]], weights: dict[str, tuple[float, ...]]) -> None:
    ranges = Ranges({t: Range(*e) for t, e in ends.items()}, weights)
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


@given(
    st.builds(
        Failure, st.sampled_from(["build", "run", "timeout", "crash", "output", "resources"]), st.text(), st.text()
    )
)
def test_failures_survive(failure: Failure) -> None:
    assert again(LayersRecord(failure=failure)) == LayersRecord(failure=failure)


MEASURED = Outcome(samples=Measurement((1.0, 2.0), (2.0, 1.0), (Measurement((1.0, 1.0), (1.0, 1.0)),)))
TIMED = kinds.TrialOutcome(samples=MEASURED.samples)
LAYERS = (Layer("a", ("n", "m"), "int8", 0.5, "compute"), Layer("b", (), "", None, "unknown"))
STORED = StoredPlacement((Edge("x", "a", 0), Edge("y")), ((Edge("w", "b", 1), "w4b32a"),))
EVERY: tuple[Record, ...] = (
    *RECORDS,
    MORE,
    kinds.TrialRecord(
        of=kinds.job_of(STORED.placement.digest, "0"),
        origin="cut", against="0", placement=STORED, result=TIMED, check=MEASURED, layers=LAYERS,
        predicted=0.5, accuracy=Accuracy(20.5, 18.0, 23.0, 0.5, 1.0, 3),
    ),
    MetricRecord(failure=Failure("run", "no")),
    LayersRecord(of="p", layers=LAYERS),
    kinds.RepeatabilityRecord(accuracy=Accuracy()),
    kinds.FloatRecord(
        of="4 samples", seconds=0.1, turn_seconds=0.2, build_seconds=1.5, start_seconds=0.0, kinds=("f", "i"),
        axis={"y": 1}, classes={"y": 10}, why_no_scores="none",
    ),
    kinds.MachineRecord(where="me@board"),
    kinds.RewriteRecord(of="hardswish:float", result=MEASURED, builds=2),
    kinds.RewritesRecord(
        found=kinds.TriedRewrites((kinds.Tried("h", "float", Ratio(0.5, None, 0.6), True),), 2, ("n",))
    ),
    kinds.BatchRecord(width=4, learning=2),
    kinds.WeightNoiseRecord(of="0.1", noise=(("w", "w8", 1e-05),), failure=Failure("run", "no", "log")),
    kinds.PredictionRecord(of="p", accuracy=Accuracy(20.5)),
    ComparisonRecord(of="proof:p:0", result=Outcome(failure=Failure("build", "no")), files=("a", "b")),
    kinds.PointRecord(of="p", accuracy=Accuracy(None, agreement=0.5), layers=LAYERS),
    kinds.PartRecord(of="k", layers=LAYERS),
    kinds.SchemeRecord(of="k:p", result=MEASURED, layers=LAYERS),
    kinds.WeightFormatsRecord(shares={"1x2x3 1": {"w8": 0.5}}),
    kinds.ConversationRecord(
        baseline_ms=1.0, best=STORED, best_ms=None, measured={"p": None}, patterns=({"digest": "d", "schemes": []},)
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
