"""Outputs and noise foretold without the engine, against the inserter's own models; and what a file is read as."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models import FORMATS, INT8, PLAIN, attention, build, conv_net, feeds, normal, ranges, run
from qdqtune.calibration import scales
from qdqtune.calibration.observe import Session, onnxruntime_session
from qdqtune.calibration.scales import Range
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import BadModel, EngineFailure, EngineRefused
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.numerics import simulation
from qdqtune.numerics.accuracy import accuracy, sqnr_db
from qdqtune.numerics.simulation import UNBOUNDED_NOISE, Simulation, check_stripped, sensitivities
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter, insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.stripping import strip_pairs
from qdqtune.search.costs.output_noise import Noise
from qdqtune.tuning.rounding_noise import each_value
from qdqtune.types import Accuracy, Edge, NumericFormat, Placement, WeightFormat
from refusals import refusal
from weight_only_nets import DYNAMIC
from workers import InProcess, WatchedModel, Workers

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("net", [conv_net, attention])
def test_it_tells_what_the_file_does(net: type[object]) -> None:
    model = net()
    known, samples = ranges(model), feeds(model)
    inserter = Inserter(model, known, replace(PLAIN, reduced_weights=True))  # with 8 bits, fused products may saturate
    reference = run(model, samples)
    with Simulation(inserter, samples) as simulation:
        for placement in start_placements.placements(model, possible_edges(model, known)).values():
            found = simulation.accuracy(placement)
            real = accuracy(reference, run(inserter.insert(placement), samples))
            fused = accuracy(reference, run(inserter.insert(placement), samples, fused=True))
            assert found.sqnr_db == pytest.approx(real.sqnr_db, abs=1e-3)
            assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=1.0)
        assert simulation.accuracy(Placement()).sqnr_db is None


BETWEEN = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
    [first] a = Conv<pads=[1,1,1,1]>(x, w0)
    [pool] b = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(a)
    [second] c = Conv(b, w1)
    [relu] y = Relu(c)
}"""


def three_ways(model: Model, tensors: str) -> tuple[Accuracy, Accuracy, Accuracy]:
    """Of a placement on some tensors: as ONNX Runtime runs it, as it is foretold for that, and by the file alone."""
    samples, known = feeds(model), ranges(model)
    placement = Placement.of(e for e in possible_edges(model, known) if e.tensor in tensors)
    inserter = Inserter(model, known, PLAIN)
    fused = accuracy(run(model, samples), run(inserter.insert(placement), samples, fused=True))
    with Simulation(inserter, samples, "onnxruntime") as meant, Simulation(inserter, samples) as unmeant:
        found, literal = meant.accuracy(placement), unmeant.accuracy(placement)
    return fused, found, literal


def test_weights_that_onnx_runtime_rounds_by_itself_count_where_it_is_meant() -> None:
    first, second = normal(4, 4, 3, 3), normal(4, 4, 1, 1, seed=1)
    # Large weights, of a channel that is always zero, and zero point 0.
    first[0], second[0, 0], second[1, 0] = 0, 50, -50
    model = build(BETWEEN, {"w0": first, "w1": second})
    fused, found, literal = three_ways(model, "ay")  # in front of MaxPool, behind
    assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=0.5)
    assert literal.sqnr_db > found.sqnr_db + 3


def test_a_softmax_in_integers_is_foretold_where_it_is_meant() -> None:
    net = "net (float[256,2] x) => (float[256,2] y) { [squash] h = Softmax(x) [twice] y = Mul(h, two) }"
    model = build(net, {"two": np.float32(2)})
    fused, found, literal = three_ways(model, "xh")
    assert found.sqnr_db == pytest.approx(fused.sqnr_db, abs=0.01)
    assert literal.sqnr_db > fused.sqnr_db + 0.2


@pytest.fixture
def session(workers: Workers) -> Iterator[Session]:
    with onnxruntime_session(EXECUTION, fuse=False) as session:
        yield session


def quantized(model: Model) -> Model:
    known = ranges(model)
    return insert(model, Placement.of(possible_edges(model, known)), known, INT8)


def check(session: Session, stripped: Model, given: Model) -> None:
    check_stripped(stripped, given, session, feeds(given, 1)[0], "net.onnx", "give the float model")


