"""Rewrites of the float model: the same outputs from fewer nodes, with the same names of tensors."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from models import Arrays, build, normal, run
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph import rewrites
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES, Rewrite, Rewrites, allowed, between, folded
from rewrite_nets import MERGED, ROOT, same
from rewrite_nets import net as named

BATCH_NORM = "n = BatchNormalization <epsilon=0.001> (c, gamma, beta, mean, variance)"


def constants(channels: int) -> Arrays:
    """Parameters of a normalization, and operands of arithmetic, with one value a channel."""
    vectors = {name: normal(channels, seed=i) for i, name in enumerate(("gamma", "beta", "mean"))}
    vectors["by_channel"] = normal(1, channels, 1, 1, seed=5)
    return vectors | {"variance": np.abs(normal(channels, seed=4)) + np.float32(0.1), "two": np.float32(2)}


def net(layer: str, behind: str, weights: Arrays, shape: str = "float[2,4,5,5]", outputs: str = "") -> Model:
    """A layer that makes c, what stands behind it and makes n, and a reader of n."""
    text = f"net ({shape} x) => (float[] y{outputs}) {{ [layer] c = {layer}\n {behind}\n [last] y = Relu(n) }}"
    return build(text, {**constants(6), **weights})


LAYERS = {
    "convolution": ("Conv(x, w, b)", {"w": normal(6, 4, 3, 3), "b": normal(6)}),
    "no bias": ("Conv(x, w)", {"w": normal(6, 4, 3, 3)}),
    "depthwise": ("Conv <group=2> (x, w)", {"w": normal(6, 2, 3, 3)}),
    "transposed": ("ConvTranspose <group=2, strides=[2,2]> (x, w, b)", {"w": normal(4, 3, 3, 3), "b": normal(6)}),
}


@pytest.mark.parametrize(
    "behind",
    [
        BATCH_NORM,
        "n = Mul(by_channel, c)",
        "m = Add(c, by_channel) o = Sub(two, m) n = Div(o, by_channel)",
        "m = Sub(c, two) n = BatchNormalization(m, gamma, beta, mean, variance)",
    ],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_convolution_takes_in_what_scales_and_shifts_its_channels(layer: str, behind: str) -> None:
    model = net(LAYERS[layer][0], behind, LAYERS[layer][1])
    rewritten = folded(model)
    assert [n.name for n in rewritten.nodes] == ["layer", "last"]
    assert rewritten.nodes[0].outputs == ("n",)
    assert rewritten.nodes[0].inputs[1] == "w"
    assert "c" not in rewritten.tensors
    same(model, rewritten)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemm_takes_in_a_batch_normalization(transposed: int) -> None:
    weights = {"w": normal(6, 4) if transposed else normal(4, 6), "b": normal(1, 6)}
    layer = f"Gemm <transB={transposed}, alpha=0.5, beta=2.0> (x, w, b)"
    model = net(layer, BATCH_NORM, weights, shape="float[3,4]")
    rewritten = folded(model)
    assert [n.op for n in rewritten.nodes] == ["Gemm", "Relu"]
    same(model, rewritten)


@pytest.mark.parametrize(
    ("layer", "behind", "more"),
    [
        ("Conv(x, w)", "d = Relu(c) " + BATCH_NORM.replace("(c", "(d"), ""),
        ("Conv(x, w)", f"{BATCH_NORM} d = Neg(c)", ", float[] d"),
        ("Conv(x, w)", BATCH_NORM, ", float[] c"),
        ("Conv(x, w)", "n = Mul(c, by_row)", ""),
        ("Conv(x, w)", "n = Mul(c, c)", ""),
        ("Conv(x, w)", "n = Div(two, c)", ""),
        ("Conv(x, w)", "n = Div(c, none)", ""),
        ("Conv(x, x2)", BATCH_NORM, ""),
    ],
    ids=["behind an activation", "read twice", "an output", "by row", "a square", "a quotient", "by zero", "no weight"],
)
def test_nodes_behind_shared_or_variable_layers_are_not_folded(layer: str, behind: str, more: str) -> None:
    weights = {"w": normal(6, 4, 3, 3), "by_row": normal(3, 1), "none": np.float32(0)}
    text = f"net (float[2,4,5,5] x, float[6,4,3,3] x2) => (float[] y{more}) {{ c = {layer} {behind} y = Relu(n) }}"
    model = build(text, {**constants(6), **weights})
    assert folded(model) is model


GELU = MERGED["gelu"][0]


def test_reciprocals_become_divisions_of_one() -> None:
    model = named("a = Abs(x) s = Add(a, two) [turned] r = Reciprocal(s) n = Reciprocal(r)")
    rewritten = REWRITES["division"].apply(model)
    assert [n.op for n in rewritten.nodes] == ["Abs", "Add", "Div", "Div", "Relu"]
    turned = rewritten.nodes[2]
    assert (turned.name, turned.outputs) == ("turned", ("r",))
    assert turned.inputs[0] == rewritten.nodes[3].inputs[0]  # one constant serves both
    same(model, rewritten)
    assert REWRITES["division"].apply(rewritten) is rewritten


def test_rewrites_have_names_an_order_and_are_recognized() -> None:
    assert allowed("auto") == Rewrites(folded=True)
    assert allowed("off") == Rewrites()
    asked = allowed("gelu, fold,hardswish")
    assert asked == Rewrites(True, ("hardswish", "gelu"))
    body = "i = Add(x, three) j = Clip(i, zero, six) k = Mul(x, j) h = Div(k, six) "
    model = named(body + GELU.replace("x", "h"))
    rewritten = asked.of(model)
    assert [n.op for n in rewritten.nodes] == ["HardSwish", "Gelu", "Relu"]
    same(model, rewritten)
    assert between({n.op for n in model.nodes}, {n.op for n in rewritten.nodes}) == asked.names
    with pytest.raises(BadOption, match="there is no rewrite best; there are fold, sizes, hardswish"):
        allowed("gelu,best")


def test_what_the_engine_merges_by_itself_comes_first_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed("auto", ("gelu",)) == Rewrites(True, merged=("gelu",))
    assert allowed("off", ("gelu",)) == allowed("off")
    assert allowed("fold", ("gelu",)) == Rewrites(True)
    model = named(GELU)
    merged, made = allowed("auto", ("gelu", "layernorm")).made(model)
    assert made == Rewrites(True, merged=("gelu",))  # there is nothing else to merge
    assert [n.op for n in merged.nodes] == ["Gelu", "Relu"]
    same(model, merged)

    monkeypatch.setattr(rewrites, "REWRITES", {**REWRITES, "gelu": Rewrite(Mock(side_effect=BadModel("no adapter")))})
    assert allowed("auto", ("gelu",)).of(model) is model


RESIZED = 'r = Resize <mode="cubic"> (table, , , c) n = Add(x, r)'
SIZES = {
    "table": normal(3, 4), "k1": np.array(1), "k2": np.array(2),
    **{f"i{i}": np.array([i]) for i in range(4)}, "i12": np.array([1, 2]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "is_known"),
    [
        ("s = Shape(x) c = Slice(s, i1, i3)", True),
        ("s = Shape(x) h = Gather(s, k1) b = Gather(s, k2) d = Unsqueeze(h, i0) e = Unsqueeze(b, i0) "
         "c = Concat <axis=0> (d, e)", True),
        ("s = Shape <start=1> (x) d = Concat <axis=0> (s, i3) e = Div(d, i1) f = Slice(e, i0, i2) c = Max(f, i1)",
         True),
        ("s = Shape(x) f = Cast <to=1> (s) g = Mul(f, half) d = Add(g, g) e = Cast <to=7> (d) c = Gather(e, i12)",
         True),
        ("a = Relu(x) s = Shape(a) c = Gather(s, i12)", True),
        ("s = Shape(x) d = Gather(s, i12) e = Gather(s, i0) f = Sub(e, e) c = Add(d, f)", True),
        ("a = Relu(x) s = Shape(a) d = Slice(s, i0, i1) e = Mul(d, i0) f = Gather(s, i12) c = Add(e, f)", True),
        ("s = Shape(x) d = Gather(s, i12) e = Gather(s, i0) f = Div(i2, e) c = Add(d, f)", False),
        ("s = Shape(x) d = Gather(s, i12) e = Gather(s, i0) c = Slice(d, i0, e)", False),
        ("s = Shape(x) t = Shape(x) d = Gather(s, i12) e = Gather(s, i0) f = Gather(t, i0) g = Sub(e, f) c = Add(d, g)",
         False),
    ],
)  # fmt: skip
def test_values_that_follow_from_known_sizes_are_constants(body: str, is_known: bool) -> None:
    model = named(body + RESIZED, SIZES, "float[N,20,16]")
    for value in model.proto.graph.value_info:
        if value.name == "a":  # as exporters write that trace one run
            value.type.tensor_type.shape.dim[0].dim_value = 1
    rewritten = REWRITES["sizes"].apply(model)
    if not is_known:
        assert rewritten is model
        return
    assert {n.op for n in rewritten.nodes} <= {"Relu", "Resize", "Add"}
    assert rewritten.tensors["r"].sizes == (20, 16)
    for batch in (1, 3):
        inputs = {"x": normal(batch, 20, 16)}
        np.testing.assert_array_equal(run(rewritten, [inputs])[0]["y"], run(model, [inputs])[0]["y"])
    assert REWRITES["sizes"].apply(rewritten) is rewritten


VECTORS = {"gamma": normal(8, seed=1), "beta": normal(8, seed=2), "axes": np.array([-1])}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, bodies in MERGED.items() for body in bodies])
def test_several_nodes_of_an_operator_become_one(name: str, body: str) -> None:
    model = named(body, VECTORS)
    rewritten = REWRITES[name].apply(model)
    assert [n.op for n in rewritten.nodes] == [REWRITES[name].makes, "Relu"]
    assert rewritten.nodes[0].outputs == ("n",)
    assert rewritten.opset >= {"gelu": 20, "rmsnorm": 23}.get(name, 19)
    assert "n" in rewritten.tensors
    same(model, rewritten)
    assert REWRITES[name].apply(rewritten) is rewritten


SWISH, NORM = MERGED["hardswish"][0], MERGED["layernorm"][0]


@pytest.mark.parametrize(
    ("name", "body", "more"),
    [
        ("gelu", GELU, ", float[] c"),
        ("gelu", GELU.replace("root)", "two)"), ""),
        ("gelu", GELU.replace("half", "two"), ""),
        ("gelu", GELU.replace("Mul(x, c)", "Mul(c, c)"), ""),
        ("gelu", GELU + " k = Neg(b)", ", float[] k"),
        ("hardswish", SWISH.replace("Clip(a, zero, six)", "Clip(a, one, six)"), ""),
        ("hardswish", SWISH.replace("three", "two"), ""),
        ("hardswish", "a = HardSigmoid(x) n = Mul(x, a)", ""),
        ("hardswish", "z = Neg(x) a = HardSigmoid <alpha=0.16666667> (z) n = Mul(x, a)", ""),
        ("layernorm", NORM, ", float[] v"),
        ("layernorm", NORM.replace("axes", "others"), ""),
        ("layernorm", NORM.replace("ReduceMean(s, axes)", "ReduceMax(s, axes)"), ""),
        ("rmsnorm", NORM, ""),
        ("rmsnorm", ROOT + "z = Neg(x) q = Div(z, r) n = Mul(q, gamma)", ""),
        ("rmsnorm", ROOT + "q = Div(r, x) n = Mul(q, gamma)", ""),
        ("rmsnorm", ROOT + "i = Div(two, r) q = Mul(x, i) n = Mul(q, gamma)", ""),
    ],
)
def test_nodes_with_other_readers_or_other_formulas_are_not_merged(name: str, body: str, more: str) -> None:
    model = named(body, {**VECTORS, "others": np.array([1])}, more=more)
    assert REWRITES[name].apply(model) is model


def test_a_tensor_that_a_body_reads_prevents_merging() -> None:
    text = f"""net (float[2,8] x, bool t) => (float[] y, float[] z) {{
        {GELU} y = Relu(n)
        z = If (t) <then_branch = g1 () => (float[2,8] p) {{ p = Neg(c) }},
                    else_branch = g2 () => (float[2,8] q) {{ q = Identity(n) }}>
    }}"""
    known = {"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    inner = build(text, known)
    assert REWRITES["gelu"].apply(inner) is inner
    result = build(text.replace("Neg(c)", "Neg(n)"), known)  # which is what the merged node makes
    rewritten = REWRITES["gelu"].apply(result)
    assert [n.op for n in rewritten.nodes] == ["Gelu", "Relu", "If"]
    same(result, rewritten)


def test_other_types_and_unknown_shapes_are_not_merged() -> None:
    half = build(
        f"net (float16[2,8] x) => (float16[] y) {{ {GELU} y = Relu(n) }}",
        {"root": np.float16(np.sqrt(2)), "one": np.float16(1), "half": np.float16(0.5)},
    )
    assert REWRITES["gelu"].apply(half) is half
    unknown = named(
        NORM.replace("x", "u").join(["u = Reshape(x, shape) ", ""]), {**VECTORS, "shape": np.array([-1, 5, 8])}
    )
    proto = type(unknown.proto)()
    proto.CopyFrom(unknown.proto)
    del proto.graph.value_info[:]
    blind = replace(unknown, proto=proto)
    assert REWRITES["layernorm"].apply(blind) is blind


def test_weights_that_another_layer_reads_too_stay_for_it() -> None:
    text = "[other] d = Conv(x, w, b) [add] m = Add(d, s) n = Identity(m)"
    behind = "s = BatchNormalization(c, gamma, beta, mean, variance) " + text
    model = net("Conv(x, w, b)", behind, {"w": normal(6, 4, 3, 3), "b": normal(6)})
    rewritten = folded(model)
    layer, other = (rewritten.nodes[rewritten.index_of[name]] for name in ("layer", "other"))
    assert layer.inputs[1:] != other.inputs[1:] == ("w", "b")
    same(model, rewritten)
