"""Values of tensors on samples: those of the model, in batches, in their own type or widened."""

import numpy as np
import pytest

from models import activations, branching, build, conv_net, feeds
from qdqtune.calibration import observe as observe_module
from qdqtune.calibration.observe import observe, onnxruntime_session, outputs_on, running, values_on
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import BadData, BadModel
from refusals import refusal

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("memory", [2**29, 1])
@pytest.mark.parametrize("half", [False, True])
def test_values_are_those_of_the_model_batch_by_batch(monkeypatch: pytest.MonkeyPatch, half: bool, memory: int) -> None:
    monkeypatch.setattr(observe_module, "BATCH_BYTES", memory)
    net = conv_net(half=half)
    samples = feeds(net, 2)
    exact = activations(net, samples)
    wanted = [t for t in ("image", "c0", "a") if t in exact[0]]
    order = [(n, t) for n in range(2) for t in wanted]
    if memory == 1:
        order.sort(key=lambda place: wanted.index(place[1]))
    for (number, name), (tensor, values) in zip(order, observe(net, wanted, samples), strict=True):
        assert tensor == name
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, exact[number][tensor], rtol=2e-3, atol=1e-3)


def test_sizes_that_are_not_static_are_those_of_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("net (float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Neg(a) }")
    samples = [{"x": np.full((8, 4), i, np.float32)} for i in range(2)]
    for tensors_at_once, order in (1, ["a", "a", "y", "y"]), (2, ["a", "y", "a", "y"]):
        monkeypatch.setattr(observe_module, "BATCH_BYTES", tensors_at_once * 8 * 4 * 4)
        assert [tensor for tensor, _ in observe(net, ["a", "y"], samples)] == order
    assert not list(observe(net, [], samples))


def test_values_on_one_sample_keep_their_types_and_inputs_may_be_asked_for() -> None:
    net = build("net (float16[2] x, int64[2] n) => (float16[2] y) { m = Neg(n) k = Cast <to = 10> (m) y = Add(x, k) }")
    sample = {"x": np.float16([1, 2]), "n": np.int64([3, 4])}
    found = values_on(net, ["x", "m", "y"], sample)
    assert {name: array.dtype.name for name, array in found.items()} == {"x": "float16", "m": "int64", "y": "float16"}
    assert found["m"].tolist() == [-3, -4]
    assert {values.dtype.name for _, values in observe(net, ["x", "y"], [sample])} == {"float32"}


def test_no_sample_and_a_model_that_does_not_run() -> None:
    net = conv_net()
    with pytest.raises(BadData, match="no sample"):
        list(outputs_on(net, []))
    with pytest.raises(BadModel, match=r"cannot run the model on .* \dx\d"):
        list(outputs_on(branching(), feeds(branching(), 1)))
    with running(branching()) as run:
        refusal(lambda: run(feeds(branching(), 1)))


def test_a_model_that_stays_built_computes_what_one_for_a_single_call_does() -> None:
    net, samples = conv_net(), feeds(conv_net(), 2)
    with onnxruntime_session(EXECUTION) as session:
        once, kept = session.outputs(net, "once", samples), session.load(net, "kept")
        for a, b, exact in zip(once, kept(samples), activations(net, samples), strict=True):
            np.testing.assert_array_equal(a["logits"], b["logits"])
            np.testing.assert_allclose(a["logits"], exact["logits"], rtol=1e-4, atol=1e-5)
