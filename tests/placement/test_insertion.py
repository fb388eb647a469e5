"""Insertion: what comes out is valid, computes the same up to rounding, and follows the engine's format."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import ml_dtypes
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
    branching,
    build,
    case,
    check,
    constant,
    conv_net,
    dq_of,
    evaluate,
    feeds,
    normal,
    of_type,
    placements,
    ranges,
    run,
    scale_of,
    sqnr,
    tapped,
)
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import RAW_OUTPUT, Inserter, insert
from qdqtune.placement.possible import WeightRole, consistent, possible_edges, weight_role
from qdqtune.placement.reading import read_placement
from qdqtune.types import Edge, NumericFormat, Placement

CASES = ("conv_net", "attention", "tapped", "embedding", "conv_net_half", "attention_half")


# Any placement


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fmt", [UINT8, FP8])
def test_the_empty_placement_is_the_model_itself(name: str, fmt: NumericFormat) -> None:
    model, samples, found, _, outputs = case(name)
    same = insert(model, Placement(), found, fmt)
    assert [n.name for n in same.nodes] == [n.name for n in model.nodes]
    assert {n: c.key for n, c in same.constants.items()} == {n: c.key for n, c in model.constants.items()}
    assert same.opset == model.opset
    for mine, theirs in zip(run(same, samples), outputs, strict=True):
        for output, array in theirs.items():
            np.testing.assert_array_equal(mine[output], array)


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


@pytest.mark.parametrize("name", ["conv_net", "attention", "tapped", "embedding"])
@settings(derandomize=True, max_examples=8, deadline=None)
@given(data=st.data())
def test_any_placement_runs_in_integer_kernels(name: str, data: st.DataObject) -> None:
    model, samples, found, _, outputs = case(name)
    quantized = insert(model, data.draw(placements(case(name).possible)), found, replace(UINT8, reduced_weights=True))
    assert sqnr(outputs, run(quantized, samples, fused=True)) > 20


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


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["conv_net_half", "attention_half"])
def test_float16_models_get_float16_scales(name: str, fmt: NumericFormat) -> None:
    model, samples, found, possible, outputs = case(name)
    quantized = insert(model, Placement(possible), found, fmt)
    check(quantized)
    for node in quantized.nodes:
        if node.op in ("QuantizeLinear", "DequantizeLinear"):
            scale = constant(quantized, node.inputs[1])
            assert scale.dtype == np.float16
            assert (scale >= ml_dtypes.finfo(np.float16).smallest_normal).all()
    assert sqnr(outputs, run(quantized, samples)) > (14 if fmt is FP8 else 22)


MIXED = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
 [sig] t = Sigmoid(x) [down] h = Cast <to=10> (t) [conv] c = Conv (h, w)
 [up] u = Cast <to=1> (c) [add] y = Add (t, u) }"""


@pytest.mark.parametrize(("highest", "quantizers"), [(1.0, ["t"]), (1.5, ["h", "t"])])
def test_values_in_two_float_types_are_quantized_once(highest: float, quantizers: list[str]) -> None:
    """Unless their scales differ by more than rounding."""
    weight = normal(4, 4, 1, 1).astype(np.float16)
    model = build(MIXED, {"w": weight})
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


def test_fp8_pairs_hold_e4m3_with_zero_point_zero() -> None:
    model, _, found, possible, _ = case("conv_net")
    quantized = insert(model, Placement(possible), found, FP8)
    check(quantized)
    assert quantized.opset == 19
    assert quantized.proto.ir_version >= 9
    for node in of_type(quantized, "DequantizeLinear"):
        zero = quantized.constants[node.inputs[2]]
        assert (zero.dtype, zero.shape, float(zero.array())) == (TensorProto.FLOAT8E4M3FN, (), 0)
    assert scale_of(quantized, "r0", "pool")[0] == np.float32(found.activations["r0"].magnitude / 448)


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
def test_weights_have_a_scale_for_each_output_channel(
    op: str, shape: tuple[int, ...], weight: tuple[int, ...], axis: int | None, fmt: NumericFormat
) -> None:
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


def test_constants_of_other_operators_are_quantized_like_activations() -> None:
    model = build("net (float[N,4] x) => (float[N,4] y) { [add] y = Add(x, c) }", {"c": np.float32([1, 2, 3, 5])})
    assert weight_role(model, Edge("c", "add", 1)) is None
    quantized = insert(model, Placement.of([Edge("c", "add", 1)]), Ranges({}), UINT8)
    check(quantized)
    (dq,) = of_type(quantized, "DequantizeLinear")
    scale, zero = scale_of(quantized, "c", "add")
    assert (scale, zero, zero.dtype) == (np.float32(5 / 255), 0, np.uint8)
    assert constant(quantized, dq.inputs[0]).tolist() == [51, 102, 153, 255]
    fp8 = insert(model, Placement.of([Edge("c", "add", 1)]), Ranges({}), FP8)
    assert scale_of(fp8, "c", "add")[0] == np.float32(5 / 448)


