"""The worker process as its parent sees it: started, sent requests over a socket, killed, its files removed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from qdqtune.engines.devices import ANYWHERE, Device, leased, pinned
from qdqtune.system.cleanup import cleaner
from qdqtune.system.interpreter import python
from qdqtune.system.writing import WORKERS, Scratch
from qdqtune.types import Failure

LOOK_SECONDS = 0.1
"""How often what `looking` was given is called while a thread waits."""

LOG_LINES = 50

_look: ContextVar[Callable[[], None] | None] = ContextVar("look", default=None)


def look() -> Callable[[], None] | None:
    """The function that `looking` was given in this thread, if any: whoever waits calls it every `LOOK_SECONDS`."""
    return _look.get()


@contextlib.contextmanager
def looking(at: Callable[[], None]) -> Iterator[None]:
    """Have `at` called every `LOOK_SECONDS` while this thread waits for an engine. What it raises ends the wait and the
    worker: so work is cancelled."""
    token = _look.set(at)
    try:
        yield
    finally:
        _look.reset(token)


class Worker(Protocol):
    """Answers the requests of one runner: names of `worker.Session` methods with their arguments.

    The first request opens the engine.
    """

    @property
    def alive(self) -> bool:
        """Whether it answers requests. One that does not has lost its builds."""

    @property
    def place(self) -> str:
        """The host and device for messages; empty on this host."""

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        """`(True, result)`, or `(False, QdqtuneError)`.

        Raises:
            TimeoutError: no answer within `limit` seconds.
            EOFError, OSError: it has ended.
        """

    def kill(self) -> None:
        """End it at once."""

    def exit_reason(self) -> str:
        """Exit code or signal of a worker that has ended."""

    def printed(self) -> str:
        """What it has printed outside of builds."""


StartWorker = Callable[[Path, Device], Worker]
"""Starts a worker on a device; it prints to the end of the file given."""


class WorkerProcess:
    """The child process and the socket to it. The child ends when this end of the socket closes.

    It runs on `device`, and holds it until it has really ended. Its temporary files are removed with it.
    """

    place = ""
    PROGRAM = "qdqtune.engines.worker"
    """The module that answers requests."""

    def __init__(self, log: Path, device: Device = ANYWHERE) -> None:
        """Start it.

        Raises:
            EngineUnavailable: another process has the device.
        """
        cleaner().start()
        with leased(device) as held, pinned(device.cores):
            self._launch(log, held, device.environment)

    def _launch(self, log: Path, held: Sequence[int], told: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._log = log
        self._scratch = Scratch(log.parent, WORKERS)
        with theirs, log.open("ab") as output:
            self._log_start = output.tell()
            # A process group of its own: Ctrl-C in a terminal reaches the parent only, and one kill reaches whatever
            # the engine has started.
            self._process = subprocess.Popen(
                **python("-m", self.PROGRAM, str(theirs.fileno()), TMPDIR=str(self._scratch.path), **told),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), *held],
                process_group=0,
            )
        self._channel: Connection[Any, Any] = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        """`Worker.request`."""
        self._channel.send((name, arguments))
        looks, deadline = look(), monotonic() + limit
        while not self._channel.poll(limit if looks is None else LOOK_SECONDS):
            if looks is None or monotonic() >= deadline:
                raise TimeoutError
            looks()
        answer: tuple[bool, Any] = self._channel.recv()
        return answer

    def kill(self) -> None:
        """End the process and those that it has started, and remove its log if that is empty."""
        self._channel.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone in between
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):
            if self._log.stat().st_size == 0:
                self._log.unlink()
        self._scratch.close()

    def exit_reason(self) -> str:
        """Exit code or signal of a process whose end of the socket has closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        if code is None:
            return "a closed connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def printed(self) -> str:
        """What this worker has printed outside of builds."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


def finish_log(log: Path, path: Path, seconds: float | Failure) -> None:
    """Write the outcome of a build to the end of its log: many engines print nothing."""
    outcome = f"failed: {seconds.reason}" if isinstance(seconds, Failure) else f"built in {seconds:.3f} s"
    with contextlib.suppress(OSError), log.open("a") as file:  # a full disk is told by what matters more
        file.write(f"[qdqtune] {path.name}: {outcome}\n")


def last_lines(log: Path | None, more: str = "") -> str:
    """The last `LOG_LINES` lines of a build's log, followed by `more`."""
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    return "\n".join((text + more).splitlines()[-LOG_LINES:])
