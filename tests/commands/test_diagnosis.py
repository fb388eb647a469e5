"""What is told of a suspect tensor follows from its ranges."""

from dataclasses import replace
from math import inf, nan

import pytest

from qdqtune.commands.diagnosis import SENSITIVE, Diagnosis, Suspect
from qdqtune.types import Edge, Placement, WeightFormat

FITS = Suspect("t", "activation", "numbers", ("a", "b"), 0.5, 0.001, 3, (-1.0, 1.0), (-1.0, 1.0), (0.01, 0.01), (0, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, SENSITIVE),
        ({"cause": "engine"}, "the engine computes other values than the pair says"),
        ({"quantized_range": (nan, inf)}, "its scale is no finite number"),
        ({"quantized_range": (0.0, 0.0)}, "its pair can give one value only"),
        (
            {"joined": {"p": (-9.0, 1.0), "s": (0.0, 0.1)}},
            "a Concat gives one scale to parts of unlike size: p up to 9",
        ),
        ({"joined": {"p": (-1.0, 1.0), "s": (0.0, 0.1)}}, SENSITIVE),
        ({"quantized_range": (-0.5, 0.5)}, "its pair cuts off 25 % of the range"),
        ({"quantized_range": (-8.0, 8.0)}, "its pair spends its steps on a range 8 times as wide"),
        ({"kind": "weight", "quantized_range": (-1.0, 0.5)}, "its constant has other values than the float one"),
        ({"kind": "bias", "quantized_range": (-1.0, 1.2)}, "it was moved to make up for what other pairs do"),
    ],
)
def test_the_reason_follows_from_the_two_ranges(changes: dict[str, object], reason: str) -> None:
    assert replace(FITS, **changes).reason.startswith(reason)  # type: ignore[arg-type]


def test_nodes_of_the_guilty_are_excluded_once_and_machines_get_decibels() -> None:
    other = replace(FITS, tensor="u", nodes=("b", "c"), scale=(nan, 0.01))
    w4 = Placement.of((), [(Edge("w", "a", 1), WeightFormat(4, 32))])
    found = Diagnosis(2, 8, 9, limit=0.01, noise=0.1, examined=2, noise_there=0.2, guilty=(FITS, other), placement=w4)
    assert found.excluded == ("a", "b", "c")
    assert found.weight_only == "w4b32"
    assert (found.is_healthy, found.unexplained) == (False, False)
    told = found.to_dict()
    assert (told["min_sqnr_db"], told["output_sqnr_db"]) == pytest.approx((20.0, 10.0))
    assert told["guilty"][1]["scale"] == ["nan", 0.01]
