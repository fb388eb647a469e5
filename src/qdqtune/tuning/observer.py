"""Events during a run: stages, progress, trials and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qdqtune.engines.execution import raise_if_cancelled
from qdqtune.search.regions.patterns import Pattern
from qdqtune.timing.ratios import Ratio
from qdqtune.types import Listener, Placement, Trial

SEARCHING = "searching"
"""The stage in which candidates are measured; others, such as measuring noise, may come in between."""


@dataclass(frozen=True)
class State:
    """The progress of a run after a trial.

    `builds` were made and `limit` are allowed, the float model's included. `best_ratio` is the latency of the best
    placement divided by float's, the product of the accepted ratios. `seconds_left` is an estimate for the whole run,
    proof included. `replayed`: the trial was read from the state file. `ratio` is the trial's latency divided by
    float's, None if it failed. `missed` names the accuracy limit that it misses, if any. `timed` is False on a
    simulator, where costs are estimated; `judged` is False where inputs are random, so that accuracy is unknown.
    """

    builds: int
    limit: int
    best_ratio: float
    best: Placement
    seconds: float
    seconds_left: float | None
    replayed: bool
    ratio: Ratio | None = None
    missed: str | None = None
    timed: bool = True
    judged: bool = True


class Observer(Listener, Protocol):
    """Receives the events of a run, in order, in the run's thread. An exception raised here ends the run; all that was
    measured is kept. Subclasses implement the methods that they need."""

    def note(self, text: str) -> None:
        return

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        """Region mode starts to tune these patterns."""
        return

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """A candidate was measured, or read from the state file."""
        return


class Silent(Observer):
    """An observer that ignores every event."""


class Observers:
    """Passes events on to those of several observers that have a method for them. Raises once the call is cancelled."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def _pass_on(self, what: str, *arguments: object) -> None:
        for observer in self._observers:
            getattr(observer, what, lambda *_: None)(*arguments)
        raise_if_cancelled()

    def stage(self, text: str) -> None:
        self._pass_on("stage", text)

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        self._pass_on("patterns", tuned)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self._pass_on("trial", trial, outcome, state)

    def progress(self, done: int, total: int | None) -> None:
        self._pass_on("progress", done, total)

    def note(self, text: str) -> None:
        self._pass_on("note", text)
