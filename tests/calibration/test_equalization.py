"""Channels are scaled where weights take the scales back: every output stays as it was, bit by bit."""

import numpy as np
import pytest

from models import build, normal, run
from qdqtune.calibration.equalization import Factor, factors, scaled, sites
from qdqtune.graph.model import Model
from qdqtune.types import Edge


def constants() -> dict[str, object]:
    return {"w0": normal(8, 4, 3, 3), "b0": normal(8), "w1": normal(8, 1, 3, 3), "w2": normal(6, 4, 1, 1),
            "slope": np.abs(normal(8, 1, 1)), "g": normal(8), "h": normal(8), "p": normal(8, 5), "q": normal(8, 3),
            "t": normal(5, 8), "a": normal(8)}  # fmt: skip


NETS = {
    "a chain with a depthwise layer": """net (float[1,4,9,9] x) => (float[1,6,N,M] y) {
        [c_node] c = Conv(x, w0, b0)
        [r_node] r = Relu(c)
        [d_node] d = Conv <group = 8> (r, w1)
        [s_node] s = PRelu(d, slope)
        [m_node] m = MaxPool <kernel_shape = [2, 2]> (s)
        [y_node] y = Conv <group = 2> (m, w2)
    }""",
    "two products behind a normalization": """net (float[2,8] x) => (float[2,5] y, float[2,3] z) {
        [n_node] n = LayerNormalization <axis = -1> (x, g, h)
        [y_node] y = MatMul(n, p)
        [z_node] z = Gemm(n, q)
    }""",
    "a product with its bias": """net (float[2,8] x) => (float[2,3] y) {
        [m_node] m = MatMul(x, eight)
        [b_node] b = Add(m, a)
        [r_node] r = Relu(b)
        [y_node] y = Gemm(r, q)
    }""",
    "transposed weights": """net (float[2,8] x) => (float[2,5] y) {
        [n_node] n = LayerNormalization <axis = -1> (x, g, h)
        [y_node] y = Gemm <transB = 1> (n, t)
    }""",
}
SITES = {"a chain with a depthwise layer": 2, "two products behind a normalization": 1, "a product with its bias": 1,
         "transposed weights": 1}  # fmt: skip


def net(name: str) -> Model:
    known = {n: v for n, v in (constants() | {"eight": normal(8, 8)}).items() if f"{n}" in NETS[name]}
    return build(NETS[name], known)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NETS)
def test_outputs_stay_as_they_are(name: str) -> None:
    model = net(name)
    found = sites(model)
    assert len(found) == SITES[name]
    wanted = [f for site in found for f in factors(model, site, [i % 5 - 2 for i in range(site.channels)])]
    changed = scaled(model, wanted)
    assert [n.inputs for n in changed.nodes] == [n.inputs for n in model.nodes]  # edges keep their names
    assert any(
        (changed.constants[t].array() != c.array()).any() for t, c in model.constants.items() if t in changed.constants
    )
    feeds = [{"x": normal(*(d or 1 for d in model.tensors["x"].shape or ()), seed=i)} for i in range(2)]
    for exact, found_now in zip(run(model, feeds), run(changed, feeds), strict=True):
        for output in exact:
            np.testing.assert_allclose(found_now[output], exact[output], rtol=1e-6, atol=1e-6)


LAYERS = {"c": "Conv(x, w0, b0)", "r": "Relu(c)", "s": "Sigmoid(c)", "y": "Conv <group = 2> (r, w2)", "n": "Neg(r)",
          "t": "Conv <group = 2> (s, w2)", "z": "Conv(x, w0)"}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("cst", "t"),  # a Sigmoid is not linear
        ("crny", "ny"),  # channels are an output
        ("crzy", "yz"),  # somebody else reads the weights
    ],
)
def test_where_scales_would_be_seen_there_is_no_site(nodes: str, outputs: str) -> None:
    text = "\n".join(f"[{n}_node] {n} = {LAYERS[n]}" for n in nodes)
    made = ", ".join(f"float[1,{6 if o in 'ty' else 8},N,M] {o}" for o in outputs)
    known = {n: v for n, v in constants().items() if n in text}
    assert not sites(build(f"net (float[1,4,9,9] x) => ({made}) {{ {text} }}", known))  # type: ignore[arg-type]
    alone = "\n".join(f"[{n}_node] {n} = {LAYERS[n]}" for n in "cry")
    assert sites(build(f"net (float[1,4,9,9] x) => (float[1,6,N,M] y) {{ {alone} }}", known))  # type: ignore[arg-type]


def test_factors_of_nodes_that_a_model_lacks_are_passed_over() -> None:
    model = net("transposed weights")
    assert scaled(model, [Factor(Edge("w", "nobody", 1), (1,), (3,))]) is model
    with pytest.raises(ValueError, match="one exponent for each"):
        Factor(Edge("w", "nobody", 1), (2,), (3,))
