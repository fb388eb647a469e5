from unittest.mock import Mock

import numpy as np
import pytest
from onnx import TensorProto
from onnxruntime.transformers.float16 import convert_np_to_float16

from models import INT8, attention, build, check, conv_net, feeds, normal, ranges, run, sqnr
from qdqtune.graph.float16 import converted, rounded_to_float16
from qdqtune.graph.model import Constant, Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.placement.stripping import strip_pairs


def dtypes(model: Model) -> dict[str, str]:
    names = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}
    return {t: names.get(i.dtype, "other") for t, i in model.tensors.items()}


@pytest.mark.parametrize("make", [conv_net, attention])
def test_values_are_those_of_float32_up_to_rounding(make) -> None:
    model = make()
    before = model.fingerprint
    half = converted(model, "fp16")
    assert half.fingerprint != before == model.fingerprint
    check(half)
    samples = feeds(model)
    assert sqnr(run(model, samples), run(half, samples)) > 50
    found = dtypes(half)
    inside = {t for n in model.nodes for t in n.outputs} - set(model.outputs)
    assert {found[t] for t in inside} == {"float16"}
    assert {found[t] for t in model.constants} == {"float16"}
    assert half.index_of.keys() >= model.index_of.keys()


def test_large_constants_are_converted_when_they_are_read() -> None:
    read = Mock(return_value=np.full((16, 64), 1e6, np.float32))
    model = build("net (float[N,16] x) => (float[N,64] y) { [mm] y = MatMul(x, w) }", {"w": normal(16, 64)})
    assert "w" in model.large
    half = converted(Model(model.proto, {"w": Constant("key", TensorProto.FLOAT, (16, 64), read)}), "fp16")
    assert not read.called
    assert (half.large["w"].dtype, half.large["w"].nbytes) == (TensorProto.FLOAT16, 16 * 64 * 2)
    values = half.large["w"].array()
    assert values.dtype == np.float16
    assert (values == np.finfo(np.float16).max).all()  # clipped, not infinite
    assert half.inputs == ("x",)


def test_unsafe_operators_stay_in_float32() -> None:
    """Two of them read one tensor: the Cast in front of both is there once. Max and Min round nothing."""
    text = """net (float[2,4] x) => (float[2,4] y) {
        [first] a = Mul(x, two)
        [high] c = Max(a, one)
        [low] d = Min(c, one)
        [rows] e = CumSum(d, zero)
        [columns] f = CumSum(d, one_axis)
        [last] y = Sub(e, f)
    }"""
    given = {"two": np.float32(2), "one": np.float32(1), "zero": np.int64(0), "one_axis": np.int64(1)}
    model = build(text, given)
    half = converted(model, "fp16")
    check(half)
    types = dtypes(half)
    by_name = {n.name: n for n in half.nodes}
    for name in ("rows", "columns"):
        assert {types[t] for t in (by_name[name].inputs[0], *by_name[name].outputs)} == {"float32"}
    assert {types[t] for n in ("first", "high", "low", "last") for t in by_name[n].outputs} == {"float16"}
    assert sum(n.op == "Cast" for n in half.nodes) == 5
    x = normal(2, 4)
    np.testing.assert_allclose(run(half, [{"x": x}])[0]["y"], run(model, [{"x": x}])[0]["y"], atol=5e-3)


def test_a_custom_operator_stays_in_float32_and_its_large_weight_keeps_its_precision() -> None:
    text = """net (float[N,16] x) => (float[N,16] y) {
        [one] t = MatMul(x, w)
        [two] u = custom.Mix(t, v)
        [three] y = MatMul(u, w)
    }"""
    model = build(text, {"w": normal(16, 16), "v": normal(16, 16, seed=1)})
    assert set(model.large) == {"w", "v"}
    half = converted(model, "fp16")
    casts = {n.inputs[0]: n for n in half.nodes if n.op == "Cast"}
    two, three = (half.node(name) for name in ("two", "three"))
    assert two.inputs == (casts["t"].outputs[0], "v")
    assert three.inputs[0] == casts[two.outputs[0]].outputs[0]
    assert half.large["v"].key == model.large["v"].key
    assert half.large["w"].dtype == TensorProto.FLOAT16


def test_bodies_stay_in_float32_with_what_they_capture() -> None:
    text = """net (float[N,4] x, bool flag) => (float[N,4] y) {
        [first] t = MatMul(x, w)
        [branch] z = If(flag) <
            then_branch = a () => (float[N,4] p) { s = Add(t, w0)  p = CumSum(s, axis) },
            else_branch = b () => (float[N,4] q) { q = Neg(t) }>
        [second] y = MatMul(z, w)
    }"""
    model = build(text, {"w": normal(4, 4), "w0": normal(4), "axis": np.int64(0)})
    half = converted(model, "fp16")
    check(half)
    assert (dtypes(half)["t"], dtypes(half)["w0"]) == ("float16", "float32")
    for flag in (True, False):
        feed = {"x": normal(2, 4), "flag": np.array(flag)}
        assert sqnr(run(model, [feed]), run(half, [feed])) > 50


