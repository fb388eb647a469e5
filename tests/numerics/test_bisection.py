"""Culprits among parts: alone, several, only together, spread; and how often damage is measured."""

from collections.abc import Callable, Collection
from math import log2

import pytest

from qdqtune.numerics.bisection import BisectionResult, Parts, culprits

LIMIT = 0.01
BACKGROUND = 0.002


class Counted:
    """A damage that counts how often it is asked for, and refuses to be asked twice."""

    def __init__(self, damage: Callable[[Collection[int]], float]) -> None:
        self.asked: list[Parts] = []
        self._damage = damage

    def __call__(self, parts: Parts) -> float:
        assert parts not in self.asked
        self.asked.append(parts)
        return self._damage(parts)


def loud(count: int, levels: dict[int, float], cap: float = 1000.0) -> Counted:
    """Parts whose damages add up to at most `cap`; those that `levels` does not name share the background."""
    return Counted(lambda on: min(cap, sum(levels.get(p, BACKGROUND / count) for p in on)))


def named(found: BisectionResult) -> list[int]:
    return [culprit.part for culprit in found.culprits]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17, 64, 65, 100])
def test_one_culprit_is_found_wherever_it_stands_within_the_bound(count: int) -> None:
    for part in range(count):
        damage = loud(count, {part: 1.0})
        found = culprits(range(count), damage, LIMIT)
        assert named(found) == [part]
        assert len(damage.asked) <= max(2, 1 + 2 * log2(count))
        assert found.rest == tuple(p for p in range(count) if p != part)
        assert found.damage == pytest.approx(BACKGROUND * (count - 1) / count)
        assert found.culprits[0].damage == pytest.approx(1 + found.damage)
        assert found.culprits[0].tested == count


@pytest.mark.parametrize("cap", [1000.0, 1.0], ids=["adding up", "no worse than one"])
@pytest.mark.parametrize("guilty", [(0, 1), (3, 60), (31, 32), (5, 6, 40, 63), tuple(range(0, 64, 8))])
def test_several_are_found_one_after_another(guilty: tuple[int, ...], cap: float) -> None:
    damage = loud(64, dict.fromkeys(guilty, 1.0), cap)
    found = culprits(range(64), damage, LIMIT)
    assert sorted(named(found)) == list(guilty)
    assert found.damage <= BACKGROUND
    assert len(damage.asked) < 64 * len(guilty)


@pytest.mark.parametrize("tested", [(9, 10, 11), (31, 32), (0, 63), (15, 31, 47)])
def test_one_of_several_that_cause_damage_only_together_is_enough(tested: tuple[int, ...]) -> None:
    together = Counted(lambda on: BACKGROUND + float(set(tested) <= set(on)))
    found = culprits(range(64), together, LIMIT)
    assert len(found.culprits) == 1
    assert named(found)[0] in tested
    assert found.damage == BACKGROUND
    assert len(together.asked) <= 1 + 2 * log2(64)


def test_two_companies_that_do_harm_together_only() -> None:
    companies = {8, 9, 10}, {40, 41}
    found = culprits(range(64), Counted(lambda on: float(any(c <= set(on) for c in companies))), LIMIT)
    assert [any(part in c for part in named(found)) for c in companies] == [True, True]
    assert found.damage == 0


def test_what_is_spread_evenly_blames_nobody() -> None:
    damage = Counted(lambda on: 0.002 * len(on))
    found = culprits(range(64), damage, LIMIT)
    assert not found.culprits
    assert found.rest == tuple(range(64))
    assert found.damage == pytest.approx(0.128)
    assert len(damage.asked) < 20


def test_what_breaks_the_limit_alone_is_named_though_there_is_worse_and_the_spread_rest_is_not() -> None:
    damage = Counted(lambda on: sum({7: 0.5, 50: 0.08}.get(p, 0.001) for p in on))
    found = culprits(range(64), damage, LIMIT)
    assert named(found) == [7, 50]
    assert found.damage == pytest.approx(0.062)


def test_the_worst_of_a_small_set_is_not_at_fault_if_damage_is_spread() -> None:
    """It makes most of what its neighbours do, but little of the whole, and alone holds the limit."""
    damage = Counted(lambda on: sum({0: 0.029, 1: 0.005, 2: 0.005, 3: 0.005}.get(p, 0.01) for p in on))
    found = culprits(range(64), damage, 0.03)
    assert (0,) in damage.asked
    assert not found.culprits


def test_the_absence_of_those_that_make_a_culprit_worse_heals_a_little_and_names_nobody_else() -> None:
    """Without the first two the culprit does a third of its harm; without itself there is next to none."""
    damage = Counted(lambda on: BACKGROUND + (0 if 40 not in on else 0.6 if {0, 1} & set(on) else 0.2))
    assert named(culprits(range(64), damage, LIMIT)) == [40]
    damage = Counted(lambda on: BACKGROUND + (0 if 20 not in on else 0.6 if {0, 1} & set(on) else 0.2))
    assert named(culprits(range(64), damage, LIMIT)) == [20]


def test_damage_that_is_there_without_any_part_is_nobodys_fault() -> None:
    for count in (1, 64):
        damage = Counted(lambda on: 1.0 + 0.001 * len(on))
        found = culprits(range(count), damage, LIMIT)
        assert not found.culprits
        assert len(damage.asked) <= 4


def test_healthy_parts_are_asked_for_once() -> None:
    damage = loud(64, {})
    assert culprits(range(64), damage, LIMIT) == BisectionResult(
        (), tuple(range(64)), damage(tuple(range(63))) * 64 / 63
    )
    assert len(damage.asked) == 2
    assert culprits((), damage, LIMIT) == BisectionResult((), (), 0.0)
