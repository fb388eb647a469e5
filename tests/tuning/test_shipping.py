"""Which trial of a batch is taken, which files are tried, and which of them ships: decided from values alone."""

from dataclasses import replace
from typing import Any

import pytest

from qdqtune.engines.runner import as_workloads
from qdqtune.timing.race import Block
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.contexts import View
from qdqtune.tuning.shipping import (
    ANEW,
    GOES_ON,
    LATE,
    TO_DECIDE,
    UNDECIDED,
    Attempt,
    Compared,
    Finalists,
    accepted,
    advise,
    beside_rules,
    finalists,
    is_more_accurate,
    narrower,
    shipped,
    slower_workloads,
    unproven,
)
from qdqtune.types import Accuracy, CostsByRule, Edge, Measurement, Placement, Proposal, Times, Trial, Workload

PLAN = Plan((12,), turn_seconds=0.0)
BEST = Placement.of([Edge("t", "n", 0)])


def trial(number: int, ratio: float, db: float, *, spread: float = 0.0, holds: bool | None = True) -> Trial:
    """`spread`: half of the rounds are as much slower, half as much faster."""
    times = tuple(ratio * (1 + (spread if i % 2 else -spread)) for i in range(12))
    proposal = Proposal("", Placement.of([Edge("t", f"n{number}", 0)]))
    return Trial(number, proposal, BEST, Measurement((1.0,) * 12, times), accuracy=Accuracy(db), holds=holds)


class TestAgainstTheBestSoFar:
    best = trial(1, 0.5, 32.0)

    @pytest.mark.parametrize(
        ("ratio", "db", "holds", "taken"),
        [
            (0.98, 37.0, True, True),  # as fast as can be told, and more exact
            (0.98, 32.2, True, False),  # less than a dB is no reason
            (1.02, 37.0, True, False),
            (0.98, 37.0, False, False),
            (0.98, 37.0, None, False),  # the user's metric was not asked
        ],
    )
    def test_what_cannot_be_told_apart_is_taken_if_it_is_more_exact(self, ratio, db, holds, taken):
        (told,) = accepted([trial(2, ratio, db, spread=0.1, holds=holds)], PLAN, self.best)
        assert told.accepted is taken

    def test_a_win_comes_before_a_tie(self) -> None:
        tie, win = accepted([trial(2, 0.98, 50.0, spread=0.1), trial(3, 0.9, 20.0)], PLAN, self.best)
        assert (tie.accepted, win.accepted) == (False, True)

    @pytest.mark.parametrize(("ratio", "db", "taken"), [(0.985, 31.0, False), (0.985, 32.0, True), (0.97, 31.0, True)])
    def test_a_gain_of_less_than_two_percent_may_not_cost_accuracy(self, ratio: float, db: float, taken: bool) -> None:
        (told,) = accepted([trial(2, ratio, db)], PLAN, self.best)
        assert told.accepted is taken

    @pytest.mark.parametrize(("to_best", "taken"), [(1.05, True), (1.2, False)])
    def test_a_gain_on_another_placement_must_be_one_on_the_best(self, to_best: float, taken: bool) -> None:
        (told,) = accepted([trial(2, 0.9, 35.0)], PLAN, self.best, to_best=to_best)
        assert told.accepted is taken

    def test_nothing_is_more_exact_than_the_float_model(self) -> None:
        (told,) = accepted([trial(2, 0.98, 99.0, spread=0.1)], PLAN)
        assert not told.accepted


@pytest.mark.parametrize(
    ("of_rules", "holds", "is_told"), [(0.505, True, True), (0.505, False, False), (0.52, True, False)]
)
def test_it_is_told_where_rules_do_as_well(of_rules: float, holds: bool, is_told: bool) -> None:
    history = [replace(t, against=Placement()) for t in (trial(1, of_rules, 30.0, holds=holds), trial(2, 0.5, 30.0))]
    rules, other = (t.placement for t in history)
    told = beside_rules(other, rules, history, PLAN)
    assert (told is not None) is is_told
    assert beside_rules(rules, rules, history, PLAN) is not None
    assert beside_rules(other, PLACEMENTS[4], history, PLAN) is None
    untimed = [replace(t, result=CostsByRule(1.0, 0.5)) for t in history]
    assert beside_rules(other, rules, untimed, PLAN) is None


# ---------------------------------------------------------------- whether a file may ship
def at(ratio: float, threads: int = 1, spread: float = 0.02) -> Compared:
    """A file that takes this share of the other one's time, known by so much."""
    return Compared(Ratio(ratio, ratio - spread, ratio + spread), 1.0, ratio, threads)


def tried(ratio: float, number: int = 1, **how: Any) -> Attempt:
    placement = Placement.of([Edge("t", f"n{number}", 0)]) if number else Placement()
    return Attempt(placement, (at(ratio),), **how)


PLACEMENTS = tuple(Placement.of([Edge("t", f"n{number}", 0)]) for number in range(1, 6))


