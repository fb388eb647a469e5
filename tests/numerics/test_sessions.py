"""Models that are built and run one after the other: their outputs, and how many inferences were made."""

import numpy as np

from fitted_nets import Heard
from models import conv_net, feeds, run
from qdqtune.engines.execution import EXECUTION
from qdqtune.numerics.simulation import InferenceCount, onnxruntime_session
from workers import Workers


def test_a_model_that_stays_built_computes_what_one_for_a_single_call_does(workers: Workers) -> None:
    model, samples = conv_net(), feeds(conv_net(), 2)
    with onnxruntime_session(EXECUTION) as session:
        once, kept = session.outputs(model, "once", samples), session.load(model, "kept")
        assert callable(kept)
        again = kept(samples)
    assert isinstance(once, list)
    assert isinstance(again, list)
    for a, b, expected in zip(once, again, run(model, samples), strict=True):
        np.testing.assert_array_equal(a["logits"], b["logits"])
        np.testing.assert_allclose(a["logits"], expected["logits"], rtol=1e-4, atol=1e-5)


def test_no_more_inferences_are_told_than_were_expected() -> None:
    heard = Heard()
    heard.stage("fitting")
    count = InferenceCount(heard, most=5)
    for made in (2, 2, 9):
        count.add(made)
    assert heard.stages == [("fitting", [(2, 5), (4, 5), (5, 5)])]
