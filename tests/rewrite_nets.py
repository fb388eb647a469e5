"""Graphs that rewrites make smaller, each between an input x and a Relu, and whether outputs stay the same."""

import numpy as np

from models import Arrays, build, feeds, run
from qdqtune.graph.model import Model


def net(
    body: str, constants: Arrays | None = None, shape: str = "float[2,5,8]", more: str = "", opset: int = 19
) -> Model:
    """What stands between an input x and a Relu that makes the output from n."""
    numbers = {
        **{"half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "six": 6.0, "zero": 0.0, "epsilon": 1e-5},
        **{"root": np.sqrt(2), "rootless": np.sqrt(0.5), "sixth": 1 / 6},
    }
    known = {name: np.float32(value) for name, value in numbers.items()} | dict(constants or {})
    text = f"net ({shape} x) => (float[] y{more}) {{ {body} [last] y = Relu(n) }}"
    return build(text, known, opset)


def same(model: Model, rewritten: Model) -> None:
    samples = feeds(model, 2)
    for exact, found in zip(run(model, samples), run(rewritten, samples), strict=True):
        assert exact.keys() == found.keys()
        for name, values in exact.items():
            np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=1e-5)


SQUARES = (
    "m = ReduceMean(x, axes) d = Sub(x, m) s = Pow(d, two) v = ReduceMean(s, axes) e = Add(v, epsilon) r = Sqrt(e) "
)
ROOT = "s = Mul(x, x) v = ReduceMean(s, axes) e = Add(epsilon, v) r = Sqrt(e) "
MERGED = {
    "gelu": [
        "a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) n = Mul(d, half)",
        "a = Mul(rootless, x) b = Erf(a) c = Add(one, b) d = Mul(half, c) n = Mul(d, x)",
        "a = Div(x, root) b = Erf(a) c = Add(b, one) d = Div(x, two) n = Mul(d, c)",
    ],
    "hardswish": [
        "a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) n = Div(c, six)",
        "a = Add(x, three) b = Clip(a, zero, six) c = Div(b, six) n = Mul(x, c)",
        "a = Add(three, x) b = Clip(a, zero, six) c = Mul(b, sixth) n = Mul(c, x)",
        "a = HardSigmoid <alpha=0.16666667> (x) n = Mul(x, a)",
    ],
    "layernorm": [
        SQUARES + "q = Div(d, r) g = Mul(q, gamma) n = Add(g, beta)",
        SQUARES.replace("Pow(d, two)", "Mul(d, d)") + "q = Div(d, r) g = Mul(gamma, q) n = Add(beta, g)",
        SQUARES + "n = Div(d, r)",
        SQUARES + "i = Div(one, r) q = Mul(d, i) g = Mul(q, gamma) n = Add(g, beta)",
    ],
    "rmsnorm": [
        ROOT + "q = Div(x, r) n = Mul(q, gamma)",
        ROOT.replace("Mul(x, x)", "Pow(x, two)") + "i = Reciprocal(r) q = Mul(x, i) n = Mul(gamma, q)",
        ROOT + "i = Div(one, r) q = Mul(x, i) n = Mul(q, gamma)",
    ],
}
