"""Prices from layer reports: each is charged to the unit or conversion that causes it."""

import pytest

from models import INT8, build, normal, ranges
from price_chain import CHAIN, FLOAT, chain, parts_of, placed, times
from qdqtune.engines.fake import CostModel
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes, attribute
from qdqtune.search.costs.decisions import everything
from qdqtune.search.costs.prices import UNMEASURED_SHARE, learn, state
from qdqtune.search.costs.units import Decision, partition
from qdqtune.types import Edge, Placement
from region_models import resnet
from runs import mixed
from weight_only_nets import SHARES, W4, W8, parts


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


def test_costs_depend_on_the_neighbours() -> None:
    parts = parts_of(chain())
    inner = times(placed(parts, "abcd", "tuvy"), a=3.0, b=3.0, c=1.0, d=3.0)
    alone = times(placed(parts, "d", "y"), {"v": 0.2}, a=10.0, b=10.0, c=3.0, d=5.0)
    ahead = times(placed(parts, "a", "t"), {}, {"t": 0.5}, a=3.0, b=12.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), inner, alone, ahead])
    assert costs.prices[3].behind_float == pytest.approx(2.0)
    assert costs.prices[1].disturbed == pytest.approx(2.0)
    assert costs.total(Decision.of({3}, {"y"})) == pytest.approx(10 + 10 + 3 + 5 + 0.2 + costs.dequantize["y"])
    assert costs.total(Decision.of({0}, {"t"})) == pytest.approx(3 + 12 + 3 + 10 + 0.5 + costs.quantize["x"])


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


def test_equal_units_with_unequal_float_times_share_no_price() -> None:
    """The third product works on values that the engine is slow with."""
    parts = parts_of(chain())
    built = times(placed(parts, "a", "t"), {}, {"t": 0.5}, a=4.0, b=10.0, c=3.0, d=30.0)
    costs = learn(parts, [times(**FLOAT | {"d": 30.0}), built])
    assert [p.as_quantized for p in costs.prices] == pytest.approx(
        [4.0, 4.0, UNMEASURED_SHARE * 3.0, UNMEASURED_SHARE * 30.0]
    )
    assert [p.as_float for p in costs.prices] == [10.0, 10.0, 3.0, 30.0]
    alike = learn(parts, [times(**FLOAT | {"d": 14.0}), built])
    assert alike.prices[3].as_quantized == pytest.approx(4.0)


def test_conversions_without_a_layer_are_free() -> None:
    """The Softmax wrote 8 bits itself, and the product b read them itself in front of the float Softmax."""
    parts = parts_of(chain())
    alone = times(placed(parts, "d", "y"), a=10.0, b=10.0, c=3.0, d=5.0)
    ahead = times(placed(parts, "a", "t"), {"x": 0.4}, a=4.0, b=10.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), alone, ahead])
    assert costs.quantize["v"] == 0
    assert costs.dequantize["t"] == 0
    assert costs.quantize["u"] > 0  # never seen: as the Q of x, by its bytes


def test_a_tensor_with_two_readers() -> None:
    """Pairs on some of its uses leave a float there; some engines run a DQ for each reader."""
    model = resnet(1)
    uses = ((t, n.name, k) for n in model.nodes for k, t in enumerate(n.inputs) if t not in model.constants)
    parts = partition(model, frozenset(Edge(*use) for use in uses), ())
    tensor = next(t for t in parts.edges if len(parts.users[t]) == 2 and t in parts.producer)
    unit = parts.units[parts.producer[tensor]]
    one = Placement(parts.placement(Decision.of({unit.number})).edges | {parts.edges[tensor][0]})
    assert state(unit, parts, one) == "handing"
    both = Decision.of({unit.number}, {tensor})
    placement = parts.placement(both)
    assert state(unit, parts, placement) == "quantized"
    base = times(**dict.fromkeys((n.name for n in model.nodes), 1.0))
    for copies, expected in ((1, 0.8), (2, 0.4)):
        built = times(placement, dequantize={tensor: 0.8}, copies={tensor: copies}, **base.nodes)
        costs = learn(parts, [base, built])
        assert costs.dequantize[tensor] == pytest.approx(expected)
        assert costs.per_consumer == (copies == 2)
        assert costs.of_tensor(tensor, both) == pytest.approx(0.8)


