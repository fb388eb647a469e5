"""What a run tells while it goes on. `report` shows it to people; tests and embedders may ignore it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qdqtune.types import Placement, Trial


@dataclass(frozen=True)
class State:
    """Where a run stands after a trial: builds spent and allowed, and best/float as the accepted ratios multiply."""

    builds: int
    limit: int
    best_ratio: float
    best: Placement
    seconds: float
    seconds_left: float | None
    replayed: bool


class Observer(Protocol):
    """Receives the stages and trials of a run, in order."""

    def stage(self, text: str) -> None:
        """A new stage begins."""

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """A candidate was measured (or found in the state of an earlier run)."""


class Silent:
    """An observer that says nothing."""

    def stage(self, text: str) -> None:
        """Ignore it."""

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Ignore it."""


class Several:
    """Observers that hear the same, one after the other."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def stage(self, text: str) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.stage(text)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.trial(trial, outcome, state)
