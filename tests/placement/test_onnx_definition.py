"""Pairs are read as ONNX defines the two operators, opset 10 to 25: its reference implementation decides."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from models import run
from qdqtune.graph.loading import load_proto
from qdqtune.placement.reading import is_quantized, pairs_of
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import file_pairs, representable, with_file_pairs
from qdqtune.types import Array

SHAPE = (2, 4, 6)
BLOCK = 2
FLOAT8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
FAR = 600.0
"""Beyond the range of most pairs here, and no more than float16 can divide by their scales."""

many = settings(derandomize=True, max_examples=40, deadline=None)


class Numbers(NamedTuple):
    """The numbers of a pair: `integers` is the type of the quantized values, `zero` None where the file has none."""

    opset: int
    integers: int
    scale: Array
    zero: Array | None
    where: dict[str, Any]
    """The attributes `axis` and `block_size`."""
    output: dict[str, Any]
    """The attribute `output_dtype` of the DQ."""

    @property
    def result(self) -> int:
        """The type of what the DQ makes."""
        return self.output.get("output_dtype", helper.np_dtype_to_tensor_dtype(self.scale.dtype))

    @property
    def read(self) -> list[str]:
        return ["s"] if self.zero is None else ["s", "z"]

    def model(self, nodes: list[onnx.NodeProto], values: int, **constants: Array) -> onnx.ModelProto:
        constants["s"] = self.scale
        if self.zero is not None:
            constants["z"] = self.zero
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("x", values, SHAPE)],
            [helper.make_tensor_value_info("y", self.result, SHAPE)],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        onnx.checker.check_model(proto, full_check=True)
        return proto


@st.composite
def numbers(draw: st.DrawFn) -> Numbers:
    opset = draw(st.integers(10, 25))
    kinds = [TensorProto.UINT8, TensorProto.INT8]
    kinds += FLOAT8 if opset >= 19 else ()
    kinds += (TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4, TensorProto.INT4) if opset >= 21 else ()
    floats = [TensorProto.FLOAT, TensorProto.FLOAT16][: 2 if opset >= 19 else 1]
    integers = draw(st.sampled_from(kinds))
    where, shape = draw(granularities(opset))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    scale = rng.uniform(0.01, 0.05, shape).astype(helper.tensor_dtype_to_np_dtype(draw(st.sampled_from(floats))))
    dtype, zero = helper.tensor_dtype_to_np_dtype(integers), None
    if draw(st.booleans()):
        ends = (0, 1) if integers in FLOAT8 else (ml_dtypes.iinfo(dtype).min, ml_dtypes.iinfo(dtype).max + 1)
        zero = rng.integers(*ends, shape).astype(dtype)
    output = {"output_dtype": draw(st.sampled_from(floats))} if opset >= 23 and draw(st.booleans()) else {}
    return Numbers(opset, integers, scale, zero, where, output)


@st.composite
def granularities(draw: st.DrawFn, opset: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Attributes and the shape of the scale: one, one for each channel, or blocks."""
    kind = draw(st.sampled_from(("one", "channels", "blocks")))
    if kind == "one" or opset < 13:
        return {}, ()
    axis = draw(st.sampled_from((None, 0, 1, 2, -1, -2, -3)))
    where = {} if axis is None else {"axis": axis}
    place = 1 if axis is None else axis % len(SHAPE)
    if kind == "channels" or opset < 21:
        return where, SHAPE[place : place + 1]
    return where | {"block_size": BLOCK}, tuple(n // BLOCK if i == place else n for i, n in enumerate(SHAPE))


def outputs(proto: onnx.ModelProto, x: Array) -> Array:
    """Of the reference implementation, which has these operators from opset 19 on; what older ones allow is the same
    there."""
    newer = onnx.ModelProto()
    newer.CopyFrom(proto)
    newer.opset_import[0].version = max(19, proto.opset_import[0].version)
    (y,) = ReferenceEvaluator(newer).run(None, {"x": x})
    return np.asarray(y)


@many
@given(data=st.data())
def test_a_pair_is_taken_off_and_put_back(data: st.DataObject) -> None:
    """The same outputs, in the same type, and the range that the pair can represent."""
    drawn = data.draw(numbers())
    q: dict[str, Any] = {}
    if drawn.zero is None:
        if drawn.opset < 21:
            drawn = drawn._replace(integers=TensorProto.UINT8)
        elif drawn.integers != TensorProto.UINT8 or data.draw(st.booleans()):
            q["output_dtype"] = drawn.integers
    if drawn.integers in FLOAT8:
        q["saturate"] = data.draw(st.integers(0, 1))
    scale_type = helper.np_dtype_to_tensor_dtype(drawn.scale.dtype)
    values = data.draw(st.sampled_from((TensorProto.FLOAT, TensorProto.FLOAT16))) if drawn.opset >= 23 else scale_type
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *drawn.read], ["q"], "q", **drawn.where, **q),
        helper.make_node("DequantizeLinear", ["q", *drawn.read], ["d"], "dq", **drawn.where, **drawn.output),
        helper.make_node("Neg", ["d"], ["y"], "last"),
    ]
    proto = drawn.model(nodes, values)
    model = load_proto(proto)
    stripped = strip_pairs(model)
    assert not is_quantized(stripped)
    assert stripped.tensors["y"].dtype == drawn.result
    pairs, unmatched = file_pairs(stripped, model)
    assert (len(pairs), unmatched) == (1, ())
    x = np.random.default_rng(0).normal(0, 2, SHAPE).astype(helper.tensor_dtype_to_np_dtype(values))
    again = outputs(with_file_pairs(stripped, pairs, model).to_proto(), x)
    expected = outputs(proto, x)
    step = float(drawn.scale.max())
    assert again.dtype == expected.dtype
    relative, absolute = 2e-3, 1e-6
    if len({values, scale_type, drawn.result}) > 1:  # what a Cast rounds in front of the pair may be another integer
        relative, absolute = 0.26 if drawn.integers in FLOAT8 else 0.0, 1.1 * step
    np.testing.assert_allclose(again.astype(float), expected.astype(float), relative, absolute)
    (pair,) = pairs_of(model)
    reach = [-outputs(proto, np.full_like(x, end)).astype(float) for end in (-FAR, FAR)]
    if np.isfinite(reach).all() and max(-pair.end("min"), pair.end("max")) < FAR:
        assert np.isclose(representable(pairs[0]), [reach[0].min(), reach[1].max()], rtol=2e-3).all()
        assert np.isclose(pair.end("max"), reach[1].max(), rtol=2e-3)
        assert reach[0].min() * 1.002 <= pair.end("min") <= reach[0].min() * 0.998 + 1.01 * step