def test_conversions_without_a_measurement_follow_a_line() -> None:
    text = CHAIN.replace("[d] y = MatMul(v, w2)", "[d] y = MatMul(v, w2)\n    [e] z = Concat <axis=0> (y, y, y, y)")
    model = build(text.replace("float[8,64] y", "float[32,64] z"), {f"w{k}": normal(64, 64, seed=k) for k in range(3)})
    parts = parts_of(model)
    size = 8 * 64 * 4
    built = times(
        placed(parts, "ad", "tyz"), {"x": 0.1 + 1e-4 * size}, {"t": 0.1 + 1e-4 * size, "z": 0.1 + 4e-4 * size}
    )
    costs = learn(parts, [times(), built])
    assert costs.quantize["u"] == pytest.approx(0.1 + 1e-4 * size)
    assert costs.quantize["z"] == pytest.approx(0.1 + 4e-4 * size)


def test_the_fake_engines_builds_are_predicted_exactly() -> None:
    """Each build's own prices give back its latency."""
    model = mixed()
    parts = parts_of(model)
    inserter = Inserter(model, ranges(model), INT8)

    def timed_builds(placement: Placement) -> tuple[BuildTimes, float]:
        found = CostModel(inserter.insert(placement).to_proto(), 1)
        return attribute(model, placement, found.layers(), 1e3 * found.seconds), 1e3 * found.seconds

    whole = everything(parts)
    base, seconds = timed_builds(Placement())
    built, quantized_seconds = timed_builds(parts.placement(whole))
    costs = learn(parts, [base, built])
    assert costs.total(Decision()) == pytest.approx(seconds)
    assert costs.total(whole) == pytest.approx(quantized_seconds)


UNLIKE = """net (float[8,64] x) => (float[8,64] y) {
    [a] t = MatMul(x, w0)
    [b] u = MatMul(t, w1)
    [c] y = Softmax(u)
}"""


def test_unknown_extras_of_a_kind_are_those_of_other_kinds_with_its_operators() -> None:
    parts = parts_of(build(UNLIKE, {"w0": normal(64, 128), "w1": normal(128, 64)}))
    floats = times(a=10.0, b=20.0, c=3.0)
    both = times(placed(parts, "ab", "tu"), a=4.0, b=8.0, c=3.0)
    unknown = learn(parts, [floats, both])
    assert [unknown.prices[parts.owner[n]].handing for n in "ab"] == [0.0, 0.0]
    told = learn(parts, [floats, both, times(placed(parts, "a"), a=9.0, b=20.0, c=3.0)])
    a, b = (told.prices[parts.owner[n]].handing for n in "ab")
    assert a == pytest.approx(5.0)
    assert b == pytest.approx(10.0)  # as large a share of its time in float


def test_weight_formats_are_priced_by_builds_or_else_by_products_alone() -> None:
    """Equal units share what was measured; a DQ that no kernel drew in is the unit's own."""
    units, (first, *_) = parts(), SHARES
    nodes = {"a": 1.0, "b": 0.1, "c": 1.0, "d": 1.0}
    floats = BuildTimes(Placement(), nodes, {}, {}, {})
    built = BuildTimes(Placement.of((), [(first, W4)]), nodes | {"a": 0.3}, {}, {"w0": 0.2}, {"w0": 1})
    costs = learn(units, [floats, built])
    assert [price.by_format.get(W4) for price in costs.prices] == pytest.approx([0.5, None, 0.5, 0.5])
    assert [price.by_format.get(W8) for price in costs.prices] == pytest.approx([0.6, None, 0.6, 0.6])
    assert costs.prices[0].as_float == pytest.approx(1.0)