def test_a_file_of_ours_is_read_rightly(session: Session) -> None:
    file = quantized(conv_net())
    check(session, strip_pairs(file), file)


AT_AN_EDGE = """net (float[1,256] x) => (float[1,N] y) {
    [weight] w1 = DequantizeLinear(w, s)
    [product] OUT = MatMul(x, w1)
    [one] o = Gather<axis = 1>(p, at)
    [quantize] q = QuantizeLinear(o, scale, zero)
    [dequantize] y = DequantizeLinear(q, scale, zero)
}"""


def test_another_order_of_sums_is_no_other_model(session: Session) -> None:
    """Of a constant weight ONNX Runtime makes another product than of one behind a DQ. The value that differs most is
    put at the edge between two steps of a pair."""
    weight = {"w": np.arange(-128, 128, dtype=np.int8).repeat(96).reshape(256, 96) ^ 77, "s": np.float32(0.013)}
    sample = feeds(build("net (float[1,256] x) => (float[1,256] y) { y = Abs(x) }"), 1)[0]
    behind_dq = build(AT_AN_EDGE.replace("OUT", "y").partition("[one]")[0] + "}", weight)
    both = [session.outputs(m, "one", [sample])[0]["y"] for m in (behind_dq, strip_pairs(behind_dq))]
    at = int(np.abs(both[0] - both[1]).argmax())
    edge = {"scale": np.float32(np.sum(both, 0)[0, at]), "zero": np.int8(0), "at": np.int64([at])}
    file = build(AT_AN_EDGE.replace("OUT", "p"), weight | edge)
    check_stripped(strip_pairs(file), file, session, sample, "net.onnx", "give the float model")


def test_another_float_model_is_refused_in_one_line(session: Session) -> None:
    file = quantized(conv_net())
    stripped = strip_pairs(file)
    other = rebuild(stripped, stripped.proto.graph.node, {"b4": Constant.of(stripped.constants["b4"].array() + 1)})
    message = r"^net.onnx cannot be read as .* outputs have -?\d+\.\d dB; give the float model$"
    with pytest.raises(BadModel, match=message):
        check(session, other, file)


def test_a_float_model_that_does_not_run_is_refused(session: Session) -> None:
    net, other = (
        f"net (float[2,4] x) => (float[2,4] y) {{ [last] y = {last} }}" for last in ("Abs(x)", "custom.No(x)")
    )
    with pytest.raises(BadModel, match="put back, they do not run: "):
        check(session, build(other), build(net))


NOISE = """net (float[2,4] x) => (float[2,4] y) {
    [noise] n = RandomNormalLike(x)
    [sum] y = Add(x, n)
}"""
NO_NUMBERS = "net (float[2,4] x) => (float[2,4] y) { [log] n = Log(x) [sum] y = Add(x, n) }"


@pytest.mark.parametrize("text", [NOISE, NO_NUMBERS, "net (float[2,4] x) => (float[2,4] y) { y = custom.Own(x) }"])
def test_what_onnxruntime_does_not_run_or_repeat_or_is_no_number_is_not_compared(session: Session, text: str) -> None:
    check(session, build(text.replace("Add(x, n)", "Sub(x, n)")), build(text))


def alone(model: Model, numbers: NumericFormat = PLAIN) -> dict[str, float]:
    known = ranges(model)
    found = sensitivities(model, each_value(model, known, numbers, possible_edges(model, known)), feeds(model))
    return dict(found.noise)


def noise_of(model: Model, placement: Placement, numbers: NumericFormat) -> float:
    """As the inserter has it."""
    samples = feeds(model)
    ratio = sqnr_db(run(model, samples), run(insert(model, placement, ranges(model), numbers), samples))
    return 0.0 if ratio is None else float(10 ** (-ratio / 10))


@pytest.mark.parametrize("numbers", FORMATS)
def test_the_sum_predicts_the_noise_of_a_placement(numbers: str) -> None:
    model = conv_net()
    noise = Noise(model, alone(model, FORMATS[numbers]))
    for placement in start_placements.placements(model, possible_edges(model, ranges(model))).values():
        real = noise_of(model, placement, FORMATS[numbers])
        assert abs(10 * np.log10(noise.summed(placement) / real)) < 4


def test_half_precision_is_rounded_as_well() -> None:
    found = alone(attention(half=True))
    assert 0 < min(v for v in found.values() if v > 0) < max(found.values()) < 1e-2


