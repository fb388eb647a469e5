"""Where points of a front may lie: between the optima of prices, and far from each other."""

import pytest

from models import build, normal, ranges
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.decisions import everything
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Decision, partition
from qdqtune.search.front import NEAR, NEAREST, Tradeoff, between, farthest, unbeaten
from qdqtune.types import Edge, Placement

CHAIN = "net (float[4,8] x) => (float[4,8] h6) {" + "".join(
    f"[m{i}] h{i + 1} = MatMul({'x' if i == 0 else f'h{i}'}, w)" for i in range(6)
) + "}"  # fmt: skip


def points(*pairs: tuple[float, float]) -> dict[Placement, Tradeoff]:
    """Some placements with these ratios and SQNRs."""
    return {Placement.of([Edge(f"{pair}")]): Tradeoff(*pair) for pair in pairs}


@pytest.mark.parametrize(
    ("candidates", "near", "chosen"),
    [
        ([(0.51, 40), (0.8, 40), (0.8, 20.5)], NEAREST, (0.8, 40)),  # in time and accuracy
        ([(0.8, 20.5)], NEAREST, (0.8, 20.5)),
        ([(0.51, 20.2)], NEAREST, (0.51, 20.2)),
        ([(0.51, 20.2)], NEAR, None),
        ([(0.5, 21)], NEAREST, None),
        ([], NEAREST, None),
    ],
)
def test_the_farthest_point_comes_next(candidates, near: float, chosen: tuple[float, float] | None) -> None:
    found = farthest(points(*candidates), [Tradeoff(0.5, 20)], near)
    assert found == next(iter(points(chosen))) if chosen else found is None


def test_beaten_points_are_left_out() -> None:
    kept = unbeaten(points((0.9, 50), (0.6, 30), (0.7, 29), (0.6, 28)))
    assert list(kept.values()) == [Tradeoff(0.6, 30), Tradeoff(0.9, 50)]


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
