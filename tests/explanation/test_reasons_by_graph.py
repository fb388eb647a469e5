"""Why a part of a Q/DQ model runs in float: concluded from the graph around it and from its numbers."""

import pytest

from layered_nets import CONV, FIRST, LAST, WEIGHT, failing, layers, net, reason
from models import FP8, INT8, PLAIN, UINT8
from qdqtune.explanation.findings import check
from qdqtune.explanation.reasons_by_graph import UNKNOWN
from qdqtune.types import NumericFormat


def test_one_of_several_readers_is_float():
    model = net(FIRST, WEIGHT, CONV, "[tanh] y = Tanh(b)", outputs=("y", "c"))
    found = failing(model, "xq: INT8", "xd: FP32", "wd + conv: INT8", "tanh: FP32")
    assert [f.nodes for f in found] == [("xd",), ("tanh",)]
    assert found[0].reason == (
        "tanh (Tanh) runs in float: no Tanh of this model runs in 8 bits: this engine seems to have no such kernel; "
        "1 of 2 readers take 8 bits"
    )


def test_the_result_has_another_reader():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST, "[tanh] t = Tanh(d)", outputs=("y", "t"))
    assert (
        reason(model, "wd + conv: FP32")
        == "conv (Conv) runs in float: its output carries no pair on the way to tanh (Tanh)"
    )
    found = failing(model, "xd + wd + conv: INT8", "yq: INT8", "tanh: FP32")
    assert [f.reason for f in found] == ["the result of conv (Conv) is read in float as well: tanh (Tanh)"]


def test_the_result_is_an_output_of_the_model():
    model = net(FIRST, WEIGHT, CONV, "[relu] y = Relu(c)")
    assert reason(model, "wd + conv + relu: FP32").endswith(
        "its output carries no pair on the way to the model's output"
    )
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST, outputs=("y", "b"))
    (finding,) = failing(model, "xd: FP32", "wd + conv + yq: INT8")
    assert finding.reason == "b is an output of the model as well"


@pytest.mark.parametrize(("scale", "words"), [
    ("s", "with the same scale: one pair is enough"), ("s2", "with another scale: give both pairs one"),
])  # fmt: skip
def test_pairs_one_behind_the_other(scale, words):
    again = f"[cq] c1 = QuantizeLinear(b, {scale}, z) [cd] c2 = DequantizeLinear(c1, {scale}, z) [conv] y = Conv(c2, v)"
    found = failing(net(FIRST, WEIGHT, again), "xd: FP32", "cq: INT8", "cd + wd + conv: INT8")
    assert [f.reason for f in found] == [f"cq follows xd {words}"] * 2


def test_values_that_are_only_moved_between_two_pairs():
    def moved(scale: str) -> list[str]:
        again = f"[cq] c1 = QuantizeLinear(t, {scale}, z) [cd] c2 = DequantizeLinear(c1, {scale}, z)"
        model = net(FIRST, "[turn] t = Transpose <perm=[0,1,3,2]>(b)", again, WEIGHT, "[conv] y = Conv(c2, v)")
        return [f.reason for f in failing(model, "xd: FP32", "turn: INT8", "cq: INT8", "cd + wd + conv: INT8")]

    assert moved("s2")[-1] == "cq follows xd with another scale: give both pairs one"
    assert moved("s")[-1] == "cq follows xd with the same scale: one pair is enough"


def test_what_carries_a_value_in_or_out_of_the_model_is_no_obstacle():
    model = net("[turn] t = Transpose <perm=[0,1,3,2]>(x)", FIRST.replace("(x,", "(t,"), WEIGHT,
                CONV.replace("c =", "d ="), LAST.replace("y =", "f ="),
                "[back] y = Transpose <perm=[0,1,3,2]>(f)")  # fmt: skip
    found = check(model, layers("turn: FP32", "xq: INT8", "xd + wd + conv + yq: INT8", "yd: FP32", "back: FP32"))
    assert [(f.kind, f.nodes) for f in found] == [("boundary", ("xq",)), ("boundary", ("yd",))]


def test_a_constant_that_is_quantized_each_time():
    model = net("[wq] q = QuantizeLinear <axis=0>(wf, ws, wz)", FIRST, "[wd] v = DequantizeLinear <axis=0>(q, ws, wz)",
                CONV.replace("c =", "y ="))  # fmt: skip
    (finding,) = failing(model, "wq: INT8", "xd + wd + conv: INT8")
    assert finding.reason == "it quantizes a constant, which the engine has not done in advance"


def test_no_reason_is_invented():
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), LAST)
    assert (
        reason(model, "xq: INT8", "xd: FP32", "wd + conv: FP32", "yq: INT8", numbers=INT8)
        == f"conv (Conv) runs in float: {UNKNOWN}"
    )


def test_a_reader_that_shares_its_pair_with_a_float_one():
    model = net(FIRST, "[conv] c = Conv <pads=[1,1,1,1]>(b, wf) [cq] c1 = QuantizeLinear(c, s, z) "
                "[cd] c2 = DequantizeLinear(c1, s, z) [add] d = Add(c2, b)", LAST)  # fmt: skip
    found = failing(model, "xq: INT8", "xd: FP32", "conv: FP32", "cq: INT8", "cd + add: FP32", "yq: INT8")
    words = {f.reason for f in found if f.cause == "add"}
    assert words == {
        "add (Add) runs in float: no Add of this model runs in 8 bits: this engine seems to have no such kernel"
    }


