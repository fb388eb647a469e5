"""An observer that shows the progress of a command: lines, and on a terminal a status line below them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qdqtune.cli.command import Terminal
from qdqtune.cli.output import console, say_notes, with_flags
from qdqtune.explanation.formatting import ORIGINS, became_in_words, counted, duration
from qdqtune.numerics.accuracy import decibels
from qdqtune.search.costs.rule_costs import left_nodes
from qdqtune.search.regions.patterns import Pattern
from qdqtune.timing.ratios import speed
from qdqtune.tuning.observer import State
from qdqtune.types import CostsByRule, Trial

O = TypeVar("O")  # noqa: E741
R = TypeVar("R", bound=Any)

LINE_SECONDS = 10.0
"""Seconds between two lines about how far a stage is. Chosen, not measured."""


def shown(*, quiet: bool = False, verbose: bool = False) -> Progress:
    """An observer that prints progress: nothing if `quiet`, lines only if `verbose` or without a terminal."""
    here = console(is_error=True, quiet=quiet)
    return Progress(here, is_moving=here.is_terminal and not here.is_dumb_terminal and not verbose)


def run(command: Callable[[O, Progress], R], options: O, terminal: Terminal) -> R:
    """Run a command with progress on the terminal, and print its notes. In its result, options are spelled as flags."""
    with shown(quiet=terminal.quiet, verbose=terminal.verbose) as observer:
        done = command(options, observer)
    if done.notes:
        done = replace(done, notes=tuple(map(with_flags, done.notes)))
        say_notes(done.notes)
    return done


class Progress:
    """Prints a line for each note and each candidate. Stages are lines, too; with `is_moving` they share a status line
    at the bottom of the terminal, which vanishes at the end. A context manager."""

    def __init__(self, console: Console, *, is_moving: bool) -> None:
        self._console = console
        self._stage, self._steps = "starting", ""
        self._started = self._begun = self._said = time.monotonic()
        self._ends: float | None = None
        self._explained = set[str]()
        self._live: Live | None = None
        if is_moving:
            self._spinner = Spinner("dots")
            self._live = Live(
                get_renderable=self._picture,
                console=console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, text: str) -> None:
        self._stage, self._steps, self._ends = text, "", None
        self._begun = time.monotonic()
        if self._live is None:
            self._say(text)

    def progress(self, done: int, total: int | None) -> None:
        """Show how far the stage is; as a line only if nothing was printed for `LINE_SECONDS`."""
        self._steps = f"{done} so far" if total is None else f"{done} of {total}"
        if done and total is not None:
            self._ends = self._begun + (time.monotonic() - self._begun) * total / done
        if self._live is None and time.monotonic() - self._said >= LINE_SECONDS:
            left = self._left()
            self._say(f"{self._stage}: {self._steps}{left and f', {left}'}")

    def note(self, text: str) -> None:
        self._say(f"note: {with_flags(text)}")

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        self._say(f"patterns: {len(tuned)}, in {sum(len(pattern.instances) for pattern in tuned)} regions")

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self._steps = f"{state.builds} of {state.limit} builds"
        self._ends = None if state.seconds_left is None else time.monotonic() + state.seconds_left
        origin = trial.proposal.origin
        self._say(line(trial, outcome, state, is_new=origin not in self._explained))
        self._explained.add(origin)

    def _left(self) -> str:
        return "" if self._ends is None else f"about {duration(max(0.0, self._ends - time.monotonic()))} left"

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=self._live is None)

    def _picture(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        stage = Text(self._stage, no_wrap=True, overflow="ellipsis")
        row.add_row(self._spinner, stage, self._steps, duration(time.monotonic() - self._started), self._left())
        return row


def line(trial: Trial, outcome: str, state: State, *, is_new: bool = False) -> str:
    """A candidate in one line: builds used, the best speed so far, the candidate's name (with an explanation if
    `is_new`), its speed or costs, and the outcome."""
    counts = f"{trial.number:4}  {state.builds:>{len(str(state.limit))}}/{state.limit} builds"
    best = f"  best {speed(state.best_ratio)}" if state.timed else ""
    proposal, figures = trial.proposal, list[str]()
    if isinstance(trial.result, CostsByRule):
        wide, left = len({edge.tensor for edge in trial.placement.wide}), len(left_nodes(trial.layers or ()))
        figures += [f"{counted(left, 'node')} elsewhere", f"{counted(wide, 'tensor')} read in 16 bits"]
        figures.append(decibels(trial.sqnr_db) if state.judged else "accuracy not measured")
    elif state.ratio is not None:
        figures.append(state.ratio.speedup)
        figures += [] if trial.metric is None else [f"metric {trial.metric:g}"]
    became = became_in_words(trial, outcome, is_best=state.best == trial.placement, missed=state.missed)
    where = f" in pattern {proposal.pattern[:8]}" if proposal.pattern else ""
    source = ", from the state file" if state.replayed else ""
    meaning = ORIGINS.get(proposal.origin) if is_new else None
    named = f"{proposal.origin} ({meaning})" if meaning else proposal.origin
    return f"{counts}{best}  {named}{where}: {', '.join([*figures, became])}{source}"
