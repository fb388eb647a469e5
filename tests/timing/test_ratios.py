"""Deciding under noise: the promised error holds for equal models, and real differences are found."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import bdtr, bdtrc

from qdqtune.timing.race import Block, Take, between_files, decided_files, race, race_candidates, wants_more_builds
from qdqtune.timing.ratios import (
    BLOCK_LOOKS,
    USUAL_BUILDS,
    Plan,
    Ratio,
    Spread,
    build_margin,
    clear_ratio,
    least_rounds,
    ratio,
)
from qdqtune.types import Measurement, Times

Array = npt.NDArray[Any]

PLAN = Plan()
ROUNDS = PLAN.looks[-1]


def simulated(count: int, *, speed: float = 1.0, noise: float, drift: float = 0.0, spikes: float = 0.0,
              coin: bool = True, seed: int = 0) -> tuple[Array, Array]:  # fmt: skip
    """Seconds of models a and b in `count` comparisons of A B B A rounds, b taking `speed` times as long.

    Noise on each slot, a drift that neighbouring slots share, rare slots that take up to three times as long, and a
    first slot in each round that is always slow. A coin says which model has the outer slots, or else a has them.
    """
    rng = np.random.default_rng(seed)
    slots = noise * rng.standard_normal((count, 4 * ROUNDS))
    if drift:
        memory = 0.995
        steps = np.sqrt(1 - memory**2) * rng.standard_normal(slots.shape)
        for slot in range(1, steps.shape[1]):
            steps[:, slot] += memory * steps[:, slot - 1]
        slots += drift * steps
    slots = np.exp(slots)
    if spikes:
        slots *= np.where(rng.random(slots.shape) < spikes, 1 + 2 * rng.random(slots.shape), 1.0)
    slots = slots.reshape(count, ROUNDS, 4)
    slots[..., 0] *= 1.02
    outer, inner = slots[..., [0, 3]].mean(-1), slots[..., 1:3].mean(-1)
    a_is_outside = rng.random((count, ROUNDS)) < (0.5 if coin else 1.0)
    return 0.01 * np.where(a_is_outside, outer, inner), 0.01 * speed * np.where(a_is_outside, inner, outer)


def verdict(a: Array, b: Array, plan: Plan) -> str:
    """What a race of two rows of samples says."""
    rows = np.array([a, b])

    def take(models: Sequence[int], rounds: range) -> Times:
        return Times(tuple(tuple((float(rows[model][n]),) for n in rounds) for model in models))

    def leave(times: Times, running: Sequence[int]) -> Sequence[int]:
        return running if ratio(times.pair(0, 1), plan).verdict != "undecided" else ()

    return ratio(race(take, 2, plan.looks, leave).pair(0, 1), plan).verdict


def many_verdicts(a: Array, b: Array, plan: Plan = PLAN) -> Array:
    """What races say of each row: all at once, with the ranks that `ratio` takes at each look."""
    found = np.full(len(a), "undecided")
    for look in plan.looks:
        low = ratio(measured(np.arange(1.0, look + 1)), plan).low
        ratios = np.sort(b[:, :look] / a[:, :look], axis=1)
        is_open = found == "undecided"
        found[is_open & (ratios[:, -int(low)] < 1)] = "faster"
        found[is_open & (ratios[:, int(low) - 1] > 1)] = "slower"
    return found


def plausible(hits: int, count: int, rate: float) -> bool:
    """Whether so many hits can come from a rate of at most `rate`: else the chance is less than one in a million."""
    return hits == 0 or bool(bdtrc(hits - 1, count, rate) > 1e-6)


def measured(ratios: Array) -> Measurement:
    """Rounds with these ratios."""
    return Measurement(tuple(np.ones(len(ratios))), tuple(float(r) for r in ratios))


# Error and power
NOISES = {
    "calm": {"noise": 0.01},
    "drift": {"noise": 0.01, "drift": 0.1},
    "spikes": {"noise": 0.02, "spikes": 0.05},
    "all": {"noise": 0.03, "drift": 0.1, "spikes": 0.03},
}


@pytest.mark.parametrize("kind", NOISES)
def test_equal_models_win_no_more_often_than_promised(kind: str) -> None:
    count = 20_000
    a, b = simulated(count, **NOISES[kind], seed=1)
    found = many_verdicts(a, b)
    for side in ("faster", "slower"):
        assert plausible(int((found == side).sum()), count, PLAN.error)
    decided = np.flatnonzero(found != "undecided")
    some = np.concatenate([decided, np.arange(100)])
    assert [verdict(a[row], b[row], PLAN) for row in some] == found[some].tolist()


@pytest.mark.parametrize(
    ("speed", "looks", "share"), [(0.95, PLAN.looks, 0.98), (1.05, PLAN.looks, 0.98), (0.5, PLAN.looks[:1], 0.9)]
)
def test_a_difference_is_found_under_three_percent_noise_and_a_large_one_at_the_first_look(speed, looks, share):
    plan = Plan(looks, PLAN.error * len(looks) / len(PLAN.looks))
    found = many_verdicts(*simulated(1000, speed=speed, **NOISES["all"], seed=3), plan)
    assert (found == ("faster" if speed < 1 else "slower")).mean() > share


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.3])
def test_the_interval_covers_the_true_ratio(speed: float) -> None:
    """At every look, with the error of all looks: more rounds narrow it."""
    plan, count = Plan(error=0.04), 1500
    a, b = simulated(count, speed=speed, noise=0.03, drift=0.1, spikes=0.02, seed=5)
    missed = np.zeros(count, bool)
    widths = []
    for look in plan.looks:
        found = [ratio(measured(y[:look] / x[:look]), plan) for x, y in zip(a, b, strict=True)]
        ends = np.array([(r.low, r.high) for r in found], float)
        missed |= (ends[:, 0] > speed) | (ends[:, 1] < speed)
        widths.append(np.mean(ends[:, 1] - ends[:, 0]))
    assert plausible(int(missed.sum()), count, 2 * plan.error)
    assert widths == sorted(widths, reverse=True)


# The interval
@pytest.mark.parametrize("rounds", [12, 13, 20, 32, 48, 200])
@pytest.mark.parametrize("error", [0.001, 0.02, 0.2])
def test_the_ends_are_the_tightest_ranks_that_keep_the_error(rounds: int, error: float) -> None:
    plan = Plan(error=error)
    ratios = np.random.default_rng(0).permutation(np.linspace(0.5, 2, rounds))
    found = ratio(measured(ratios), plan)
    below, above = int((ratios < found.low).sum()), int((ratios > found.high).sum())
    assert below == above
    share = plan.error / len(plan.looks)
    # The median lies under the (below + 1)-th smallest if at most `below` ratios fall under the median.
    assert bdtr(below, rounds, 0.5) <= share < bdtr(below + 1, rounds, 0.5)
    assert found.median == pytest.approx(np.median(ratios))


def test_too_few_rounds_bound_nothing() -> None:
    found = ratio(measured(np.full(11, 0.5)), PLAN)
    assert (found.low, found.high, found.verdict) == (None, None, "undecided")
    assert str(found) == "0.500 [?, ?]"
    assert found.speedup == "2.00x [too few measurements]"


def test_intervals_as_users_see_them() -> None:
    assert Ratio(0.9, 0.8, 1.001).speedup == "1.11x [1.00x, 1.25x]"
    assert Ratio(0.9, None, 0.95).speedup == "1.11x [1.05x, ?]"
    assert str(Ratio(0.5, 0.41, 0.6)) == "0.500 [0.410, 0.600]"


@pytest.mark.parametrize(
    ("looks", "error"), [((), 0.01), ((20, 12), 0.01), ((12, 12), 0.01), ((0, 12), 0.01), ((12,), 0.0), ((12,), 0.5)]
)
def test_plans_that_make_no_sense(looks: tuple[int, ...], error: float) -> None:
    with pytest.raises(ValueError, match=r"looks|error"):
        Plan(looks, error)


@pytest.mark.parametrize(("error", "looks", "rounds"), [(0.001, 1, 10), (0.001, 4, 12), (0.0005, 4, 13), (0.4, 1, 2)])
def test_the_least_rounds_that_can_decide(error: float, looks: int, rounds: int) -> None:
    assert least_rounds(error, looks) == rounds
    plan = Plan(tuple(range(rounds, rounds + looks)), error)
    assert ratio(measured(np.full(rounds, 0.9)), plan).verdict == "faster"
    assert ratio(measured(np.full(rounds - 1, 0.9)), plan).verdict == "undecided"


@pytest.mark.parametrize("ends", [(0.0, None, None), (1.0, 0.0, 2.0), (-1.0, None, None), (1.0, 0.5, -2.0)])
def test_ratios_of_times_are_above_zero(ends: tuple[float, float | None, float | None]) -> None:
    """A state file that was tampered with must not make the table of results divide by zero."""
    with pytest.raises(ValueError, match="above 0"):
        Ratio(*ends)


# Races: who leaves when, and what the builds of files tell
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


def test_looks_are_at_preset_rounds_and_all_samples_are_kept_in_order() -> None:
    field = Field(1.0, 1.1, later={1: 0.9}, change=5)
    times = race_candidates(field, 2, PLAN)
    assert [rounds for _, rounds in field.asked] == [range(4), range(4, 12), range(12, 20), range(20, 32)]
    pair = times.pair(0, 1)
    assert pair.a == tuple(1.0 + n for n in range(32))
    assert pair.b == tuple((1.0 + n) * (1.1 if n < 5 else 0.9) for n in range(32))
    assert ratio(pair, PLAN).verdict == "faster"


def test_candidates_leave_once_they_are_decided_or_show_no_gain_and_clear_losers_early() -> None:
    field = Field(1.0, 0.5, 1.2, 0.999, 0.95, later={4: 1.01}, change=8)
    times = race_candidates(field, 5, PLAN)
    assert [models for models, _ in field.asked][:3] == [(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 4)]
    assert [len(rounds) for rounds in times.seconds[1:4]] == [12, 4, 12]
    assert ratio(times.pair(0, 2), PLAN).verdict == "slower"
    assert ratio(times.pair(0, 2), Plan((4,))).verdict == "undecided"  # a plan of few rounds claims nothing
    assert len(times.seconds[4]) == len(times.seconds[0]) > 12
    assert len(times.pair(1, 4).a) == 12


def test_a_race_ends_where_it_is_late() -> None:
    field = Field(1.0, 0.9, later={1: 1.1}, change=6)
    race_candidates(field, 2, PLAN, lambda: True)
    assert [rounds for _, rounds in field.asked] == [range(4)]


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
    gain: float, differ: float, rng: np.random.Generator, *, builds: int = 3, noise: float = 0.001, plan: Plan = PROOF
) -> tuple[str, int]:
    """What a race of two files says, of which one takes the share `gain` of the other's time, where builds of a file
    differ by `differ` of a ratio; and the builds of each file."""
    blocks: list[Block] = []
    for look in BLOCK_LOOKS:
        while len(blocks) < look:
            files = np.repeat([0.0, np.log(gain)], builds)
            levels = files + differ / np.sqrt(2) * rng.standard_normal(2 * builds)
            leave = decided_files([(0, 1)], builds, plan, ONE_VIEW)
            blocks.append(Block(race(builds_of(levels, noise, rng), 2 * builds, plan.looks, leave), builds))
        if not wants_more_builds(blocks, [(0, 1)], plan):
            break
    return between_files(blocks, 0, 1, plan).verdict, builds * len(blocks)


@pytest.mark.parametrize("builds", [1, 3])
def test_builds_that_differ_for_good_win_no_more_often_than_promised(builds: int) -> None:
    """Equal files: that two builds agree says little."""
    plan, count, rng = Plan((12, 24)), 300, np.random.default_rng(8)
    verdicts = [proof(1.0, 0.13, rng, builds=builds, plan=plan)[0] for _ in range(count)]
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


def test_one_build_of_each_file_shows_a_large_gain_only() -> None:
    def seen(gain: float) -> Ratio:
        block = Block(race(Field(1.0, gain), 2, PROOF.looks, decided_files([(0, 1)], 1, PROOF, ONE_VIEW)), 1)
        return between_files([block], 0, 1, PROOF)

    assert seen(0.6).verdict == "faster"
    assert seen(0.7).verdict == "undecided"
    assert seen(1 / 0.6).verdict == "slower"
    assert 0.6 < clear_ratio(1, len(BLOCK_LOOKS), PROOF.error) < 0.7


def test_builds_leave_once_all_comparisons_of_their_file_are_decided() -> None:
    field = Field(1.0, 1.0, 0.5, 0.5, 0.98, 0.98, later={4: 1.02, 5: 1.02}, change=8)
    race(field, 6, PROOF.looks, decided_files([(0, 1), (0, 2)], 2, PROOF, ONE_VIEW))
    assert [models for models, _ in field.asked][:2] == [(0, 1, 2, 3, 4, 5), (0, 1, 4, 5)]


@pytest.mark.parametrize("gain", [1.001, 1.0])
def test_rounds_that_can_change_nothing_are_not_taken(gain: float) -> None:
    field = Field(1.0, gain)
    race(field, 2, PROOF.looks, decided_files([(0, 1)], 1, PROOF, ONE_VIEW))
    assert len(field.asked) == 1


def test_the_usual_number_of_builds_that_agree_narrows_the_margin() -> None:
    agreeing = [Spread(2 * 0.006**2, 2)]
    assert build_margin(agreeing, USUAL_BUILDS, 0.00025) < 0.7 * build_margin((), USUAL_BUILDS, 0.00025)
