"""Prices from layer reports: nothing is lost, and each price goes to the one that causes it."""

from __future__ import annotations

import msgspec
import numpy as np
import onnx
import pytest
from test_tensorrt_report import EXPORTS, report_of

from models import INT8, build, normal, ranges
from qdqtune.engines.fake import _CostModel
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes, TimedBuild, attribute
from qdqtune.search.costs.observations import behind, state, stored_in
from qdqtune.search.costs.optimum import cut, everything
from qdqtune.search.costs.prices import UNMEASURED_SHARE, learn, learned_prior
from qdqtune.search.costs.priors import Prices, packed, unpacked
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.types import Edge, Layer, Placement
from region_models import resnet
from runs import mixed

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


def layer(time: float, *nodes: str) -> Layer:
    return Layer(nodes[0] if nodes else "reformat", nodes, "FP32", time, "compute" if nodes else "reformat")


def times(placement: Placement = EMPTY, quantize=None, dequantize=None, copies=None, **nodes: float) -> BuildTimes:
    dequantize = dequantize or {}
    return BuildTimes(placement, nodes, quantize or {}, dequantize, copies or dict.fromkeys(dequantize, 1))


FLOAT = {"a": 10.0, "b": 10.0, "c": 3.0, "d": 10.0}


def placed(parts: Partition, running: str, stored: str = "") -> Placement:
    return parts.placement(Decision.of((parts.owner[n] for n in running), stored))


def test_attribution_adds_up_to_the_scaled_latency() -> None:
    conversions = layer(1.0, "u_DequantizeLinear"), layer(1.0, "u_DequantizeLinear_2"), layer(0.5, "t_QuantizeLinear")
    layers = (layer(2.0, "a", "t_QuantizeLinear"), layer(1.0), layer(4.0, "b", "c"), *conversions)
    found = attribute(chain(), TimedBuild(Placement(), layers, 0.5), 38.0)
    scale = 0.5 * 38.0 / 9.5
    assert found.nodes["a"] == pytest.approx(2.0 * scale)
    assert found.nodes["b"] + found.nodes["c"] == pytest.approx(5.0 * scale)  # with the reformat in front
    assert found.nodes["b"] > 50 * found.nodes["c"]  # by work
    assert found.dequantize == pytest.approx({"u": 2.0 * scale})
    assert found.copies["u"] == 2
    assert found.quantize == pytest.approx({"t": 0.5 * scale})


def test_a_report_without_times_gives_none() -> None:
    found = attribute(chain(), TimedBuild(Placement(), (Layer("a", ("a",), "", None, "compute"),)), 0.0)
    assert sum(found.nodes.values()) == 0


def test_states() -> None:
    parts = parts_of(chain())

    def states(placement: Placement) -> list[str]:
        return [state(u, parts, placement) for u in parts.units]

    assert states(Placement()) == ["float"] * 4
    assert states(placed(parts, "abcd", "tuvy")) == ["quantized"] * 4
    assert states(placed(parts, "a")) == ["handing", "float", "float", "float"]
    assert states(placed(parts, "a", "t")) == ["quantized", "fed", "float", "float"]
    assert states(Placement.of([Edge("x", "a", 0)])) == ["fed", "float", "float", "float"]
    assert states(Placement.of([Edge("w0", "a", 1)]))[0] == "float"
    two = placed(parts, "ab", "tu")
    stored = stored_in(parts, two, [state(u, parts, two) for u in parts.units])
    assert [behind(u, parts, stored) for u in parts.units] == ["quantized", "quantized", "quantized", "float"]


def test_pairs_inside_a_unit_say_nothing_about_it() -> None:
    model = chain()
    parts = partition(model, possible_edges(model, ranges(model)), [("a", "b")])
    whole = parts.placement(Decision.of({0}, {"u"}))
    assert state(parts.units[0], parts, whole) == "quantized"
    assert state(parts.units[0], parts, whole | Placement.of([Edge("t", "b", 0)])) == "mixed"


