"""Insertion: what comes out is valid, computes the same up to rounding, and follows the engine's format."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from models import (
    FORMATS,
    FP8,
    INT8,
    PLAIN,
    REDUCED,
    UINT8,
    build,
    case,
    check,
    constant,
    conv_net,
    edges,
    evaluate,
    feeds,
    normal,
    of_type,
    placements,
    ranges,
    run,
    scale_of,
    sqnr,
)
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.model import Model, Node
from qdqtune.graph.saving import ConstantFile
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import RAW_OUTPUT, Inserter, insert
from qdqtune.placement.possible import WeightRole, possible_edges, weight_role
from qdqtune.placement.quantizations import Quantizer
from qdqtune.placement.reading import read_placement
from qdqtune.types import Edge, NumericFormat, Placement, QType

CASES = ("conv_net", "attention", "tapped", "embedding", "conv_net_half", "attention_half")


@pytest.mark.parametrize("name", CASES)
@settings(derandomize=True, max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_placement_gives_a_valid_model_that_computes_the_same(name: str, data: st.DataObject) -> None:
    model, samples, found, possible, outputs = case(name)
    placement = data.draw(placements(possible))
    fmt = data.draw(st.sampled_from(list(FORMATS.values())))
    quantized = insert(model, placement, found, fmt)
    check(quantized)
    assert [o.SerializeToString() for o in quantized.proto.graph.output] == [
        o.SerializeToString() for o in model.proto.graph.output
    ]
    tensors = Counter(n.inputs[0].removesuffix(RAW_OUTPUT) for n in of_type(quantized, "QuantizeLinear"))
    assert tensors == dict.fromkeys((e.tensor for e in placement if e.tensor not in model.constants), 1)
    floor = 14 if fmt is FP8 else 22
    assert sqnr(outputs, run(quantized, samples)) > floor
    assert sqnr(outputs[:1], evaluate(quantized, samples[:1])) > floor


@pytest.mark.parametrize("name", CASES)
def test_insertion_changes_nothing_and_repeats_itself(name: str) -> None:
    model, _, found, possible, _ = case(name)
    before, content = model.fingerprint, model.proto.SerializeToString(deterministic=True)
    inserter = Inserter(model, found, UINT8)
    some, whole = Placement.of(sorted(possible)[::3]), Placement(possible)
    first = inserter.insert(whole)
    inserter.insert(some)
    for other in (inserter.insert(whole), insert(model, whole, found, UINT8)):
        assert other.fingerprint == first.fingerprint
        assert other.to_proto().SerializeToString() == first.to_proto().SerializeToString()
    assert inserter.insert(some).fingerprint == insert(model, some, found, UINT8).fingerprint != first.fingerprint
    fresh = Model(onnx.ModelProto.FromString(content), model.large)
    assert (model.fingerprint, model.proto.SerializeToString(deterministic=True)) == (before, content)
    assert fresh.fingerprint == before


# Graph outputs
@pytest.mark.parametrize("inside", [False, True])
def test_a_pair_on_a_graph_output_that_is_used_inside(inside: bool) -> None:
    """The output is the rounded tensor, under its name; other users read the float one unless they have the pair, and
    with a pair for them alone the output stays exact."""
    model, samples, found, _, outputs = case("tapped")
    alone = run(insert(model, Placement.of([Edge("first", "relu", 0)]), found, PLAIN), samples)
    assert all(np.array_equal(mine["first"], exact["first"]) for mine, exact in zip(alone, outputs, strict=True))
    edges = [Edge("first", "", 1)] + [Edge("first", "relu", 0)] * inside
    quantized = insert(model, Placement.of(edges), found, PLAIN)
    check(quantized)
    assert quantized.outputs == model.outputs == ("second", "first")
    (q,) = of_type(quantized, "QuantizeLinear")
    assert q.inputs[0] == "first" + RAW_OUTPUT
    relu = quantized.nodes[quantized.index_of["relu"]]
    assert relu.inputs[0] == ("first" if inside else "first" + RAW_OUTPUT)
    scale = constant(quantized, q.inputs[1])
    for mine, exact in zip(run(quantized, samples), outputs, strict=True):
        steps = mine["first"] / scale
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
        np.testing.assert_allclose(mine["first"], exact["first"], atol=0.51 * scale)
        assert np.array_equal(mine["second"], exact["second"]) != inside


@pytest.mark.parametrize(("highest", "quantizers"), [(1.0, ["t"]), (1.5, ["h", "t"])])
def test_values_in_two_float_types_are_quantized_once(highest: float, quantizers: list[str]) -> None:
    """Unless their scales differ by more than rounding."""
    weight = normal(4, 4, 1, 1).astype(np.float16)
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
     [sig] t = Sigmoid(x) [down] h = Cast <to=10> (t) [conv] c = Conv (h, w)
     [up] u = Cast <to=1> (c) [add] y = Add (t, u) }"""
    model = build(text, {"w": weight})
    placement = Placement.of({Edge("t", "add", 0), Edge("h", "conv", 0), Edge("w", "conv", 1)})
    known = Ranges({"t": Range(0.0, 1.0), "h": Range(0.0, highest)})
    done = insert(model, placement, known, INT8)
    assert sorted(n.inputs[0] for n in of_type(done, "QuantizeLinear")) == quantizers
    assert scale_of(done, "t", "add")[0].dtype == np.float32
    assert scale_of(done, "h", "conv")[0].dtype == np.float16
    check(done)
    assert read_placement(model, done).placement == placement
    assert sqnr(evaluate(model, feeds(model)), evaluate(done, feeds(model))) > 20


