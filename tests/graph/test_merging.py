"""Operators of several nodes become one: the same outputs, and only where no other node reads the inner tensors."""

from dataclasses import replace

import numpy as np
import pytest

from models import build, normal
from qdqtune.graph.rewrites import REWRITES
from rewrite_nets import MERGED, ROOT, net, same

VECTORS = {"gamma": normal(8, seed=1), "beta": normal(8, seed=2), "axes": np.array([-1])}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, bodies in MERGED.items() for body in bodies])
def test_several_nodes_of_an_operator_become_one(name: str, body: str) -> None:
    model = net(body, VECTORS)
    rewritten = REWRITES[name].apply(model)
    assert [n.op for n in rewritten.nodes] == [REWRITES[name].makes, "Relu"]
    assert rewritten.nodes[0].outputs == ("n",)
    assert rewritten.opset >= {"gelu": 20, "rmsnorm": 23}.get(name, 19)
    assert "n" in rewritten.tensors
    same(model, rewritten)
    assert REWRITES[name].apply(rewritten) is rewritten


GELU, SWISH, NORM = MERGED["gelu"][0], MERGED["hardswish"][0], MERGED["layernorm"][0]


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
    model = net(body, {**VECTORS, "others": np.array([1])}, more=more)
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
    unknown = net(
        NORM.replace("x", "u").join(["u = Reshape(x, shape) ", ""]), {**VECTORS, "shape": np.array([-1, 5, 8])}
    )
    proto = type(unknown.proto)()
    proto.CopyFrom(unknown.proto)
    del proto.graph.value_info[:]
    blind = replace(unknown, proto=proto)
    assert REWRITES["layernorm"].apply(blind) is blind
