"""Worker processes as their parent sees them: how one starts, answers over two pipes, is killed, and is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from qdqtune.engines import EngineSpec
from qdqtune.engines.channel import Channel
from qdqtune.engines.devices import ANYWHERE, Device, leased, pinned
from qdqtune.engines.execution import Deadline, Execution
from qdqtune.engines.memory import OUT_OF_RESOURCES
from qdqtune.errors import EngineFailure, EngineRefused, EngineUnavailable, Failure, QdqtuneError, Stage, writing
from qdqtune.system.interpreter import end_group, python
from qdqtune.system.writing import WORKERS, Scratch, append

START_SECONDS = 120.0
"""Least time limit for opening an engine: how long a library takes to load says nothing about a candidate."""

LOG_LINES = 50
"""Lines of a log that a `Failure` quotes. Chosen, not measured."""

T = TypeVar("T")


class Worker(Protocol):
    """Answers requests: names of `worker.Session` methods with their arguments. The first request opens the engine."""

    @property
    def alive(self) -> bool:
        """Whether the worker answers requests. If not, its builds are lost."""

    @property
    def location(self) -> str:
        """Host and device of the worker, for messages; "" on this host."""

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        """Send a request. The answer is `(True, result)`, or `(False, error)` with a QdqtuneError.

        Raises:
            TimeoutError: no answer within `limit` seconds.
            EOFError, OSError: the worker has ended.
        """

    def kill(self) -> None:
        """End the worker at once."""

    def exit_reason(self) -> str:
        """The exit code or the signal with which the worker has ended, for messages."""

    def printed(self) -> str:
        """What the worker has printed outside of builds."""


StartWorker = Callable[[Path, Device], Worker]
"""Starts a worker, given its log file, to which it appends what it prints, and its device."""


class Program:
    """A running command that answers messages over its standard input and output, in a process group of its own: Ctrl-C
    in a terminal does not reach it, and one kill ends it with all that it has started. What it prints is appended to a
    log."""

    def __init__(self, log: Path, **command: Any) -> None:
        """Start it; `command` are arguments for `subprocess.Popen`.

        Raises:
            OutputError: the log cannot be written.
            OSError: the system starts no process.
        """
        self._log = log
        with writing(log):
            output = log.open("ab")
        with output:
            self._log_start = output.tell()
            streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "bufsize": 0}
            self._process = subprocess.Popen(**command, **streams, process_group=0)
        self.channel = channel_to(self._process)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: object, limit: float) -> None:
        """Send a message that has no answer. Raises as `ask`."""
        self.channel.send(message, Deadline(limit))

    def ask(self, message: object, limit: float) -> Any:
        """Send a message and wait for its answer.

        Raises:
            TimeoutError: no answer within `limit` seconds.
            EOFError, OSError: the process has ended.
        """
        self.send(message, limit)
        return self.channel.recv(Deadline(limit))

    def end(self, seconds: float = 0.0) -> None:
        """End the process and all that it has started; it may take so long to end by itself, as its input closes. Its
        log is removed if it is empty."""
        self.channel.close()
        if self.exit_code(seconds) is None:
            end_group(self._process.pid)
        self._process.wait()
        with contextlib.suppress(OSError):
            if self._log.stat().st_size == 0:
                self._log.unlink()

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The exit code, or the negative number of a signal; None if the process has not ended within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def exit_reason(self) -> str:
        """Implements `Worker.exit_reason`."""
        code = self.exit_code(5.0)
        if code is None:
            return "a closed connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def printed(self) -> str:
        """Implements `Worker.printed`."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


def channel_to(process: subprocess.Popen[bytes]) -> Channel:
    """The channel to a process, over its standard input and output."""
    assert process.stdin is not None
    assert process.stdout is not None
    channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()), asks=True)
    process.stdin.close()
    process.stdout.close()
    return channel


class WorkerProcess(Program):
    """A `Worker` on this host.

    It runs on `device` and holds it until it has ended. Its temporary files are removed when it is killed.
    """

    location = ""

    def __init__(self, log: Path, device: Device = ANYWHERE) -> None:
        """Start the process. A device that is still in use is waited for, for `LEASE_SECONDS` at most.

        Raises:
            EngineUnavailable: another process has the device, or the system starts no process.
            OutputError: the log cannot be written.
        """
        with leased(device) as held, pinned(device.cores), contextlib.ExitStack() as undo:
            with writing(log):
                self._scratch = Scratch(log.parent, WORKERS)
            undo.callback(self._scratch.close)
            variables = {"TMPDIR": str(self._scratch.path), **device.environment}
            try:
                super().__init__(log, **python("-m", "qdqtune.engines.worker", **variables), pass_fds=held)
            except OSError as error:
                raise EngineUnavailable(f"no process for the engine can be started: {error.strerror}") from error
            undo.pop_all()

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        """Implements `Worker.request`."""
        answer: tuple[bool, Any] = self.ask((name, arguments), limit)
        return answer

    def kill(self) -> None:
        """Implements `Worker.kill`."""
        with contextlib.closing(self._scratch):  # also where Ctrl-C comes meanwhile
            self.end()


