"""Channels that a file has scaled are told from weights that are wrong."""

import numpy as np
import pytest

from models import build, normal
from qdqtune.calibration.equalization import Factor, factors, scaled, sites
from qdqtune.graph.model import Model
from qdqtune.placement.stripping import moved_channels
from qdqtune.types import Edge

NET = """net (float[2,8] x) => (float[2,3] y) {
    [first] m = Gemm(x, w, b)
    [relu] r = Relu(m)
    [second] y = Gemm(r, v)
}"""

WRONG = {
    "first": Factor(Edge("w", "first", 1), (1,), (-6,)),
    "second": Factor(Edge("v", "second", 1), (1,), (5,)),
}


@pytest.fixture
def model() -> Model:
    return build(NET, {"w": normal(8, 8), "b": normal(8), "v": normal(8, 3)})


def moved(model: Model) -> list[Factor]:
    (site,) = sites(model)
    return list(factors(model, site, [i % 4 - 1 for i in range(site.channels)]))


def test_what_was_scaled_is_found(model: Model) -> None:
    assert list(moved_channels(model, scaled(model, moved(model)))) == moved(model)
    assert moved_channels(model, model) == ()


@pytest.mark.parametrize("where", WRONG)
def test_weights_with_a_wrong_scale_have_moved_nothing(model: Model, where: str) -> None:
    """Off by a power of two in all channels alike, as channels might have been moved."""
    assert moved_channels(model, scaled(model, [WRONG[where]])) == ()


def test_a_wrong_scale_does_not_hide_what_was_scaled(model: Model) -> None:
    spoiled = scaled(scaled(model, moved(model)), [WRONG["second"]])
    found = moved_channels(model, spoiled)
    assert [f.edge for f in found] == [f.edge for f in moved(model)]
    assert all(np.array_equal(a.array(), b.array()) for a, b in zip(found, moved(model), strict=True))
