"""Values of a state file: each comes back as it was, bit by bit, and another value anywhere is refused or serves."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadState, Failure
from qdqtune.numerics.label_metrics import Score
from qdqtune.search.costs.profiles import SchemeResult
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning import records as kinds
from qdqtune.tuning.records import RangesRecord
from qdqtune.tuning.store import Line, plain
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
        axis={"y": 1}, classes={"y": 10}, why_no_scores="none",
    ),
    kinds.RewriteRecord(results={"h": MEASURED}, builds=2),
    kinds.TriedRewrites((kinds.Tried("h", "float", Ratio(0.5, None, 0.6), True),), 2, ("n",)),
    Times((((1.0, 2.0),), ((2.0, 1.0),)), (0.5, 0.5)),
    SchemeResult("full", PLACEMENT, MEASURED, LAYERS),
    kinds.ConversationRecord(
        baseline_ms=1.0, best=PLACEMENT, best_ms=None, measured={"p": None}, patterns=({"digest": "d", "schemes": []},)
    ),
)  # fmt: skip
"""Values of every kind, with as much as they can hold."""


def test_values_of_every_kind_come_back_as_they_were() -> None:
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


@pytest.mark.parametrize("value", EVERY, ids=lambda value: type(value).__name__)
def test_a_record_with_another_value_anywhere_is_refused_or_serves(value: Any) -> None:
    """What msgspec lets pass has its types."""
    refused = 0
    for values in changed(json.loads(json.dumps(plain(value)))):
        try:
            other = Line("key", values).read(type(value))
        except BadState:
            refused += 1
            continue
        assert again(other) == other
    assert refused > 10
