"""Prices from layer reports: each is charged to the unit or conversion that causes it."""

import random
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import build, normal, ranges
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes, attribute, node_times
from qdqtune.search.costs.decisions import cut, cut_holding, cut_within, margin
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.prices import UNMEASURED_SHARE, Costs, Price, learn
from qdqtune.search.costs.table import Table, solve
from qdqtune.search.costs.units import Decision, Partition, partition, state
from qdqtune.types import Edge, Layer, Placement, WeightFormat
from tensorrt_exports import EXPORTS, report_of
from weight_only_nets import MODEL, SHARES, W4, W8, parts

EMPTY = Placement()
CHAIN = """net (float[8,64] x) => (float[8,64] y) {
    [a] t = MatMul(x, w0)
    [b] u = MatMul(t, w1)
    [c] v = Softmax(u)
    [d] y = MatMul(v, w2)
}"""


def chain() -> Model:
    return build(CHAIN, {f"w{k}": normal(64, 64, seed=k) for k in range(3)})


def parts_of(model: Model) -> Partition:
    return partition(model, possible_edges(model, ranges(model)), ())


def times(placement: Placement = EMPTY, quantize=None, dequantize=None, **nodes: float) -> BuildTimes:
    return BuildTimes(placement, nodes, quantize or {}, dequantize or {})


FLOAT = {"a": 10.0, "b": 10.0, "c": 3.0, "d": 10.0}


def placed(parts: Partition, running: str, stored: str = "") -> Placement:
    return parts.placement(Decision.of((parts.owner[n] for n in running), stored))


def test_states() -> None:
    parts = parts_of(chain())

    def states(placement: Placement) -> list[str]:
        return [state(u, parts, placement) for u in parts.units]

    assert states(Placement()) == ["float"] * 4
    assert states(placed(parts, "abcd", "tuvy")) == ["quantized"] * 4
    assert states(placed(parts, "a")) == ["handing", "float", "float", "float"]
    assert states(placed(parts, "a", "t")) == ["quantized", "float", "float", "float"]
    assert states(Placement.of([Edge("x", "a", 0)])) == ["float"] * 4
    assert states(Placement.of([Edge("w0", "a", 1)]))[0] == "float"


def test_a_unit_with_pairs_inside_is_mixed() -> None:
    model = chain()
    parts = partition(model, possible_edges(model, ranges(model)), [("a", "b")])
    whole = parts.placement(Decision.of({0}, {"u"}))
    assert state(parts.units[0], parts, whole) == "quantized"
    assert state(parts.units[0], parts, whole | Placement.of([Edge("t", "b", 0)])) == "mixed"


def test_units_without_a_measurement_are_guessed_to_be_fast() -> None:
    costs = learn(parts_of(chain()), [times(**FLOAT)])
    assert [p.as_float for p in costs.prices] == [10.0, 10.0, 3.0, 10.0]
    assert [p.as_quantized for p in costs.prices] == [UNMEASURED_SHARE * p.as_float for p in costs.prices]


def test_a_unit_measured_behind_float_units_only_has_no_extra_for_them() -> None:
    """What products take more behind floats is known of the second one. The last has not been anywhere else: that is in
    its price, and not guessed on top of it."""
    text = (
        CHAIN.replace("MatMul(t, w1)", "MatMul(t, w3)")
        .replace("MatMul(v, w2)", "MatMul(v, w4)")
        .replace("64] y", "16] y")
    )
    model = build(text, {"w0": normal(64, 64), "w3": normal(64, 32, seed=1), "w4": normal(32, 16, seed=2)})
    parts = parts_of(model)
    inside = times(placed(parts, "abd", "ty"), {"v": 0.5}, a=4.0, b=4.0, c=3.0, d=5.0)
    apart = times(placed(parts, "b"), {"t": 0.5}, a=10.0, b=9.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), apart, inside])
    assert costs.prices[1].behind_float == pytest.approx(5.0)
    assert (costs.prices[3].as_quantized, costs.prices[3].behind_float) == (5.0, 0.0)


