"""Where points of a front may lie: between the optima of prices, and far from each other."""

import pytest

from models import build, normal, ranges
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.decisions import everything
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Decision, partition
from qdqtune.search.front import NEAR, PredictedPoint, Tradeoff, between, farthest, unbeaten
from qdqtune.types import Edge, Placement

CHAIN = "net (float[4,8] x) => (float[4,8] h6) {" + "".join(
    f"[m{i}] h{i + 1} = MatMul({'x' if i == 0 else f'h{i}'}, w)" for i in range(6)
) + "}"  # fmt: skip


def offer(ratio: float, db: float) -> PredictedPoint:
    return PredictedPoint(Placement.of([Edge(f"{ratio} {db}", "n", 0)]), Tradeoff(ratio, db))


def test_the_farthest_point_in_time_and_accuracy_comes_next() -> None:
    slow_and_exact, nearly_as_fast, nearly_as_exact = offer(0.8, 40), offer(0.51, 40), offer(0.8, 20.5)
    assert farthest([nearly_as_fast, slow_and_exact, nearly_as_exact], [Tradeoff(0.5, 20)]) is slow_and_exact
    assert farthest([nearly_as_exact], [Tradeoff(0.5, 20)]) is nearly_as_exact
    near = offer(0.51, 20.2)
    assert farthest([near], [Tradeoff(0.5, 20)]) is near
    assert farthest([near], [Tradeoff(0.5, 20)], NEAR) is None
    assert farthest([offer(0.5, 21)], [Tradeoff(0.5, 20)]) is None
    assert farthest([], []) is None


def test_beaten_points_are_left_out() -> None:
    kept = unbeaten([offer(0.9, 50), offer(0.6, 30), offer(0.7, 29), offer(0.6, 28)])
    assert [(o.tradeoff.ratio, o.tradeoff.db) for o in kept] == [(0.6, 30), (0.9, 50)]


def test_mixtures_of_neighbours_lie_between_them() -> None:
    model = build(CHAIN, {"w": normal(8, 8)})
    parts = partition(model, possible_edges(model, ranges(model)), [])
    costs = Costs(parts, (Price(1.0, 0.5),) * 6, dict.fromkeys(parts.edges, 0.1), dict.fromkeys(parts.edges, 0.1))
    found = list(between(costs, [everything(parts), Decision()]))
    stretches = {tuple(sorted(d.quantized)) for d in found}
    assert (0,) in stretches
    assert (2, 3, 4) in stretches
    assert tuple(range(6)) not in stretches
    assert all(s == tuple(range(s[0], s[-1] + 1)) for s in stretches)
    lone = next(d for d in found if d.quantized == {3})
    assert costs.total(lone) == pytest.approx(5 + 0.5 + 0.2)
