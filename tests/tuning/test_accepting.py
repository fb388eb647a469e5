"""Which trial of a batch is taken, and what a run shows of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqtune.timing.ratios import Plan
from qdqtune.tuning.accepting import accepted
from qdqtune.tuning.loop import tune
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial
from runs import mixed, settings, write

PLAN = Plan((12,), slot_seconds=0.0)
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


@pytest.mark.usefixtures("workers")
def test_what_ships_stands_among_what_nothing_beats_and_each_has_a_name(tmp_path: Path) -> None:
    rows = tune(settings(write(mixed(), tmp_path), mode="cut", builds=12)).summary["met"]
    assert [row["shipped"] for row in rows].count(True) == 1
    assert len({row["name"] for row in rows}) == len({row["number"] for row in rows}) == len(rows)
    assert [row["ratio"] for row in rows] == sorted(row["ratio"] for row in rows)
