"""What rounding one value does to the outputs: against the inserter's own models, one value at a time."""

from typing import Any

import numpy as np
import pytest

from models import FORMATS, PLAIN, attention, build, conv_net, feeds, normal, ranges, run
from qdqtune.calibration import scales
from qdqtune.calibration.scales import Range
from qdqtune.errors import EngineFailure, EngineRefused
from qdqtune.graph.model import Model
from qdqtune.numerics import sensitivity
from qdqtune.numerics.accuracy import sqnr_db
from qdqtune.numerics.sensitivity import UNBOUNDED_NOISE, Block, halved, sensitivities
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.output_noise import Noise
from qdqtune.tuning.rounding_noise import each_value
from qdqtune.types import Edge, NumericFormat, Placement, WeightFormat
from refusals import refusal
from weight_only_nets import DYNAMIC
from workers import WatchedModel, Workers

NETS = {"conv": conv_net, "attention": attention}


pytestmark = pytest.mark.usefixtures("workers")


def alone(model: Model, numbers: NumericFormat = PLAIN) -> dict[str, float]:
    known = ranges(model)
    found = sensitivities(model, each_value(model, known, numbers, possible_edges(model, known)), feeds(model))
    return found


def noise_of(model: Model, placement: Placement, numbers: NumericFormat) -> float:
    """As the inserter has it."""
    samples = feeds(model)
    ratio = sqnr_db(run(model, samples), run(insert(model, placement, ranges(model), numbers), samples))
    return 0.0 if ratio is None else float(10 ** (-ratio / 10))


@pytest.mark.parametrize("name", NETS)
def test_each_value_alone_is_as_the_inserter_rounds_it(name: str) -> None:
    model = NETS[name]()
    possible = possible_edges(model, ranges(model))
    noise = Noise(model, alone(model))
    assert set(noise.value_noise) == {noise.value(e.tensor) for e in possible}
    for value, found in noise.value_noise.items():
        placement = Placement.of(e for e in possible if noise.value(e.tensor) == value)
        assert found == pytest.approx(noise_of(model, placement, PLAIN), rel=0.1, abs=1e-9), value


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


def test_the_noisiest_blocks_are_halved_until_the_measurements_are_spent() -> None:
    real = np.array([1, 1, 1, 1, 1, 100, 1, 1.0])
    asked: list[tuple[int, int]] = []

    def noise(block: Block) -> float:
        asked.append(block)
        return float(real[slice(*block)].sum())

    assert halved(8, noise, 100) == real.tolist()
    assert len(asked) == 15
    asked.clear()
    assert halved(8, noise, 7) == [1, 1, 1, 1, 1, 100, 1, 1]
    assert asked == [(0, 8), (0, 4), (4, 8), (4, 6), (6, 8), (4, 5), (5, 6)]
    assert halved(8, noise, 100, floor=4.0) == real.tolist()
    assert halved(8, noise, 100, floor=1000.0) == [real.sum() / 8] * 8


def test_weights_that_are_stored_in_fewer_bits_do_what_they_do_in_a_file() -> None:
    model = build("net (float[2,32] x) => (float[2,8] y) { [product] y = MatMul(x, w) }", {"w": normal(32, 8)}, 21)
    edge, weight_format = Edge("w", "product", 1), WeightFormat(4, 32)
    known = noise_of(model, Placement.of((), {edge: weight_format}.items()), PLAIN)
    found = sensitivities(model, {edge: weight_format}, feeds(model))
    assert found["w"] == pytest.approx(known, rel=0.1)


def test_dynamic_quantization_rounds_the_weight_and_the_activation() -> None:
    model = build("net (float[2,32] x) => (float[2,8] y) { [product] y = MatMul(x, w) }", {"w": normal(32, 8)})
    edge, dynamic = Edge("w", "product", 1), DYNAMIC
    known = noise_of(model, Placement.of((), {edge: dynamic}.items()), PLAIN)
    found = sensitivities(model, {edge: dynamic, Edge("x", "product", 0): None}, feeds(model))
    assert min(found["w"], found["x"]) > 0.1 * known
    assert found["w"] + found["x"] == pytest.approx(known, rel=0.3)  # errors of both are independent


def test_measurements_that_time_has_no_room_for_are_left_out_and_told() -> None:
    model, told = conv_net(), list[bool]()
    known = ranges(model)
    pairs = each_value(model, known, PLAIN, possible_edges(model, known))
    found = sensitivities(model, pairs, feeds(model), deadline=0.0, on_fewer=lambda: told.append(True))
    assert len(set(found.values())) == 1
    assert told == [True]


@pytest.fixture
def one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are measured on one sample, chosen among all."""
    monkeypatch.setattr(sensitivity, "SAMPLES", 1)
    monkeypatch.setattr(sensitivity, "CONSIDERED", 10.0)


@pytest.mark.usefixtures("one_sample")
def test_the_samples_are_those_to_which_rounding_does_most() -> None:
    """The first ones lie within the ranges, and say nothing of what is cut off from a later one."""
    model = conv_net()
    samples = feeds(model)
    (name,) = model.inputs
    wide = {name: 3 * samples[2][name]}
    pairs = each_value(model, ranges(model), PLAIN, possible_edges(model, ranges(model)))
    found = sensitivities(model, pairs, [*samples[:2], wide, samples[3]])
    assert found == sensitivities(model, pairs, [wide])


def test_outputs_that_are_not_finite() -> None:
    text = "net (float[1,4] x) => (float[1,4] y) { [first] h = Neg(x) y = Reciprocal(h) }"
    model = build(text, {})
    pairs = {Edge("x", "first", 0): scales.of_range(Range(-1, 1), PLAIN)}
    tiny, zero = ({"x": np.float32([[1, 1, 1, last]])} for last in (1e-3, 0))
    assert sensitivities(model, pairs, [tiny]) == {"x": UNBOUNDED_NOISE}
    with pytest.raises(EngineRefused, match="NaN or infinite"):
        sensitivities(model, pairs, [zero])


@pytest.mark.usefixtures("one_sample")
def test_samples_are_taken_as_they_come_where_all_rounding_together_leaves_nothing_finite() -> None:
    text = "net (float[1,4] x, float[1,4] z) => (float[1,4] y) { [first] r = Reciprocal(x) [sum] y = Add(r, z) }"
    model = build(text, {})
    edges = Edge("x", "first", 0), Edge("z", "sum", 1)
    sample = {"x": np.float32([[1, 1, 1, 1e-3]]), "z": np.float32([[0.3, 100, 0.1, 0.1]])}
    pairs = dict.fromkeys(edges, scales.of_range(Range(-1, 1), PLAIN))
    found = sensitivities(model, pairs, [sample, sample])
    assert 0 < found["z"] < found["x"] == UNBOUNDED_NOISE


def test_what_onnx_runtime_does_not_run_is_a_failure() -> None:
    model = build(
        "net (float[2,4] x) => (float[2,4] y) { [first] h = MatMul(x, w) y = custom.Knows(h) }", {"w": normal(4, 4)}
    )
    edge = Edge("x", "first", 0)
    with pytest.raises(EngineRefused):
        sensitivities(model, {edge: scales.of_range(Range(-1, 1), PLAIN)}, feeds(model))


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