@pytest.mark.parametrize(
    ("to_float", "others", "verdict"),
    [
        ([at(0.5)], {}, "ships"),
        ([at(1.0)], {}, "not faster"),
        ([at(0.5), at(1.5, 4)], {}, "slower elsewhere"),
        ([at(0.5), at(1.06, 4, 0.15)], {}, "slower elsewhere"),
        ([at(0.5), at(1.0, 4)], {}, "ships"),
        ([at(1.0), at(0.5, 4)], {}, "ships"),
        ([at(1.0), at(0.99, 4)], {}, "not faster"),
        ([at(0.5)], {"to_given": (at(1.0),), "must_beat_given": True}, "not faster than given"),
        ([at(0.5)], {"to_given": (at(0.9),), "must_beat_given": True}, "ships"),
        ([at(0.5), at(0.5, 4)], {"to_given": (at(0.9), at(1.2, 4)), "must_beat_given": True}, "not faster than given"),
        ([at(0.5)], {"to_given": (at(1.0),)}, "ships"),
        ([at(0.5)], {"to_rewritten": (at(1.0),)}, "pairs do not pay"),
        ([at(0.5)], {"missed": "the metric is 0"}, "misses the limits"),
        ([at(1.0)], {"missed": "the metric is 0"}, "not faster"),
    ],
)
def test_the_verdict_on_a_file_that_may_ship(to_float: list[Compared], others: dict[str, Any], verdict: str) -> None:
    assert Attempt(PLACEMENTS[0], tuple(to_float), **others).verdict == verdict


# ---------------------------------------------------------------- which files are tried, and which ships

LATER = Attempt(PLACEMENTS[0], (at(0.5), at(1.5, 4)))
NO_GAIN, PAIRS_DO_NOT_PAY = tried(1.0), tried(0.5, to_rewritten=(at(1.0),))


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], PLACEMENTS[:2]),
        ([NO_GAIN, NO_GAIN], ()),
        ([NO_GAIN, LATER], PLACEMENTS[2:3]),
        ([LATER, NO_GAIN, NO_GAIN, NO_GAIN], PLACEMENTS[4:]),
        ([PAIRS_DO_NOT_PAY], ()),
        ([tried(0.5)], ()),
        ([tried(1.0), tried(0.5, missed="the metric is 0")], PLACEMENTS[2:3]),
        ([tried(1.0), LATER, tried(0.5, 0)], PLACEMENTS[2:3]),
    ],
)
def test_the_next_files_depend_on_what_became_of_those_before(attempts: list[Attempt], expected: Any) -> None:
    assert Finalists(PLACEMENTS, first=2).next(attempts) == expected


def test_finalists_are_the_best_of_the_search_and_then_the_fastest_that_hold_the_limits() -> None:
    def of(number: int, ratio: float, db: float = 30.0, **how: Any) -> Trial:
        return replace(trial(number, ratio, db, **how), against=Placement())

    first, second, third = (replace(of(n, r), accepted=True) for n, r in ((1, 0.9), (2, 0.8), (3, 0.7)))
    fast, inaccurate, slow = of(4, 0.5), of(5, 0.4, holds=False), of(6, 0.99)
    history = [first, second, third, fast, inaccurate, slow]
    found = finalists(history, PLAN)
    assert (found.placements, found.first) == (tuple(t.placement for t in (third, fast, second, first)), 2)
    assert finalists([first, third], PLAN).first == 1, "the other one is clearly slower"
    assert finalists(history, PLAN, {fast.placement}).placements[1] == second.placement
    assert finalists([], PLAN) == Finalists()

    near, won = of(7, 0.52, db=36.0), replace(of(8, 0.5), accepted=True)
    assert finalists([near, *history, won], PLAN).placements[:2] == (won.placement, near.placement)
    even = of(9, 0.505, db=36.0)
    assert finalists([even, won], PLAN).placements == (even.placement, won.placement), "there may be time for one only"
    assert finalists([replace(even, holds=None), won], PLAN).placements == (won.placement, even.placement)


