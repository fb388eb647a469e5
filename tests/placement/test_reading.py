"""Q/DQ models read back: ours exactly, those of quantize_static and of others as far as they go, and stripped again."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import FORMATS, FP8, INT8, REDUCED, UINT8, build, case, feeds, normal, placements, ranges, run, sqnr, static
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.model import LARGE_BYTES, Model
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import is_quantized, read_placement
from qdqtune.placement.start_placements import everything
from qdqtune.placement.stripping import strip_pairs
from qdqtune.types import Edge, Placement
from rewrite_nets import same

CASES = ("conv_net", "attention", "tapped", "embedding", "conv_net_half", "attention_half")


def counts(model: Model) -> Counter[str]:
    return Counter(n.op for n in model.nodes)


# Our own
@pytest.mark.parametrize("name", CASES)
@settings(derandomize=True, max_examples=12, deadline=None)
@given(data=st.data())
def test_our_own_models_are_read_exactly_and_stripped(name: str, data: st.DataObject) -> None:
    """Placement, scales and zero points: inserted again, the same model comes out, bit for bit. Stripping gives the
    float model back; `--from-qdq` reads against that, and inserts with the scales that came."""
    model, samples, found, possible, outputs = case(name)
    placement = data.draw(placements(possible))
    fmt = data.draw(st.sampled_from(list(FORMATS.values())))
    quantized = insert(model, placement, found, fmt)
    reading = read_placement(model, quantized)
    assert reading.placement == placement
    assert reading.unmatched == ()
    assert insert(model, placement, reading.ranges, fmt).fingerprint == quantized.fingerprint
    stripped = strip_pairs(quantized)
    onnx.checker.check_model(stripped.to_proto(), full_check=True)
    assert not is_quantized(stripped)
    assert (stripped.inputs, stripped.outputs) == (model.inputs, model.outputs)
    assert {o.name: o.type for o in stripped.proto.graph.output} == {o.name: o.type for o in model.proto.graph.output}
    if fmt is not UINT8:
        assert [n.name for n in stripped.nodes] == [n.name for n in model.nodes]
    assert sum(counts(stripped)[op] for op in ("Relu", "Clip")) == sum(counts(model)[op] for op in ("Relu", "Clip"))
    assert sqnr(outputs, run(stripped, samples)) > (20 if fmt in (FP8, REDUCED) else 30)  # only weights are rounded now
    reading = read_placement(stripped, quantized)
    assert reading.unmatched == ()
    again = insert(stripped, reading.placement, reading.ranges, fmt)
    assert counts(again) == counts(quantized)
    for mine, theirs in zip(run(again, samples), run(quantized, samples), strict=True):
        for output, array in theirs.items():
            half = array.dtype == np.float16
            np.testing.assert_allclose(mine[output], array, rtol=1e-2 if half else 1e-4, atol=1e-2 if half else 1e-5)


# Clamps that a quantizer dropped
NEVER_NEGATIVE = [
    "Relu(x)", "Sigmoid(x)", "Softmax(x)", "MaxPool<kernel_shape=[1,1]>(r)", "Add(r, r)", "Concat<axis=1>(r, r)",
    "Mul(r, r)", "Add(e, one)", "Clip(x, zero)", "Add(r, one)", "Flatten(r)",
    "DepthToSpace<blocksize=1>(r)", "SpaceToDepth<blocksize=1>(r)",
]  # fmt: skip


@pytest.mark.parametrize(
    "op", [*NEVER_NEGATIVE, "Add(r, x)", "Mul(r, x)", "Concat<axis=1>(r, x)", "Add(e, half)", "Neg(x)"]
)
def test_no_clamp_comes_back_where_nothing_was_negative(op: str) -> None:
    text = f"""net (float[1,2,3,3] x) => (float[A,B,C,D] y) {{ [relu] r = Relu(x)\n [erf] e = Erf(x)\n [node] k = {op}
        [last] y = Tanh(k) }}"""
    model = build(text, {"one": np.float32(1), "half": np.float32(0.5), "zero": np.float32(0)})
    fmt = replace(UINT8, drop_clamps=False)
    quantized = insert(model, Placement.of([Edge("k", "last", 0)]), Ranges({"k": Range(0, 2)}), fmt)
    assert ("k_clamp" in strip_pairs(quantized).index_of) == (op not in NEVER_NEGATIVE)


def test_a_signed_pair_in_front_does_not_hide_a_lost_clamp() -> None:
    """The pool reads a pair that goes below zero, so the Relu behind it did something."""
    text = """net (float[N,2,4,4] x) => (float[N,2,2,2] y) {
        [pool] p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)
        [relu] r = Relu(p)
        [last] y = Sigmoid(r)
    }"""
    model = build(text)
    samples = [{"x": normal(2, 2, 4, 4) - 1}]
    found = Ranges({"x": Range(-4, 2), "p": Range(-3, 2), "r": Range(0, 2)})
    quantized = insert(model, Placement.of([Edge("x", "pool", 0), Edge("r", "last", 0)]), found, UINT8)
    assert "relu" not in quantized.index_of
    stripped = strip_pairs(quantized)
    np.testing.assert_array_equal(run(stripped, samples)[0]["y"], run(model, samples)[0]["y"])


# quantize_static
@pytest.mark.parametrize("name", ["conv_net", "attention", "tapped", "embedding"])
@pytest.mark.parametrize("options", [(), ("per_channel", "reduce_range")])
def test_quantize_static_is_read_and_reached(name: str, options: tuple[str, ...]) -> None:
    """Every pair is found; inserted again it gives as many Q and DQ and the same accuracy."""
    model, quantized = static(name, **dict.fromkeys(options, True))
    samples = feeds(model, 64)
    outputs = run(model, samples)
    assert is_quantized(quantized)
    reading = read_placement(model, quantized)
    assert reading.unmatched == ()
    assert reading.placement.edges <= case(name).possible
    mine = insert(model, reading.placement, reading.ranges, replace(UINT8, per_channel="per_channel" in options))
    theirs, ours = counts(quantized), counts(mine)
    assert theirs - ours == ({"DequantizeLinear": 2} if name == "attention" else {})  # LayerNormalization's two biases
    assert ours - theirs == {}
    reached, wanted = sqnr(outputs, run(mine, samples)), sqnr(outputs, run(quantized, samples))
    assert reached > wanted - 0.5
    own = insert(model, reading.placement, ranges(model, samples), replace(UINT8, per_channel="per_channel" in options))
    assert sqnr(outputs, run(own, samples)) > wanted - 0.5


# Other quantizers
FLOAT = """net (float[N,3,6,6] x) => (float[N,3,6,6] y) {
    [conv] c = Conv <pads=[1,1,1,1]> (x, w, b)
    [relu] r = Relu(c)
    [conv2] d = Conv <pads=[1,1,1,1]> (r, w, b)
    [add] y = Add(d, x)
}"""
QDQ = """net (float[N,3,6,6] x) => (float[N,3,6,6] y) {
    [x_q] xq = QuantizeLinear(x, sx, zero)
    [x_dq] xd = DequantizeLinear(xq, sx, zero)
    [w_q] wq = QuantizeLinear <axis=0> (w, sw, zeros)
    [w_dq] wd = DequantizeLinear <axis=0> (wq, sw, zeros)
    [conv] c = Conv <pads=[1,1,1,1]> (xd, wd, b)
    [relu] r = Relu(c)
    [r_q] rq = QuantizeLinear(r, sr, zero)
    [r_dq] rd = DequantizeLinear(rq, sr, zero)
    [conv2] d = Conv <pads=[1,1,1,1]> (rd, wd, b)
    [add] y = Add(d, xd)
}"""
SCALES = {"sx": np.float32(0.03), "sr": np.float32(0.02), "sw": np.float32([0.01, 0.02, 0.03]), "zero": np.int8(0),
          "zeros": np.zeros(3, np.int8)}  # fmt: skip
WEIGHTS = {"w": normal(3, 3, 3, 3), "b": normal(3)}


def test_float_weights_with_pairs_of_their_own() -> None:
    """ModelOpt leaves weights in float in front of Q and DQ, symmetric int8; one pair serves several users."""
    model, quantized = build(FLOAT, WEIGHTS), build(QDQ, WEIGHTS | SCALES)
    reading = read_placement(model, quantized)
    assert reading.placement == Placement.of(
        [Edge("x", "conv", 0), Edge("x", "add", 1), Edge("w", "conv", 1), Edge("w", "conv2", 1), Edge("r", "conv2", 0)]
    )
    assert reading.unmatched == ()
    mine = insert(model, reading.placement, reading.ranges, INT8)
    same(quantized, mine)
    stripped = strip_pairs(quantized)
    assert sorted((n.name, n.op) for n in stripped.nodes) == sorted((n.name, n.op) for n in model.nodes)
    same(model, stripped)


def test_renamed_nodes_are_found_by_what_they_make_and_else_counted() -> None:
    model = build(FLOAT, WEIGHTS)
    renamed = build(QDQ.replace("[conv]", "[first]").replace("[add]", "[sum]"), WEIGHTS | SCALES)
    assert read_placement(model, renamed).placement == read_placement(model, build(QDQ, WEIGHTS | SCALES)).placement
    foreign = build(QDQ.replace("[conv] c", "[first] c0").replace("Relu(c)", "Relu(c0)"), WEIGHTS | SCALES)
    reading = read_placement(model, foreign)
    assert reading.unmatched == ("x_dq", "w_dq")
    assert reading.placement == Placement.of([Edge("x", "add", 1), Edge("w", "conv2", 1), Edge("r", "conv2", 0)])


def test_scales_that_are_computed_and_integer_operators_are_left_alone() -> None:
    text = """net (float[N,4] x) => (float[N,4] y, int32[N,4] z, float[N,4] v) {
        [max] m = ReduceMax <keepdims=0> (x)
        [scale] s = Div(m, top)
        [q] q1 = QuantizeLinear(x, s, zero)
        [dq] d1 = DequantizeLinear(q1, s, zero)
        [mm] y = MatMul(d1, w)
        [q2] q2 = QuantizeLinear(x, fixed, zero)
        [dq2] d2 = DequantizeLinear(q2, fixed, zero)
        [relu] r = Relu(d2)
        [integer] z = MatMulInteger(q2, wi)
        [zero] zc = Cast <to=3> (m)
        [q3] q3 = QuantizeLinear(x, fixed, zc)
        [dq3] v = DequantizeLinear(q3, fixed, zc)
    }"""
    model = build(text, {"top": np.float32(127), "zero": np.int8(0), "fixed": np.float32(0.1), "w": normal(4, 4),
                         "wi": np.ones((4, 4), np.int8)})  # fmt: skip
    stripped = strip_pairs(model)
    onnx.checker.check_model(stripped.to_proto(), full_check=True)
    names = {"max", "scale", "q", "dq", "mm", "q2", "relu", "integer", "zero", "q3", "dq3"}
    assert {n.name for n in stripped.nodes} == names
    same(model, stripped)


def test_outputs_and_bodies_that_read_a_pair_directly() -> None:
    """A pair on a graph input that is an output, one that two outputs share, and one that the bodies of an If read."""
    text = """net (float[N,4] x, bool flag) => (float[N,4] y, float[N,4] t, float[N,4] u, float[N,4] z) {
        [q1] q1 = QuantizeLinear(x, s, zero)
        [dq1] y = DequantizeLinear(q1, s, zero)
        [mm] t = MatMul(y, w)
        [q2] q2 = QuantizeLinear(t, s, zero)
        [dq2] u = DequantizeLinear(q2, s, zero)
        [neg] n = Neg(u)
        [q3] q3 = QuantizeLinear(n, s, zero)
        [dq3] d = DequantizeLinear(q3, s, zero)
        [branch] z = If(flag) <
            then_branch = a () => (float[N,4] p) { p = Relu(d) },
            else_branch = b () => (float[N,4] q) { q = Abs(d) }>
    }"""
    model = build(text, {"s": np.float32(0.001), "zero": np.int16(0), "w": normal(4, 4)}, opset=21)
    stripped = strip_pairs(model)
    assert not is_quantized(stripped)
    assert stripped.outputs == model.outputs
    samples = feeds(model)
    assert sqnr(run(model, samples), run(stripped, samples)) > 50


@pytest.mark.parametrize(
    ("scale", "zero", "axis", "kept"),
    [
        (np.float32([1, 2, 3, 4]), np.zeros(4, np.int8), 0, False),
        (np.float32([1, 2, 3, 4]), np.zeros(4, np.int8), 1, True),
        (np.float32([1, 2, 3, 4]), np.zeros(4, np.int8), -1, True),
        (np.float32(1), np.int8(7), 1, False),
        (np.float32(1), np.uint8(0), 1, False),
        (np.float32(1), np.uint8(128), 1, True),
    ],
)
def test_scales_of_weights_are_kept_if_they_serve_symmetric_channels(scale, zero, axis, kept):
    """A scale for each row is none for each column, and 127 steps of an uneven pair would cut the weight off."""
    model = build("net (float[N,4] x) => (float[N,4] y) { [mm] y = MatMul(x, w) }", {"w": normal(4, 4)})
    text = f"""net (float[N,4] x) => (float[N,4] y) {{
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        e = DequantizeLinear <axis={axis}> (w, sw, zw)
        [mm] y = MatMul(d, e)
    }}"""
    numbers = {"s": np.float32(1), "z": np.int8(0), "w": np.ones((4, 4), zero.dtype), "sw": scale, "zw": zero}
    reading = read_placement(model, build(text, numbers))
    assert Edge("w", "mm", 1) in reading.placement
    assert ("w" in reading.ranges.weights) == kept


def test_scales_of_fp8_weights_are_taken_anew_for_integers() -> None:
    """E4M3 reaches 448 times its scale, and 8-bit integers 127 times."""
    model, scales = build(FLOAT, WEIGHTS), ranges(build(FLOAT, WEIGHTS))
    quantized = insert(model, everything(model, possible_edges(model, scales)), scales, FP8)
    kept = read_placement(model, quantized, "fp8")
    assert kept.ranges.weights
    anew = read_placement(model, quantized, "int8")
    assert not anew.ranges.weights
    assert (anew.placement, anew.ranges.activations) == (kept.placement, kept.ranges.activations)
    integers = insert(model, kept.placement, ranges(model), INT8)
    assert read_placement(model, integers).ranges.weights
    assert not read_placement(model, integers, "fp8").ranges.weights


@pytest.mark.parametrize("block", ["", ", block_size=2"])
def test_an_activation_with_several_scales_is_refused(block: str) -> None:
    text = f"""net (float[2,4] x) => (float[2,4] y) {{
        q = QuantizeLinear <axis=1{block}> (x, s, z)
        d = DequantizeLinear <axis=1{block}> (q, s, z)
        [mm] y = MatMul(d, w)
    }}"""
    shape = (2, 2) if block else (4,)
    numbers = {"s": np.ones(shape, np.float32), "z": np.zeros(shape, np.int8), "w": normal(4, 4)}
    quantized = build(text, numbers, opset=21)
    with pytest.raises(BadModel, match="the pair on x has a scale for each channel or block"):
        read_placement(strip_pairs(quantized), quantized)


def test_the_pair_of_a_weight_behind_a_transpose_is_that_of_the_product() -> None:
    """As exporters write a Linear whose weight has a pair."""
    weight = (np.arange(512) % 255 - 127).astype(np.int8).reshape(8, 64)
    weight[:, 0] = 127
    scales = np.linspace(0.01, 0.02, 8, dtype=np.float32)
    text = """g (float[2,64] x) => (float[2,8] y) {
        [x_q] xq = QuantizeLinear(x, sx, zero)
        [x_dq] xd = DequantizeLinear(xq, sx, zero)
        [w_dq] wd = DequantizeLinear <axis=0> (w, sw)
        [turn] wt = Transpose <perm=[1,0]> (wd)
        [product] y = MatMul(xd, wt)
    }"""
    quantized = build(text, {"w": weight, "sw": scales, "sx": SCALES["sx"], "zero": SCALES["zero"]})
    model = Rewrites().of(strip_pairs(quantized))
    assert [node.op for node in model.nodes] == ["MatMul"]
    reading = read_placement(model, quantized)
    assert reading.placement == Placement.of([Edge("x", "product", 0), Edge("wt", "product", 1)])
    assert not reading.ranges.weights, "its channels lie along another axis"
    mine = insert(model, reading.placement, reading.ranges, INT8)
    samples = feeds(model, 2)
    assert sqnr(run(quantized, samples), run(mine, samples)) > 60


@pytest.mark.parametrize(
    ("numbers", "axis", "is_read"),
    [
        ({"s": np.float32(2), "t": np.array([2], np.float32), "z": np.array([3], np.int8)}, "1", True),
        ({"s": np.float32(2), "t": np.float32(3), "z": np.int8(0)}, "1", False),
        (dict.fromkeys("st", np.float32([1, 2, 3, 4])) | {"z": np.zeros(4, np.int8)}, "-1", True),
        (dict.fromkeys("st", np.float32([1, 2, 3, 4])) | {"z": np.zeros(4, np.int8)}, "0", False),
    ],
)
def test_q_and_dq_may_write_the_same_numbers_in_two_ways_but_no_others(numbers: dict, axis: str, is_read: bool) -> None:
    text = f"""net (float[N,4] x) => (float[N,4] y) {{
        [q] q = QuantizeLinear <axis=1> (w, s, z)
        [dq] d = DequantizeLinear <axis={axis}> (q, t, z)
        [product] y = MatMul(x, d)
    }}"""
    weights = {"w": normal(4, 4)}
    model = build("net (float[N,4] x) => (float[N,4] y) { [product] y = MatMul(x, w) }", weights)
    if is_read:
        found = read_placement(model, build(text, weights | numbers)).placement
        assert found == Placement.of([Edge("w", "product", 1)])
    else:
        with pytest.raises(BadModel, match="the pair on w does not give its values back"):
            read_placement(model, build(text, weights | numbers))


def test_weights_that_differ_in_their_zero_points_only_are_different_constants() -> None:
    """Constants with one key are written once."""
    text = """net (float[N] x) => (float[N] y) {
        [dq1] d1 = DequantizeLinear(w, s, zero)
        [dq2] d2 = DequantizeLinear(w, s, one)
        [add] a = Add(x, d1)
        [sub] y = Sub(a, d2)
    }"""
    constants = {"w": np.zeros(LARGE_BYTES, np.int8), "s": np.float32(1), "zero": np.int8(0), "one": np.int8(1)}
    stripped = strip_pairs(build(text, constants))
    assert stripped.constants["d1"].key != stripped.constants["d2"].key
