"""A switch for each pair: models with switches compute what models of their own do."""

import numpy as np
import onnx
import pytest

from models import FORMATS, Arrays, attention, build, conv_net, evaluate, feeds, normal, ranges, run, tapped
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import SWITCH, file_pairs, with_file_pairs
from qdqtune.types import Placement

NETS = {"conv": conv_net, "attention": attention, "tapped": tapped}


def quantized(model: Model, numbers: str = "plain") -> Model:
    known = ranges(model)
    whole = Placement.of(possible_edges(model, known))
    return load_proto(insert(model, whole, known, FORMATS[numbers]).to_proto())


def equal(a: list[Arrays], b: list[Arrays]) -> bool:
    pairs = ((x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True) for x, y in pairs)


@pytest.mark.parametrize("name", NETS)
def test_switches_choose_the_same_as_a_model_of_its_own(name: str) -> None:
    model = NETS[name]()
    file, samples = quantized(model, "uint8"), feeds(model)
    pairs, _ = file_pairs(model, file)
    switched = with_file_pairs(model, pairs, file, switched=True)
    onnx.checker.check_model(switched.to_proto())
    for chosen in ([], [0], [len(pairs) - 1], range(0, len(pairs), 2), range(len(pairs))):
        switches = {f"{SWITCH}{i}": np.asarray(i in chosen) for i in range(len(pairs))}
        by_switch = run(switched, [{**sample, **switches} for sample in samples])
        assert equal(by_switch, run(with_file_pairs(model, [pairs[i] for i in chosen], file), samples)), chosen


def test_a_bias_that_the_float_model_lacks_is_no_pair_on_nothing() -> None:
    """Correcting biases gives one to a Conv that had none."""
    proto = conv_net().to_proto()
    first = next(node for node in proto.graph.node if node.op_type == "Conv" and len(node.input) == 3)
    del first.input[2:]
    _, unmatched = file_pairs(load_proto(proto), quantized(conv_net(), "uint8"))
    assert not unmatched


def test_scales_of_another_type_than_the_values_run() -> None:
    """Opset 23: float16 values with float32 scales, for which ONNX Runtime has no kernel."""
    text = """net (float16[N,4] x) => (float16[N,4] y) {
        [q] q = QuantizeLinear(x, s, z)
        [dq] d = DequantizeLinear <output_dtype=10> (q, s, z)
        [wq] e = DequantizeLinear <output_dtype=10> (w, s, z)
        [mm] m = MatMul(d, e)
        [q2] p = QuantizeLinear(m, s, z)
        [dq2] f = DequantizeLinear(p, s, z)
        [cast] c = Cast <to=10> (f)
        [relu] y = Relu(c)
    }"""
    numbers = {"s": np.float32(0.03), "z": np.int8(0), "w": np.arange(16, dtype=np.int8).reshape(4, 4)}
    file = load_proto(build(text, numbers, opset=23).to_proto())
    stripped = strip_pairs(file)
    assert [n.op for n in stripped.nodes] == ["MatMul", "Cast", "Cast", "Relu"]
    pairs, unmatched = file_pairs(stripped, file)
    assert not unmatched
    samples = [{"x": normal(2, 4).astype(np.float16)}]
    (found,), (expected,) = run(with_file_pairs(stripped, pairs, file), samples), evaluate(file, samples)
    np.testing.assert_allclose(found["y"], expected["y"], atol=0.031)
    assert found["y"].dtype == np.float16
