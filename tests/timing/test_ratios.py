"""Deciding under noise: the promised error holds for equal models, and real differences are found."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from scipy.special import bdtr, bdtrc

from models import build, normal
from qdqtune.engines import EngineSpec
from qdqtune.engines.worker import Session
from qdqtune.errors import EngineRefused, Failure
from qdqtune.timing.ratios import (
    MOST_PAIRS,
    Plan,
    Ratio,
    Spread,
    across_builds,
    as_many_pairs_as_needed,
    compare,
    compare_pairs,
    envelope,
    is_cut_short,
    judge,
    least_rounds,
    on_these_builds,
    ratio,
    spread_of,
)
from qdqtune.types import Measurement, Placement, Proposal, Trial, Turn, Workload
from refusals import refusal

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


def source(a: Array, b: Array) -> Callable[[int, int], Measurement]:
    """Rounds out of two rows of samples."""
    return lambda first, count: Measurement(tuple(a[first : first + count]), tuple(b[first : first + count]))


def verdicts(a: Array, b: Array, plan: Plan = PLAN) -> list[str]:
    """What `compare` and `ratio` say of each row."""
    found = [compare(source(*rows), plan) for rows in zip(a, b, strict=True)]
    return [ratio(m, plan).verdict for m in found if isinstance(m, Measurement)]


def many_verdicts(a: Array, b: Array, plan: Plan = PLAN) -> Array:
    """The same for all rows at once, with the ranks that `ratio` takes at each look."""
    found = np.full(len(a), "undecided")
    for look in plan.looks:
        low = ratio(measured(np.arange(1.0, look + 1)), plan).low
        assert low is not None
        ratios = np.sort(b[:, :look] / a[:, :look], axis=1)
        is_open = found == "undecided"
        found[is_open & (ratios[:, -int(low)] < 1)] = "faster"
        found[is_open & (ratios[:, int(low) - 1] > 1)] = "slower"
    return found


def measured(ratios: Array) -> Measurement:
    """Rounds with these ratios."""
    return Measurement(tuple(np.ones(len(ratios))), tuple(float(r) for r in ratios))


def plausible(hits: int, count: int, rate: float) -> bool:
    """Whether so many hits can come from a rate of at most `rate`: else the chance is less than one in a million."""
    return hits == 0 or bool(bdtrc(hits - 1, count, rate) > 1e-6)


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
    assert verdicts(a[some], b[some]) == found[some].tolist()


@pytest.mark.parametrize("speed", [0.95, 1.05])
def test_a_difference_of_five_percent_is_found_under_three_percent_noise(speed: float) -> None:
    found = many_verdicts(*simulated(2000, speed=speed, noise=0.03, drift=0.1, seed=3))
    assert (found == ("faster" if speed < 1 else "slower")).mean() > 0.98


def test_a_large_difference_is_found_at_the_first_look() -> None:
    a, b = simulated(200, speed=0.5, **NOISES["all"], seed=4)
    lengths = [
        len(m.a) for rows in zip(a, b, strict=True) if isinstance(m := compare(source(*rows), PLAN), Measurement)
    ]
    assert lengths.count(PLAN.looks[0]) > 180


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.3])
def test_the_interval_covers_the_true_ratio(speed: float) -> None:
    """At every look, with the error of all looks: more rounds narrow it."""
    plan, count = Plan(error=0.04), 1500
    a, b = simulated(count, speed=speed, noise=0.03, drift=0.1, spikes=0.02, seed=5)
    missed = np.zeros(count, bool)
    widths = []
    for look in plan.looks:
        found = [ratio(source(*rows)(0, look), plan) for rows in zip(a, b, strict=True)]
        ends = np.array([(r.low, r.high) for r in found], float)
        missed |= (ends[:, 0] > speed) | (ends[:, 1] < speed)
        widths.append(np.mean(ends[:, 1] - ends[:, 0]))
    assert plausible(int(missed.sum()), count, 2 * plan.error)
    assert widths == sorted(widths, reverse=True)


def test_a_file_against_itself_on_an_engine(tmp_path: Path) -> None:
    """Rounds as the worker takes them, its coin included, with an engine whose latencies drift and spike."""
    file = tmp_path / "model.onnx"
    text = "net (float[1,64] x) => (float[1,64] y) { [mm] y = MatMul(x, w) }"
    onnx.save(build(text, {"w": normal(64, 64)}).to_proto(), file)
    session = Session(EngineSpec("fake", {"seed": 3, "noise": 0.03, "drift": 0.1, "spikes": 0.02}))
    for number in (0, 1):
        session.build(number, file, tmp_path / "log")
    session.feed((Workload({"x": normal(1, 64)}),))
    plan, count = Plan((8, 16), error=0.1), 400
    taken = session.rounds(0, 1, 5, range(16 * count), [Turn(1, 2, 0.0)], 0)
    found = verdicts(np.reshape(taken.a, (count, 16)), np.reshape(taken.b, (count, 16)), plan)
    for side in ("faster", "slower"):
        assert plausible(found.count(side), count, plan.error)
        assert found.count(side) > 0


# The interval


@pytest.mark.parametrize("rounds", [12, 13, 20, 32, 48, 200])
@pytest.mark.parametrize("error", [0.001, 0.02, 0.2])
def test_the_ends_are_the_tightest_ranks_that_keep_the_error(rounds: int, error: float) -> None:
    plan = Plan(error=error)
    ratios = np.random.default_rng(0).permutation(np.linspace(0.5, 2, rounds))
    found = ratio(measured(ratios), plan)
    assert found.low is not None
    assert found.high is not None
    below, above = int((ratios < found.low).sum()), int((ratios > found.high).sum())
    assert below == above
    share = plan.error / len(plan.looks)
    # The median lies under the (below + 1)-th smallest if at most `below` ratios fall under the median.
    assert bdtr(below, rounds, 0.5) <= share < bdtr(below + 1, rounds, 0.5)
    assert found.median == pytest.approx(np.median(ratios))


def test_the_first_look_decides_only_if_all_rounds_agree() -> None:
    ratios = np.full(12, 0.9)
    assert ratio(measured(ratios), PLAN).verdict == "faster"
    assert ratio(measured(2 - ratios), PLAN).verdict == "slower"
    ratios[5] = 1.01
    assert ratio(measured(ratios), PLAN).verdict == "undecided"


def test_too_few_rounds_bound_nothing() -> None:
    found = ratio(measured(np.full(11, 0.5)), PLAN)
    assert (found.low, found.high, found.verdict) == (None, None, "undecided")
    assert str(found) == "0.500 [?, ?]"
    assert found.speedup == "2.00x [too few measurements]"


@pytest.mark.parametrize(
    ("ratio", "rival", "told"),
    [
        (Ratio(1.04, 1.002, 1.08), 1.0, "0.962x [0.926x, 0.998x]"),
        (Ratio(0.999, 0.997, 0.9996), 1.0, "1.0010x [1.0004x, 1.0030x]"),
        (Ratio(0.9, 0.8, 1.001), 1.0, "1.11x [1.00x, 1.25x]"),
        (Ratio(0.52, 0.501, 0.6), 0.5, "1.923x [1.667x, 1.996x]"),
        (Ratio(0.9, None, 0.95), 1.0, "1.11x [1.05x, ?]"),
    ],
)
def test_a_written_interval_reaches_the_rival_only_where_the_verdict_is_open(
    ratio: Ratio, rival: float, told: str
) -> None:
    assert ratio.speedup_beside(rival) == told
    assert str(Ratio(0.5, 0.41, 0.6)) == "0.500 [0.410, 0.600]"


def test_models_that_are_exactly_equal_are_undecided() -> None:
    found = ratio(measured(np.ones(48)), PLAN)
    assert (found, found.verdict) == (Ratio(1.0, 1.0, 1.0), "undecided")


@pytest.mark.parametrize(
    ("looks", "error"), [((), 0.01), ((20, 12), 0.01), ((12, 12), 0.01), ((0, 12), 0.01), ((12,), 0.0), ((12,), 0.5)]
)
def test_plans_that_make_no_sense(looks: tuple[int, ...], error: float) -> None:
    with pytest.raises(ValueError, match=r"looks|error"):
        Plan(looks, error)


# Comparing


class Source:
    """Rounds with a constant ratio, or with others from a round on, and a note of what was asked."""

    def __init__(self, first: float, later: float | None = None, change: int = 0, fail_at: int | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self._ratios = [first if later is None or i < change else later for i in range(1000)]
        self._fail_at = fail_at

    def __call__(self, first: int, count: int) -> Measurement:
        self.asked.append((first, count))
        if self._fail_at is not None and first + count > self._fail_at:
            raise EngineRefused(Failure("crash", "gone"))
        numbers = range(first, first + count)
        return Measurement(tuple(1.0 + i for i in numbers), tuple((1.0 + i) * self._ratios[i] for i in numbers))


def test_looks_are_at_preset_rounds_only() -> None:
    rounds, seen = Source(1.0), list[Ratio]()
    compare(rounds, PLAN, decided=lambda r: bool(seen.append(r)))
    assert rounds.asked == [(0, 12), (12, 8), (20, 12), (32, 16)]
    assert len(seen) == 4


@pytest.mark.parametrize(("value", "verdict"), [(0.9, "faster"), (1.1, "slower")])
def test_a_comparison_ends_when_it_is_decided(value: float, verdict: str) -> None:
    rounds = Source(value)
    found = compare(rounds, PLAN)
    assert rounds.asked == [(0, 12)]
    assert isinstance(found, Measurement)
    assert ratio(found, PLAN).verdict == verdict


def test_all_samples_are_kept_in_order() -> None:
    rounds = Source(1.1, 0.9, change=5)
    found = compare(rounds, PLAN)
    assert isinstance(found, Measurement)
    assert found.a == tuple(1.0 + i for i in range(len(found.a)))
    assert found.b == tuple((1.0 + i) * (1.1 if i < 5 else 0.9) for i in range(len(found.a)))
    assert rounds.asked[-1][0] + rounds.asked[-1][1] == len(found.a) == 32
    assert ratio(found, PLAN).verdict == "faster"


def test_the_caller_may_decide() -> None:
    rounds = Source(0.9)
    found = compare(rounds, PLAN, decided=lambda _: False)
    assert len(found.a) == 48
    rounds = Source(1.0)
    compare(rounds, PLAN, decided=lambda r: r.median > 0.997)
    assert rounds.asked == [(0, 12)]


@pytest.mark.parametrize(("fail_at", "asked"), [(0, 1), (15, 2)])
def test_a_failure_is_passed_on(fail_at: int, asked: int) -> None:
    rounds = Source(1.0, fail_at=fail_at)
    assert refusal(lambda: compare(rounds, PLAN)) == Failure("crash", "gone")
    assert len(rounds.asked) == asked


# Several builds


PROOF = Plan((12, 24, 48, 96))


def of_pairs(found: list[Measurement], plan: Plan) -> str:
    return envelope([ratio(m, plan) for m in found]).verdict


@pytest.mark.parametrize("kind", NOISES)
def test_two_pairs_of_builds_win_by_luck_no_more_often_than_one(kind: str) -> None:
    """At 10 %, so that some do: the pairs are in turns, and either stops when it is decided."""
    plan, count = Plan((10, 20, 40), error=0.1), 1500
    sides = [simulated(count, **NOISES[kind], seed=seed) for seed in (6, 7)]
    pairs = [[source(*rows) for rows in zip(*side, strict=True)] for side in sides]
    found = [of_pairs(compare_pairs(pair, plan), plan) for pair in zip(*pairs, strict=True)]
    for side in ("faster", "slower"):
        assert plausible(found.count(side), count, plan.error**2)


def of_builds(rounds: Array, plan: Plan, numbers: Sequence[int]) -> list[Measurement]:
    """Pairs of builds by number, of which a row of ratios is known."""
    return compare_pairs([source(np.ones(rounds.shape[1]), rounds[n]) for n in numbers], plan)


def proofs(gain: float, differ: float, count: int, plan: Plan) -> dict[str, int]:
    """What proofs say of files of which one takes so much of the other's time, where pairs of builds differ for good
    and rounds on each tell 0.1 %."""
    found, rng = {"faster": 0, "slower": 0, "undecided": 0}, np.random.default_rng(8)
    for _ in range(count):
        speeds = gain * np.exp(differ * rng.standard_normal(MOST_PAIRS))
        rounds = speeds[:, None] * np.exp(0.001 * rng.standard_normal((MOST_PAIRS, plan.looks[-1])))
        pairs = as_many_pairs_as_needed(partial(of_builds, rounds, plan), plan)
        assert isinstance(pairs, list)
        found[across_builds([ratio(m, plan) for m in pairs], plan).verdict] += 1
    return found


@pytest.mark.parametrize("differ", [0.005, 0.08])
def test_builds_that_differ_for_good_win_no_more_often_than_promised(differ: float) -> None:
    """Equal files: that two builds agree says little."""
    plan, count = Plan((12, 24)), 2000
    found = proofs(1.0, differ, count, plan)
    assert all(plausible(found[side], count, plan.error) for side in ("faster", "slower"))


def test_a_gain_of_three_percent_is_found_where_builds_differ_by_one() -> None:
    found = proofs(0.97, 0.01, 200, Plan((12, 24)))
    assert found["faster"] > 180


def test_deviations_seen_elsewhere_narrow_an_interval_or_widen_it() -> None:
    plan, pairs = Plan((12, 24)), [Ratio(0.95, 0.949, 0.951), Ratio(0.951, 0.95, 0.952)]
    alone = across_builds(pairs, plan)
    quiet, wild = (across_builds(pairs, plan, Spread(8 * s**2, 8)) for s in (0.003, 0.1))
    assert alone.verdict == wild.verdict == "undecided"
    assert quiet.verdict == "faster"
    assert (wild.high or 0) > (alone.high or 2)


def test_what_builds_of_the_users_file_have_for_themselves_is_told_from_the_rest() -> None:
    """Files that meet the same builds: all deviations count, and none twice."""
    rng, found = np.random.default_rng(1), list[float]()
    for _ in range(400):
        logs = 0.01 * rng.standard_normal((4, 2)) - 0.01 * rng.standard_normal(2)
        seen = spread_of([[Ratio(float(np.exp(x)), None, None) for x in row] for row in logs])
        assert seen.free == 4
        found.append(seen.squares / seen.free)
    assert np.mean(found) == pytest.approx(2 * 0.01**2, rel=0.1)
    assert np.std(found) / np.mean(found) == pytest.approx((2 / 4) ** 0.5, rel=0.15)
    assert spread_of([]) == spread_of([[Ratio(0.9, None, None)]]) == Spread(0.0, 0)


def test_a_small_gain_takes_more_builds_and_a_large_one_two() -> None:
    asked: list[list[int]] = []

    def builds(value: float) -> str:
        def measure(numbers: Sequence[int]) -> list[Measurement]:
            asked.append(list(numbers))
            return compare_pairs([Source(value) for _ in numbers], PROOF)

        pairs = as_many_pairs_as_needed(measure, PROOF)
        assert isinstance(pairs, list)
        return across_builds([ratio(m, PROOF) for m in pairs], PROOF).verdict

    assert [builds(0.6), builds(0.96), builds(0.99), builds(1.6)] == ["faster", "faster", "faster", "slower"]
    two, four = [0, 1], [2, 3]
    assert asked == [two, two, four, two, four, two]
    asked.clear()
    assert builds(1.0) == "undecided"
    assert asked == [two]


def test_pairs_of_builds_are_in_turns_and_stop_when_they_are_decided() -> None:
    soon, later = Source(0.9), Source(1.1, 0.9, change=2)
    found = compare_pairs([soon, later], PROOF)
    assert of_pairs(found, PROOF) == "faster"
    assert (soon.asked, later.asked) == ([(0, 12)], [(0, 12), (12, 12)])


@pytest.mark.parametrize(("first", "second", "rounds"), [(0.9, 1.1, 12), (1.001, 0.999, 12), (1.0, 1.0, 12)])
def test_rounds_that_can_change_nothing_are_not_taken(first: float, second: float, rounds: int) -> None:
    """Pairs that disagree for good, and files between which there is no difference worth having."""
    sources = [Source(first), Source(second)]
    found = compare_pairs(sources, PROOF)
    assert of_pairs(found, PROOF) == "undecided"
    assert [source.asked for source in sources] == [[(0, rounds)]] * 2


@pytest.mark.parametrize(("gain", "ends", "verdict"), [(1.0, 24, "undecided"), (0.98, 96, "faster")])
def test_rounds_that_are_unlikely_to_decide_anything_are_not_taken(gain: float, ends: int, verdict: str) -> None:
    """Equal files, and a gain that only the last look can tell from noise of 5 %."""
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal((2, 96)))
    pairs = [source(np.ones(96), gain * row / np.median(row)) for row in noise]
    plan = Plan((12, 24, 48, 96))
    found = compare_pairs(pairs, plan)
    assert isinstance(found, list)
    assert [len(m.a) for m in found] == [ends] * 2
    assert on_these_builds([ratio(m, plan) for m in found]).verdict == verdict


def test_pairs_end_in_time_and_fail_together() -> None:
    sources = [Source(0.9, 1.1, change=6), Source(0.9, 1.1, change=6)]
    assert isinstance(compare_pairs(sources, PROOF, is_late=lambda: True), list)
    assert [source.asked for source in sources] == [[(0, 12)]] * 2
    assert refusal(lambda: compare_pairs([Source(0.9), Source(0.9, fail_at=0)], PROOF)) == Failure("crash", "gone")


@pytest.mark.parametrize(("error", "looks", "rounds"), [(0.001, 1, 10), (0.001, 4, 12), (0.0005, 4, 13), (0.4, 1, 2)])
def test_the_least_rounds_that_can_decide(error: float, looks: int, rounds: int) -> None:
    assert least_rounds(error, looks) == rounds
    plan = Plan(tuple(range(rounds, rounds + looks)), error)
    assert ratio(measured(np.full(rounds, 0.9)), plan).verdict == "faster"
    assert ratio(measured(np.full(rounds - 1, 0.9)), plan).verdict == "undecided"


def test_an_envelope_is_as_wide_as_all_its_ratios() -> None:
    found = envelope([Ratio(0.5, 0.4, 0.6), Ratio(0.8, 0.7, 1.1)])
    assert found.median == pytest.approx((0.5 * 0.8) ** 0.5)
    assert (found.low, found.high, found.verdict) == (0.4, 1.1, "undecided")
    assert envelope([Ratio(0.5, 0.4, 0.6), Ratio(0.8, 0.7, 0.9)]).verdict == "faster"
    one = envelope([Ratio(0.5, 0.4, 0.6)])
    assert (one.median, one.low, one.high) == (pytest.approx(0.5), 0.4, 0.6)
    unknown = envelope([Ratio(0.5, 0.4, 0.6), Ratio(0.8, None, None)])
    assert (unknown.low, unknown.high, unknown.verdict) == (None, None, "undecided")


def trial(result: Measurement | Failure, check: Measurement | Failure | None = None) -> Trial:
    return Trial(1, Proposal("test", Placement()), Placement(), result, check)


def test_a_trial_is_judged_by_both_of_its_measurements() -> None:
    fast, even, failure = measured(np.full(12, 0.8)), measured(np.linspace(0.9, 1.1, 12)), Failure("run", "no")
    first = judge(trial(fast), PLAN)
    assert first is not None
    assert (first.verdict, first.median) == ("faster", pytest.approx(0.8))
    both = judge(trial(fast, even), PLAN)
    assert both is not None
    assert both.verdict == "undecided"
    assert both.median == pytest.approx(0.8**0.5, rel=0.01)
    confirmed = judge(trial(fast, fast), PLAN)
    assert confirmed is not None
    assert confirmed.verdict == "faster"
    assert judge(trial(failure), PLAN) is None
    assert judge(trial(fast, failure), PLAN) is None


@pytest.mark.parametrize("ends", [(0.0, None, None), (1.0, 0.0, 2.0), (-1.0, None, None), (1.0, 0.5, -2.0)])
def test_ratios_of_times_are_above_zero(ends: tuple[float, float | None, float | None]) -> None:
    """A state file that was tampered with must not make the table of results divide by zero."""
    with pytest.raises(ValueError, match="above 0"):
        Ratio(*ends)


def test_a_comparison_that_another_plan_would_have_gone_on_with_is_cut_short() -> None:
    short, usual = Plan((7, 20), 0.02), Plan()
    seemingly, clearly, hardly = (0.9, 0.95, 1.02), (0.5,), (1.0, 1.01)

    def of(ratios: tuple[float, ...], rounds: int) -> Measurement:
        return Measurement((1.0,) * rounds, tuple(ratios[n % len(ratios)] for n in range(rounds)))

    assert [is_cut_short(of(seemingly, 20), plan) for plan in (short, usual)] == [False, True]
    assert [is_cut_short(of(clearly, 7), plan) for plan in (short, usual)] == [False, True]
    assert [is_cut_short(of(clearly, 20), plan) for plan in (short, usual)] == [False, False]
    assert [is_cut_short(of(hardly, 20), plan) for plan in (short, usual)] == [False, False]
    assert not is_cut_short(of(seemingly, 48), usual)