def test_equal_units_share_their_price() -> None:
    """Of the three products only the second ran quantized."""
    parts = parts_of(chain())
    built = times(placed(parts, "b", "u"), {"t": 0.5}, {"u": 0.7}, a=10.0, b=4.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), built])
    assert [costs.prices[k].as_quantized for k in (0, 1, 3)] == [4.0, 4.0, 4.0]
    assert costs.quantize["t"] == 0.5
    assert costs.dequantize["u"] == 0.7


def test_a_dq_is_charged_to_the_consumer_that_did_not_absorb_it() -> None:
    parts = parts_of(chain())
    built = times(placed(parts, "abcd", "tuvy"), {"v": 0.6}, {"u": 0.7}, a=3.0, b=3.0, c=3.0, d=3.0)
    costs = learn(parts, [times(**FLOAT), built])
    assert [p.as_quantized for p in costs.prices] == pytest.approx([3.0, 3.0, 3.0 + 0.7 + 0.6, 3.0])


def test_a_float_unit_may_suffer_from_a_pair_on_what_it_writes() -> None:
    """An engine moved the Q of d's input in front of the Softmax c, and ran that four times as slowly."""
    parts = parts_of(chain())
    floats = times(**FLOAT)
    moved = times(placed(parts, "d", "y"), {"v": 0.2}, a=10.0, b=10.0, c=12.0, d=5.0)
    usual = times(placed(parts, "d", "y"), {"v": 0.2}, a=10.0, b=10.0, c=3.3, d=5.0)
    costs = learn(parts, [floats, moved])
    assert costs.prices[2].disturbed == pytest.approx(9.0)
    assert costs.prices[2].as_float == 3.0
    assert costs.total(Decision.of({3}, {"y"})) == pytest.approx(10 + 10 + 3 + 9 + 5 + 0.2 + costs.dequantize["y"])
    assert costs.total(Decision()) == pytest.approx(33.0)
    assert learn(parts, [floats, usual]).prices[2].disturbed == pytest.approx(0.3)


def test_conversions_without_a_layer_are_free() -> None:
    """The Softmax wrote 8 bits itself, and the product b read them itself in front of the float Softmax."""
    parts = parts_of(chain())
    alone = times(placed(parts, "d", "y"), a=10.0, b=10.0, c=3.0, d=5.0)
    ahead = times(placed(parts, "a", "t"), {"x": 0.4}, a=4.0, b=10.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), alone, ahead])
    assert costs.quantize["v"] == 0
    assert costs.dequantize["t"] == 0
    assert costs.quantize["u"] == 0.4  # never seen: as the Q of x, which has as many elements


def test_weight_formats_are_priced_by_builds_or_else_by_products_alone() -> None:
    """Equal units share what was measured; a DQ that no kernel drew in is the unit's own."""
    units, (first, *_) = parts(), SHARES
    nodes = {"a": 1.0, "b": 0.1, "c": 1.0, "d": 1.0}
    floats = BuildTimes(Placement(), nodes, {}, {})
    built = BuildTimes(Placement.of((), [(first, W4)]), nodes | {"a": 0.3}, {}, {"w0": 0.2})
    costs = learn(units, [floats, built])
    assert [price.by_format.get(W4) for price in costs.prices] == pytest.approx([0.5, None, 0.5, 0.5])
    assert [price.by_format.get(W8) for price in costs.prices] == pytest.approx([0.6, None, 0.6, 0.6])
    assert costs.prices[0].as_float == pytest.approx(1.0)


