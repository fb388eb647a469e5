"""Processes of qdqtune that this process starts: one for each of several models, or one that Ray may end.

A child watches a pipe and ends when this process does. A child that tunes one of several models reports its events as
lines of JSON on its standard error (see `output.Event`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qdqtune.cli.command import command_line, is_quiet
from qdqtune.cli.output import EVENTS, Event, console, parsed_event, say
from qdqtune.cli.streams import INTERRUPTED, PARENT
from qdqtune.engines.allocation import NODE_LOST
from qdqtune.engines.devices import Device, leased, pinned
from qdqtune.engines.execution import Check, Checked
from qdqtune.engines.pool import WorkerPool
from qdqtune.errors import EngineUnavailable
from qdqtune.explanation.formatting import duration
from qdqtune.system.interpreter import end_group, python

LOOK_SECONDS = 0.1
"""Seconds between two checks whether a child has ended or the call is cancelled. Chosen, not measured."""
CLEANUP_SECONDS = 20.0
"""How long an interrupted child may take to clean up before it is killed. Chosen, not measured."""

DRIVER = "QDQTUNE_RAY_DRIVER"
"""The environment variable that marks the child which may use Ray."""

LOST = 1
"""The exit code of a program that Ray ends because its node is lost; commands of qdqtune use other codes."""


@contextmanager
def started(
    arguments: Sequence[str], variables: Mapping[str, str], fds: Sequence[int] = (), **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start `qdqtune` with these arguments. `variables` are added to its environment, `fds` stay open in it, `how` are
    arguments of `subprocess.Popen`."""
    reads, holds = os.pipe()  # the child ends when this process closes its end, or is gone
    try:
        words = python("-m", "qdqtune", *arguments, **variables, **{PARENT: str(reads)})
        child = subprocess.Popen(**words, process_group=0, pass_fds=(reads, *fds), **how)
    except BaseException:
        os.close(holds)
        raise
    finally:
        os.close(reads)
    try:
        yield child
    finally:
        os.close(holds)


def is_driver() -> bool:
    """Whether this process is the child that may use Ray."""
    return os.environ.pop(DRIVER, None) is not None


def run_on_ray() -> int:
    """Run the typed command in a child, since Ray ends a program without a message when its node is lost. Returns the
    exit code.

    Raises:
        EngineUnavailable: the child was ended.
    """
    with started(command_line()[1:], {DRIVER: "1"}, stdout=sys.stdout.fileno()) as run:
        while run.returncode is None:
            try:
                run.wait()
            except KeyboardInterrupt:  # a terminal interrupts this process only
                run.send_signal(signal.SIGINT)
    if run.returncode != LOST and run.returncode >= 0:
        return run.returncode
    end_group(run.pid)
    if run.returncode == LOST:
        raise EngineUnavailable(NODE_LOST)
    name = signal.Signals(-run.returncode).name
    raise EngineUnavailable(f"{name} has ended the run: the same command goes on from what was measured")


@dataclass
class ModelRow:
    """The progress of one model. A thread that reads the child's events writes it, the board reads it."""

    name: str
    builds: str = ""
    best: str = ""
    now: str = "waiting"
    begun: float | None = None
    ended: float | None = None

    def take(self, event: Event) -> None:
        """Update the row by an event of the child."""
        self.builds, self.best = event.builds or self.builds, event.best or self.best
        self.now = event.short or event.text

    @property
    def seconds(self) -> str:
        """How long the child has been running, in words; empty before it starts."""
        if self.begun is None:
            return ""
        return duration((self.ended or time.monotonic()) - self.begun)


class Board:
    """Progress of several models: a table on a terminal; elsewhere lines that begin with the name of the model."""

    def __init__(self, rows: Sequence[ModelRow]) -> None:
        self._rows = rows
        here = console(is_error=True, quiet=is_quiet())
        self._display = Live(
            get_renderable=self._picture, console=here, refresh_per_second=4, transient=True, redirect_stdout=False
        )
        self._console = here if here.is_terminal and not here.is_dumb_terminal else None

    def __enter__(self) -> Self:
        if self._console is not None:
            self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._console is not None:
            self._display.stop()

    def take(self, row: ModelRow, event: Event) -> None:
        """Show an event of a model; notes and errors stay on the screen."""
        row.take(event)
        if self._console is None:
            if not is_quiet():
                say(f"{row.name}: {event.text.strip()}")
        elif event.kind in ("note", "error"):
            self._console.print(f"{row.name}: {event.text}", highlight=False, markup=False, soft_wrap=True)

    def _picture(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column("model", no_wrap=True)
        for column in ("builds", "best", "time"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("now", no_wrap=True, overflow="ellipsis", ratio=1)
        for row in self._rows:
            table.add_row(*map(Text, (row.name, row.builds, row.best, row.seconds, row.now)))
        return table


@dataclass(frozen=True)
class Ended:
    """The exit code of a child, and what it has written to standard output."""

    code: int
    output: str


def run_all(asked: Sequence[tuple[str, Sequence[str]]], devices: Sequence[Device]) -> list[Ended]:
    """Run command lines of qdqtune, each given with the name of its model, one at a time on each device. Results come
    in the order of `asked`.

    Raises:
        KeyboardInterrupt: this process was interrupted, or one of them; all of them have ended.
    """
    rows = [ModelRow(name) for name, _ in asked]
    places = [_Place(device) for device in devices]
    with Board(rows) as board, WorkerPool(places, repeat_after=None, checking=_Place.checking) as pool:
        jobs = [partial(_run, words, row, board) for (_, words), row in zip(asked, rows, strict=True)]
        found: dict[int, Ended] = {}
        for number, ended in pool.results(jobs):
            if ended.code == INTERRUPTED:
                raise KeyboardInterrupt
            found[number] = ended
    return [found[number] for number in range(len(jobs))]


class _Place(Checked):
    """A device for one command line at a time."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device


def _run(asked: Sequence[str], row: ModelRow, board: Board, place: _Place) -> Ended:
    """Run one command line on a device to its end."""
    row.begun, device = time.monotonic(), place.device
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with tempfile.TemporaryFile("w+") as output, leased(device) as held, pinned(device.cores):
        with started(asked, device.environment | {EVENTS: "1"}, held, stdout=output, **pipes) as child:
            reader = threading.Thread(target=_show_events, args=(child, row, board), daemon=True)
            reader.start()
            try:
                _wait(child, place.check)
            finally:
                _end(child)
                reader.join()
                row.ended = time.monotonic()
        output.seek(0)
        row.now = f"ended with exit code {code}" if (code := child.returncode) else "done"
        return Ended(child.returncode, output.read())


def _show_events(child: subprocess.Popen[str], row: ModelRow, board: Board) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        if line.strip():
            board.take(row, parsed_event(line.rstrip("\n")))


def _wait(child: subprocess.Popen[str], check: Check | None) -> None:
    while child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(LOOK_SECONDS)
        if check is not None:
            check()


def _end(child: subprocess.Popen[str]) -> None:
    """Interrupt a child that still runs, and kill it if it does not end."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(CLEANUP_SECONDS)
        except subprocess.TimeoutExpired:
            end_group(child.pid)
            child.wait()
