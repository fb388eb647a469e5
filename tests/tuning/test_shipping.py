"""Which trial of a batch is taken, which files are tried, and which of them ships: decided from values alone."""

from dataclasses import replace
from typing import Any, cast

import pytest

from qdqtune.engines.runner import as_workloads
from qdqtune.errors import Failure
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.shipping import (
    Attempt,
    AttemptVerdict,
    Compared,
    Finalists,
    InContext,
    Terms,
    accepted,
    finalists,
    first_faster,
    given_to_float,
    is_proven,
    keeps_given,
    may_owe_it_to_rewrites,
    next_finalist,
    notes_of,
    shipped,
    slower_workloads,
    unproven,
    verdict_of,
    with_comparison_without_pairs,
    within_limits,
)
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial, Workload

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
    def test_what_cannot_be_told_apart_is_taken_if_it_is_more_exact(
        self, ratio: float, db: float, holds: bool | None, taken: bool
    ) -> None:
        (told,) = accepted([trial(2, ratio, db, spread=0.1, holds=holds)], PLAN, self.best)
        assert told.accepted is taken

    def test_a_win_comes_before_a_tie(self) -> None:
        tie, win = accepted([trial(2, 0.98, 50.0, spread=0.1), trial(3, 0.9, 20.0)], PLAN, self.best)
        assert (tie.accepted, win.accepted) == (False, True)

    def test_nothing_is_more_exact_than_the_float_model(self) -> None:
        (told,) = accepted([trial(2, 0.98, 99.0, spread=0.1)], PLAN)
        assert not told.accepted


# ---------------------------------------------------------------- whether a file may ship


def at(ratio: float, threads: int = 1, spread: float = 0.02) -> Compared:
    """A file that takes this share of the other one's time, known by so much."""
    return Compared(Ratio(ratio, ratio - spread, ratio + spread), 1.0, ratio, threads)


def tried(verdict: AttemptVerdict, number: int = 0) -> Attempt:
    placement = Placement.of([Edge("t", f"n{number}", 0)]) if number else Placement()
    return Attempt(placement, (InContext(at(0.5)),), verdict)


PAIRS = Placement.of([Edge("t", "n1", 0)])
PLACEMENTS = tuple(Placement.of([Edge("t", f"n{number}", 0)]) for number in range(1, 6))


@pytest.mark.parametrize(
    ("ends", "proven"),
    [
        ([(0.5, 0.4, 0.6), (0.9, 0.8, 0.95)], True),
        ([(0.5, 0.4, 0.6), (1.0, 0.98, 1.02)], True),
        ([(1.0, 0.98, 1.02), (0.5, 0.4, 0.6)], True),
        ([(0.5, 0.4, 0.6), (1.06, 1.02, 1.1)], False),
        ([(0.5, 0.4, 0.6), (1.06, 0.9, 1.2)], False),
        ([(1.0, 0.98, 1.02), (0.99, 0.97, 1.01)], False),
    ],
)
def test_a_file_is_proven_if_it_is_slower_in_no_context_and_faster_in_one(
    ends: list[tuple[float, float, float]], proven: bool
) -> None:
    contexts = [Compared(Ratio(*e), 1.0, e[0], 2**n) for n, e in enumerate(ends)]
    assert is_proven(contexts) == proven
    if proven:
        assert first_faster(contexts).ratio.verdict == "faster"


@pytest.mark.parametrize(
    ("placement", "contexts", "terms", "verdict"),
    [
        (PAIRS, [InContext(at(0.5))], Terms(), "ships"),
        (PAIRS, [InContext(at(1.0))], Terms(), "not faster"),
        (PAIRS, [InContext(at(0.5)), InContext(at(1.5, 4))], Terms(), "slower elsewhere"),
        (PAIRS, [InContext(at(1.5))], Terms(), "not faster"),
        (PAIRS, [InContext(at(1.0), at(0.5))], Terms(beats_given=True), "not faster than given"),
        (PAIRS, [InContext(at(1.0), at(0.5))], Terms(), "ships"),
        (PAIRS, [InContext(at(0.9), at(0.5))], Terms(beats_given=True), "ships"),
        (PAIRS, [InContext(at(0.9), at(0.5)), InContext(at(1.2, 4), at(0.5))], Terms(True), "not faster than given"),
        (PAIRS, [InContext(Failure("build", "no"), at(0.5))], Terms(beats_given=True), "ships"),
        (Placement(), [InContext(at(0.5))], Terms(), "is float"),
        (Placement(), [InContext(at(0.5))], Terms(is_rewritten=True), "ships"),
        (Placement(), [InContext(at(1.0))], Terms(is_rewritten=True), "not faster"),
    ],
)
def test_the_verdict_on_a_file_that_may_ship(
    placement: Placement, contexts: list[InContext], terms: Terms, verdict: str
) -> None:
    assert verdict_of(placement, contexts, terms) == verdict