@pytest.mark.parametrize(("half", "fmt"), [(True, UINT8), (True, FP8), (False, FP8)])
def test_opsets_that_are_too_low(half: bool, fmt: NumericFormat) -> None:
    model = conv_net(half, opset=17)
    placement = Placement.of([Edge("image", "stem", 0)])
    with pytest.raises(ValueError, match="opset 17, its pairs need 19"):
        insert(model, placement, ranges(model), fmt)
    assert insert(model, Placement(), ranges(model), fmt).opset == 17
    if not half:
        check(insert(model, placement, ranges(model), UINT8))


# Weights
WEIGHTS = [
    ("Conv(x, w)", (1, 4, 5, 5), (6, 4, 2, 2), 0),
    ("Conv<group=2>(x, w)", (1, 4, 5, 5), (6, 2, 2, 2), 0),
    ("ConvTranspose(x, w)", (1, 4, 5, 5), (4, 6, 2, 2), 1),
    ("ConvTranspose<group=2>(x, w)", (1, 4, 5, 5), (4, 3, 2, 2), None),
    ("Gemm(x, w)", (3, 4), (4, 6), 1),
    ("Gemm<transB=1>(x, w)", (3, 4), (6, 4), 0),
    ("Gemm(w, x)", (4, 3), (6, 4), None),
    ("MatMul(x, w)", (3, 4), (4, 6), 1),
    ("MatMul(x, w)", (2, 3, 4), (2, 4, 6), None),
    ("MatMul(x, w)", (3, 4), (4,), None),
    ("MatMul(w, x)", (4, 3), (6, 4), None),
]


@pytest.mark.parametrize(("op", "shape", "weight", "axis"), WEIGHTS)
@pytest.mark.parametrize("fmt", [PLAIN, REDUCED, FP8, replace(PLAIN, per_channel=False)])
def test_weights_have_a_scale_for_each_output_channel(op, shape, weight, axis, fmt):
    values = normal(*weight)
    if axis is not None:  # channels of very different size: one scale for all would lose the small ones
        values *= np.logspace(-3, 0, weight[axis], dtype=np.float32).reshape(
            [-1 if i == axis else 1 for i in range(len(weight))]
        )
    dims, open_dims = ",".join(map(str, shape)), ",".join("ABCD"[: max(len(shape) - (len(weight) == 1), 1)])
    model = build(f"net (float[{dims}] x) => (float[{open_dims}] y) {{ [node] y = {op} }}", {"w": values})
    edge = Edge("w", "node", model.nodes[0].inputs.index("w"))
    assert weight_role(model, edge) == WeightRole(axis)
    quantized = insert(model, Placement.of([edge]), Ranges({}), fmt)
    check(quantized)
    (dq,) = of_type(quantized, "DequantizeLinear")
    scale, integers = constant(quantized, dq.inputs[1]), constant(quantized, dq.inputs[0])
    assert not constant(quantized, dq.inputs[2]).astype(int).any()
    by_channel = axis is not None and fmt.per_channel
    assert scale.shape == ((weight[axis],) if by_channel else ())
    assert dq.attributes.get("axis") == (axis if by_channel else None)
    top = 64 if fmt.reduced_weights else fmt.weight.high
    others = tuple(i for i in range(len(weight)) if i != axis)
    assert (np.abs(integers.astype(float)).max(axis=others if by_channel else None) == top).all()
    samples = feeds(model)
    if fmt is not FP8 and (by_channel or axis is None):
        assert sqnr(run(model, samples), run(quantized, samples)) > 30