@many
@given(drawn=numbers(), seed=st.integers(0, 99))
def test_a_constant_of_integers_is_read(drawn: Numbers, seed: int) -> None:
    """The float model has the values that its DQ makes."""
    dtype, rng = helper.tensor_dtype_to_np_dtype(drawn.integers), np.random.default_rng(seed)
    ends = (-8, 8) if drawn.integers in FLOAT8 else (ml_dtypes.iinfo(dtype).min, ml_dtypes.iinfo(dtype).max + 1)
    constant = rng.integers(*ends, SHAPE).astype(dtype)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", *drawn.read], ["d"], "dq", **drawn.where, **drawn.output),
        helper.make_node("Add", ["x", "d"], ["y"], "add"),
    ]
    proto = drawn.model(nodes, drawn.result, w=constant)
    model = load_proto(proto)
    stripped = strip_pairs(model)
    assert not is_quantized(stripped)
    x = np.zeros(SHAPE, helper.tensor_dtype_to_np_dtype(drawn.result))
    expected = outputs(proto, x)
    read = outputs(stripped.to_proto(), x)
    assert read.dtype == expected.dtype
    np.testing.assert_allclose(read.astype(float), expected.astype(float), rtol=2e-3, atol=1e-6)
    (pair,), _ = file_pairs(stripped, model)
    assert np.isclose(representable(pair), [expected.min(), expected.max()], rtol=2e-3).all()
    put_back = with_file_pairs(stripped, [pair], model)
    np.testing.assert_array_equal(outputs(put_back.to_proto(), x), expected)


@st.composite
def nets(draw: st.DrawFn) -> onnx.ModelProto:
    """A few operators without names; what they read, and what the graph gives, may come through one or two pairs."""
    constants: dict[str, Array] = {}
    nodes: list[onnx.NodeProto] = []
    tensors = ["x"]

    def paired(tensor: str, most: int = 2) -> str:
        for _ in range(draw(st.integers(0, most))):
            at = len(nodes)
            scale = draw(st.sampled_from((0.01, 0.05, 6 / 255)))
            zero = draw(st.sampled_from((None, np.uint8(0), np.uint8(100), np.int8(0), np.int8(-128), np.int16(0))))
            read = [f"s{at}"] if zero is None else [f"s{at}", f"z{at}"]
            constants.update(zip(read, (np.float32(scale), zero), strict=False))
            nodes.append(helper.make_node("QuantizeLinear", [tensor, *read], [f"q{at}"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"q{at}", *read], [f"d{at}"]))
            tensor = f"d{at}"
        return tensor

    for number in range(draw(st.integers(1, 4))):
        op = draw(st.sampled_from(("Relu", "Clip", "Tanh", "MatMul", "Add", "Sub", "Transpose")))
        inputs = [paired(draw(st.sampled_from(tensors)))]
        if op == "MatMul":
            constants["w"] = np.eye(4, dtype=np.float32)[::-1] - np.float32(0.3)
            inputs.append(paired("w", 1))
        elif op == "Clip":
            constants |= {"low": np.float32(0), "high": np.float32(6)}
            inputs += ["low", "high"]
        elif op in ("Add", "Sub"):
            inputs.append(paired(draw(st.sampled_from(tensors))))
        nodes.append(helper.make_node(op, inputs, [f"t{number}"]))
        tensors.append(f"t{number}")
    shown = dict.fromkeys([paired(tensors[-1]), *draw(st.lists(st.sampled_from(tensors[1:]).map(paired), max_size=2))])
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 4))],
        [helper.make_tensor_value_info(tensor, TensorProto.FLOAT, (4, 4)) for tensor in shown],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@many
@given(proto=nets())
def test_pairs_are_taken_off_and_put_back_wherever_they_stand(proto: onnx.ModelProto) -> None:
    model = load_proto(proto)
    stripped = strip_pairs(model)
    assert not is_quantized(stripped)
    pairs, unmatched = file_pairs(stripped, model)
    samples = [{"x": np.random.default_rng(0).normal(0, 2, (4, 4)).astype(np.float32)}]
    (found,), (expected,) = run(with_file_pairs(stripped, pairs, model), samples), run(model, samples)
    assert not unmatched
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, strict=True)
