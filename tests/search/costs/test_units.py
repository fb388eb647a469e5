"""Units: every node in one of them, and what decisions about them mean for the edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import build, conv_net, normal, ranges
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.units import (
    Partition,
    fusion_groups,
    inner_edges,
    partition,
    split,
    weights_by_family,
)
from qdqtune.types import Edge, Layer, WeightFormat
from region_models import networks


def parts_of(model: Model, *groups: tuple[str, ...]) -> Partition:
    return partition(model, possible_edges(model, ranges(model)), groups)


def unit_of(parts: Partition, name: str):
    return parts.units[parts.owner[name]]


@given(networks(), st.data())
@settings(max_examples=30, deadline=None)
def test_every_node_is_in_one_unit(net, data: st.DataObject) -> None:
    """Whatever the groups are: overlapping, unknown names, disconnected."""
    model = net.model()
    names = st.sampled_from([*(n.name for n in model.nodes), "unknown"])
    groups = data.draw(st.lists(st.lists(names, max_size=4), max_size=5))
    possible = frozenset(Edge(t, n.name, k) for n in model.nodes for k, t in enumerate(n.inputs) if t)
    parts = partition(model, possible, groups)
    assert sorted(n for u in parts.units for n in u.nodes) == list(range(len(model.nodes)))
    assert [u.number for u in parts.units] == list(range(len(parts.units)))
    edges = [e for u in parts.units for e in (*u.inputs, *u.weights, *u.inner)]
    assert sorted(edges) == sorted(possible)


def test_constants_behind_a_product_carry_no_pair_in_its_unit() -> None:
    """By itself the addition has its constant as a weight; fused with the product, it adds in float."""
    text = "net (float[4,8] x) => (float[4,8] y) { [product] t = MatMul(x, w) [addition] y = Add(t, b) }"
    model = build(text, {"w": normal(8, 8), "b": normal(8)})
    assert unit_of(parts_of(model), "addition").weights == (Edge("b", "addition", 1),)
    fused = unit_of(parts_of(model, ("product", "addition")), "addition")
    assert fused.weights == (Edge("w", "product", 1),)
    assert set(fused.inner) == {Edge("t", "addition", 0), Edge("b", "addition", 1)}


def test_edges_of_a_fused_unit() -> None:
    parts = parts_of(conv_net(), ("stem", "stem_relu"))
    unit = unit_of(parts, "stem_relu")
    assert unit is unit_of(parts, "stem")
    assert unit.inputs == (Edge("image", "stem", 0),)
    assert unit.weights == (Edge("w0", "stem", 1),)
    assert unit.inner == (Edge("c0", "stem_relu", 0),)
    assert unit.outputs == ("r0",)
    assert unit.storable == ()
    assert unit_of(parts, "pool").storable == ("r0",)


def test_groups_are_layers_of_several_known_nodes() -> None:
    model = conv_net()
    layers = [
        Layer("a", ("stem", "added_by_the_engine", "stem_relu"), "FP32", 1.0, "compute"),
        Layer("b", ("pool",), "FP32", 1.0, "compute"),
        Layer("c", ("project", "add"), "FP32", 1.0, "reformat"),
        Layer("d", ("unknown", "other"), "FP32", 1.0, "compute"),
    ]
    assert fusion_groups(model, layers) == [("stem", "stem_relu")]


def test_splitting_at_inner_edges() -> None:
    model = conv_net()
    group = ("project", "add", "add_relu")
    inner = inner_edges(model, group, possible_edges(model, ranges(model)))
    assert inner == (Edge("c2", "add", 0), Edge("a", "add_relu", 0))
    assert split(model, group, ()) == [group]
    assert split(model, group, inner[:1]) == [("project",), ("add", "add_relu")]
    assert split(model, group, inner) == [("project",), ("add",), ("add_relu",)]


def test_equal_kinds_are_equal_operators_attributes_and_shapes() -> None:
    text = """net (float[2,4] x) => (float[2,4] y, float[2,8] z) {
        [a] a = MatMul(x, w0)
        [b] b = MatMul(a, w1)
        [c] z = MatMul(b, w2)
        [d] y = Softmax <axis=0> (b)
        [e] e = Softmax <axis=1> (a)
    }"""
    parts = parts_of(build(text, {"w0": normal(4, 4), "w1": normal(4, 4, seed=1), "w2": normal(4, 8)}))
    kinds = {name: unit_of(parts, name).kind for name in "abcde"}
    assert kinds["a"] == kinds["b"]
    assert len(set(kinds.values())) == 4


COARSE, FINE, FINER = WeightFormat(4, 128), WeightFormat(4, 32), WeightFormat(4, 32, symmetric=False)


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        ({COARSE: 0.30, FINE: 0.32, FINER: 0.50}, FINE),  # of equally fast formats the one that keeps more
        ({WeightFormat(8): 0.95}, None),
    ],
)
def test_the_format_of_a_family(shares, chosen: WeightFormat | None) -> None:
    edge = Edge("w0", "a", 1)
    placements = weights_by_family({edge: shares})
    assert [dict(p.weight_formats) for p in placements.values()] == ([{edge: chosen}] if chosen else [])