def test_candidates_share_their_weights(tmp_path: Path) -> None:
    model, _, found, possible, _ = case("conv_net")
    inserter = Inserter(model, found, UINT8)
    first = inserter.insert(Placement(possible))
    second = inserter.insert(start_placements.compute_inputs(model, possible))
    assert first.large["w3_quantized"].key == second.large["w3_quantized"].key
    with ConstantFile(tmp_path / "constants.bin") as constants:
        constants.save(first, tmp_path / "a.onnx")
        size = (tmp_path / "constants.bin").stat().st_size
        constants.save(second, tmp_path / "b.onnx")
        assert (tmp_path / "constants.bin").stat().st_size == size
        constants.save(inserter.insert(Placement()), tmp_path / "c.onnx")
        with_floats = (tmp_path / "constants.bin").stat().st_size
        constants.save(inserter.insert(Placement.of([Edge("image", "stem", 0)])), tmp_path / "d.onnx")
        assert with_floats == (tmp_path / "constants.bin").stat().st_size > size


# Edges and names
@pytest.mark.parametrize("edge", ["c0 no_such_node 0", "image stem 9", "c0 stem_relu -1", "a add_relu 0"])
def test_edges_where_no_pair_can_stand(edge: str) -> None:
    """There is none, or its range is unknown."""
    model, _, found, _, _ = case("conv_net")
    known = Ranges({t: r for t, r in found.activations.items() if t != "a"})
    with pytest.raises(ValueError, match="no pair can stand on"):
        insert(model, Placement(edges(edge)), known, UINT8)


def test_new_names_collide_with_nothing() -> None:
    text = """net (float[N,4] x, bool flag, float[4] x_scale) => (float[N,4] y, float[N,4] y_QuantizeLinear_Input) {
        [x_QuantizeLinear] a = Relu(x)
        [x_DequantizeLinear] y_QuantizeLinear_Input = Add(a, x_scale)
        [branch] z = If(flag) <
            then_branch = t () => (float[N,4] a_QuantizeLinear_Output) { a_QuantizeLinear_Output = Neg(a) },
            else_branch = e () => (float[N,4] a_zero_point) { a_zero_point = Abs(a) }>
        [difference] b = Sub(z, a)
        [last] y = Mul(b, b_scale)
    }"""
    model = build(text, {"b_scale": np.float32([1, 2, 3, 4])})
    samples = feeds(model, 2)
    found = ranges(model, samples)
    quantized = insert(model, Placement(possible_edges(model, found)), found, UINT8)
    check(quantized)
    assert quantized.outputs == model.outputs
    assert len(quantized.index_of) == len(quantized.nodes)
    assert sqnr(run(model, samples), run(quantized, samples)) > 30


def test_an_engine_without_integer_weights_reads_no_float16_scales() -> None:
    model = conv_net(half=True)
    placement = Placement.of([next(e for e in possible_edges(model, ranges(model)) if e.tensor in model.constants)])
    with pytest.raises(BadModel, match="float32 scales only"):
        insert(model, placement, ranges(model), replace(INT8, float_weights=True))


# Clamps that pairs replace
CLAMPS = """net (float[N,4] x) => (float[N,4] y) {
    [mm] c = MatMul(x, w)
    [clamp] k = CLAMP
    [mm2] d = MatMul(k, w)
    [mm3] e = MatMul(k, v)
    [add] y = Add(d, e)
}"""


