"""What people see: progress while a run goes on, and tables at its end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qdqtune.comparing import Row
from qdqtune.observer import State
from qdqtune.timing import Ratio
from qdqtune.tune import Estimate, Result
from qdqtune.types import Failure, Trial


class Live:
    """Progress on a terminal: stage, best so far, builds, time left. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def stage(self, text: str) -> None:
        """See `Observer`."""
        self._progress.update(self._task, description=text)

    def trial(self, trial: Trial, verdict: str, state: State) -> None:
        """See `Observer`."""
        left = "" if state.seconds_left is None else f", at most {_duration(state.seconds_left)} left"
        note = f"best {_speedup(state.best_ratio)}{left}"
        self._progress.update(self._task, description="searching", completed=state.builds, total=state.limit, note=note)
        if verdict in ("faster", "failed"):
            self._console.print(_trial_line(trial, verdict, state), highlight=False)


class Plain:
    """Progress as lines, for logs and pipes. `quiet` leaves out what changed nothing."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def stage(self, text: str) -> None:
        """See `Observer`."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def trial(self, trial: Trial, verdict: str, state: State) -> None:
        """See `Observer`."""
        self._console.print(_trial_line(trial, verdict, state), highlight=False, soft_wrap=True)


def _trial_line(trial: Trial, verdict: str, state: State) -> str:
    where = f" on pattern {trial.proposal.pattern[:8]}" if trial.proposal.pattern else ""
    failure = trial.result if isinstance(trial.result, Failure) else trial.check
    said = f"failed: {failure.reason}" if isinstance(failure, Failure) else verdict
    source = " (from the state file)" if state.replayed else ""
    best = f", best so far {_speedup(state.best_ratio)}"
    return (
        f"  {trial.number:3} ({state.builds}/{state.limit} builds) {trial.proposal.origin}{where}: {said}{best}{source}"
    )


def result_table(result: Result) -> Table:
    """Latency before and after with its interval, pairs, output SQNR."""
    summary = result.summary
    table = Table(title=None, show_header=True, header_style="bold")
    for column in ("", "baseline", "final"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("latency, ms", f"{summary['baseline_ms']:.3f}", f"{summary['final_ms']:.3f}")
    table.add_row("final / baseline", "1", interval(result.ratio) if result.ratio else "1 (no improvement)")
    if result.ratio:
        table.add_row("speedup", "1x", _speedup(result.ratio.median))
    table.add_row("tensors with a Q/DQ pair", "0", str(summary["pairs"]))
    sqnr = summary["output_sqnr_db"]
    table.add_row("output SQNR, dB", "exact", "exact" if sqnr is None else f"{sqnr:.1f}")
    table.add_row(
        "search", "", f"{summary['trials']} candidates, {summary['builds']} builds, {_duration(summary['seconds'])}"
    )
    return table


def comparison_table(first: str, rows: Sequence[Row]) -> Table:
    """Every file against the first."""
    table = Table(title=f"against {first}", title_justify="left", header_style="bold")
    for column in ("file", "first, ms", "ms", "ratio [interval]", "verdict", "SQNR, dB"):
        table.add_column(column, justify="left" if column in ("file", "verdict") else "right")
    for row in rows:
        if row.ratio is None or row.ms is None or row.first_ms is None:
            table.add_row(row.file, "", "", "", f"failed: {row.reason}", "")
            continue
        sqnr = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        table.add_row(row.file, f"{row.first_ms:.3f}", f"{row.ms:.3f}", interval(row.ratio), row.verdict, sqnr)
    return table


def estimate_lines(estimate: Estimate) -> str:
    """What a run would do, in four lines."""
    return (
        f"regions: {estimate.regions}\npatterns: {estimate.patterns}\nbuilds: at most {estimate.builds}\n"
        f"time: about {_duration(estimate.seconds)} (float model: {estimate.latency * 1e3:.3f} ms)"
    )


def interval(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return str(ratio)


def _speedup(ratio: float) -> str:
    return f"{1 / ratio:.3f}x"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
