"""Races: who leaves when, and what the builds of files tell."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qdqtune.timing.race import (
    Block,
    Take,
    between_files,
    decided_candidates,
    decided_files,
    race,
    wants_more_builds,
)
from qdqtune.timing.ratios import BLOCK_LOOKS, Plan, ratio
from qdqtune.types import Times
from rates import plausible

Array = npt.NDArray[Any]
PLAN = Plan()
PROOF = Plan((12, 24, 48, 96))
ONE_VIEW = [(1.0,)]


class Field:
    """Models with constant times, or whose times change at a round; what was asked of it is kept."""

    def __init__(self, *seconds: float, later: dict[int, float] | None = None, change: int = 0) -> None:
        self.seconds, self.later, self.change = seconds, later or {}, change
        self.asked: list[tuple[tuple[int, ...], range]] = []

    def __call__(self, models: Sequence[int], rounds: range) -> Times:
        self.asked.append((tuple(models), rounds))
        drift = [1.0 + number for number in rounds]
        return Times(tuple(tuple((self._of(m, n) * d,) for n, d in zip(rounds, drift, strict=True)) for m in models))

    def _of(self, model: int, number: int) -> float:
        return self.later[model] if model in self.later and number >= self.change else self.seconds[model]


def raced(field: Take, models: int, plan: Plan = PLAN) -> Times:
    return race(field, models, plan, decided_candidates(plan))


def test_looks_are_at_preset_rounds_and_all_samples_are_kept_in_order() -> None:
    field = Field(1.0, 1.1, later={1: 0.9}, change=5)
    times = raced(field, 2)
    assert [rounds for _, rounds in field.asked] == [range(12), range(12, 20), range(20, 32)]
    pair = times.pair(0, 1)
    assert pair.a == tuple(1.0 + n for n in range(32))
    assert pair.b == tuple((1.0 + n) * (1.1 if n < 5 else 0.9) for n in range(32))
    assert ratio(pair, PLAN).verdict == "faster"


def test_candidates_leave_once_they_are_decided_or_show_no_gain() -> None:
    field = Field(1.0, 0.5, 1.2, 0.999, 0.95, later={4: 1.01}, change=8)
    times = raced(field, 5)
    assert [models for models, _ in field.asked][:2] == [(0, 1, 2, 3, 4), (0, 4)]
    assert [len(rounds) for rounds in times.seconds[1:4]] == [12] * 3
    assert len(times.seconds[4]) == len(times.seconds[0]) > 12
    assert len(times.pair(1, 4).a) == 12


def test_a_race_ends_where_it_is_late() -> None:
    field = Field(1.0, 0.9, later={1: 1.1}, change=6)
    race(field, 2, PLAN, decided_candidates(PLAN), lambda: True)
    assert [rounds for _, rounds in field.asked] == [range(12)]


def test_calls_have_their_shares() -> None:
    times = Times((((1.0, 3.0),) * 2, ((2.0, 2.0),) * 2), (0.75, 0.25))
    pair = times.pair(0, 1)
    assert (pair.a, pair.b) == ((1.5, 1.5), (2.0, 2.0))
    assert [(part.a[0], part.b[0]) for part in pair.parts] == [(1.0, 2.0), (3.0, 2.0)]
    one = Block(times).at((0.0, 1.0)).pair(0, 1)
    assert (one.a[0], one.b[0]) == (3.0, 2.0)


# Files with several builds


def builds_of(levels: Array, noise: float, rng: np.random.Generator) -> Take:
    """Builds with these logarithms of seconds; rounds drift, and each time has noise of its own."""

    def take(models: Sequence[int], rounds: range) -> Times:
        drift = 0.05 * rng.standard_normal((len(rounds), 1))
        logs = levels[list(models)] + drift + noise * rng.standard_normal((len(rounds), len(models)))
        return Times(tuple(tuple((float(x),) for x in column) for column in np.exp(logs).T))

    return take


def proof(
    gain: float,
    differ: float,
    rng: np.random.Generator,
    *,
    builds: int = 3,
    noise: float = 0.001,
    plan: Plan = PROOF,
    steady: int | None = None,
) -> tuple[str, int]:
    """What a race of two files says, of which one takes the share `gain` of the other's time, where builds of a file
    differ by `differ` of a ratio, but those of the `steady` one do not; and the builds of each file."""
    blocks: list[Block] = []
    for look in BLOCK_LOOKS:
        while len(blocks) < (2 * look if builds == 1 else look):
            files = np.repeat([0.0, np.log(gain)], builds)
            scale = np.repeat([differ * (file != steady) / np.sqrt(2) for file in (0, 1)], builds)
            levels = files + scale * rng.standard_normal(2 * builds)
            leave = decided_files([(0, 1)], builds, plan, ONE_VIEW)
            blocks.append(Block(race(builds_of(levels, noise, rng), 2 * builds, plan, leave), builds))
        if not wants_more_builds(blocks, [(0, 1)], plan):
            break
    return between_files(blocks, 0, 1, plan).verdict, builds * len(blocks)


@pytest.mark.parametrize(
    ("differ", "builds", "steady"),
    [*((differ, builds, None) for differ in (0.005, 0.03, 0.13) for builds in (1, 2, 3)), (0.13, 3, 0), (0.13, 3, 1)],
)
def test_builds_that_differ_for_good_win_no_more_often_than_promised(
    differ: float, builds: int, steady: int | None
) -> None:
    """Equal files: that two builds agree says little, and so it is where those of the other file alone differ."""
    plan, count, rng = Plan((12, 24)), 1500, np.random.default_rng(8)
    verdicts = [proof(1.0, differ, rng, builds=builds, plan=plan, steady=steady)[0] for _ in range(count)]
    assert all(plausible(verdicts.count(side), count, plan.error) for side in ("faster", "slower"))


def test_a_gain_of_five_percent_is_found_where_builds_differ_by_one() -> None:
    rng = np.random.default_rng(9)
    found = [proof(0.95, 0.01, rng) for _ in range(100)]
    assert sum(verdict == "faster" for verdict, _ in found) > 95


def test_a_large_gain_takes_one_block_and_a_small_one_more() -> None:
    rng = np.random.default_rng(2)
    large, small, none = (np.mean([proof(gain, 0.004, rng)[1] for _ in range(50)]) for gain in (0.6, 0.985, 1.0))
    assert large == 3
    assert small > 5
    assert none < 4


def test_one_build_of_each_file_bounds_nothing() -> None:
    block = Block(race(Field(1.0, 0.5), 2, PROOF, decided_files([(0, 1)], 1, PROOF, ONE_VIEW)), 1)
    found = between_files([block], 0, 1, PROOF)
    assert (found.median, found.low, found.high) == (pytest.approx(0.5), None, None)


def test_builds_leave_once_all_comparisons_of_their_file_are_decided() -> None:
    field = Field(1.0, 1.0, 0.5, 0.5, 0.98, 0.98, later={4: 1.02, 5: 1.02}, change=8)
    race(field, 6, PROOF, decided_files([(0, 1), (0, 2)], 2, PROOF, ONE_VIEW))
    assert [models for models, _ in field.asked][:2] == [(0, 1, 2, 3, 4, 5), (0, 1, 4, 5)]


@pytest.mark.parametrize("gain", [1.001, 1.0])
def test_rounds_that_can_change_nothing_are_not_taken(gain: float) -> None:
    field = Field(1.0, gain)
    race(field, 2, PROOF, decided_files([(0, 1)], 1, PROOF, ONE_VIEW))
    assert len(field.asked) == 1
