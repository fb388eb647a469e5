"""The arithmetic of quantization against exact references: numpy in float64, and ONNX's own operators."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from models import FP8, INT8, PLAIN, REDUCED, normal
from qdqtune.calibration.scales import Quantization, Range, of_range, of_weight, quantize, rounded_weight
from qdqtune.types import Array, NumericFormat, QType, WeightFormat

SIGNED = NumericFormat(QType.INT8, QType.INT8, symmetric=False)

ends = st.floats(-1e30, 1e30).filter(lambda v: v == 0 or abs(v) > 1e-30)
intervals = st.tuples(ends, ends).map(lambda pair: Range(min(pair), max(pair)))


@settings(derandomize=True, deadline=None)
@given(intervals)
def test_scales_follow_the_formula(values: Range) -> None:
    low, high = min(values.low, 0.0), max(values.high, 0.0)
    for fmt in (PLAIN, SIGNED):
        how = of_range(values, fmt)
        assert (how.scale.dtype, how.scale.shape) == (np.float32, ())
        assert how.scale == np.float32((high - low if low < high else 1) / 255)
        expected = np.rint(fmt.activation.low - low / np.float64(how.scale))
        assert how.zero_point == np.clip(expected, fmt.activation.low, fmt.activation.high)
    for fmt, top in ((INT8, 127), (FP8, 448)):
        how = of_range(values, fmt)
        assert (how.scale, how.zero_point) == (np.float32((max(-low, high) or 1) / top), 0)


def test_a_channel_of_zeros_has_the_scale_of_values_up_to_one() -> None:
    values = normal(3, 5)
    values[1] = 0
    how = of_weight(values, 0, PLAIN)
    assert how.scale[1] == np.float32(1 / 127)
    assert not quantize(values, how)[1].any()


def test_given_scales_are_kept_and_a_floor_raises_them() -> None:
    values = normal(3, 5)
    given_scales = (0.5, 0.25, 0.125)
    np.testing.assert_array_equal(of_weight(values, 0, PLAIN, given_scales).scale, given_scales)
    raised = of_weight(values, 0, PLAIN, given_scales, np.array([0.1, 1.0, 0.1]))
    np.testing.assert_array_equal(raised.scale, [0.5, 1.0, 0.125])
    for how in (of_weight(values, None, PLAIN, given_scales), of_weight(values, 1, PLAIN, given_scales)):
        assert (how.scale, how.axis) == (0.5, None)


def operators(values: Array, how: Quantization) -> list[Array]:
    """What the QuantizeLinear of ONNX's reference and of ONNX Runtime give, as integers or E4M3."""
    types = {QType.UINT8: TensorProto.UINT8, QType.INT8: TensorProto.INT8, QType.FP8: TensorProto.FLOAT8E4M3FN}
    qtype = types[how.qtype]
    zeros = helper.make_tensor("z", qtype, how.scale.shape, [how.zero_point] * how.scale.size)
    axis = {} if how.axis is None else {"axis": how.axis}
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], **axis),
         helper.make_node("Cast", ["y"], ["f"], to=TensorProto.FLOAT)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, values.shape)],
        [helper.make_tensor_value_info("f", TensorProto.FLOAT, values.shape)],
        [numpy_helper.from_array(how.scale, "s"), zeros],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [ReferenceEvaluator(model).run(None, {"x": values})[0], session.run(None, {"x": values})[0]]


@pytest.mark.parametrize("fmt", [PLAIN, SIGNED, INT8, FP8])
@settings(derandomize=True, max_examples=15, deadline=None)
@given(values=intervals, seed=st.integers(0, 2**32))
def test_quantize_equals_the_operator(fmt: NumericFormat, values: Range, seed: int) -> None:
    how = of_range(values, fmt)
    rng = np.random.default_rng(seed)
    spread = max(values.high - values.low, 10 * float(how.scale))  # the reference's int32 overflows on far more
    array = rng.uniform(values.low - spread / 4, values.high + spread / 4, 300).astype(np.float32)
    halves = ((np.arange(-20, 20) + 0.5) * how.scale).astype(np.float32)
    array = np.concatenate([array, halves, np.float32([0, -0.0, values.low, values.high])])
    mine = quantize(array, how)
    assert mine.dtype == fmt.activation.dtype
    for theirs in operators(array, how):
        np.testing.assert_array_equal(mine.astype(np.float32), theirs)


@pytest.mark.parametrize(("fmt", "axis"), [(PLAIN, 0), (PLAIN, 1), (REDUCED, 0), (FP8, None), (INT8, 3)])
def test_quantize_equals_the_operator_on_weights(fmt: NumericFormat, axis: int | None) -> None:
    values = normal(4, 6, 3, 2)
    how = of_weight(values, axis, fmt)
    for theirs in operators(values, how):
        np.testing.assert_array_equal(quantize(values, how).astype(np.float32), theirs)


def test_ranges_join_and_reject_what_is_none() -> None:
    assert Range(-1, 2) | Range(0, 3) == Range(-1, 3)
    assert Range(-4, 2).magnitude == 4
    for low, high in ((1, 0), (float("nan"), 1), (0, float("inf"))):
        with pytest.raises(ValueError, match="not a range"):
            Range(low, high)


WEIGHT = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)


def error(name: str, weight: np.ndarray = WEIGHT) -> float:
    return float(np.square(rounded_weight(weight, WeightFormat.named(name)).values() - weight).mean())


def test_searched_steps_lose_less_than_those_of_the_largest_values() -> None:
    blocks = WEIGHT.reshape(2, 32, 24)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 7
    usual = np.square(np.clip(np.rint(blocks / step), -8, 7) * step - blocks).mean()
    assert error("w4b32") < 0.85 * usual
    assert error("w8b32") < error("w8") < error("w4b16") < error("w4b32")


def test_weights_that_are_zero_stay_zero_and_scales_are_what_the_type_holds() -> None:
    weight = np.zeros((32, 4), np.float16)
    weight[:, 0] = 1e-7
    for name in ("w4b32", "w4b32a", "w8"):
        found = rounded_weight(weight, WeightFormat.named(name))
        assert found.scale.dtype == np.float16
        assert (found.scale > 0).all()
        assert np.array_equal(found.values()[:, 1:], weight[:, 1:])


def test_a_range_covers_a_clamp_only_if_both_of_its_ends_do() -> None:
    step = np.float32(0.5)
    assert Quantization(QType.UINT8, step).covers(0.0, 127.5)
    assert not Quantization(QType.UINT8, step, 20).covers(0.0, 127.5), "it reaches below zero"
    assert not Quantization(QType.UINT8, step).covers(0.0, 100.0)