def clamped(clamp: str = "Relu(c)", text: str = CLAMPS) -> Model:
    constants = {"w": normal(4, 4), "v": normal(4, 4, seed=1), "zero": np.float32(0), "six": np.float32(6),
                 "one": np.float32(1)}  # fmt: skip
    return build(text.replace("CLAMP", clamp), constants)


def on(model: Model, *tensors: str) -> Placement:
    """All uses of these tensors."""
    return Placement.of(
        Edge(t, model.nodes[u.node].name if u.node >= 0 else "", u.slot) for t in tensors for u in model.uses(t)
    )


@pytest.mark.parametrize(
    ("clamp", "low", "high"),
    [("Relu(c)", 0, 5), ("Clip(c, zero, six)", 0, 3), ("Clip(c, zero, six)", 0, 6), ("Clip(c, zero)", 0, 9),
     ("Clip(c, , six)", -2, 6)],
)  # fmt: skip
def test_clamps_whose_work_the_pair_does_are_dropped(clamp: str, low: float, high: float) -> None:
    model = clamped(clamp)
    found = Ranges(ranges(model).activations | {"k": Range(low, high)})
    with_clamp = insert(model, on(model, "k"), found, PLAIN)
    without = insert(model, on(model, "k"), found, replace(PLAIN, drop_clamps=True))
    assert "clamp" in with_clamp.index_of
    assert "clamp" not in without.index_of
    check(without)
    samples = [{"x": 10 * normal(50, 4, seed=s)} for s in range(3)]  # far beyond the range on both sides
    for a, b in zip(run(with_clamp, samples), run(without, samples), strict=True):
        np.testing.assert_array_equal(a["y"], b["y"])


@pytest.mark.parametrize(
    ("clamp", "low", "high", "fmt"),
    [
        ("Relu(c)", 0, 5, INT8),
        ("Relu(c)", -1, 5, UINT8),
        ("Clip(c, zero, six)", 0, 8, UINT8),
        ("Clip(c, one, six)", 1, 6, UINT8),
        ("Clip(c, zero, six)", -0.5, 6, UINT8),
        ("Relu(c)", 0, 5, PLAIN),
        ("Clip(c, zero, x0)", 0, 5, UINT8),
        ("LeakyRelu(c)", 0, 5, UINT8),
    ],
)
def test_clamps_that_do_more_than_the_pair_stay(clamp: str, low: float, high: float, fmt: NumericFormat) -> None:
    text = CLAMPS.replace("(float[N,4] x)", "(float[N,4] x, float x0)") if "x0" in clamp else CLAMPS
    model = clamped(clamp, text)
    found = Ranges({t: Range(-9, 9) for t in ("x", "c", "d", "e", "y")} | {"k": Range(low, high)})
    assert "clamp" in insert(model, on(model, "k"), found, fmt).index_of


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        (CLAMPS, [Edge("k", "mm2", 0)]),  # the other user wants the clamped float tensor
        (CLAMPS, [Edge("k", "mm2", 0), Edge("k", "mm3", 0), Edge("c", "clamp", 0)]),  # c's own pair reads c
        (CLAMPS.replace("Add(d, e)", "Add(d, c)"), [Edge("k", "mm2", 0), Edge("k", "mm3", 0)]),  # c is used as well
        (CLAMPS.replace("float[N,4] y)", "float[N,4] y, float[N,4] k)"),
         [Edge("k", "mm2", 0), Edge("k", "mm3", 0), Edge("k", "", 1)]),
        (CLAMPS.replace("float[N,4] y)", "float[N,4] y, float[N,4] c)"), [Edge("k", "mm2", 0), Edge("k", "mm3", 0)]),
        (CLAMPS.replace("[mm] c = MatMul(x, w)", "").replace("CLAMP", "Relu(x)"),  # a graph input cannot be renamed
         [Edge("k", "mm2", 0), Edge("k", "mm3", 0)]),
    ],
)  # fmt: skip
def test_clamps_that_somebody_else_sees_stay(text: str, placed: list[Edge]) -> None:
    model = clamped(text=text)
    found = Ranges({t: Range(0 if t == "k" else -9, 9) for t in ("x", "c", "k", "d", "e", "y")})
    quantized = insert(model, Placement.of(placed), found, UINT8)
    check(quantized)
    assert "clamp" in quantized.index_of


