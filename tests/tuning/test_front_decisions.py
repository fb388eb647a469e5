"""Which candidates of a front are compared further, which become points, and which ships: decided from values alone."""

from typing import Any

import pytest

from qdqtune.errors import Failure
from qdqtune.search.front import Tradeoff, unbeaten
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.front import ProvenPoint, shipped_point
from qdqtune.tuning.front_candidates import (
    FrontCandidate,
    FrontTerms,
    has_builds_for_another,
    judged,
    may_ship,
    promising,
    to_compare_again,
)
from qdqtune.tuning.shipping import Compared
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial

TERMS = FrontTerms(Plan((12,), turn_seconds=0.0), Limits(min_sqnr=30.0), builds=20)
FAILED = Failure("build", "no kernel")


def rounds(ratio: float, spread: float = 0.0) -> Measurement:
    """`spread`: half of the rounds are as much slower, half as much faster."""
    return Measurement((1.0,) * 12, tuple(ratio * (1 + (spread if i % 2 else -spread)) for i in range(12)))


def trial(number: int, db: float) -> Trial:
    placement = Placement.of([Edge("t", f"n{number}", 0)]) if number else Placement()
    return Trial(number, Proposal("", placement), Placement(), rounds(0.5), accuracy=Accuracy(db))


def candidate(number: int, db: float, *measured: Measurement | Failure, terms: FrontTerms = TERMS) -> FrontCandidate:
    return judged(trial(number, db), Tradeoff(0.3, 25.0), measured, terms, is_new=True)


def point(number: int, ratio: float, db: float, **how: Any) -> ProvenPoint:
    compared = Compared(Ratio(ratio, ratio - 0.01, ratio + 0.01), 1.0, ratio)
    return ProvenPoint(trial(number, db), (compared,), **{"pairs": 2, "holds": True, **how})


def test_a_candidate_lies_where_its_builds_show_it_beside_the_float_model_of_the_search() -> None:
    terms = FrontTerms(TERMS.plan, TERMS.limits, builds=20, rewrites_ratio=0.5)
    fast = candidate(1, 40.0, rounds(0.4), rounds(0.4), terms=terms)
    assert fast.tradeoff == Tradeoff(pytest.approx(0.8), 40.0)
    assert (fast.is_faster, fast.is_slower, fast.is_obvious, fast.is_exact) == (True, False, True, True)
    assert fast.taken == (fast.tradeoff,)
    slow = candidate(2, 20.0, rounds(1.2))
    assert (slow.is_faster, slow.is_slower, slow.is_exact) == (False, True, False)
    assert slow.taken == (slow.tradeoff, slow.expected)
    failed = candidate(3, 40.0, rounds(0.4), FAILED)
    assert (failed.seems, failed.tradeoff, failed.is_slower) == (None, failed.expected, True)


def test_beaten_candidates_are_not_promising_unless_the_users_metric_took_them() -> None:
    fast, beaten, exact, slow = (
        candidate(n, db, rounds(r)) for n, r, db in ((1, 0.5, 40.0), (2, 0.6, 35.0), (3, 0.9, 60.0), (4, 1.1, 90.0))
    )
    assert promising([fast, beaten, exact, slow], None) == [fast, exact]
    assert promising([fast, beaten, exact, slow], beaten.placement) == [fast, beaten, exact]


def test_what_may_ship_is_about_as_fast_as_the_fastest_that_holds_the_limits() -> None:
    inaccurate, fastest, near, far = (
        candidate(n, db, rounds(r)) for n, r, db in ((1, 0.4, 20.0), (2, 0.5, 40.0), (3, 0.52, 50.0), (4, 0.7, 60.0))
    )
    assert may_ship([inaccurate, fastest, near, far]) == [fastest, near]
    assert may_ship([inaccurate]) == []


def test_what_may_ship_is_compared_again_first_and_only_as_far_as_builds_are_left() -> None:
    ships, close = candidate(1, 40.0, rounds(0.5)), candidate(2, 60.0, rounds(0.97))
    candidates = [close, ships]
    assert to_compare_again(candidates, TERMS, 1, 2, spent=0, to_open=1) == [ships, close]
    assert to_compare_again(candidates, TERMS, 1, 2, spent=18, to_open=1) == [ships]
    assert to_compare_again(candidates, TERMS, 1, 2, spent=19, to_open=1) == []
    assert to_compare_again(candidates, TERMS, 2, 4, spent=0, to_open=0) == []  # neither has two pairs


def test_builds_are_kept_for_what_others_still_need() -> None:
    assert has_builds_for_another([], TERMS, spent=16, to_open=2)
    assert not has_builds_for_another([], TERMS, spent=17, to_open=2)
    ships = candidate(1, 40.0, rounds(0.5))
    assert has_builds_for_another([ships], TERMS, spent=17, to_open=0)
    assert not has_builds_for_another([ships], TERMS, spent=18, to_open=0)  # it needs a second pair
    inaccurate = candidate(1, 20.0, rounds(0.5), rounds(0.5))
    assert not has_builds_for_another([inaccurate], TERMS, spent=15, to_open=0)  # the usual proof takes four


def test_a_front_holds_what_nothing_beats_the_fastest_first() -> None:
    fast, beaten, exact = point(1, 0.5, 30.0), point(2, 0.6, 25.0), point(3, 0.8, 50.0)
    assert unbeaten([exact, beaten, fast]) == (fast, exact)


def test_the_fastest_point_that_holds_ships_or_the_most_exact_that_is_as_fast() -> None:
    inaccurate, fast, exact = point(1, 0.4, 20.0, holds=False), point(2, 0.5, 35.0), point(3, 0.504, 45.0)
    slower, once = point(4, 0.8, 60.0), point(5, 0.45, 33.0, pairs=1)
    assert shipped_point([inaccurate, once, fast, exact, slower]) == exact
    assert shipped_point([inaccurate, fast, slower]) == fast
    assert shipped_point([inaccurate, once]) is None