# The cheapest labels of a table against every assignment
COSTS = st.integers(0, 6).map(float) | st.just(inf)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Two labels with small whole costs, so that ties are common and exact. Some forbid; conversions repeat."""
    count = draw(st.integers(1, 6))
    numbers = st.integers(0, count - 1)
    table = Table(draw(st.lists(st.tuples(COSTS, COSTS), min_size=count, max_size=count)))
    readers = st.lists(numbers, min_size=1, max_size=3)
    for conversion in draw(st.lists(st.tuples(numbers, readers, COSTS, COSTS), max_size=8)):
        table.convert(*conversion)
    return table


@given(tables())
def test_two_labels_have_the_optimum_with_the_fewest_ones(table: Table) -> None:
    options = product((0, 1), repeat=len(table.costs))
    cost, _, labels = min((table.total(labels), sum(labels), labels) for labels in options)
    if cost == inf:
        with pytest.raises(ValueError, match="forbid"):
            solve(table)
    else:
        assert tuple(solve(table)) == labels  # it is unique: optima are closed under "and"


@pytest.mark.parametrize("seed", range(5))
def test_three_labels_are_decided_nearly_exactly(seed: int) -> None:
    """On a chain with branches: each part but the last writes a value that one to three later ones read."""
    draw, table = random.Random(seed), Table()
    for _ in range(7):
        table.part(*(draw.random() * draw.choice([3, 10]) for _ in range(3)))
    for maker in range(6):
        readers = {draw.choice(range(maker + 1, 7)) for _ in range(draw.choice([1, 1, 2, 3]))}
        table.convert(maker, sorted(readers), *(draw.random() * 3 for _ in range(3)))
    labels = solve(table)
    assert table.total(labels) <= 1.05 * min(map(table.total, product(range(3), repeat=7)))
    for number, label in product(range(7), range(3)):
        assert table.total([*labels[:number], label, *labels[number + 1 :]]) >= table.total(labels) - 1e-6


def test_labels_that_are_forbidden_are_not_chosen() -> None:
    table = Table([(inf, 4.0, inf), (0.0, 9.0, 2.0)])
    table.convert(0, (1,), 1.0, 1.0, 1.0)
    assert solve(table) == [1, 0]
    with pytest.raises(ValueError, match="forbid"):
        solve(Table([(inf, inf)]))
    assert solve(Table()) == []


def test_huge_and_tiny_costs_do_not_wrap() -> None:
    """In 32-bit integers the sum of such costs is below zero, and an infinite cost is the cheapest."""
    table = Table([(1e12, 3e11)] * 500)
    forbidden, tiny = table.part(1e12, inf), table.part(1e-12, 0.0)
    for number in range(500):
        table.convert(number, (forbidden,), 0.0, 2e12)
        table.convert(tiny, (number,), 0.0, inf)
    assert solve(table) == [*[1] * 500, 0, 1]


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_negative_costs_are_refused(bad: float) -> None:
    table = Table([(0.0, 0.0)] * 2)
    table.convert(0, (1,), 0.0, bad)
    with pytest.raises(ValueError, match="zero"):
        solve(table)


def test_ten_thousand_parts() -> None:
    """A chain whose first part is label 0: it pays to convert once, right behind it."""
    table = Table([(1.0, inf), *[(3.0, 2.0)] * 9_999])
    for number in range(1, 10_000):
        table.convert(number - 1, (number,), 5.0, 7.0)
    assert solve(table) == [0, *[1] * 9_999]


# The cut against all decisions: with weight formats, and within a limit on noise
def made_up(seed: int) -> Costs:
    """Arbitrary prices."""
    random, units = np.random.default_rng(seed), parts()
    prices = []
    for unit in units.units:
        stored = {s: float(random.random()) for s in units.weight_formats(unit)}
        prices.append(Price(*random.random(5).tolist(), by_format=stored))
    q, d = ({t: float(random.random()) / 4 for t in units.edges} for _ in range(2))
    return Costs(units, tuple(prices), q, d)


def every_decision(units: Partition) -> list[Decision]:
    able = [u for u in units.units if u.inputs]
    found = []
    for runs in product((False, True), repeat=len(able)):
        quantized = frozenset(u.number for u, r in zip(able, runs, strict=True) if r)
        kept = [t for t in units.edges if units.producer.get(t) in quantized]
        floats = [u for u in units.units if u.number not in quantized]
        for stored in product((False, True), repeat=len(kept)):
            for ways in product(*((None, *units.weight_formats(u)) for u in floats)):
                chosen = ((u.number, w) for u, w in zip(floats, ways, strict=True) if w is not None)
                found.append(Decision.of(quantized, (t for t, k in zip(kept, stored, strict=True) if k), chosen))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_takes_the_cheapest_format_of_every_unit_with_its_noise(seed: int) -> None:
    costs = made_up(seed)
    stored = {(e.tensor, s.name): 0.03 / s.bits * (1 + i) for i, e in enumerate(SHARES) for s in (W4, W8)}
    noise = Noise(MODEL, dict.fromkeys(("x", "q", "r", "w0", "w1", "w2"), 0.002), limit=0.01, weight_noise=stored)

    def value(decision: Decision, price: float) -> float:
        return costs.total(decision) + price * noise.summed(costs.partition.placement(decision))

    decisions = every_decision(costs.partition)
    assert len(decisions) > 300
    for price in (0.0, 1.0, 20.0, 200.0):
        found = value(cut(costs, noise, price), price)
        assert found == pytest.approx(min(value(d, price) for d in decisions))
    held = cut_within(costs, noise, 0.01)
    assert noise.summed(costs.partition.placement(held)) <= 0.01


def test_a_decision_is_read_back_from_its_placement_and_margins_are_to_the_best_alternative() -> None:
    costs = made_up(1)
    units = costs.partition
    floats = Decision.of((), (), [(0, W4), (3, W8)])
    placement = units.placement(floats)
    assert placement.weight_formats == {Edge("w0", "a", 1): W4, Edge("w2", "d", 1): W8}
    assert units.decision(placement) == floats
    quantized = Decision.of([0])
    prices = list(costs.prices)
    prices[0] = replace(prices[0], as_float=5.0, by_format={W4: 1.0, W8: 2.0}, disturbed=0.0)
    costs = replace(costs, prices=tuple(prices))
    assert margin(costs, quantized, units.units[0]) == pytest.approx(
        costs.total(Decision.of((), (), [(0, W4)])) - costs.total(quantized)
    )


def test_of_decisions_with_equal_time_the_one_with_less_noise_is_taken() -> None:
    steps = "[a] b = MatMul(x, u) [c] d = MatMul(b, v) [e] y = MatMul(d, w)"
    weights = {name: normal(6, 6, seed=seed) for seed, name in enumerate("uvw")}
    model = build(f"net (float[4,6] x) => (float[4,6] y) {{ {steps} }}", weights)
    loud, quiet = WeightFormat(4, 32), WeightFormat(8)
    edges = {"u": Edge("u", "a", 1), "v": Edge("v", "c", 1), "w": Edge("w", "e", 1)}
    parts = partition(model, frozenset(), [], {edge: {loud: 0.5, quiet: 0.5} for edge in edges.values()})
    prices = tuple(Price(1.0, 1.0, by_format={loud: 0.5, quiet: ms}) for ms in (0.505, 0.504, 0.7))
    shares = {("u", loud): 0.06, ("v", loud): 0.03, ("w", loud): 0.03}
    of_weights = {(t, way.name): shares.get((t, way), 0.001) for t in edges for way in (loud, quiet)}
    costs = Costs(parts, prices, {}, {})

    noise = Noise(model, {}, weight_noise=of_weights)
    assert dict(cut(costs).weight_formats) == {0: loud, 1: loud, 2: loud}
    for limit in (0.2, 0.1):  # nothing binds; the first alone would hold it
        for found in (cut_holding(costs, noise, limit), cut_within(costs, noise, limit)):
            assert dict(found.weight_formats) == {0: quiet, 1: quiet, 2: loud}


def test_nothing_is_quantized_where_values_do_not_explain_the_noise() -> None:
    unknown = Noise(MODEL, {}, limit=0.1, simulate=lambda placement: 0.5 if placement else 0.0)
    assert cut_holding(made_up(3), unknown, 0.1) == Decision()


# Layer reports by node and tensor: no time is lost
def layer(time: float, *nodes: str) -> Layer:
    return Layer(nodes[0] if nodes else "reformat", nodes, "FP32", time, "compute" if nodes else "reformat")


def test_a_conversion_counts_with_one_node_and_that_of_an_added_bias_with_none() -> None:
    layers = layer(4.0, "a"), layer(1.0, "t_QuantizeLinear"), layer(1.0, "t_DequantizeLinear")
    folded = Layer("folded", ("w1_DequantizeLinear", "u_bias_DequantizeLinear"), "", 0.0, "folded")
    spent = node_times(chain(), attribute(chain(), Placement(), (*layers, layer(4.0, "b"), folded), 10.0))
    assert {name: tuple(time) for name, time in spent.items() if any(time)} == {"a": (4.0, 1.0), "b": (4.0, 1.0)}


def test_attribution_adds_up_to_the_scaled_latency() -> None:
    conversions = layer(1.0, "u_DequantizeLinear"), layer(1.0, "u_DequantizeLinear_2"), layer(0.5, "t_QuantizeLinear")
    layers = (layer(2.0, "a", "t_QuantizeLinear"), layer(1.0), layer(4.0, "b", "c"), *conversions)
    found = attribute(chain(), Placement(), layers, 0.5 * 38.0)
    scale = 0.5 * 38.0 / 9.5
    assert found.nodes["a"] == pytest.approx(2.0 * scale)
    assert found.nodes["b"] + found.nodes["c"] == pytest.approx(5.0 * scale)  # with the reformat in front
    assert found.nodes["b"] > 50 * found.nodes["c"]  # by work
    assert found.dequantize == pytest.approx({"u": 2.0 * scale})
    assert found.quantize == pytest.approx({"t": 0.5 * scale})


def test_a_dynamic_quantization_counts_for_the_products_that_read_it() -> None:
    model = build(
        "net (float[4,8] x) => (float[4,8] y, float[4,8] z) { [a] y = MatMul(x, w0) [b] z = MatMul(x, w1) }",
        {"w0": normal(8, 8), "w1": normal(8, 8)},
    )
    dynamic = WeightFormat(8, dynamic=True)
    placement = Placement.of((), [(Edge("w0", "a", 1), dynamic), (Edge("w1", "b", 1), dynamic)])
    layers = layer(2.0, "x_DynamicQuantizeLinear"), layer(3.0, "a", "a_Cast", "a_scales", "a_Mul"), layer(3.0, "b")
    assert attribute(model, placement, layers, 8.0).nodes == pytest.approx({"a": 4.0, "b": 4.0})


@pytest.mark.parametrize("export", EXPORTS)
def test_recorded_reports_of_tensorrt_are_attributed(export: str) -> None:
    """To a model of other names nothing can be attributed, and to one of its names everything."""
    report = report_of(export)
    total = sum(found.time_ms or 0.0 for found in report)
    stranger = attribute(chain(), Placement(), report, total)
    assert not stranger.nodes
    parts = parts_of(chain())
    costs = learn(parts, [times(**FLOAT), stranger])
    assert np.isfinite(costs.total(cut(costs)))
    named = [n for found in report for n in found.nodes if "QuantizeLinear" not in n]
    names = list(dict.fromkeys(named))
    nodes = [onnx.helper.make_node("Relu", [f"t{k}"], [f"t{k + 1}"], name) for k, name in enumerate(names)]
    ends = [onnx.helper.make_tensor_value_info(t, 1, [2, 4]) for t in ("t0", f"t{len(names)}")]
    model = Model(onnx.helper.make_model(onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:])))
    found = attribute(model, Placement(), report, 0.5 * total)
    spent = sum((*found.nodes.values(), *found.quantize.values(), *found.dequantize.values()))
    assert 0.8 * 0.5 * total < spent <= 0.5 * total * (1 + 1e-9)  # what runs behind the last node has no owner
