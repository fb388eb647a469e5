"""The noise of outputs: relative to their signal, of the worst one, and a number for what cannot be compared."""

import numpy as np
import pytest

from qdqtune.commands.probes import LOUDEST, UNKNOWN_NOISE, noise
from qdqtune.types import Array, Failure

EXACT = {"y": np.array([3.0, 4.0]), "class": np.array([1, 2, 3, 4])}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 0.0),
        ({"y": np.array([3.0, 4.5])}, 0.01),
        ({"class": np.array([1, 2, 3, 0])}, 0.25),
        ({"y": np.array([3.0, 4.5]), "class": np.array([0, 0, 3, 0])}, 0.75),
        ({"y": np.array([3e9, 0.0])}, LOUDEST),
        ({"y": np.array([np.nan, 4.0])}, UNKNOWN_NOISE),
        ({"y": np.array([3.0, 4.0, 5.0])}, UNKNOWN_NOISE),
    ],
)
def test_the_worst_output_counts(changed: dict[str, Array], expected: float) -> None:
    assert noise([EXACT], [EXACT | changed]) == pytest.approx(expected)


def test_a_failure_is_no_finite_output() -> None:
    assert noise([EXACT], Failure("run", "no")) == UNKNOWN_NOISE
