"""What a call tells while it goes on: to the log, to a notebook or terminal if asked, to the caller's own observer.

The logger is `qdqtune`, silent unless the program configures it. Stages and candidates are of level INFO, in the lines
of the command line's `-v`; notes about a result are of level WARNING.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rich.console import Console

from qdqtune.cli import progress as lines
from qdqtune.engines.process import looking
from qdqtune.tuning.observer import Cancel, Observer, Several, Silent, State, check_cancel
from qdqtune.types import Trial

LOGGER = logging.getLogger("qdqtune")
LOGGER.addHandler(logging.NullHandler())


class _Log(Silent):
    """Lines of progress as records of the log."""

    def stage(self, text: str) -> None:
        LOGGER.info("%s", text)

    def note(self, text: str) -> None:
        LOGGER.warning("%s", text)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        LOGGER.info("%s", lines.line(trial, outcome, state).strip())


@contextmanager
def telling(observer: Observer | None, progress: bool, cancel: Cancel | None) -> Iterator[Observer]:
    """All who hear of a call. What is shown of its progress vanishes at the end, or stays as lines."""
    heard: list[Observer] = [_Log()] if observer is None else [_Log(), observer]
    with ExitStack() as stack:
        stack.enter_context(cancellable(cancel))
        if progress:
            shown = _shown()
            stack.enter_context(shown)
            heard.insert(0, shown)
        yield Several(heard, cancel)


@contextmanager
def cancellable(cancel: Cancel | None) -> Iterator[None]:
    """End waits for the engine when that is asked for.

    Raises:
        Cancelled: it is, or was before.
    """
    if cancel is None:
        yield
        return
    check_cancel(cancel)
    with looking(partial(check_cancel, cancel)):
        yield


def _shown() -> lines.Live | lines.Plain:
    """A picture that changes, on a terminal, and in a notebook that has ipywidgets; lines elsewhere."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return lines.Live(console) if importlib.util.find_spec("ipywidgets") else lines.Plain(console)
    return lines.shown()


def tell_notes(notes: Iterable[str]) -> None:
    """Notes about a result to the log."""
    for note in notes:
        LOGGER.warning("%s", note)
