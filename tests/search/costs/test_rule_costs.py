"""Costs by rule: parts, their placements, and what counts first."""

from dataclasses import replace
from itertools import product

import pytest

from models import attention, build, conv_net, normal, ranges
from qdqtune.graph.model import Model
from qdqtune.placement import engine_rules
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.rule_costs import (
    FLOAT,
    W8A8,
    W8A16,
    W16A16,
    RuleCosts,
    left_nodes,
)
from qdqtune.types import Layer, Placement


def costs_of(model: Model) -> RuleCosts:
    placed = engine_rules.place(model, possible_edges(model, ranges(model)), "qnn", "int8")
    return RuleCosts(model, placed.placement)


def chain() -> RuleCosts:
    text = """n (float[1,4,8,8] x) => (float[1,4,8,8] y) {
        [first] a = Conv <pads=[1,1,1,1]> (x, w)
        [relu] b = Relu(a)
        [second] c = Conv <pads=[1,1,1,1]> (b, v)
        [add] y = Add(c, b)
    }"""
    return costs_of(build(text, {"w": normal(4, 4, 3, 3), "v": normal(4, 4, 3, 3, seed=1)}))


def layer(node: str, elsewhere: str = "") -> Layer:
    return Layer(node, (node,), "", None, "compute", elsewhere=elsewhere)


def test_nodes_without_a_pair_between_them_are_one_part() -> None:
    costs = chain()
    names = [[costs.model.nodes[n].name for n in part.nodes] for part in costs.parts]
    assert names == [["first", "relu"], ["second"], ["add"]]
    assert [part.writes for part in costs.parts] == [("b",), ("c",), ("y",)]


@pytest.mark.parametrize("make", [chain, lambda: costs_of(conv_net()), lambda: costs_of(attention())])
def test_the_fullest_placement_is_everything_in_8_bits(make) -> None:
    costs = make()
    assert costs.placement(costs.everywhere(W8A8)) == costs.fullest
    assert costs.placement(costs.everywhere(W8A16)).edges == costs.fullest.edges
    assert costs.placement(tuple(FLOAT for _ in costs.parts)) == Placement()


def test_labels_are_read_back_from_placements() -> None:
    costs = chain()
    for labels in product((W8A8, W8A16, W16A16, FLOAT), (W8A8, W8A16, W16A16, FLOAT), (W8A8, W8A16, FLOAT)):
        assert costs.labels(costs.placement(labels)) == labels


def test_an_operator_without_weights_computes_as_its_neighbours_do() -> None:
    text = "n (float[1,4] x) => (float[1,4] y) { [a] p = Gemm(x, w) [b] q = Sigmoid(p) [c] y = Gemm(q, v) }"
    costs = costs_of(build(text, {"w": normal(4, 4), "v": normal(4, 4, seed=1)}))
    assert costs.placement((W8A8, FLOAT, W8A8)) == costs.fullest
    assert costs.labels(costs.fullest) == (W8A8, W8A8, W8A8)


def test_8_bits_cost_less_than_16_and_these_less_than_floats() -> None:
    costs = chain()
    by_label = [costs.total(costs.everywhere(label)) for label in (W8A8, W8A16, W16A16)]
    assert by_label[0] < by_label[1] < by_label[2] < costs.total((FLOAT,) * 3)


def test_a_node_that_runs_elsewhere_costs_more_than_all_bytes() -> None:
    costs = chain()
    report = [layer("first"), layer("second"), layer("add", "on the CPU: no reason")]
    narrow, wide = costs.fullest, costs.placement(costs.everywhere(W8A16))
    assert costs.cost(narrow, report) > costs.cost(wide, [layer("add")]) > costs.cost(narrow, [layer("add")])
    learned = costs.learned([(narrow, report)])
    assert set(learned.off.values()) == {0, 1}
    assert learned.cheapest(Noise(learned.model, {}), 0.0, float_too=False)[2] == W8A16


def test_of_a_report_only_nodes_that_run_elsewhere_count() -> None:
    converts = Layer("a_QuantizeLinear", ("a_QuantizeLinear",), "", None, "quantize", elsewhere="on the CPU")
    assert left_nodes([layer("a"), layer("b", "on the CPU"), converts]) == {"b"}


def test_operators_that_were_refused_in_16_bits_stay_in_8() -> None:
    costs = replace(chain(), refused=frozenset({("Add", W8A16)}))
    assert costs.everywhere(W8A16) == (W8A16, W8A16, W8A8)
    assert costs.everywhere(W16A16) == (W16A16, W16A16, W8A8)
    costs = replace(costs, refused=frozenset({("Relu", W16A16)}))
    assert costs.everywhere(W16A16) == (W8A16, W16A16, W8A16)
    assert costs.in_16_bits(["Conv"], costs.placement((W8A16, W16A16, W8A16))) == {("Conv", W8A16), ("Conv", W16A16)}


@pytest.mark.parametrize("float_too", [True, False])
@pytest.mark.parametrize("price", [0.0, 1.0, 1e3, 1e5, 1e7])
def test_the_cheapest_labels_are_those_of_brute_force(price: float, float_too: bool) -> None:
    costs = chain()
    noise = Noise(costs.model, {"x": 0.01, "b": 0.1, "c": 3.0, "y": 0.02, "w": 0.2, "v": 2.0})
    some = (W8A8, W8A16, FLOAT)[: 2 + float_too]
    every = product((*some, W16A16), (*some, W16A16), some)
    least = min(costs.total(labels) + price * noise.summed(costs.placement(labels)) for labels in every)
    found = costs.cheapest(noise, price, float_too=float_too)
    assert float_too or FLOAT not in found
    assert costs.total(found) + price * noise.summed(costs.placement(found)) == pytest.approx(least, rel=1e-6)
