"""Units: every node in one of them, and what decisions about them mean; schemes of groups that stand alone."""

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import INT8, build, conv_net, normal, ranges
from qdqtune.engines.fake import CostModel
from qdqtune.errors import Failure
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.profiles import (
    PricedScheme,
    Profile,
    SchemeResult,
    passthrough_profile,
    points_of,
    profile_of,
    schemes,
    select,
    signature,
)
from qdqtune.search.costs.units import Partition, Unit, fusion_groups, inner_edges, partition, split, weights_by_family
from qdqtune.search.subgraph import SubgraphSearch
from qdqtune.tuning.subgraph_groups import Resolved, by_rules, extract
from qdqtune.types import Edge, Layer, Measurement, Placement, WeightFormat
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


def by_the_rules(model: Model) -> Partition:
    possible = possible_edges(model, ranges(model))
    return partition(model, possible, by_rules(model, possible).groups)


def alone(parts: Partition, unit: Unit) -> tuple[Model, frozenset[Edge]]:
    """A group as a model, and where pairs may stand in it."""
    known = {name: info.shape for name, info in parts.model.tensors.items() if info.shape and None not in info.shape}
    part = extract(parts.model, unit.nodes, Resolved(known), {})
    own = {e for e in parts.possible if e.node in part.index_of}
    return part, frozenset(own | {Edge(t, "", k) for k, t in enumerate(unit.outputs) if parts.edges.get(t)})


def test_the_schemes_of_a_convolution() -> None:
    parts = by_the_rules(conv_net())
    unit = parts.units[parts.owner["stem"]]
    found = schemes(*alone(parts, unit))
    x, w, out = Edge("image", "stem", 0), Edge("w0", "stem", 1), Edge("r0", "", 0)
    assert found["full"].edges == {x, w}
    assert found["full, output"].edges == {x, w, out}
    assert found["weight-only"].edges == {w}


def test_a_scheme_means_the_same_edges_in_every_equal_group() -> None:
    model = build(
        "net (float[4,8] x) => (float[4,8] y) {"
        "[a] t = MatMul(x, w) [b] u = Relu(t) [c] v = MatMul(u, w) [d] y = Relu(v)}",
        {"w": normal(8, 8)},
    )
    parts = by_the_rules(model)
    first, second = (parts.units[parts.owner[name]] for name in ("a", "c"))
    sizes = dict.fromkeys("xtuvy", (4, 8)) | {"w": (8, 8)}
    part, possible = alone(parts, first)
    options = (PricedScheme("full, output", points_of(part, schemes(part, possible)["full, output"]), 0.5),)
    ends = {Edge("x", "a", 0), Edge("w", "a", 1), Edge("u", "c", 0)}
    for gaining, edges in (({0}, ends), ({0, 1}, {*ends, Edge("w", "c", 1)})):
        profiles = {n: Profile(1.0, options if n in gaining else ()) for n in (first.number, second.number)}
        assert select(parts, profiles).placement().edges - {Edge("y", "", 0)} == edges
    assert signature(parts, first, sizes) == signature(parts, second, sizes)
    assert signature(parts, first, sizes) != signature(parts, second, sizes | {"v": (5, 8)})
    fewer = partition(model, parts.possible - {Edge("w", "c", 1)}, [["a", "b"], ["c", "d"]])
    assert signature(fewer, first, sizes) != signature(fewer, fewer.units[1], sizes)


def layer(name: str, ms: float, kind: str = "compute", *nodes: str) -> Layer:
    return Layer(name, nodes, "", ms, kind)


def test_reformats_and_conversions_at_the_border_are_no_part_of_a_groups_own_time() -> None:
    parts = by_the_rules(conv_net())
    part, possible = alone(parts, parts.units[parts.owner["stem"]])
    floats = [
        layer("in", 5.0, "reformat"),
        layer("conv", 4.0, "compute", "stem", "stem_relu"),
        layer("out", 1.0, "copy"),
    ]
    quantized = [
        layer("q", 0.5, "quantize", "image_QuantizeLinear"), layer("layout", 3.0, "reformat"),
        layer("conv", 1.0, "compute", "stem", "stem_relu"), layer("dq", 0.25, "quantize", "r0_DequantizeLinear"),
    ]  # fmt: skip
    placement = schemes(part, possible)["full, output"]
    refused = SchemeResult("weight-only", Placement(), Failure("build", "no kernel"))
    (option,) = profile_of(part, floats, [SchemeResult("s", placement, None, quantized), refused]).options
    assert option.ms == pytest.approx(1.0)
    assert option.quantize == {(0, 0): pytest.approx(0.5)}
    assert option.dequantize == {(-1, 0): pytest.approx(0.25)}
    measured = Measurement((1.0, 1.0), (0.95, 0.95))  # the rounds say that all layers took twice as long as profiled
    profile = profile_of(part, floats, [SchemeResult("s", placement, measured, quantized), refused])
    assert profile.float_ms == 4.0
    assert profile.options[0].ms == pytest.approx(2.0)
    assert profile.failures == {"weight-only": "no kernel"}


def test_without_layers_the_total_latency_counts() -> None:
    parts = by_the_rules(conv_net())
    part, possible = alone(parts, parts.units[parts.owner["stem"]])
    answer = SchemeResult("s", schemes(part, possible)["full"], Measurement((0.002,), (0.001,)))
    profile = profile_of(part, [], [answer])
    assert profile.float_ms == pytest.approx(2.0)
    assert profile.options[0].ms == pytest.approx(1.0)
    assert profile_of(part, [], []).options == ()


