"""Numbers and biases are chosen by their effect on the outputs; the means of layers stay those of the float model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models import FP8, INT8, PLAIN, UINT8, Arrays, build, conv_net, normal, ranges, run
from models import feeds as feeds_of
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import Calibration, Method, Range, Ranges
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import accuracy, sqnr_db
from qdqtune.numerics.fitting import BiasedPlacement, bias_session, compared_values, fitted, shifts_by_others
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import biased_layers, possible_edges
from qdqtune.types import Deaf, Edge, NumericFormat, Placement

pytestmark = pytest.mark.usefixtures("workers")


def prepared(net: Model, feeds: list[Arrays]) -> Prepared:
    samples = Samples("test", "", False, lambda: iter(feeds))
    return Prepared(net, net, samples, samples, samples)


def inputs_of(net: Model, *nodes: str) -> Callable[[Ranges], Placement]:
    """Pairs on the inputs of some nodes."""
    return lambda known: Placement.of(e for e in possible_edges(net, known) if e.node in nodes)


TWO_LAYERS = """net (float[N,4,6,6] x) => (float[N,4,4,4] y, float[N,4,6,6] a) {
    [first] a = Conv(x, w0)
    b = Relu(a)
    [second] y = Conv(b, w1, bias)
}"""


def lopsided(*shape: int) -> np.ndarray[Any, Any]:
    """One weight of 1 in each channel and others of 0.4 steps, which all round down to 0."""
    weights = np.full(shape, 0.4 / 127, np.float32)
    weights.reshape(shape[0], -1)[:, 0] = 1
    return weights


def two_layers(half: bool = False) -> Model:
    constants = {"w0": lopsided(4, 4, 1, 1), "w1": lopsided(4, 4, 3, 3), "bias": np.arange(4, dtype=np.float32)}
    return build(TWO_LAYERS, constants, half=half)


def positive(net: Model, count: int = 6) -> list[Arrays]:
    """Inputs that differ little from each other in the mean."""
    dtype = np.float16 if net.tensors["x"].dtype == 10 else np.float32
    return [{"x": (2 + normal(1, 4, 6, 6, seed=i)).astype(dtype)} for i in range(count)]


@contextmanager
def biased(
    net: Model, feeds: list[Arrays], placement: Placement, known: Ranges, numbers: NumericFormat
) -> Iterator[BiasedPlacement]:
    with bias_session(net, placement, EXECUTION) as session:
        yield BiasedPlacement(session, net, placement, numbers, known, feeds, Deaf())


def shifts_of(*arguments: Any) -> dict[str, tuple[float, ...]]:
    with biased(*arguments) as found:
        return dict(found.shifts(found.offsets()))


def everything(net: Model, known: Ranges) -> Placement:
    return Placement.of(e for e in possible_edges(net, known) if not e.is_graph_output)


def means(net: Model, feeds: list[Arrays], output: str) -> np.ndarray[Any, Any]:
    return np.stack([out[output].astype(np.float64).mean(axis=(0, 2, 3)) for out in run(net, feeds)]).mean(axis=0)


@pytest.mark.parametrize(
    ("half", "numbers", "left"), [(False, UINT8, 0.2), (False, INT8, 0.2), (True, INT8, 0.9), (False, FP8, 1.0)]
)
def test_the_mean_of_every_layer_is_that_of_the_float_model(half: bool, numbers: NumericFormat, left: float) -> None:
    net = two_layers(half)
    feeds = positive(net)
    known = ranges(net, feeds)
    placement = everything(net, known)
    shifts = shifts_of(net, feeds, placement, known, numbers)
    plain, corrected = (insert(net, placement, r, numbers) for r in (known, replace(known, shifts=shifts)))
    for output in ("a", "y"):
        wanted = means(net, feeds, output)
        lost = np.abs(means(plain, feeds, output) - wanted)
        assert (np.abs(means(corrected, feeds, output) - wanted) <= left * lost).all()
    if numbers is FP8 or half:
        bias = corrected.constants[corrected.node("first").inputs[2]]
        assert bias.dtype == net.constants["w0"].dtype
    if numbers is not FP8:
        assert set(shifts) == {"first", "second"}
        np.testing.assert_allclose(shifts["first"], 3 * 0.4 / 127 * 2, rtol=0.15)  # three lost weights, inputs around 2


@pytest.mark.parametrize("numbers", [PLAIN, INT8])
def test_its_noise_is_that_of_the_file(numbers: NumericFormat) -> None:
    model = conv_net()
    known, samples = ranges(model), feeds_of(model)
    placement = start_placements.placements(model, possible_edges(model, known))["everything"]
    real = accuracy(run(model, samples), run(insert(model, placement, known, numbers), samples)).sqnr_db
    with biased(model, samples, placement, known, numbers) as found:
        assert found.db() == pytest.approx(real, abs=0.2)


def test_the_constant_behind_a_product_is_its_bias() -> None:
    text = "net (float[N,3,4] x) => (float[N,3,4] y) { [product] p = MatMul(x, w) [add] y = Add(bias, p) }"
    net = build(text, {"w": lopsided(4, 4).T, "bias": np.arange(4, dtype=np.float32)})
    feeds = [{"x": 2 + normal(1, 3, 4, seed=i)} for i in range(6)]
    known = ranges(net, feeds)
    placement = Placement.of(e for e in possible_edges(net, known) if e.node == "product")
    shifts = shifts_of(net, feeds, placement, known, INT8)
    assert set(shifts) == {"add"}
    np.testing.assert_allclose(shifts["add"], 3 * 0.4 / 127 * 2, rtol=0.2)
    corrected = insert(net, placement, replace(known, shifts=shifts), INT8)
    (bias,) = (t for t in corrected.nodes[corrected.index_of["add"]].inputs if t in corrected.constants)
    np.testing.assert_allclose(corrected.constants[bias].array(), np.arange(4) + np.asarray(shifts["add"]), rtol=1e-5)
    assert insert(net, Placement(), replace(known, shifts=shifts), INT8).to_proto() == net.to_proto()


def test_a_constant_that_is_quantized_itself_is_left_alone() -> None:
    text = "net (float[2,4] x) => (float[2,4] y) { [product] p = MatMul(x, w) [add] y = Add(p, bias) }"
    net = build(text, {"w": lopsided(4, 4).T, "bias": np.arange(4, dtype=np.float32)})
    known = ranges(net, [{"x": 2 + normal(2, 4)}])
    assert not biased_layers(net, everything(net, known))
    foreign = build("net (float[2,4] x) => (float[2,4] y) { [own] y = custom.Conv(x, w) }", {"w": normal(4, 4)})
    assert not biased_layers(foreign, Placement.of([Edge("x", "own", 0), Edge("w", "own", 1)]))


@pytest.mark.parametrize(
    "text",
    [
        "net (float[1,1] x) => (float[1,1] y) { [only] y = Gemm(x, w) }",
        """net (float[1,1] x) => (float[N] y) {
            [only] z = Gemm(x, w)
            least = Constant <value = float[1,1] {0.1}> ()
            is_large = Greater(z, least)
            all = Constant <value = int64[1] {-1}> ()
            those = Reshape(is_large, all)
            y = Compress(z, those)
        }""",
    ],
)
def test_biases_are_corrected_for_each_sample_by_the_others(text: str) -> None:
    net = build(text, {"w": np.ones((1, 1), np.float32)})
    feeds = [{"x": np.full((1, 1), 0.4, np.float32)}] * 3
    known = Ranges({"x": Range(-127, 127), "y": Range(-127, 127)})
    placement = Placement.of([Edge("x", "only", 0), Edge("w", "only", 1)])
    with biased(net, feeds, placement, known, INT8) as found:
        offsets = found.offsets()
        np.testing.assert_allclose(offsets, 0.4, rtol=1e-5)
        assert found.db() <= 0 < 40 < found.db(offsets)
    one_sided = np.array([[0.0], [0.0], [50.0]])
    assert [shift[0] for shift in shifts_by_others(one_sided)] == [0.0, 0.0, 0.0]  # chance explains one of two
    assert [shift[0] for shift in shifts_by_others(np.array([[1.0], [2.0]]))] == [2.0, 1.0]


def test_values_in_front_of_squashing_operators_are_compared_too() -> None:
    text = """net (float[2,8] x) => (float[2,8] p, int64[2,1] i, float[2,8] s, float[2,8] d, float[2,8] y) {
        [softmax] q = Softmax(x)
        [shape] p = Identity(q)
        [most] i = ArgMax <axis=1> (x)
        [log] s = Log(x)
        [exp] e = Exp(s)
        [sum] t = ReduceSum(e)
        [share] d = Div(e, t)
        [relu] y = Relu(x)
    }"""
    assert compared_values(build(text)) == (
        (Edge("p", "", 0), Edge("x", "softmax", 0)), (Edge("x", "most", 0),), (Edge("s", "", 2),),
        (Edge("d", "", 3), Edge("s", "exp", 0)), (Edge("y", "", 4),),
    )  # fmt: skip


@pytest.mark.parametrize("is_transient", [False, True])
def test_what_does_not_run_keeps_its_biases_but_a_failure_of_the_machine_is_one(workers, monkeypatch, is_transient):
    net, how = two_layers(), Calibration(bias_correction=True)
    data = prepared(net, positive(net))
    monkeypatch.setattr(Prepared, "ranges", lambda *_: ranges(net))
    workers.refused = lambda _: "std::bad_alloc" if is_transient else "no kernel"
    if is_transient:
        with pytest.raises(EngineFailure, match="biases cannot be corrected"):
            fitted(data, how, INT8, inputs_of(net, "first"))
    else:
        assert not fitted(data, how, INT8, inputs_of(net, "first")).shifts


@pytest.mark.parametrize("method", ["mse", "percentile", "minmax"])
def test_probabilities_have_the_range_that_they_can_have(method: Method) -> None:
    net = build("net (float[1,64] x) => (float[1,64] y) { [soft] p = Softmax(x) [last] y = Relu(p) }", {})
    feeds = [{"x": 12 * normal(1, 64, seed=i)} for i in range(6)]  # nearly all is next to zero, and what counts is not
    found = fitted(prepared(net, feeds), Calibration(method), UINT8, inputs_of(net, "last"))
    assert found.activations["p"] == Range(0.0, 1.0)
    flat = fitted(prepared(net, [{"x": normal(1, 64)}]), Calibration(method), UINT8, inputs_of(net, "last"))
    assert flat.activations["p"].high < 0.5
    assert fitted(prepared(net, feeds), Calibration(method), INT8, inputs_of(net, "last")).activations["p"].high < 1.01


def test_biases_are_corrected_where_the_outputs_gain_by_it_and_only_if_asked() -> None:
    feeds = [{"x": 3 + normal(1, 4, 5, 5, seed=i) / 4} for i in range(6)]
    text = "net (float[1,4,5,5] x) => (float[1,2,5,5] y) { [only] y = Conv(x, w) }"
    net = build(text, {"w": lopsided(2, 4, 1, 1)})
    place = inputs_of(net, "only")
    corrected = fitted(prepared(net, feeds), Calibration(bias_correction=True), INT8, place)
    assert corrected.shifts.keys() == {"only"}
    assert not fitted(prepared(net, feeds), Calibration(), INT8, place).shifts
    asked = list[float]()

    def only_at_first(each: float) -> int:
        asked.append(each)
        return 0 if len(asked) > 1 else 6

    with_biases = Calibration(bias_correction=True)
    assert not fitted(prepared(net, feeds), with_biases, INT8, place, bias_samples=only_at_first).shifts
    assert 0 < asked[0] < asked[1], "an estimate, and what the float model takes"
    exact = run(net, feeds)
    gained, lost = (sqnr_db(exact, run(insert(net, place(r), r, INT8), feeds)) or 0.0
                    for r in (corrected, Ranges(corrected.activations)))  # fmt: skip
    assert gained > lost + 3
    zero_mean = [{"x": normal(1, 4, 5, 5, seed=i)} for i in range(6)]
    even = build(text, {"w": np.full((2, 4, 1, 1), 0.4 / 127, np.float32)})
    assert not fitted(
        prepared(even, zero_mean), Calibration(bias_correction=True), INT8, inputs_of(even, "only")
    ).shifts