# Biases
def bias_dq(model: Model, node: str) -> Node | None:
    name = model.nodes[model.index_of[node]].inputs[2]
    return model.nodes[model.producers[name]] if name in model.producers else None


@pytest.mark.parametrize("node", ["stem", "depthwise", "project", "head"])
@pytest.mark.parametrize("fmt", [UINT8, REDUCED, replace(INT8, bias="int32", per_channel=False)])
def test_biases_are_int32_with_the_scale_of_the_accumulator(node: str, fmt: NumericFormat) -> None:
    model, _, found, possible, _ = case("conv_net")
    quantized = insert(model, Placement(possible), found, fmt)
    dq = bias_dq(quantized, node)
    float_node = model.nodes[model.index_of[node]]
    sx, _ = scale_of(quantized, float_node.inputs[0], node)
    sw, _ = scale_of(quantized, float_node.inputs[1], node)
    values, scale = constant(quantized, dq.inputs[0]), constant(quantized, dq.inputs[1])
    assert (values.dtype, scale.dtype, scale.shape) == (np.int32, np.float32, sw.shape)
    np.testing.assert_array_equal(scale, sx * sw)
    np.testing.assert_array_equal(values, np.rint(constant(model, float_node.inputs[2]) / scale.astype(np.float64)))
    assert dq.attributes.get("axis", 1) == (0 if fmt.per_channel else 1)


@pytest.mark.parametrize(
    ("gemm", "bias", "quantized"),
    [
        ("Gemm(x, w, b)", normal(3), True),
        ("Gemm<transB=1>(x, v, b)", normal(3), True),
        ("Gemm<alpha=0.5>(x, w, b)", normal(3), False),
        ("Gemm<beta=2.0>(x, w, b)", normal(3), False),
        ("Gemm(x, w, b)", normal(1, 3), False),
        ("Gemm(x, w, b)", normal(1), False),
        ("Gemm(x, w, c)", normal(1), False),
    ],
)
def test_only_plain_biases_of_gemm_are_quantized(gemm: str, bias: Any, quantized: bool) -> None:
    head = "float[N,4] x, float[3] c" if ", c)" in gemm else "float[N,4] x"
    text = f"net ({head}) => (float[N,3] y) {{ [gemm] y = {gemm} }}"
    model = build(text, {"w": normal(4, 3), "v": normal(3, 4), "b": bias})
    weight = model.nodes[0].inputs[1]
    samples = feeds(model)
    result = insert(model, Placement.of([Edge("x", "gemm", 0), Edge(weight, "gemm", 1)]), ranges(model), UINT8)
    check(result)
    assert (bias_dq(result, "gemm") is not None) == quantized
    assert sqnr(run(model, samples), run(result, samples)) > 30


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_bias_that_would_overflow_raises_the_scale_of_its_weight(per_channel: bool) -> None:
    """A channel with almost no weight and a large bias: its sum fits 31 bits, and the other channels keep theirs."""
    weight = normal(4, 4, 1, 1)
    weight[2] *= 1e-12 if per_channel else 1
    bias = np.float32([1, -2, 1000, 3])
    if not per_channel:
        weight *= np.float32(1e-12)
    model = build("net (float[1,4,3,3] x) => (float[1,4,3,3] y) { [conv] y = Conv(x, w, b) }", {"w": weight, "b": bias})
    samples = feeds(model)
    found = ranges(model)
    fmt = replace(UINT8, per_channel=per_channel)
    quantized = insert(model, Placement.of([Edge("x", "conv", 0), Edge("w", "conv", 1)]), found, fmt)
    check(quantized)
    dq = bias_dq(quantized, "conv")
    values = constant(quantized, dq.inputs[0])
    sx, sw = scale_of(quantized, "x", "conv")[0], scale_of(quantized, "w", "conv")[0]
    np.testing.assert_array_equal(constant(quantized, dq.inputs[1]), sx * sw)
    assert np.abs(values.astype(np.int64)).max() < 2**31
    assert (np.abs(values * (sx * sw).astype(np.float64) - bias) <= 0.5001 * sx * sw).all()
    if per_channel:
        usual = insert(model, Placement.of([Edge("w", "conv", 1)]), found, fmt)
        raised = scale_of(usual, "w", "conv")[0] != sw
        assert raised.tolist() == [False, False, True, False]
    for mine, exact in zip(run(quantized, samples), run(model, samples), strict=True):
        np.testing.assert_allclose(mine["y"], exact["y"], rtol=0.02, atol=0.05)