def measured_alone(model: Model) -> tuple[Partition, dict[int, Profile]]:
    """Every group's profile, from the exact cost model."""
    parts, found = by_the_rules(model), {}
    for unit in parts.units:
        part, possible = alone(parts, unit)
        inserter = Inserter(part, ranges(model), INT8)

        def layers(placement: Placement, inserter: Inserter = inserter) -> tuple[Layer, ...]:
            return CostModel(inserter.insert(placement).to_proto(), 1).layers()

        answers = (
            [SchemeResult(n, p, None, layers(p)) for n, p in schemes(part, possible).items()] if unit.inputs else []
        )
        found[unit.number] = profile_of(part, layers(Placement()), answers)
    return parts, found


def names(parts: Partition, units: Collection[int]) -> set[str]:
    return {parts.model.nodes[n].name for u in units for n in parts.units[u].nodes}


def test_the_selection_is_the_best_of_all_for_the_exact_engine() -> None:
    """A group that gains nothing alone is taken where it saves its neighbours a conversion, and only there."""
    text = """net (float[1,8,16,16] x) => (float[1,8,16,16] y) {
        [one] a = Conv <pads=[1,1,1,1]> (x, w0)
        [relu] b = Relu(a)
        [two] c = Conv <pads=[1,1,1,1]> (b, w1)
        [skip] d = Add(c, b)
        [three] e = Conv <pads=[1,1,1,1]> (d, w2)
        [soft] y = Softmax(e)
    }"""
    model = build(text, {f"w{k}": normal(8, 8, 3, 3, scale=0.1, seed=k) for k in range(3)})
    parts, profiles = measured_alone(model)
    chosen = select(parts, profiles)
    assert names(parts, chosen.decision.quantized) == {"one", "relu", "two", "skip", "three"}
    inserter = Inserter(parts.model, ranges(parts.model), INT8)

    def seconds(placement: Placement) -> float:
        return CostModel(inserter.insert(placement).to_proto(), 1).seconds

    best = min(map(seconds, start_placements.placements(parts.model, parts.possible).values()))
    assert seconds(chosen.placement()) <= best * 1.0001
    assert chosen.ratio == pytest.approx(seconds(chosen.placement()) / seconds(Placement()), rel=0.15)
    assert all(gain > 0 for gain in chosen.savings().values())
    assert chosen.option(parts.owner["soft"]) is None


def test_a_small_group_that_passes_values_on_may_follow_its_neighbours() -> None:
    model = build("net (float[2,8] x) => (float[8,2] y) {[a] t = Transpose <perm=[1,0]> (x) [b] y = Tanh(t)}")
    parts = by_the_rules(model)
    moving, other = parts.units
    assert passthrough_profile(parts, moving, 0.1).options == (
        PricedScheme("passing", frozenset({(0, 0), (-1, 0)}), 0.1),
    )
    assert passthrough_profile(parts, other, 0.1).options == ()


def test_weights_in_fewer_bits_are_schemes_of_a_group() -> None:
    net = (
        """net (float[4,64] x) => (float[4,64] y) { [a] p = MatMul(x, w0) [b] q = Softmax(p) [c] y = MatMul(q, w1) }"""
    )
    model = build(net, {f"w{k}": normal(64, 64, seed=k) for k in range(2)})
    w4, w4a, w8 = WeightFormat(4, 32), WeightFormat(4, 32, symmetric=False), WeightFormat(8)
    ways = {Edge(f"w{k}", node, 1): {w4a: 0.5, w4: 0.4, w8: 0.6} for k, node in enumerate("ac")}
    parts = partition(model, possible_edges(model, ranges(model)), [], ways)
    part, possible = alone(parts, parts.units[0])
    found = schemes(part, possible, {edge: shares for edge, shares in ways.items() if edge.node == "a"})
    stored = {name: dict(p.weight_formats) for name, p in found.items() if not p.edges}
    assert stored == {f"weights as {s.name}": {Edge("w0", "a", 1): s} for s in (w4, w8)}

    floats = [layer("a", 1.0, "compute", "a")]
    answer = SchemeResult("weights as w4b32", found["weights as w4b32"], None, [layer("a", 0.3, "compute", "a")])
    profile = profile_of(part, floats, [answer])
    assert [(o.weight_format, o.points, o.ms) for o in profile.options] == [(w4, frozenset(), 0.3)]
    assert select(parts, {u.number: Profile(1.0) for u in parts.units}).placement() == Placement()
    chosen = select(parts, {0: profile, 1: Profile(1.0), 2: profile})
    assert chosen.placement() == Placement.of((), [(edge, w4) for edge in ways])
    assert chosen.savings() == pytest.approx({0: 0.69, 2: 0.69})
    option = chosen.option(2)
    assert option.scheme == "weights as w4b32"

    search = SubgraphSearch(chosen)
    first, last = ways
    every = search.all_accepted
    assert search.mixed(Placement(), every, [0]) == Placement.of((), [(first, w4)])
    in_pairs = Placement.of(Edge(t, "c", slot) for slot, t in enumerate(("q", "w1")))
    assert search.mixed(every, in_pairs, [2]) == Placement(in_pairs.edges, frozenset({(first, w4)}))
    assert search.mixed(in_pairs, every, [2]) == Placement.of((), [(last, w4)])
