"""The pairs of a file put onto the float model: all of them give the file again, damaged as it is."""

import numpy as np
import pytest
from onnx import numpy_helper

from models import FORMATS, attention, build, conv_net, feeds, ranges, run
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement.file_pairs import file_pairs, representable, with_file_pairs
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Edge, Placement, WeightFormat
from quantized_nets import NETS, equal, quantized


def spoil(model: Model, tensor: str, factor: float) -> Model:
    """A Q/DQ model with a scale that is off by `factor`."""
    proto = model.to_proto()
    (scale,) = (t for t in proto.graph.initializer if t.name == f"{tensor}_scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(factor), scale.name))
    return load_proto(proto)


@pytest.mark.parametrize("numbers", ["plain", "uint8", "int8", "fp8"])
@pytest.mark.parametrize("name", NETS)
def test_all_pairs_give_the_file_and_none_the_float_model(name: str, numbers: str) -> None:
    model = NETS[name]()
    file, samples = quantized(model, numbers), feeds(model)
    pairs, unmatched = file_pairs(model, file)
    assert not unmatched
    assert len(pairs) == sum(n.op == "DequantizeLinear" for n in file.nodes)
    assert equal(run(with_file_pairs(model, pairs, file), samples), run(file, samples))
    assert equal(run(with_file_pairs(model, (), file), samples), run(model, samples))
    assert not equal(run(file, samples), run(model, samples))


@pytest.mark.parametrize(("tensor", "factor"), [("w2", 32.0), ("r0", 1 / 64), ("image", np.nan), ("b0", 2.0)])
def test_a_damaged_pair_stands_as_it_is(tensor: str, factor: float) -> None:
    model, name = conv_net(), f"{tensor}_quantized" if tensor == "b0" else tensor
    good = quantized(model, "uint8")
    file, samples = spoil(good, name, factor), feeds(model)
    pairs, _ = file_pairs(model, file)
    assert equal(run(with_file_pairs(model, pairs, file), samples), run(file, samples))
    (pair,) = (p for p in pairs if p.tensor == tensor)
    (healthy,) = (p for p in file_pairs(model, good)[0] if p.tensor == tensor)
    assert pair.scale == pytest.approx(healthy.scale * np.float32(factor), nan_ok=True)
    if np.isfinite(factor):
        assert representable(pair) == pytest.approx([factor * end for end in representable(healthy)])
        low, high = representable(healthy)
        values = model.constants[tensor].array() if tensor in model.constants else np.array([0, 1.0])
        assert low <= values.min() + 0.02
        assert high >= values.max() - 0.02
    else:
        assert np.isnan(representable(pair)).all()


def test_pairs_of_another_model_are_unmatched() -> None:
    pairs, unmatched = file_pairs(attention(), quantized(conv_net()))
    assert not pairs
    assert len(unmatched) > 10


def test_pairs_come_in_graph_order() -> None:
    model = conv_net()
    pairs, _ = file_pairs(model, quantized(model))
    first = [min(model.index_of.get(e.node, len(model.nodes)) for e in p.edges) for p in pairs]
    assert first == sorted(first)
    assert {p.kind for p in pairs} == {"activation", "constant"}
    assert {e for p in pairs for e in p.edges} == set(possible_edges(model, ranges(model)))


def test_what_a_weight_in_blocks_gives() -> None:
    weights = np.linspace(-1, 2, 64 * 4, dtype=np.float32).reshape(64, 4)
    model = build("net (float[1,64] x) => (float[1,4] y) { [m] y = MatMul(x, w) }", {"w": weights}, 21)
    stored = Placement.of((), [(Edge("w", "m", 1), WeightFormat(4, 32, symmetric=False))])
    (pair,), _ = file_pairs(model, load_proto(insert(model, stored, Ranges({}), FORMATS["plain"]).to_proto()))
    assert representable(pair) == pytest.approx((-1, 2), abs=0.1)