# Scales
CHAIN_RANGES = Ranges({"x": Range(-1, 8), "p": Range(0, 8), "t": Range(0, 8), "u": Range(-0.1, 7), "z": Range(-2, 1),
                       "c": Range(-3, 8), "y": Range(-3, 8)})  # fmt: skip


@pytest.mark.parametrize(
    ("ops", "groups"),
    [
        ({"MaxPool", "Transpose", "Concat", "Flatten"}, [{"x", "p", "t", "u", "z", "c", "y"}]),
        ({"MaxPool", "Transpose"}, [{"x", "p", "t", "u"}, {"z"}, {"y"}]),
        ({"Concat"}, [{"x"}, {"p"}, {"t"}, {"u", "z", "c"}, {"y"}]),
        (set(), [{t} for t in "xptuzcy"]),
    ],
)
def test_tensors_of_value_passing_operators_share_their_range(ops: set[str], groups: list[set[str]]) -> None:
    text = """net (float[1,4,6,6] x, float[1,4,3,3] z) => (float[1,72] y) {
        [pool] p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)
        [turn] t = Transpose <perm=[0,2,3,1]> (p)
        [back] u = Transpose <perm=[0,3,1,2]> (t)
        [join] c = Concat <axis=1> (u, z)
        [flat] y = Flatten(c)
    }"""
    model = build(text)
    placement = on(model, *sorted(set().union(*groups)))
    quantized = insert(model, placement, CHAIN_RANGES, replace(PLAIN, shared_scale_ops=frozenset(ops)))
    check(quantized)
    found = {}
    for q in of_type(quantized, "QuantizeLinear"):
        found[q.inputs[0].removesuffix(RAW_OUTPUT)] = q.inputs[1:]
    for group in groups:
        whole = CHAIN_RANGES.activations[min(group)]
        for tensor in group:
            whole |= CHAIN_RANGES.activations[tensor]
        expected = np.float32((max(whole.high, 0) - min(whole.low, 0)) / 255)
        for tensor in group:
            assert constant(quantized, found[tensor][0]) == expected
        assert len({int(constant(quantized, found[t][1])) for t in group}) == 1


@pytest.mark.parametrize(
    ("other", "low", "alike"),
    [("x", 0.0, {"absc"}), ("b", 0.0, {"acs", "b"}), ("s", 0.0, {"abs", "c"}), ("x", -0.5, {"bcs", "a"})],
    ids=["only concats read them", "another node reads one", "another node reads a concat", "a relu would stay"],
)
def test_what_a_concat_alone_reads_has_its_range_if_near(other: str, low: float, alike: set[str]) -> None:
    """It is copied then, and rounded once; a scale of its own is needed where another node reads it."""
    text = """net (float[1,4] x, float[1,4] z) => (float[1,12] y) {
        [clip] a = Relu(x)
        [squash] b = Tanh(z)
        [inner] s = Concat <axis=1> (a, b)
        [join] c = Concat <axis=1> (s, z)
        [last] y = Neg(c)
        [other] unread = Neg(OTHER)
    }"""
    model = build(text.replace("OTHER", other))
    own = Ranges({"a": Range(0, 7.8), "b": Range(low, 7.9), "s": Range(low, 7.5), "c": Range(low, 8)})
    fmt = replace(PLAIN, shared_scale_ops=frozenset({"MaxPool"}))
    scales, _ = Quantizer(model, own, fmt).scales(on(model, *"absc"))
    by_scale: dict[float, str] = {}
    for tensor in sorted(scales):
        by_scale[float(scales[tensor].scale)] = by_scale.get(float(scales[tensor].scale), "") + tensor
    assert set(by_scale.values()) == {"".join(sorted(group)) for group in alike}


