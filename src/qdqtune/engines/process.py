"""Worker processes as their parent sees them: how one starts, answers over two pipes, and is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from qdqtune.engines.channel import Channel
from qdqtune.engines.devices import ANYWHERE, Device, leased
from qdqtune.engines.execution import Deadline
from qdqtune.errors import EngineUnavailable, writing
from qdqtune.system.interpreter import end_group, python
from qdqtune.system.writing import WORKERS, Scratch

NODE_LOST = (
    "the Ray node that the run was connected through is lost, and the run with it: the same command goes on from what "
    "was measured"
)


class Worker(Protocol):
    """A process that answers messages. A `Runner` sends its worker (name, arguments) of a method of `worker.Session`,
    first that which opens the engine; the answer is `(True, result)`, or `(False, error)` with a QdqtuneError."""

    location: str
    """Host and device of the worker, for messages; "" on this host."""

    @property
    def alive(self) -> bool:
        """False once the process has ended, and its builds are lost."""

    def ask(self, message: Any, limit: float) -> Any:
        """Send a message and wait for its answer.

        Raises:
            TimeoutError: no answer within `limit` seconds.
            EOFError: the worker has ended; the text says how.
        """

    def end(self, seconds: float = 0.0) -> None:
        """End the worker and all processes that it started; it has `seconds` to end by itself."""


StartWorker = Callable[[Path, Device], Worker]
"""Starts a worker on a device; what it prints is appended to the log file."""


class Program:
    """A running command that answers messages over standard input and output; a `Worker`. It leads its own process
    group, so that Ctrl-C does not reach it, and one kill ends all that it started. Its output is appended to a log."""

    location = ""

    def __init__(self, log: Path, **command: Any) -> None:
        """Start it; `command` are arguments for `subprocess.Popen`.

        Raises:
            OutputError: the log cannot be written.
            OSError: the system starts no process.
        """
        with writing(log):
            output = log.open("ab")
        with output:
            streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "bufsize": 0}
            process: Any = subprocess.Popen(**command, **streams, process_group=0)
        self._process: subprocess.Popen[bytes] = process
        self.channel = Channel(process.stdout, process.stdin, asks=True)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: Any, limit: float) -> Any:
        try:
            self.channel.send(message, Deadline(limit))
            return self.channel.recv(Deadline(limit))
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            code = self.exit_code(5.0)
            if code is None:
                raise EOFError("a closed connection") from error
            raise EOFError(f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}") from error

    def end(self, seconds: float = 0.0) -> None:
        self.channel.close()  # by which it knows that it is to end
        if self.exit_code(seconds) is None:
            end_group(self._process.pid)
        self._process.wait()

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The exit code, or minus the number of a signal; None if the process still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None


class WorkerProcess(Program):
    """A runner's worker on this host. It reserves `device` until it ends; then its temporary files are removed."""

    def __init__(self, log: Path, device: Device = ANYWHERE) -> None:
        """Start the process. Waits up to `LEASE_SECONDS` for a device that is still in use."""
        with leased(device) as held, contextlib.ExitStack() as undo:
            with writing(log):
                self._scratch = Scratch(log.parent, WORKERS)
            undo.callback(self._scratch.close)
            variables = {"TMPDIR": str(self._scratch.path), **device.environment}
            try:
                super().__init__(log, **python("-m", "qdqtune.engines.worker", **variables), pass_fds=held)
            except OSError as error:
                raise EngineUnavailable(f"no process for the engine can be started: {error.strerror}") from error
            undo.pop_all()

    def end(self, seconds: float = 0.0) -> None:
        with contextlib.closing(self._scratch):  # also where Ctrl-C comes meanwhile
            super().end(seconds)
