"""What a run tells while it goes on. `report` shows it to people; tests and embedders may ignore it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qdqtune.errors import Cancelled
from qdqtune.timing.ratios import Ratio
from qdqtune.types import Deaf, Listener, Placement, Trial

SEARCHING = "searching"
"""The stage in which candidates are measured; what a search has to find out on the way interrupts it."""


@dataclass(frozen=True)
class State:
    """Where a run stands after a trial: builds spent and allowed, the float model's among both, and best/float as the
    accepted ratios multiply.

    `seconds_left` are those of the whole run, proof included.
    `ratio` is the trial's own to the float model, None if it failed; `against_ratio` that of what it was compared with.
    """

    builds: int
    limit: int
    best_ratio: float
    best: Placement
    seconds: float
    seconds_left: float | None
    replayed: bool
    ratio: Ratio | None = None
    against_ratio: float = 1.0


class Cancel(Protocol):
    """What tells that a call is to end, set from another thread: a `threading.Event`, say."""

    def is_set(self) -> bool:
        """Whether it is."""
        ...


def check_cancel(cancel: Cancel) -> None:
    """End the call if that was asked for.

    Raises:
        Cancelled: it was.
    """
    if cancel.is_set():
        raise Cancelled("cancelled: what was measured is kept, and the same call goes on from there")


class Observer(Listener, Protocol):
    """Receives the stages and trials of a run, in order, in the thread that runs it. What it raises ends the run, and
    what was measured is kept. A subclass may leave out what it does not care for."""

    def note(self, text: str) -> None:
        """What the user should know at once."""
        return

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """A candidate was measured (or found in the state of an earlier run)."""
        return


class Silent(Deaf):
    """An observer that says nothing."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Ignore it."""


class Several:
    """Observers that hear the same, one after the other, until the call is cancelled; each of them what it has a method
    for."""

    def __init__(self, observers: Sequence[Observer], cancel: Cancel | None = None) -> None:
        self._observers, self._cancel = observers, cancel

    def _tell(self, what: str, *told: object) -> None:
        for observer in self._observers:
            getattr(observer, what, lambda *_: None)(*told)
        if self._cancel is not None:
            check_cancel(self._cancel)

    def stage(self, text: str) -> None:
        """See `Observer`."""
        self._tell("stage", text)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        self._tell("trial", trial, outcome, state)

    def progress(self, done: int, total: int | None) -> None:
        """See `Observer`."""
        self._tell("progress", done, total)

    def note(self, text: str) -> None:
        """See `Observer`."""
        self._tell("note", text)