def test_what_a_convolution_reads_from_a_concat_has_the_same_steps_around_128() -> None:
    text = """net (float[1,4,6,6] x, float[1,4,6,6] z) => (float[1,2,6,6] y, float[1,8,6,6] v, float[1,2,6,6] u) {
        [join] c = Concat <axis=1> (x, z)
        [read] y = Conv(c, w)
        [other] d = Concat <axis=1> (z, x)
        [last] v = Neg(d)
        [alone] u = Conv(x, k)
    }"""
    model = build(text, {"w": normal(2, 8, 1, 1), "k": normal(2, 4, 1, 1)})
    own = Ranges(dict.fromkeys("xzcd", Range(-2, 1)))
    signed = replace(INT8, unsigned=True, shared_scale_ops=frozenset({"Concat"}))
    placement = Placement(on(model, *"xzcd").edges | edges("w read 1", "k alone 1"))
    scales, _ = Quantizer(model, own, signed).scales(placement)
    assert {t: (q.qtype, q.zero_point) for t, q in scales.items()} == {
        **dict.fromkeys("xzd", (QType.INT8, 0)),
        "c": (QType.UINT8, 128),
    }
    assert len({float(q.scale) for q in scales.values()}) == 1
    assert {q.zero_point for q in Quantizer(model, own, INT8).scales(placement)[0].values()} == {0}


def test_an_engine_without_integer_weights_gets_them_in_float_behind_a_pair() -> None:
    model, samples, found, possible, _ = case("conv_net")
    usual = insert(model, Placement(possible), found, INT8)
    float_weights = insert(model, Placement(possible), found, replace(INT8, float_weights=True))
    check(float_weights)
    integers = {c.dtype for c in float_weights.constants.values()} & {TensorProto.INT8, TensorProto.UINT8}
    assert integers <= {c.dtype for n, c in float_weights.constants.items() if n.endswith("_zero_point")}
    assert not [n for n in float_weights.constants if n.endswith("_quantized")]
    for mine, theirs in zip(run(float_weights, samples), run(usual, samples), strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert read_placement(model, float_weights).placement == read_placement(model, usual).placement


def test_a_bias_stays_float_without_both_pairs_or_where_the_format_says_so() -> None:
    model, _, found, _, _ = case("conv_net")
    x, w = Edge("image", "stem", 0), Edge("w0", "stem", 1)
    for placed, fmt in (({x}, UINT8), ({w}, UINT8), ({x, w}, PLAIN), ({x, w}, INT8)):
        assert bias_dq(insert(model, Placement.of(placed), found, fmt), "stem") is None
    assert bias_dq(insert(model, Placement.of({x, w}), found, UINT8), "stem") is not None
    half = case("conv_net_half")
    assert bias_dq(insert(half.model, Placement(half.possible), half.ranges, UINT8), "stem") is None


def test_a_table_and_what_is_looked_up_in_it_share_their_scale() -> None:
    """Else the engine would dequantize the whole table in each inference. As a weight elsewhere it keeps its own."""
    text = """net (int64[N,3] ids, float[N,8] x) => (float[N,3,8] y, float[N,7] z) {
        [lookup] e = Gather(table, ids)
        [relu] y = Relu(e)
        [tied] z = Gemm <transB=1> (x, table)
    }"""
    model = build(text, {"table": normal(7, 8)})
    found = Ranges({"e": Range(-0.5, 0.5), "x": Range(-1, 1)})
    placement = Placement.of(
        [Edge("table", "lookup", 0), Edge("e", "relu", 0), Edge("x", "tied", 0), Edge("table", "tied", 1)]
    )
    quantized = insert(model, placement, found, UINT8)
    check(quantized)
    table, looked_up = scale_of(quantized, "table", "lookup"), scale_of(quantized, "e", "relu")
    assert table == looked_up
    assert table[0] == np.float32((normal(7, 8).max() - np.float64(normal(7, 8).min())) / 255)
    assert scale_of(quantized, "table", "tied")[0].shape == (7,)
    apart = insert(model, placement, found, PLAIN)
    assert scale_of(apart, "e", "relu")[0] == np.float32(1 / 255)