def test_pairs_are_compared_with_none_only_where_rewrites_may_have_gained_as_much() -> None:
    attempt = replace(tried("ships", 1), contexts=(InContext(at(0.5)),))
    assert may_owe_it_to_rewrites(attempt, Terms(is_rewritten=True, rewrites_ratio=0.52))
    assert not may_owe_it_to_rewrites(attempt, Terms(is_rewritten=True, rewrites_ratio=0.9))
    assert not may_owe_it_to_rewrites(attempt, Terms(rewrites_ratio=0.52))
    assert not may_owe_it_to_rewrites(replace(attempt, placement=Placement()), Terms(is_rewritten=True))
    assert with_comparison_without_pairs(attempt, at(0.9)).verdict == "ships"
    assert with_comparison_without_pairs(attempt, at(1.0)).verdict == "pairs do not pay"


# ---------------------------------------------------------------- which files are tried, and which ships


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], 1),
        (["not faster"], 2),
        (["not faster", "not faster"], 0),
        (["not faster", "slower elsewhere"], 3),
        (["slower elsewhere", "not faster", "not faster", "not faster"], 5),
        (["slower elsewhere"] * 5, 0),
        (["pairs do not pay"], 0),
        (["ships"], None),
    ],
)
def test_the_next_file_depends_on_what_became_of_those_before(verdicts: list[Any], expected: int | None) -> None:
    queue = Finalists(PLACEMENTS, first=2)
    attempts = [tried(verdict, number) for number, verdict in enumerate(verdicts, 1)]
    found = next_finalist(queue, attempts, lacks_time=False)
    assert found == (None if expected is None else PLACEMENTS[expected - 1] if expected else Placement())
    if expected == 0:  # the float model is tried last, whatever comes of it
        for verdict in ("is float", "not faster", "slower elsewhere"):
            assert next_finalist(queue, [*attempts, tried(cast(Any, verdict))], lacks_time=False) is None
        assert next_finalist(replace(queue, tries_float=False), attempts, lacks_time=False) is None


def test_without_time_only_the_first_file_is_tried() -> None:
    queue = Finalists(PLACEMENTS, first=2)
    assert next_finalist(queue, [], lacks_time=True) == PLACEMENTS[0]
    assert next_finalist(queue, [tried("not faster", 1)], lacks_time=True) is None
    assert next_finalist(Finalists(), [], lacks_time=True) is None


def test_after_a_file_that_misses_the_limits_the_next_one_is_tried() -> None:
    queue = Finalists(PLACEMENTS, first=1)
    refused = within_limits(tried("ships", 1), trial(1, 0.5, 30.0, holds=False), "the metric is 0")
    assert (refused.verdict, refused.missed) == ("misses the limits", "the metric is 0")
    assert shipped([refused]) is None
    assert next_finalist(queue, [refused], lacks_time=False) == PLACEMENTS[1]
    unmeasured = within_limits(tried("ships", 1), trial(1, 0.5, 30.0, holds=None), None)
    assert unmeasured.verdict == "misses the limits"
    assert within_limits(tried("ships", 1), trial(1, 0.5, 30.0), None) == tried("ships", 1)


def test_finalists_are_what_was_accepted_last_and_then_the_fastest_that_hold_the_limits() -> None:
    def of(number: int, ratio: float, **how: Any) -> Trial:
        return replace(trial(number, ratio, 30.0, **how), against=Placement())

    first, second, third = (replace(of(n, r), accepted=True) for n, r in ((1, 0.9), (2, 0.8), (3, 0.7)))
    fast, inaccurate, slow = of(4, 0.5), of(5, 0.4, holds=False), of(6, 0.99)
    history = [first, second, third, fast, inaccurate, slow]
    found = finalists(history, PLAN, is_bounded=False, tries_float=True)
    assert (found.placements, found.first) == (tuple(t.placement for t in (third, second, fast, first)), 2)
    assert finalists(history, PLAN, is_bounded=True, tries_float=True).first == 1
    assert finalists([], PLAN, is_bounded=True, tries_float=True) == Finalists(tries_float=False)


