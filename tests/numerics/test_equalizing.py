"""Channels are made alike where samples gain by it."""

import numpy as np
import pytest

from fitted_nets import Heard, db, inputs_of, prepared
from models import UINT8, build, normal, run
from qdqtune.calibration.scales import Calibration
from qdqtune.graph.model import Model
from qdqtune.numerics.fitting import fitted
from qdqtune.placement.insertion import insert
from qdqtune.types import Placement

pytestmark = pytest.mark.usefixtures("workers")

NORMALIZED = """net (float[4,32] x) => (float[4,16] y) {
    n = LayerNormalization <axis = -1> (x, g, h)
    [last] y = MatMul(n, w)
}"""


def uneven(by: float) -> Model:
    """A few channels behind a normalization are larger than the others, and matter less."""
    gain = np.ones(32, np.float32)
    gain[:3] = by
    weights = normal(32, 16) / gain[:, None]
    return build(NORMALIZED, {"g": gain, "h": np.zeros(32, np.float32), "w": weights})


def test_channels_are_made_alike_where_samples_gain_that_set_no_scale() -> None:
    feeds = [{"x": normal(4, 32, seed=i)} for i in range(8)]
    how = Calibration("minmax", equalization=True)
    net = uneven(64.0)
    place = inputs_of(net, "last")
    heard = Heard()
    found, plain = (fitted(prepared(net, feeds), h, UINT8, place, listener=heard) for h in (how, Calibration()))
    assert [text for text, _ in heard.stages] == [
        "trying to make channels alike",
        "calibrating on test",
        "calibrating on test",
    ]
    assert {f.edge.tensor for f in found.factors} == {"g", "h", "w"}
    assert how.chosen(found).equalization
    assert not how.chosen(plain).equalization
    unseen = [{"x": normal(4, 32, seed=i)} for i in range(20, 24)]
    exact = run(net, unseen)
    gained, lost = (db(exact, run(insert(net, place(r), r, UINT8), unseen)) for r in (found, plain))
    assert gained > lost + 6
    assert insert(net, Placement(), found, UINT8).to_proto() == insert(net, Placement(), plain, UINT8).to_proto()
    assert not fitted(prepared(uneven(1.0), feeds), how, UINT8, place).factors
    assert not fitted(prepared(net, feeds[:1]), how, UINT8, place).factors  # which nobody else can judge
