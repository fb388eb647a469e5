"""Observers that show the progress of a command: a changing display on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live as Display
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qdqtune.cli.output import EVENTS, Event, console, emit, with_flags
from qdqtune.explanation.formatting import counted, duration
from qdqtune.numerics.accuracy import decibels
from qdqtune.search.costs.rule_costs import left_nodes
from qdqtune.search.regions.patterns import Pattern
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import speed
from qdqtune.tuning.observer import State
from qdqtune.types import CostsByRule, Trial

BAR_WIDTH = 24
"""Width of a bar, in characters."""

LINE_SECONDS = 10.0
"""Seconds between two lines about how far a stage is. Chosen, not measured."""


def shown(*, quiet: bool = False, verbose: bool = False) -> Live | Plain:
    """An observer that shows progress: a few changing lines on a terminal; plain lines elsewhere, or with `verbose`."""
    here = console(is_error=True, quiet=quiet)
    is_moving = here.is_terminal and not here.is_dumb_terminal and not verbose and EVENTS not in os.environ
    return Live(here) if is_moving else Plain(here)


class _Steps:
    """Progress of the current stage, and an estimate of the time left."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self._begun = self._updated = time.monotonic()

    def take(self, done: int, total: int | None) -> None:
        """Set the number of steps that are done."""
        self.done, self.total, self._updated = done, total, time.monotonic()

    @property
    def left(self) -> float | None:
        """Seconds left at the pace so far; None if unknown."""
        if not self.done or self.total is None:
            return None
        pace = (self._updated - self._begun) / self.done
        return max(0.0, pace * (self.total - self.done) - (time.monotonic() - self._updated))

    def __str__(self) -> str:
        return f"{self.done} of {self.total}" if self.total is not None else f"{self.done} so far"


class Live:
    """A display of a few changing lines on a terminal. A context manager; the display vanishes at its end.

    It shows the stage, its progress and the time; during a search also builds, the best candidate so far, the time left
    and the last candidate. A line for each candidate stays on the screen.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._updated = time.monotonic()
        self._stage = "starting"
        self._steps = _Steps()
        self._spinner = Spinner("dots")
        self._state: State | None = None
        self._searching = False
        self._last = self._best = self._speed = ""
        self._display = Display(
            get_renderable=self._picture, console=console, refresh_per_second=8, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._display.stop()

    def stage(self, text: str) -> None:
        """Show another stage."""
        self._stage, self._searching, self._steps = text, False, _Steps()

    def progress(self, done: int, total: int | None) -> None:
        """Show how far the stage is."""
        self._steps.take(done, total)

    def note(self, text: str) -> None:
        """Print the note above the display."""
        self._print(f"note: {with_flags(text)}")

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        """Print how many there are above the display."""
        self._print(counts_of(tuned))

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Print a line about the candidate, and show it as the last one."""
        self._updated = time.monotonic()
        self._state, self._searching = state, True
        self._speed = _best_text(state)
        self._last = f"{name(trial)}: {outcome_text(trial, outcome, state)}"
        if state.best and state.best == trial.placement:
            self._best = f" ({name(trial)})"
        self._print(line(trial, outcome, state))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _picture(self) -> RenderableType:
        now = time.monotonic()
        cells: list[RenderableType] = [self._spinner, Text(self._stage, no_wrap=True, overflow="ellipsis")]
        below: list[str] = []
        state, left = self._state, self._steps.left
        if state is not None and self._speed:
            below.append(f"  best so far: {self._speed} the speed of float{self._best}")
        if state is not None and self._searching:
            below.append(f"  last: {self._last}")
            cells += [ProgressBar(state.limit, state.builds, BAR_WIDTH), f"{state.builds} of {state.limit} builds"]
            left = state.seconds_left and max(0.0, state.seconds_left - (now - self._updated))
        elif self._steps.done:
            bar = [] if self._steps.total is None else [ProgressBar(self._steps.total, self._steps.done, BAR_WIDTH)]
            cells += [*bar, str(self._steps)]
        cells.append(duration(now - self._started))
        if left is not None:
            cells.append(f"about {duration(left)} left")
        head = Table.grid(padding=(0, 2))
        head.add_row(*cells)
        return Group(head, *(Text(text, no_wrap=True, overflow="ellipsis") for text in below))