def test_pairs_that_do_not_pay_ship_where_the_rewritten_float_model_did_not_prove_itself() -> None:
    even = tried("pairs do not pay", 1)
    assert shipped([even, tried("not faster")]) == even
    assert shipped([even, tried("ships")]) == tried("ships")
    assert shipped([tried("not faster", 1), tried("is float")]) is None


@pytest.mark.parametrize(
    ("ratio", "terms", "from_qdq", "pairs_hold", "expected"),
    [
        (1.0, Terms(), False, False, False),
        (1.1, Terms(), False, False, True),
        (1.0, Terms(is_rewritten=True), False, False, True),
        (1.1, Terms(), True, False, False),
        (1.0, Terms(), True, True, True),
    ],
)
def test_the_users_file_is_kept_where_nothing_is_proven(
    ratio: float, terms: Terms, from_qdq: bool, pairs_hold: bool, expected: bool
) -> None:
    attempts = [replace(tried("is float"), contexts=(InContext(at(ratio)),))]
    assert keeps_given(attempts, terms, from_qdq=from_qdq, pairs_hold=pairs_hold) == expected
    assert keeps_given([], terms, from_qdq=from_qdq, pairs_hold=pairs_hold) == (pairs_hold or terms.is_rewritten)


def test_the_time_of_the_users_file_follows_from_a_file_that_was_compared_with_both() -> None:
    refused = InContext(Failure("build", "no"), at(0.5))
    both = InContext(at(0.8), at(0.6))  # 0.8 of the user's time, 0.6 of the float model's
    attempts = [
        replace(tried("not faster", number), contexts=(context,)) for number, context in ((1, both), (2, refused))
    ]
    assert given_to_float(attempts) == pytest.approx(0.75)
    assert given_to_float([tried("is float")]) == 1.0  # the user's file is the float model
    assert given_to_float(attempts[1:]) is None
    assert given_to_float([]) is None


def test_times_agree_with_the_ratio_where_the_machine_drifts() -> None:
    """Both models take ten times as long in the last round, and b runs in it twice: the medians alone would mislead."""
    rounds = Measurement((1.0, 1.0, 10.0, 10.0), (0.9, 9.0, 9.0, 9.0))
    found = Compared.of([rounds, rounds], Plan((2,)))
    assert found.b_seconds / found.a_seconds == pytest.approx(found.ratio.median)


FAST, SLOW = Compared(Ratio(0.5, 0.4, 0.625), 1.0, 0.5, 1), Compared(Ratio(2.0, 1.6, 2.5), 1.0, 2.0, 4)
IT = "a candidate of 1 edges"


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        ("ships", None),
        ("is float", None),
        ("pairs do not pay", f"{IT} did not prove more than its rewrites: 0.50x [0.40x, 0.62x] the speed without"),
        (
            "slower elsewhere",
            f"{IT} is no gain where it may run: 2.00x [1.60x, 2.50x] the speed of float at 1 thread, but 0.50x "
            "[0.40x, 0.62x] at 4 threads",
        ),
        ("not faster than given", f"{IT} did not prove faster than m.onnx: 0.50x"),
        ("not faster", f"{IT} did not prove faster on fresh builds: 2.00x [1.60x, 2.50x] the speed of float"),
    ],
)
def test_why_a_file_did_not_ship(verdict: AttemptVerdict, note: str | None) -> None:
    contexts = InContext(FAST), InContext(SLOW)
    notes = list(notes_of(Attempt(Placement.of([Edge("t", "n", 0)]), contexts, verdict, SLOW), "m.onnx", ""))
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_a_users_file_that_the_engine_does_not_run_is_told() -> None:
    attempt = Attempt(Placement(), (InContext(Failure("build", "no kernel"), FAST),), "ships")
    (note,) = notes_of(attempt, "m.onnx", "")
    assert note == "the engine does not run m.onnx as it is, so it was not compared: no kernel"


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


def test_a_result_that_proves_nothing_is_told_with_what_would_decide_it() -> None:
    assert unproven(Ratio(0.8, 0.7, 1.1)).startswith("1.25x [0.91x, 1.43x] the speed of float; a quieter")
    assert unproven(Ratio(2.0, 1.9, 2.1)) == "0.50x [0.48x, 0.53x] the speed of float"