def test_unseen_units_are_hoped_to_be_fast() -> None:
    costs = learn(parts_of(chain()), [times(**FLOAT)])
    assert [p.as_float for p in costs.prices] == [10.0, 10.0, 3.0, 10.0]
    assert [p.as_quantized for p in costs.prices] == [UNMEASURED_SHARE * p.as_float for p in costs.prices]
    assert not any(p.seen for p in costs.prices)


def test_what_earlier_runs_have_learned_is_a_share_of_the_float_time_and_gives_way_to_builds() -> None:
    """The third unit was never built in 8 bits: it has what units of its operators have."""
    parts = parts_of(chain())
    seen = times(placed(parts, "ab", "tu"), {}, {}, a=2.0, b=2.0, c=3.0, d=10.0)
    told = learned_prior(parts, [times(**FLOAT), seen])
    assert unpacked(msgspec.json.decode(msgspec.json.encode(packed(told)), type=Prices)) == told
    twice = {name: 2 * ms for name, ms in FLOAT.items()}
    costs = learn(parts, [times(**twice)], told)
    assert [(p.as_quantized, p.seen) for p in costs.prices] == [
        (4.0, True),
        (4.0, True),
        (UNMEASURED_SHARE * 6.0, False),
        (4.0, True),
    ]
    own = learn(parts, [times(**twice), times(placed(parts, "ab", "tu"), {}, {}, a=9.0, b=9.0, c=6.0, d=20.0)], told)
    assert own.prices[0].as_quantized == 9.0


def test_a_unit_that_was_only_seen_behind_floats_pays_for_them_once() -> None:
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
    assert costs.prices[1].behind_float == 5.0
    assert (costs.prices[3].as_quantized, costs.prices[3].behind_float) == (5.0, 0.0)


def test_equal_units_share_their_price() -> None:
    """Of the three products only the second ran quantized."""
    parts = parts_of(chain())
    built = times(placed(parts, "b", "u"), {"t": 0.5}, {"u": 0.7}, a=10.0, b=4.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), built])
    assert [costs.prices[k].as_quantized for k in (0, 1, 3)] == [4.0, 4.0, 4.0]
    assert costs.quantize["t"] == 0.5
    assert costs.dequantize["u"] == 0.7
    assert [p.seen for p in costs.prices] == [True, True, False, True]


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
    assert learn(parts, [floats, usual]).prices[2].disturbed == 0  # noise


def test_equal_units_that_the_float_build_took_unequal_time_for_share_nothing() -> None:
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


def test_conversions_that_no_layer_ran_are_free() -> None:
    """The Softmax wrote 8 bits itself, and the product b read them itself in front of the float Softmax."""
    parts = parts_of(chain())
    alone = times(placed(parts, "d", "y"), a=10.0, b=10.0, c=3.0, d=5.0)
    ahead = times(placed(parts, "a", "t"), {"x": 0.4}, a=4.0, b=10.0, c=3.0, d=10.0)
    costs = learn(parts, [times(**FLOAT), alone, ahead])
    assert costs.quantize["v"] == 0
    assert costs.dequantize["t"] == 0
    assert costs.quantize["u"] > 0  # never seen: as the Q of x, by its bytes


def test_pairs_on_some_uses_of_an_output_leave_a_float_there() -> None:
    model = resnet(1)
    uses = ((t, n.name, k) for n in model.nodes for k, t in enumerate(n.inputs) if t not in model.constants)
    parts = partition(model, frozenset(Edge(*use) for use in uses), ())
    tensor = next(t for t in parts.edges if len(parts.users[t]) == 2 and t in parts.producer)
    unit = parts.units[parts.producer[tensor]]
    one = Placement(parts.placement(Decision.of({unit.number})).edges | {parts.edges[tensor][0]})
    assert state(unit, parts, one) == "handing"
    assert state(unit, parts, parts.placement(Decision.of({unit.number}, {tensor}))) == "quantized"