class WorkerConnection:
    """Sends requests to a worker, which is started before the first request, and replaced after it was lost.

    `start` starts one. `first_requests` are sent to each new worker once its engine is open. `ended` is called when a
    worker has ended, and with it the builds that it held. Each request has the time limits of `execution`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        execution: Execution,
        *,
        start: Callable[[], Worker],
        first_requests: Callable[[], Iterable[tuple[Any, ...]]],
        ended: Callable[[], None],
    ) -> None:
        self.worker: Worker | None = None
        self.spec, self.limit, self.execution = spec, execution.seconds, execution
        self._start, self._first_requests, self._ended = start, first_requests, ended

    @property
    def is_open(self) -> bool:
        """Whether there is a worker that answers."""
        return self.worker is not None and self.worker.alive

    def close(self) -> None:
        """End the worker at once."""
        if (worker := self.released()) is not None:
            worker.kill()

    def released(self) -> Worker | None:
        """The worker, which the caller ends or uses for something else."""
        worker, self.worker = self.worker, None
        self._ended()
        return worker

    def ask(self, name: str, *arguments: Any, what: str, log: Path | None = None, extra: float = 0.0) -> Any:
        """The answer to a request. `what` says in messages what is being done; `log` is the log of a build; `extra`
        seconds are added to the limit.

        Raises:
            EngineRefused: the engine refuses, or the worker gives no answer.
            EngineUnavailable: the engine cannot be opened.
            QdqtuneError: what else the engine raises.
        """
        try:
            self.open()
            return self.exchange(name, *arguments, what=what, log=log, limit=self.limit + extra)
        except EngineRefused:
            raise
        except EngineFailure as error:
            stage: Stage = "build" if name == "build" else "run"
            if OUT_OF_RESOURCES.search(str(error)):
                stage = "resources"
            raise EngineRefused(Failure(stage, str(error), last_lines(log) if log else "")) from error

    def open(self) -> None:
        """Start a worker, unless there is one, and open the engine there.

        Raises:
            EngineUnavailable, BadOption: the engine cannot be opened.
        """
        if self.is_open:
            return
        self.close()
        self.worker = self._start()
        limit = max(self.limit, START_SECONDS)
        spec = EngineSpec(self.spec.name, dict(self.spec.options))
        try:
            self.exchange("open", spec, what="opening the engine", limit=limit)
            for name, *arguments in self._first_requests():
                self.exchange(name, *arguments, what="opening the engine", limit=limit)
        except EngineRefused as refused:
            raise EngineUnavailable(f"engine {self.spec.name!r} does not work here: {refused}") from refused
        except QdqtuneError:
            self.close()
            raise

    def exchange(
        self, name: str, *arguments: Any, what: str, log: Path | None = None, limit: float | None = None
    ) -> Any:
        """Send a request to the running worker, and return its answer.

        Raises:
            EngineRefused: the worker gave no answer.
            QdqtuneError: the error that it answered with.
        """
        worker, limit = self.worker, self.execution.within_budget(self.limit if limit is None else limit)
        assert worker is not None
        answered = False
        try:
            good, result = worker.request(name, arguments, limit)
            answered = True
        except TimeoutError:
            reason = f"{what} took longer than {limit:.4g} s"
            raise EngineRefused(Failure("timeout", reason, last_lines(log, worker.printed()))) from None
        except (EOFError, OSError):
            reason = f"the engine process ended with {worker.exit_reason()} while {what}"
            raise EngineRefused(Failure("crash", reason, last_lines(log, worker.printed()))) from None
        finally:
            if not answered:  # also after an interrupt: a late answer must not be taken for that of the next request
                self.close()
        if not good:
            raise result
        return result


def twice(ask: Callable[[], T]) -> T:
    """The result of `ask`; of a second call if the worker crashed in the first one: the system may have killed it."""
    try:
        return ask()
    except EngineRefused as refused:
        if refused.failure.stage != "crash":
            raise
    return ask()


def finish_log(log: Path, path: Path, outcome: str) -> None:
    """Write the outcome of a build to the end of its log: many engines print nothing."""
    with contextlib.suppress(OSError):  # a full disk is reported where a write has to succeed
        append(log, f"[qdqtune] {path.name}: {outcome}\n")


def last_lines(log: Path | None, more: str = "") -> str:
    """The last `LOG_LINES` lines of a build's log, followed by `more`."""
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    return "\n".join((text + more).splitlines()[-LOG_LINES:])