def test_a_weight_in_two_roles_is_quantized_for_each() -> None:
    text = "net (float[N,4] x) => (float[N,4] y) {\n [a] p = MatMul(x, w)\n [b] y = Gemm<transB=1>(p, w) }"
    model = build(text, {"w": normal(4, 4) * np.float32([1, 10, 100, 1000])})
    both = Placement.of([Edge("w", "a", 1), Edge("w", "b", 1)])
    quantized = insert(model, both, Ranges({}), PLAIN)
    check(quantized)
    assert len(of_type(quantized, "DequantizeLinear")) == 2
    assert [dq_of(quantized, "w", n).attributes["axis"] for n in "ab"] == [1, 0]
    samples = feeds(model)
    assert sqnr(run(model, samples), run(quantized, samples)) > 30


def test_candidates_share_their_weights(tmp_path: Path) -> None:
    model, _, found, possible, _ = case("conv_net")
    inserter = Inserter(model, found, UINT8)
    first = inserter.insert(Placement(possible))
    second = inserter.insert(start_placements.compute_inputs(model, possible))
    shared = [n for n in first.large if n in second.large]
    assert {"w2_quantized", "w3_quantized"} <= set(inserter.insert(Placement(possible)).constants)
    assert "w3_quantized" in shared
    assert all(first.large[n] is second.large[n] for n in shared)
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


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (Edge("c0", "no_such_node", 0), "no such edge"),
        (Edge("c0", "stem", 0), "no such edge"),
        (Edge("image", "stem", 9), "no such edge"),
        (Edge("c0", "stem_relu", -1), "no such edge"),
        (Edge("logits", "", -1), "no such edge"),
        (Edge("image", "", 0), "no such edge|hands it through"),
        (Edge("a", "add_relu", 0), "range is unknown"),
    ],
)
def test_edges_where_no_pair_can_stand(edge: Edge, message: str) -> None:
    model, _, found, _, _ = case("conv_net")
    known = Ranges({t: r for t, r in found.activations.items() if t != "a"})
    with pytest.raises(ValueError, match=message):
        insert(model, Placement.of([edge]), known, UINT8)


def test_bodies_go_on_reading_the_float_tensors() -> None:
    net = branching()
    net.proto.graph.node.pop()
    net = Model(net.proto, net.large)
    samples = feeds(net, 2)
    found = ranges(net, samples)
    placement = Placement(possible_edges(net, found))
    assert {e.tensor for e in placement} == {"x", "wa", "wb", "t", "r", "z", "y"}
    for flag in (True, False):
        tried = [s | {"flag": np.array(flag)} for s in samples]
        quantized = insert(net, placement, ranges(net, tried), UINT8)
        check(quantized)
        assert sqnr(run(net, tried), run(quantized, tried)) > 25


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


def test_a_model_that_is_written_carries_the_ir_version_that_its_opset_needs() -> None:
    model = tapped()
    model.proto.ir_version = 7
    older = Model(model.proto, model.large)
    found = ranges(case("tapped").model)
    assert insert(older, Placement.of([Edge("x", "a", 0)]), found, UINT8).proto.ir_version == 9
    assert model.proto.ir_version == 7


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


def test_an_engine_without_integer_weights_reads_no_float16_scales() -> None:
    model = conv_net(half=True)
    placement = Placement.of([next(e for e in possible_edges(model, ranges(model)) if e.tensor in model.constants)])
    with pytest.raises(BadModel, match="float32 scales only"):
        insert(model, placement, ranges(model), replace(INT8, float_weights=True))


def test_candidates_are_the_same_whatever_was_written_before() -> None:
    """What an inserter keeps for the next candidate is what that would write itself."""
    net = """net (float[1,8,4,4] x) => (float[1,8,4,4] y) {
        [one] a = Conv <pads=[1,1,1,1]> (x, w) [relu] b = Relu(a) [two] c = Conv <pads=[1,1,1,1]> (b, w)
        [pool] b_scale = MaxPool <kernel_shape=[1,1]> (c) [y_scale] y = Add(b_scale, b) }"""
    model = build(net, {"w": normal(8, 8, 3, 3, scale=0.1)})
    found = ranges(model)
    possible = sorted(possible_edges(model, found))
    placements = [Placement.of(possible[k::2]) | Placement.of(possible[:k]) for k in range(len(possible))]
    used = Inserter(model, found, PLAIN)
    for placement in [consistent(model, p) for p in (*placements, *placements[::-1])]:
        assert used.insert(placement).proto == insert(model, placement, found, PLAIN).proto