class Plain:
    """Progress as lines, for logs and pipes. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._steps = _Steps()
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def stage(self, text: str) -> None:
        """Print the stage."""
        self._stage, self._steps = text, _Steps()
        self._say(text)

    def progress(self, done: int, total: int | None) -> None:
        """Print how far the stage is, if nothing was printed for `LINE_SECONDS`."""
        self._steps.take(done, total)
        if time.monotonic() - self._said >= LINE_SECONDS:
            left = "" if self._steps.left is None else f", about {duration(self._steps.left)} left"
            self._say(f"{self._stage}: {self._steps}{left}")

    def note(self, text: str) -> None:
        """Print the note."""
        self._say(f"note: {with_flags(text)}", "note")

    def patterns(self, tuned: Sequence[Pattern]) -> None:
        """Print how many there are."""
        self._say(counts_of(tuned))

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Print a line about the candidate."""
        builds, short = f"{state.builds}/{state.limit}", f"{name(trial)}: {outcome_text(trial, outcome, state)}"
        self._emit(Event("line", line(trial, outcome, state), short, builds, _best_text(state)))

    def _say(self, text: str, kind: Literal["line", "note"] = "line") -> None:
        self._emit(Event(kind, text))

    def _emit(self, event: Event) -> None:
        self._said = time.monotonic()
        if not self._console.quiet:
            emit(event, partial(self._console.print, highlight=False, soft_wrap=True, markup=False))


def counts_of(tuned: Sequence[Pattern]) -> str:
    """How many patterns region mode tunes, on which the time of a search depends, and in how many regions."""
    return f"patterns: {len(tuned)}, in {sum(len(pattern.instances) for pattern in tuned)} regions"


def name(trial: Trial) -> str:
    """The name of a candidate: its origin and pattern."""
    where = f" in pattern {trial.proposal.pattern[:8]}" if trial.proposal.pattern else ""
    return trial.proposal.origin + where


def outcome_text(trial: Trial, outcome: str, state: State) -> str:
    """The result of a candidate: its speed against the float model with the interval, and whether it is taken."""
    if failed := failure(trial):
        return f"failed: {failed.reason}"
    if isinstance(trial.result, CostsByRule):
        return _by_rule_text(trial, outcome, state)
    assert state.ratio is not None  # it was measured
    metric = "" if trial.metric is None else f", metric {trial.metric:g}"
    return f"{state.ratio.speedup_beside(state.against_ratio)}{metric}, {_verdict(trial, outcome, state)}"


def _by_rule_text(trial: Trial, outcome: str, state: State) -> str:
    """The result of a candidate that was not timed: nodes elsewhere, tensors in 16 bits, accuracy, and whether it is
    taken."""
    wide, left = len({edge.tensor for edge in trial.placement.wide}), len(left_nodes(trial.layers or ()))
    exact = decibels(trial.sqnr_db) if state.judged else "accuracy not measured"
    facts = f"{counted(left, 'node')} elsewhere, {counted(wide, 'tensor')} read in 16 bits, {exact}"
    if outcome == "inaccurate":
        return f"{facts}, not taken: {state.missed or 'too inaccurate'}"
    is_best = state.best == trial.placement
    return f"{facts}, {'the cheapest by rule so far' if is_best else 'not taken: not cheaper by rule than the best'}"


def _best_text(state: State) -> str:
    """The speed of the best candidate so far; empty where nothing is timed."""
    return speed(state.best_ratio) if state.timed else ""


def _verdict(trial: Trial, outcome: str, state: State) -> str:
    rival = "float" if not trial.against else f"the best's {speed(state.against_ratio)}"
    match outcome:
        case "slower":
            return f"slower than {rival}"
        case "inaccurate":
            assert state.ratio is not None
            slow = "" if state.ratio.median < state.against_ratio else f"not any faster than {rival}; "
            return f"not taken: {slow}{state.missed or 'too inaccurate'}"
        case "undecided" if state.best == trial.placement:
            return f"as fast as {rival} within noise, and more exact: the best so far"
        case "undecided":
            assert state.ratio is not None
            clearly = "clearly" if state.ratio.median < state.against_ratio else "any"
            return f"not taken: not {clearly} faster than {rival}"
    if state.best == trial.placement:
        return f"faster than {rival}: the best so far"
    if state.ratio is not None and state.best_ratio <= state.ratio.median:
        return "not taken: another of this batch is faster"
    return "not taken: as fast as another of this batch within noise, which is more exact"


def line(trial: Trial, outcome: str, state: State) -> str:
    """The line that is printed about a candidate."""
    source = ", from the state file" if state.replayed else ""
    counts = f"{trial.number:4}  {state.builds:>{len(str(state.limit))}}/{state.limit} builds"
    best = f"  best {told}" if (told := _best_text(state)) else ""
    return f"{counts}{best}  {name(trial)}: {outcome_text(trial, outcome, state)}{source}"