def test_integers_and_casts_to_float() -> None:
    text = """net (int64[N,4] ids, float[N,4] x) => (float[N,4] y) {
        [cast] f = Cast<to=1>(ids)
        [add] y = Add(f, x)
    }"""
    model = build(text)
    half = converted(model, "fp16")
    check(half)
    assert dtypes(half)["f"] == "float16"
    feed = {"ids": np.arange(8).reshape(2, 4), "x": normal(2, 4)}
    np.testing.assert_allclose(run(half, [feed])[0]["y"], run(model, [feed])[0]["y"], atol=1e-2)


def test_scales_of_a_resize_stay_float32_and_made_up_values_take_the_type_of_their_readers() -> None:
    text = """net (float[1,2,2,2] x, int64[4] sizes) => (float[1,2,H,W] y, float[1,2,2,2] z) {
        [double] s = Add(scales, scales)
        [resize] r = Resize(x, , s)
        [zeros] o = ConstantOfShape(sizes)
        [noise] n = RandomNormal <shape=[1,2,2,2], scale=2.0> ()
        [add] a = Add(o, n)
        [sum] z = Add(x, a)
        [last] y = Neg(r)
    }"""
    model = build(text, {"scales": np.float32([0.5, 0.5, 1, 1])})
    half = converted(model, "fp16")
    check(half)
    assert {dtypes(half)[t] for t in ("r", "o", "n", "a")} == {"float16"}
    assert dtypes(half)[half.node("resize").inputs[2]] == "float32"


def test_a_quantized_model_keeps_its_pairs() -> None:
    model = conv_net()
    found = ranges(model)
    placement = start_placements.placements(model, possible_edges(model, found))["static"]
    half = converted(insert(model, placement, found, INT8), "fp16")
    check(half)
    assert {half.tensors[n.inputs[1]].dtype for n in half.nodes if n.op == "QuantizeLinear"} == {TensorProto.FLOAT16}
    stripped = strip_pairs(half)
    reading = read_placement(stripped, half)
    assert reading.unmatched == ()
    assert len(reading.placement) == len(placement)
    samples = feeds(model)
    assert sqnr(run(model, samples), run(insert(stripped, reading.placement, reading.ranges, INT8), samples)) > 25


def test_rounding_to_float16_keeps_what_the_converter_keeps() -> None:
    wide = normal(400) * 10.0 ** np.linspace(-12, 9, 400)
    ends = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, -65520, 1e30, 5.96e-8, -2.9e-8, 3e-8, -1e-40]
    values = np.concatenate([wide, ends]).astype(np.float32)
    expected = convert_np_to_float16(values)
    np.testing.assert_array_equal(rounded_to_float16(values), expected)
    np.testing.assert_array_equal(np.signbit(rounded_to_float16(values)), np.signbit(expected))
    assert rounded_to_float16(np.float32(-1e-12)) == np.float16(-(2.0**-24))


INTERFACE = """g (float[4,8] x, float[8] gain) => (float[4,8] y, float[1] version, float[8] shift, float[4,8] x_out) {
    [scale] a = Mul(x, gain)
    [add] y = Add(a, shift)
    [pass] x_out = Identity(x)
}"""


@pytest.mark.parametrize("size", [8, 512])
def test_the_interface_stays_float32_where_no_node_makes_it(size: int) -> None:
    """A default that callers may override, and constants that are outputs, one of them read by a node as well."""
    constants = {"gain": normal(size), "version": np.float32([1 + 2**-20]), "shift": normal(size, seed=1)}
    model = build(INTERFACE.replace("8]", f"{size}]"), constants)
    half = converted(model, "fp16")
    check(half)
    assert half.proto.graph.input == model.proto.graph.input
    assert half.proto.graph.output == model.proto.graph.output
    assert half.overridable == {"gain"}
    x = normal(4, size, seed=2)
    for sample in ({"x": x}, {"x": x, "gain": normal(size, seed=3)}):
        (before,), (after,) = run(model, [sample]), run(half, [sample])
        np.testing.assert_allclose(after["y"], before["y"], atol=0.02)
        assert all((after[name] == before[name]).all() for name in ("version", "shift"))
    assert dtypes(half)["a"] == "float16"