@pytest.mark.parametrize(("numbers", "words"), [
    (INT8, "this engine fuses them in float16, or in FP8 with pairs on q, k, v and behind the Softmax"),
    (UINT8, "not every engine runs them in 8 bits"),
])  # fmt: skip
def test_both_products_of_attention(numbers, words):
    zero = "z" if numbers is INT8 else "zu"
    pair = f"[{{0}}q] {{0}}1 = QuantizeLinear({{0}}, s, {zero}) [{{0}}d] {{0}}2 = DequantizeLinear({{0}}1, s, {zero})"
    model = net(pair.format("x"), "[scores] t = MatMul(x2, x2)", pair.format("t"), "[softmax] p = Softmax(t2)",
                pair.format("p"), "[context] c = MatMul(p2, x2)", pair.format("c"), "[end] y = Tanh(c2)",
                shape="8,8")  # fmt: skip
    found = failing(model, "xd + scores: FP32", "tq: INT8", "td + softmax: FP32", "context + pd: FP32", "cq: INT8",
                    numbers=numbers)  # fmt: skip
    told = {f.cause: f.reason for f in found if f.kind == "float compute"}
    assert told == {
        name: f"{name} (MatMul) runs in float: it is one of the two products of attention: {words}"
        for name in ("scores", "context")
    }


def of_numbers(first: str = FIRST, weight: str = WEIGHT, bias: str = "", numbers: NumericFormat | None = PLAIN) -> str:
    model = net(first, weight, bias, f"[conv] d = Conv <pads=[1,1,1,1]>(b, v{', h' if bias else ''})", LAST)
    return reason(model, "conv: FP32", numbers=numbers).removeprefix("conv (Conv) runs in float: ")


def test_scales():
    assert of_numbers("[s1] sx = Abs(s) [xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, sx, z)") == (
        "the scale of xd is no constant"
    )
    assert of_numbers("[xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, s2, z)") == (
        "xq and xd differ in scale or zero point"
    )
    channels = "[xq] a = QuantizeLinear <axis=1>(x, ws, wz) [xd] b = DequantizeLinear <axis=1>(a, ws, wz)"
    assert of_numbers(channels) == "xd has a scale for each channel of an activation, and engines want one for all"
    assert of_numbers(weight=WEIGHT.replace("axis=0", "axis=1")) == (
        "wd has its scales along axis 1, which is not that of the output channels"
    )
    assert of_numbers(numbers=FP8) == "wd has a scale for each channel, and this engine wants one for all"


def test_types():
    five = FIRST.replace(", z)", ", z5)")
    assert of_numbers(five, numbers=INT8) == (
        "the zero point of xd is not 0, and this engine takes symmetric pairs only"
    )
    assert of_numbers(FIRST, numbers=PLAIN) == "xd takes int8, and this engine wants uint8"
    assert of_numbers(FIRST.replace(", z)", ", zu)"), numbers=INT8) == "xd takes uint8, and this engine wants int8"
    assert of_numbers(five, numbers=None) == UNKNOWN


def test_what_runs_elsewhere_is_no_obstacle():
    second = "[yq] e = QuantizeLinear(d, s, z) [yd] f = DequantizeLinear(e, s, z) [conv2] y = Conv(f, v)"
    model = net(FIRST, WEIGHT, CONV.replace("c =", "d ="), second)
    assert reason(model, "conv: FP32", "yd + conv2: INT8", numbers=PLAIN).endswith(f": {UNKNOWN}")


@pytest.mark.parametrize(("bias", "numbers", "words"), [
    ("[hd] h = DequantizeLinear <axis=0>(bias, ws)", INT8,
     "its bias h comes out of a DQ, and this engine wants it in float"),
    ("[hd] h = Abs(bf)", UINT8, "its bias h is in float, and this engine wants it in int32 behind a DQ"),
    ("[hd] h = DequantizeLinear <axis=0>(bias, ws)", UINT8,
     "the scale of its bias h is not that of its input times that of its weight"),
    ("[hd] h = DequantizeLinear <axis=0>(bias, ss)", UINT8, UNKNOWN),
])  # fmt: skip
def test_biases(bias, numbers, words):
    first = FIRST if numbers is INT8 else FIRST.replace(", z)", ", zu)")
    assert of_numbers(first, bias=bias, numbers=numbers) == words


def test_a_clamp_that_the_pair_behind_it_does_not_replace():
    relu = "[relu] d = Relu(c)"
    model = net(FIRST, WEIGHT, CONV, relu, LAST)
    given = ("wd + conv + relu: FP32", "yq: INT8")
    assert reason(model, *given, numbers=UINT8) == (
        "conv (Conv) runs in float: relu (Relu) behind it has to run, since yq keeps values below 0"
    )
    lowest = net(FIRST, WEIGHT, CONV, relu, LAST.replace(", z)", ", low)"))
    assert "relu (Relu) behind it" not in reason(lowest, *given, numbers=UINT8)
    assert reason(model, *given, numbers=INT8).endswith(f": {UNKNOWN}")
