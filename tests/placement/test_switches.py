"""A switch for each pair: models with switches compute what models of their own do."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import FORMATS, Arrays, attention, build, conv_net, evaluate, feeds, normal, ranges, run, tapped
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import SWITCH, FilePair, file_pairs, representable, with_file_pairs
from qdqtune.types import Edge, Placement

NETS = {"conv": conv_net, "attention": attention, "tapped": tapped}


def quantized(model: Model, numbers: str = "plain") -> Model:
    known = ranges(model)
    whole = Placement.of(possible_edges(model, known))
    return load_proto(insert(model, whole, known, FORMATS[numbers]).to_proto())


def file_given_back(model: Model, file: Model) -> tuple[FilePair, ...]:
    """The pairs of a file, all found: put on the float model they compute what the file does."""
    pairs, unmatched = file_pairs(model, file)
    assert not unmatched
    assert equal(run(with_file_pairs(model, pairs, file), feeds(model)), run(file, feeds(model)))
    return pairs


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


@pytest.mark.parametrize("switched", [False, True])
def test_a_clamp_that_the_file_dropped_is_missed_if_the_pair_does_not_clamp(switched: bool) -> None:
    model, samples = conv_net(), feeds(conv_net())
    known = ranges(model)
    clamps = {"stem_relu", "clip", "add_relu"}
    placement = Placement.of(e for e in possible_edges(model, known) if e.node not in clamps)
    proto = insert(model, placement, known, FORMATS["uint8"]).to_proto()
    (zero,) = (t for t in proto.graph.initializer if t.name == "r0_zero_point")
    zero.CopyFrom(numpy_helper.from_array(np.uint8(100), zero.name))
    file = load_proto(proto)
    assert "stem_relu" not in file.index_of
    pairs, _ = file_pairs(model, file)
    assert {p.tensor: p.source for p in pairs if p.source != p.tensor}["r0"] == "c0"
    if switched:
        switches = {f"{SWITCH}{i}": np.asarray(True) for i in range(len(pairs))}
        found = run(with_file_pairs(model, pairs, file, switched=True), [{**sample, **switches} for sample in samples])
    else:
        assert "stem_relu" not in with_file_pairs(model, pairs, file).index_of
        found = run(with_file_pairs(model, pairs, file), samples)
    assert equal(found, run(file, samples))


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
    assert len(file_given_back(model, file)) == sum(n.op == "DequantizeLinear" for n in file.nodes)
    assert equal(run(with_file_pairs(model, (), file), samples), run(model, samples))
    assert not equal(run(file, samples), run(model, samples))


@pytest.mark.parametrize(("tensor", "factor"), [("w2", 32.0), ("r0", 1 / 64), ("image", np.nan), ("b0", 2.0)])
def test_a_damaged_pair_stands_as_it_is(tensor: str, factor: float) -> None:
    model, name = conv_net(), f"{tensor}_quantized" if tensor == "b0" else tensor
    good = quantized(model, "uint8")
    (pair,) = (p for p in file_given_back(model, spoil(good, name, factor)) if p.tensor == tensor)
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


def test_a_bias_that_the_float_model_lacks_is_no_pair_on_nothing() -> None:
    """Correcting biases gives one to a Conv that had none."""
    proto = conv_net().to_proto()
    first = next(node for node in proto.graph.node if node.op_type == "Conv" and len(node.input) == 3)
    del first.input[2:]
    _, unmatched = file_pairs(load_proto(proto), quantized(conv_net(), "uint8"))
    assert not unmatched


def test_pairs_come_in_graph_order() -> None:
    model = conv_net()
    pairs, _ = file_pairs(model, quantized(model))
    first = [min(model.index_of.get(e.node, len(model.nodes)) for e in p.edges) for p in pairs]
    assert first == sorted(first)
    assert {p.kind for p in pairs} == {"activation", "constant"}
    assert {e for p in pairs for e in p.edges} == set(possible_edges(model, ranges(model)))


PRODUCTS = """net (float[N,4] x) => (float[N,4] y) {{
    m = MatMul(x, w)
    r = Relu(m)
    y = {0}
}}"""
BEHIND = """net (float[N,4] x) => (float[N,4] y) {{
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    m = MatMul(d, w)
    r = Relu(m)
    last = {0}
    p = QuantizeLinear(last, s, z)
    y = DequantizeLinear(p, s, z)
}}"""


@pytest.mark.parametrize("last", ["MatMul(r, v)", "Relu(r)", "Clip(r, low, high)"])
def test_a_pair_at_an_output_is_found_whatever_names_the_file_has(last: str) -> None:
    """Nodes without names are named by their position, which the pairs in front change."""
    constants = {"w": normal(4, 4), "v": normal(4, 4, seed=1), "low": np.float32(-1), "high": np.float32(1)}
    model = load_proto(build(PRODUCTS.format(last), constants).to_proto())
    numbers = {"s": np.float32(0.02), "z": np.int8(0)}
    file = load_proto(build(BEHIND.format(last), constants | numbers).to_proto())
    assert [pair.tensor for pair in file_given_back(model, file)] == ["x", "y"]


def test_a_pair_at_an_output_that_clamps_in_place_of_a_relu() -> None:
    model = load_proto(build(PRODUCTS.format("Relu(t)").replace("r = Relu(m)", "t = MatMul(m, v)"),
                             {"w": normal(4, 4), "v": normal(4, 4)}).to_proto())  # fmt: skip
    text = BEHIND.format("MatMul(m, v)").replace("r = Relu(m)", "").replace("(last, s, z)", "(last, s)")
    numbers = {"w": normal(4, 4), "v": normal(4, 4), "s": np.float32(0.02), "z": np.int8(0)}
    file = load_proto(build(text.replace("(p, s, z)", "(p, s)"), numbers).to_proto())
    assert [(pair.tensor, pair.source) for pair in file_given_back(model, file)] == [("x", "x"), ("y", "t")]


def test_a_name_by_position_is_no_sign_of_the_same_node() -> None:
    """`MatMul_2` is the second product of the float model, and the first one of the file."""
    float_text = "net (float[N,4] x) => (float[N,4] y) { m = MatMul(x, w)\n r = Relu(m)\n y = MatMul(r, w) }"
    text = """net (float[N,4] x) => (float[N,4] y) {
        q = QuantizeLinear(x, s)
        d = DequantizeLinear(q, s)
        m = MatMul(d, w)
        r = Relu(m)
        y = MatMul(r, w)
    }"""
    model = load_proto(build(float_text, {"w": normal(4, 4)}).to_proto())
    file = load_proto(build(text, {"w": normal(4, 4), "s": np.float32(0.1)}).to_proto())
    (pair,), _ = file_pairs(model, file)
    assert pair.edges == (Edge("x", "MatMul_0", 0),)


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
