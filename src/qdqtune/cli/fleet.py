"""Several models at a time, each in a process of its own on a device of its own, and a table that shows how far each
is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qdqtune.cli.command import is_quiet
from qdqtune.cli.output import console, say
from qdqtune.cli.streams import INTERRUPTED, PARENT
from qdqtune.engines.devices import Device, leased, pinned
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.process import look
from qdqtune.explanation.words import duration
from qdqtune.system.interpreter import python

LOOK_SECONDS = 0.1
ENDING_SECONDS = 20.0
"""How long a run may take to put everything away when it was interrupted."""

TRIAL = re.compile(r"\s*\d+\s+(?P<builds>\d+/\d+) builds  best (?P<best>\S+)  (?P<last>.*)")
"""A line about a candidate (see `progress.line`)."""


@dataclass
class Row:
    """How far one model is. Its thread writes it, the board reads it."""

    name: str
    builds: str = ""
    best: str = ""
    now: str = "waiting"
    begun: float | None = None
    ended: float | None = None

    def take(self, line: str) -> None:
        """What its process has said last."""
        if (trial := TRIAL.fullmatch(line)) is not None:
            self.builds, self.best, self.now = trial["builds"], trial["best"], trial["last"]
        else:
            self.now = line

    @property
    def seconds(self) -> str:
        """How long it has been at work."""
        if self.begun is None:
            return ""
        return duration((self.ended or time.monotonic()) - self.begun)


class Board:
    """A table on a terminal that shows all models at work; lines with the name of the model elsewhere."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        here = console(is_error=True, quiet=is_quiet())
        self._display = Live(
            get_renderable=self._picture, console=here, refresh_per_second=4, transient=True, redirect_stdout=False
        )
        self._console: Console | None = here if here.is_terminal and not here.is_dumb_terminal else None

    def __enter__(self) -> Self:
        if self._console is not None:
            self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._console is not None:
            self._display.stop()

    def hear(self, row: Row, line: str) -> None:
        """One line of a model's process; notes and errors stay on the screen."""
        row.take(line)
        if self._console is None:
            if not is_quiet():
                say(f"{row.name}: {line.strip()}")
        elif line.startswith(("note:", "error:")):
            self._console.print(f"{row.name}: {line}", highlight=False, markup=False, soft_wrap=True)

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
    """How a process ended, and what it has written to standard output."""

    code: int
    output: str


@dataclass
class _Process:
    """One model's process. It ends when this one does, however that comes about: it watches a pipe."""

    asked: Sequence[str]
    device: Device
    process: subprocess.Popen[str] = field(init=False)

    def run(self, row: Row, board: Board) -> Ended:
        """Run it to its end, while others run as well.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        row.begun = time.monotonic()
        ours_reads, ours_holds = os.pipe()
        with tempfile.TemporaryFile("w+") as output, leased(self.device) as held, pinned(self.device.cores):
            told = self.device.environment | {PARENT: str(ours_reads)}
            self.process = subprocess.Popen(
                **python("-m", "qdqtune", *self.asked, **told),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=[ours_reads, *held],
                process_group=0,
            )
            os.close(ours_reads)
            reader = threading.Thread(target=self._read, args=(row, board), daemon=True)
            reader.start()
            try:
                self._wait()
            finally:
                self._end()
                reader.join()
                os.close(ours_holds)
                row.ended = time.monotonic()
            output.seek(0)
            row.now = f"ended with exit code {code}" if (code := self.process.returncode) else "done"
            return Ended(self.process.returncode, output.read())

    def _read(self, row: Row, board: Board) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.strip():
                board.hear(row, line.rstrip("\n"))

    def _wait(self) -> None:
        looks = look()
        while self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_SECONDS)
            if looks is not None:
                looks()

    def _end(self) -> None:
        """Interrupt it if it still runs, and kill it if that does not help."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def run_all(asked: Sequence[tuple[str, Sequence[str]]], devices: Sequence[Device]) -> list[Ended]:
    """Run command lines of qdqtune, each behind the name of its model, one on each device at a time. Answers come in
    their order.

    Raises:
        KeyboardInterrupt: this process was interrupted, or one of them; all of them have ended.
    """
    rows = [Row(name) for name, _ in asked]
    with Board(rows) as board, WorkerPool(devices, repeat_after=None) as pool:
        jobs = [partial(_run, words, row, board) for (_, words), row in zip(asked, rows, strict=True)]
        found: dict[int, Ended] = {}
        for number, ended in pool.results(jobs):
            if ended.code == INTERRUPTED:
                raise KeyboardInterrupt
            found[number] = ended
    return [found[number] for number in range(len(jobs))]


def _run(asked: Sequence[str], row: Row, board: Board, device: Device) -> Ended:
    return _Process(asked, device).run(row, board)