def test_weights_in_fewer_bits_and_dynamic_quantization_do_what_they_do_in_a_file() -> None:
    model = build("net (float[2,32] x) => (float[2,8] y) { [product] y = MatMul(x, w) }", {"w": normal(32, 8)}, 21)
    edge, stored = Edge("w", "product", 1), WeightFormat(4, 32)
    known, dynamic = (noise_of(model, Placement.of((), {edge: how}.items()), PLAIN) for how in (stored, DYNAMIC))
    assert sensitivities(model, {edge: stored}, feeds(model)).noise["w"] == pytest.approx(known, rel=0.1)
    found = sensitivities(model, {edge: DYNAMIC, Edge("x", "product", 0): None}, feeds(model)).noise
    assert min(found["w"], found["x"]) > 0.1 * dynamic
    assert found["w"] + found["x"] == pytest.approx(dynamic, rel=0.3)  # errors of both are independent


def test_measurements_that_time_has_no_room_for_are_left_out_and_told() -> None:
    model, told = conv_net(), list[bool]()
    known = ranges(model)
    pairs = each_value(model, known, PLAIN, possible_edges(model, known))
    found = sensitivities(model, pairs, feeds(model), deadline=0.0, on_fewer=lambda: told.append(True))
    assert not found.alone
    assert told == [True]
    whole = Placement(frozenset(pairs))
    assert sum(found.noise.values()) == pytest.approx(noise_of(model, whole, PLAIN), rel=0.5)
    measured = alone(model)
    worst = sorted(measured, key=lambda tensor: -measured[tensor])
    assert sorted(found.noise, key=lambda tensor: -found.noise[tensor])[0] in worst[: len(worst) // 3]


@pytest.fixture
def one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are measured on one sample, chosen among all."""
    monkeypatch.setattr(simulation, "SAMPLES", 1)
    monkeypatch.setattr(simulation, "CONSIDERED", 10.0)


@pytest.mark.usefixtures("one_sample")
def test_the_samples_are_those_to_which_rounding_does_most() -> None:
    """The first ones lie within the ranges, and say nothing of what is cut off from a later one."""
    model = conv_net()
    samples = feeds(model)
    (name,) = model.inputs
    wide = {name: 3 * samples[2][name]}
    pairs = each_value(model, ranges(model), PLAIN, possible_edges(model, ranges(model)))
    found = sensitivities(model, pairs, [*samples[:2], wide, samples[3]])
    of_it = sensitivities(model, pairs, [wide])
    assert found.alone == of_it.alone
    assert {tensor: found.noise[tensor] for tensor in found.alone} == {t: of_it.noise[t] for t in of_it.alone}


def test_outputs_that_are_not_finite() -> None:
    text = "net (float[1,4] x) => (float[1,4] y) { [first] h = Neg(x) y = Reciprocal(h) }"
    model = build(text, {})
    pairs = {Edge("x", "first", 0): scales.of_range(Range(-1, 1), PLAIN)}
    tiny, zero = ({"x": np.float32([[1, 1, 1, last]])} for last in (1e-3, 0))
    assert sensitivities(model, pairs, [tiny]).noise == {"x": UNBOUNDED_NOISE}
    with pytest.raises(EngineRefused, match="NaN or infinite"):
        sensitivities(model, pairs, [zero])


@pytest.mark.parametrize("first", [2, 5])
def test_a_failure_of_the_machine_is_no_noise(workers: Workers, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    model, asked, run_of = conv_net(), [0], WatchedModel.run

    def killed(built: WatchedModel, inputs: Any) -> Any:
        asked[0] += 1
        if asked[0] >= first:
            raise EngineFailure("std::bad_alloc")
        return run_of(built, inputs)

    monkeypatch.setattr(WatchedModel, "run", killed)
    found = ranges(model)
    pairs = each_value(model, found, PLAIN, possible_edges(model, found))
    assert refusal(lambda: sensitivities(model, pairs, feeds(model, 2))).is_transient


def test_its_engine_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ended = conv_net(), list[InProcess]()
    monkeypatch.setattr(InProcess, "end", lambda worker, seconds=0.0: ended.append(worker))
    with Simulation(Inserter(model, ranges(model), PLAIN), feeds(model, 1)) as simulation:
        simulation.accuracy(Placement())
        before = len(ended)
    assert len(ended) > before
