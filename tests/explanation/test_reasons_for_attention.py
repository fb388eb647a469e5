from collections.abc import Iterable

import numpy as np
import pytest

from models import INT8, build, normal
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.explanation.findings import check
from qdqtune.explanation.reasons_for_attention import splits
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import insert
from qdqtune.types import Edge, Layer, NumericFormat, Placement, QType

FP8 = NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False)

ATTENTION = """net ({2}[1,4,{0},{1}] q, {2}[1,4,{0},{1}] k, {2}[1,4,{0},{1}] v) => ({2}[A,B,C,D] y) {{
    [turn] t = Transpose <perm=[0,1,3,2]> (k)
    [scores] s = MatMul(q, t)
    [scale] d = Mul(s, c)
    [softmax] p = Softmax(d)
    [context] o = MatMul(p, v)
    [back] b = Transpose <perm=[0,2,1,3]> (o)
    [project] y = MatMul(b, w)
}}"""

QUERIES, KEYS = Edge("q", "scores", 0), Edge("t", "scores", 1)
PROBABILITIES, VALUES = Edge("p", "context", 0), Edge("v", "context", 1)
BEHIND, WEIGHTS = Edge("b", "project", 0), Edge("w", "project", 1)
FOUR = (QUERIES, KEYS, PROBABILITIES, VALUES)
ALL = (*FOUR, BEHIND, WEIGHTS)


def attention(
    pairs: Iterable[Edge], positions: int = 64, head: int = 32, half: bool = True, numbers: NumericFormat = INT8
) -> Model:
    dtype = np.float16 if half else np.float32
    kind = "float16" if half else "float"
    constants = {"c": dtype(0.25), "w": normal(head, 32).astype(dtype)}
    model = build(ATTENTION.format(positions, head, kind), constants)
    return insert(model, Placement.of(pairs), Ranges({t: Range(-1, 1) for t in "qktvpbd"}), numbers)


def layers(model: Model, *together: str) -> list[Layer]:
    """Each node in a layer of its own, those of `together` in one."""
    fused = [Layer("fused", together, "INT8", 1.0, "compute")] if together else []
    return fused + [Layer(n.name, (n.name,), "INT8", 1.0, "compute") for n in model.nodes if n.name not in together]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"pairs": ALL, "head": 48}, "size 48, and INT8 attention is fused for 16, 32 and 64 only"),
        ({"pairs": ALL, "positions": 520}, "over 520 positions"),
        ({"pairs": FOUR}, "no pair stands behind the second product, context"),
        ({"pairs": ALL[1:]}, "its queries carry no pair"),
        ({"pairs": (QUERIES, PROBABILITIES, BEHIND, WEIGHTS)}, "its keys and values carry no pair"),
        ({"pairs": (*ALL, Edge("d", "softmax", 0))}, "between the first product and the Softmax"),
        ({"pairs": ALL, "half": False}, "`precision` fp16"),
        ({"pairs": (BEHIND, WEIGHTS), "half": False}, "without pairs attention is fused in float16 only"),
        ({"pairs": (BEHIND, WEIGHTS), "head": 272}, "size 272, and attention is fused up to 256"),
        ({"pairs": FOUR, "numbers": FP8, "half": False}, "FP8 attention is fused in float16 graphs only"),
        ({"pairs": FOUR, "numbers": FP8, "head": 320}, "up to 256"),
        ({"pairs": ALL}, "every condition known here"),
    ],
)
def test_the_condition_that_is_missed_is_named(told: dict, words: str) -> None:
    model = attention(**told)
    (found,) = splits(model, layers(model))
    assert words in found.reason
    assert found.nodes == ("scores", "softmax", "context")


def test_attention_in_one_kernel_is_no_finding() -> None:
    model = attention(ALL)
    assert not list(splits(model, layers(model, "scores", "scale", "softmax", "context")))


@pytest.mark.parametrize(("pairs", "fails"), [(ALL, True), ((BEHIND, WEIGHTS), False)])
def test_it_is_a_finding_that_fails_if_pairs_are_in_vain(pairs: tuple[Edge, ...], fails: bool) -> None:
    model = attention(pairs, head=48)
    (first, *others) = check(model, layers(model), INT8, fuses_attention=True)
    assert (first.kind, first.fails, first.time_ms) == ("split attention", fails, 3.0)
    assert not [f for f in others if f.kind == "float compute" and {"scores", "context"} & set(f.nodes)]
    assert not [f for f in check(model, layers(model), INT8) if f.kind == "split attention"]