@pytest.mark.parametrize(
    ("to_fast", "db", "more", "ships"),
    [
        ([at(1.04, spread=0.05)], 27.0, {}, False),  # noise may be the difference, but speed is what was asked for
        ([at(1.015, spread=0.005)], 27.0, {}, True),  # slower beyond noise, but hardly
        ([at(1.0), at(1.04, 4)], 27.0, {}, False),
        ([at(1.0)], 21.9, {}, False),
        ([at(1.0)], 21.9, {"nbytes": 90}, True),
        ([at(1.0)], 21.9, {"nbytes": 95}, False),
        ([at(1.0)], 19.9, {"nbytes": 50}, False),
        ([at(1.0)], 27.0, {"nbytes": 200}, True),
        ([at(1.0)], 27.0, {"missed": "too few dB"}, False),
        ([], 27.0, {}, False),  # of another race, with medians that are too far apart
    ],
)
def test_of_files_equally_fast_the_more_accurate_ships_and_then_the_smaller(to_fast, db, more, ships):
    fast = tried(0.5, 1, trial=trial(1, 0.5, 21.0), nbytes=100)
    to_rivals = {fast.placement: tuple(to_fast)} if to_fast else {}
    other = replace(tried(0.52, 2, trial=trial(2, 0.52, db), to_rivals=to_rivals, nbytes=100), **more)
    assert shipped([other, fast]) == (other if ships else fast)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((27.0, None), (21.0, None), True),
        ((27.0, 0.79), (21.0, 0.8), False),
        ((27.0, 0.8), (21.0, 0.8), True),
        ((27.0, 0.79), (21.0, None), True),
        ((200.0, 0.8), (200.0, 0.79), True),
    ],
)
def test_the_users_metric_may_forbid_what_decibels_prefer(one: Any, other: Any, expected: bool) -> None:
    first, second = (replace(trial(1, 0.5, db), metric=metric) for db, metric in (one, other))
    assert is_more_accurate(first, second) is expected


def test_a_worst_sample_near_its_limit_counts_as_less_accurate() -> None:
    near, far = (replace(trial(1, 0.5, 24.0), accuracy=Accuracy(24.0, lowest)) for lowest in (10.5, 20.0))
    assert is_more_accurate(far, near)
    assert is_more_accurate(trial(1, 0.5, 21.6), near)
    assert not is_more_accurate(trial(1, 0.5, 24.9), far)


def test_what_earlier_sessions_have_proven_counts_unless_it_is_wider_or_contradicted() -> None:
    wide, narrow, other = (at(0.5, spread=0.1),), (at(0.52, spread=0.02),), (at(0.9, spread=0.2),)
    assert narrower(wide, narrow) == narrower(narrow, wide) == narrow
    assert narrower(wide, None) == wide
    assert narrower(other, narrow) == other


def test_pairs_that_do_not_pay_ship_where_the_rewritten_float_model_did_not_prove_itself() -> None:
    rewritten = tried(0.5, 0)
    assert shipped([NO_GAIN, LATER]) is None
    assert shipped([PAIRS_DO_NOT_PAY, tried(1.0, 0)]) == PAIRS_DO_NOT_PAY
    assert shipped([PAIRS_DO_NOT_PAY, rewritten]) == rewritten
    assert shipped([tried(0.6), rewritten]) == tried(0.6)


def test_times_agree_with_the_ratio_where_the_machine_drifts() -> None:
    """Both models take ten times as long in the last round, and b runs in it twice: the medians alone would mislead."""
    rounds = Times((((1.0,), (1.0,), (10.0,), (10.0,)), ((0.9,), (9.0,), (9.0,), (9.0,))))
    found = Compared.of([Block(rounds), Block(rounds)], 0, 1, Plan((2,)), View(None, (1.0,)))
    assert found.b_seconds / found.a_seconds == pytest.approx(found.ratio.median)


def test_a_workload_that_got_slower_is_noted() -> None:
    mix = as_workloads((Workload({}, 0.8, "decode"), Workload({}, 0.2, "prefill")))
    slow, fast = Compared(Ratio(1.25, 1.2, 1.3), 1.0, 1.25, 4), Compared(Ratio(0.5, 0.4, 0.6), 1.0, 0.5, 4)
    one, four = (
        Compared(Ratio(0.8, 0.7, 0.9), 1.0, 0.8, count, by_workload=(fast, x)) for count, x in ((1, fast), (4, slow))
    )
    assert list(slower_workloads([one], mix)) == []
    (line,) = slower_workloads([one, four], mix)
    assert line.startswith(
        "prefill alone (20% of the calls) got slower: 0.80x [0.77x, 0.83x] the speed of float at 4 th"
    )


def test_a_result_that_proves_nothing_is_told_with_one_thing_that_would_decide_it() -> None:
    undecided, ended = at(0.8, spread=0.3), f"{LATE} has ended the search"
    told, wants_builds = unproven(undecided), unproven(replace(undecided, wants_builds=True))
    assert told == f"1.25x [0.91x, 2.00x] the speed of float; {UNDECIDED}"
    decided = unproven(at(2.0, spread=0.1))
    assert decided == "0.50x [0.48x, 0.53x] the speed of float"
    for notes, advice, of_cut_short in (
        ((decided, decided), (), ANEW),
        ((told,), (TO_DECIDE,), f"{TO_DECIDE}; {ANEW}"),
        ((wants_builds, told), (GOES_ON,), f"{GOES_ON}; {ANEW}"),
        ((told, ended), (GOES_ON,), f"{GOES_ON}; {ANEW}"),
    ):
        plain, cut_short = (advise(notes, is_cut_short=is_cut) for is_cut in (False, True))
        assert plain == (*dict.fromkeys(notes), *advice)
        assert cut_short == (*dict.fromkeys(notes), of_cut_short)
        assert advise(cut_short, is_cut_short=False) == plain, "an earlier session's advice goes"