def test_engines_that_run_a_dq_for_each_consumer() -> None:
    model = resnet(2)
    uses = ((t, n.name, k) for n in model.nodes for k, t in enumerate(n.inputs) if t not in model.constants)
    parts = partition(model, possible := frozenset(Edge(*use) for use in uses), ())
    tensor = next(t for t in parts.edges if len(parts.users[t]) == 2 and t in parts.producer)
    producer = parts.producer[tensor]
    placement = parts.placement(Decision.of({producer}, {tensor}))
    assert placement.edges <= possible
    base = times(**dict.fromkeys((n.name for n in model.nodes), 1.0))
    for copies, expected in ((1, 0.8), (2, 0.4)):
        built = times(placement, dequantize={tensor: 0.8}, copies={tensor: copies}, **base.nodes)
        costs = learn(parts, [base, built])
        assert costs.dequantize[tensor] == pytest.approx(expected)
        assert costs.per_consumer == (copies == 2)
        assert costs.of_tensor(tensor, Decision.of({producer}, {tensor})) == pytest.approx(0.8)


def test_unseen_conversions_follow_a_line() -> None:
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
        found = _CostModel(inserter.insert(placement).to_proto(), 1)
        return attribute(model, TimedBuild(placement, found.layers()), 1e3 * found.seconds), 1e3 * found.seconds

    whole = everything(parts)
    base, seconds = timed_builds(Placement())
    built, quantized_seconds = timed_builds(parts.placement(whole))
    costs = learn(parts, [base, built])
    assert costs.total(Decision()) == pytest.approx(seconds)
    assert costs.total(whole) == pytest.approx(quantized_seconds)


@pytest.mark.parametrize("export", EXPORTS)
def test_recorded_reports_of_tensorrt_are_attributed(export: str) -> None:
    """To a model of other names nothing can be attributed, and to one of its names everything."""
    report = report_of(export)
    total = sum(found.time_ms or 0.0 for found in report)
    stranger = attribute(chain(), TimedBuild(Placement(), report), total)
    assert not stranger.nodes
    parts = parts_of(chain())
    costs = learn(parts, [times(**FLOAT), stranger])
    assert np.isfinite(costs.total(cut(costs)))
    named = [n for found in report for n in found.nodes if "QuantizeLinear" not in n]
    model = lookalike(list(dict.fromkeys(named)))
    found = attribute(model, TimedBuild(Placement(), report, 0.5), total)
    spent = sum((*found.nodes.values(), *found.quantize.values(), *found.dequantize.values()))
    assert 0.8 * 0.5 * total < spent <= 0.5 * total * (1 + 1e-9)  # what runs behind the last node has no owner


UNLIKE = """net (float[8,64] x) => (float[8,64] y) {
    [a] t = MatMul(x, w0)
    [b] u = MatMul(t, w1)
    [c] y = Softmax(u)
}"""


def test_what_no_build_has_shown_of_a_kind_is_as_in_others_of_its_operators() -> None:
    parts = parts_of(build(UNLIKE, {"w0": normal(64, 128), "w1": normal(128, 64)}))
    floats = times(a=10.0, b=20.0, c=3.0)
    both = times(placed(parts, "ab", "tu"), a=4.0, b=8.0, c=3.0)
    unknown = learn(parts, [floats, both])
    assert [unknown.prices[parts.owner[n]].handing for n in "ab"] == [0.0, 0.0]
    told = learn(parts, [floats, both, times(placed(parts, "a"), a=9.0, b=20.0, c=3.0)])
    a, b = (told.prices[parts.owner[n]].handing for n in "ab")
    assert a == pytest.approx(5.0)
    assert b == pytest.approx(10.0)  # as large a share of its time in float


def lookalike(names: list[str]) -> Model:
    """A chain of nodes with given names."""
    nodes = [onnx.helper.make_node("Relu", [f"t{k}"], [f"t{k + 1}"], name) for k, name in enumerate(names)]
    ends = [onnx.helper.make_tensor_value_info(t, 1, [2, 4]) for t in ("t0", f"t{len(names)}")]
    return Model(onnx.helper.make_model(onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:])))
