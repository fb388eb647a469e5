"""Another machine over SSH or adb: one connection, through which the workers of a run are started there and asked.

The system's `ssh` is used, so that names, keys and jumps of ~/.ssh/config hold, or its `adb`. It asks for nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from queue import Empty, SimpleQueue
from typing import IO, Any

import msgspec

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, LEASE_SECONDS, Device
from qdqtune.engines.execution import CHECK_SECONDS, EXECUTION, Check, Execution
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.remote.agent import GREETING, PULSE_SECONDS, SILENT_SECONDS
from qdqtune.engines.remote.files import Sender
from qdqtune.engines.remote.messages import Pipe, Reply, WorkerLocation
from qdqtune.engines.remote.worker import NETWORK_SECONDS, LinkLostError, RemoteWorker
from qdqtune.errors import BadOption, EngineUnavailable, QdqtuneError, one_line, parsed_json
from qdqtune.system.interpreter import end_group
from qdqtune.version import __version__

SSH = (
    "ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ClearAllForwardings=yes",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "--",
)  # fmt: skip
"""The program: no password prompt that nobody sees, and an end where the network is gone for a minute."""

ADB_REASONS = {
    "no devices|not found": "connect it, and look whether `adb devices` lists it",
    "more than one": "name one that `adb devices` lists, as in `on` adb:SERIAL",
    "unauthorized": "accept the key of this computer on the device",
    "permission": "this user may not open the USB device: see the udev rules of adb",
    "PTY|shell_v2": "its adbd is too old: use SSH",
}
"""What to do, by a pattern of what `adb` prints."""

START_SECONDS = 90.0
"""How long a machine may take to answer: a small board imports NumPy for seconds. Chosen, not measured."""

ENDING_SECONDS = 10.0
"""How long the other side may take to remove its files before the program is ended. Chosen, not measured."""

ANSWER_SECONDS = 1.0
"""How long after the limit of a request its answer may still begin to come, and how long it may then pause. Chosen, not
measured."""

MOST_KEPT = 2**30
"""Bytes of inputs that are kept there. Chosen, not measured."""

USUAL_PYTHON = "python3"

NOISE = re.compile(r"^\s*$|^(Warning: Permanently added|Connection to .* closed|\* daemon )|setlocale")
"""Lines that shells, SSH and adb print beside the reason of a failure."""


@dataclass(frozen=True)
class Destination:
    """What to connect to, as `ssh` takes it or `adb:` with a serial number, if one is given, and the Python there."""

    host: str
    python: str = USUAL_PYTHON

    @classmethod
    def parsed(cls, text: str) -> Destination:
        """Of `[user@]host[:python]`, `ssh://[user@]host[:port][/path/of/python]` or `adb:[serial][:python]`.

        Raises:
            BadOption: it is none of them.
        """
        if text.startswith("adb:"):
            found = re.fullmatch(r"(adb:(?:[^:/\s]+(?::\d+)?)?)(?::(\S.*))?", text)
            if found is None or ("/" in (found[2] or "") and not found[2].startswith("/")):
                raise BadOption(f"`on` {text!r} is no device: give adb:SERIAL or adb:SERIAL:/path/of/python")
            return cls(found[1], found[2] or USUAL_PYTHON)
        found = re.fullmatch(r"(ssh://[^/:\s]+(?::\d+)?)(/\S+)?|([^-:/\s][^:/\s]*)(?::(?!//)(\S.*))?", text)
        if found is None:
            raise BadOption(
                f"`on` {text!r} is no machine: give user@host, user@host:path/of/python or "
                "ssh://user@host:port/path/of/python"
            )
        return cls(found[1] or found[3], found[2] or found[4] or USUAL_PYTHON)

    def command(self, module: str) -> list[str]:
        """The command that runs a module there, which arguments may follow. The path of the Python is relative to the
        home folder there."""
        words = f"exec {shlex.quote(self.python.removeprefix('~/'))} -P -m {module}"
        if self.serial is None:
            return [*SSH, self.host, words]
        return ["adb", *(("-s", self.serial) if self.serial else ()), "shell", "-T", words]

    @property
    def serial(self) -> str | None:
        """The serial number of a device that `adb` reaches, "" for the only one; None for SSH."""
        return self.host.removeprefix("adb:") if self.host.startswith("adb:") else None


class Connection:
    """A running `ssh` or `adb` with an agent at its other end, which starts workers and answers for them."""

    def __init__(self, destination: Destination, execution: Execution = EXECUTION) -> None:
        """Connect. `execution` limits the time to send constants and inputs.

        Raises:
            EngineUnavailable: there is no way, no Python, or no qdqtune of this version.
        """
        self.destination, self._execution = destination, execution
        try:
            self._program = subprocess.Popen(
                destination.command("qdqtune.engines.remote.agent"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C in a terminal does not reach it
            )
        except OSError as error:
            program = "ssh" if destination.serial is None else "adb"
            raise EngineUnavailable(f"`on` needs the program {program}: {one_line(error)}") from error
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        assert self._program.stderr is not None
        self._pipe = Pipe(self._program.stdout, self._program.stdin, values_only=True)
        self._answers: dict[int, SimpleQueue[Any]] = {}
        self._printed: deque[str] = deque(maxlen=50)
        self._closing = threading.Event()
        self._greeted: SimpleQueue[bytes] = SimpleQueue()
        self._listening = threading.Thread(target=self._listen, args=(self._program.stderr,), daemon=True)
        self._listening.start()
        self.lost: str | None = None
        """Why nothing more comes; None while the connection stands."""
        threading.Thread(target=self._receive, args=(self._program.stdout,), daemon=True).start()
        try:
            self.facts = self._greeting()
        except BaseException:
            self.close()
            raise
        self._pipe.heard = time.monotonic()
        for endless in (self._ping, self._watch):
            threading.Thread(target=endless, daemon=True).start()
        # Model files go with each build, and are removed with it, so that no disk fills up with candidates.
        self.sender = Sender(self._store, least_proto=inf, most_kept=MOST_KEPT, forget=self._forget)

    def _greeting(self) -> MachineFacts:
        try:
            line = self._greeted.get(timeout=START_SECONDS)
        except Empty:
            raise EngineUnavailable(f"{self.destination.host} does not answer within {START_SECONDS:.0f} s") from None
        if not line:
            self._program.wait()
            self._listening.join(ENDING_SECONDS)
            raise EngineUnavailable(why_not(self.destination, self._program.returncode, list(self._printed)))
        said = parsed_json(line.decode(errors="replace"))
        if said["version"] != __version__:
            raise EngineUnavailable(
                f"{self.destination.host} has qdqtune {said['version']}, and here is {__version__}: install one "
                "version on both"
            )
        return replace(msgspec.convert(said["facts"], MachineFacts), where=self.destination.host)

    def _listen(self, errors: IO[bytes]) -> None:
        for line in errors:
            self._printed.append(line.decode(errors="replace").rstrip())

    def _receive(self, output: IO[bytes]) -> None:
        """Wait for the greeting, then give each answer to whoever waits for it."""
        line = b" "
        while line and not line.startswith(GREETING):
            line = output.readline(2**16)
        self._greeted.put(line.removeprefix(GREETING))
        reason = "the connection has closed"
        try:
            while line:
                number, answer = self._pipe.receive()
                if (waiting := self._answers.get(number)) is not None:  # or its worker has been ended
                    waiting.put(answer)
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001  (bytes from elsewhere: to read them may raise anything)
            reason = f"what came from there is no answer: {one_line(error)}"
        self.lost = self.lost or self._why_lost(reason)
        for answers in list(self._answers.values()):
            answers.put(None)

    @property
    def is_silent(self) -> bool:
        """Whether the other side says nothing any more, not even that it lives: its program has been stopped, say."""
        return time.monotonic() - self._pipe.heard > SILENT_SECONDS

    def _why_lost(self, otherwise: str) -> str:
        if self.is_silent:
            return f"nothing has come from there for {SILENT_SECONDS:g} s"
        return next((text for text in reversed(self._printed) if not NOISE.search(text)), otherwise)

    def _ping(self) -> None:
        while not self._closing.wait(PULSE_SECONDS) and self.lost is None:
            with suppress(OSError, ValueError):
                self._pipe.send((0, "ping", None), NETWORK_SECONDS)

    def _watch(self) -> None:
        """End the connection if the other side is silent, which ends what waits for it to read or to answer."""
        while not self._closing.wait(min(PULSE_SECONDS, SILENT_SECONDS) / 10) and self.lost is None:
            if self.is_silent:
                end_group(self._program.pid)
                return

    def _store(self, digest: str, values: Any) -> str:
        limit = self._execution.within_budget(self._execution.seconds)
        self.send(0, "content", (digest, values), limit, self._execution.check)
        return digest

    def _forget(self, digest: str) -> None:
        self.send(0, "forget", digest)

    def open(self, number: int) -> None:
        """Wait for answers of a worker from now on."""
        self._answers[number] = SimpleQueue()

    def send(
        self, number: int, kind: str, content: Any, limit: float = NETWORK_SECONDS, check: Check | None = None
    ) -> None:
        """Send a message to the agent. What `check` raises ends the wait.

        Raises:
            LinkLostError: the connection is lost, also because nobody has taken anything for `limit` seconds.
        """
        try:
            self._pipe.send((number, kind, content), limit, check)
        except TimeoutError as error:
            self.lost = f"{self.destination.host} has taken nothing for {limit:.4g} s"
            end_group(self._program.pid)
            raise LinkLostError(self.lost) from error
        except (OSError, ValueError) as error:
            self.lost = self.lost or self._why_lost(one_line(error))  # the thread that reads may not know of it yet
            raise LinkLostError(self.lost) from error

    def answer(self, number: int, seconds: float, check: Check | None) -> Any:
        """The next answer of a worker. What `check` raises ends the wait.

        Raises:
            TimeoutError: none came in time, and no message is coming in.
            LinkLostError: the connection is lost.
        """
        ends = time.monotonic() + seconds
        if (waiting := self._answers.get(number)) is None:
            raise LinkLostError("the worker has been ended")
        while True:
            if self.lost is not None and waiting.empty():
                raise LinkLostError(self.lost)
            with suppress(Empty):
                if (found := waiting.get(timeout=CHECK_SECONDS)) is None:
                    raise LinkLostError(str(self.lost))
                return found
            if check is not None:
                check()
            if time.monotonic() >= ends and not self._is_coming:
                raise TimeoutError

    @property
    def _is_coming(self) -> bool:
        return self._pipe.is_receiving and time.monotonic() - self._pipe.heard < ANSWER_SECONDS

    def stop(self, number: int) -> None:
        """End a worker."""
        with suppress(LinkLostError):
            self.send(number, "stop", None, ANSWER_SECONDS)
        self._answers.pop(number, None)

    def close(self) -> None:
        """End the agent with all its workers, and the program that reaches it."""
        self._closing.set()
        assert self._program.stdin is not None
        late = threading.Timer(ENDING_SECONDS, end_group, [self._program.pid])  # a full pipe holds up its closing, too
        late.start()
        try:
            with suppress(OSError):
                self._program.stdin.close()
            self._program.wait()
        finally:
            late.cancel()


@dataclass(frozen=True)
class ConnectedLink:
    """The `Link` to a worker at the other end of a connection."""

    connection: Connection
    number: int

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float, check: Check | None) -> Reply:
        """Implements `Link.ask`.

        Raises:
            QdqtuneError: what the agent answers with.
        """
        self.connection.send(self.number, "request", (name, arguments, limit), limit, check)
        reply = self.connection.answer(self.number, limit + ANSWER_SECONDS, check)
        if isinstance(reply, QdqtuneError):
            raise reply
        assert isinstance(reply, Reply)
        return reply

    def end(self) -> None:
        """Implements `Link.end`."""
        self.connection.stop(self.number)


class RemoteMachine:
    """Starts workers on another machine, and connects again where a connection was lost."""

    def __init__(self, destination: Destination, execution: Execution) -> None:
        self._destination, self._execution, self._lock = destination, execution, threading.Lock()
        self._numbers = itertools.count(1)
        self._connection = Connection(destination, execution)

    @property
    def facts(self) -> MachineFacts:
        """What is known of the machine."""
        return self._connection.facts

    def start(
        self, log: Any, device: Device, check: Check | None = None, own: tuple[EngineSpec, int] | None = None
    ) -> RemoteWorker:
        """A worker there: a `StartWorker`. `own`: for a device other than `ANYWHERE`, the engine and the cores of each
        worker, which no other one uses.

        Raises:
            EngineUnavailable: the connection is lost and cannot be made again, or the machine has no free cores or GPU.
            BadOption: the machine has too few cores.
        """
        spec, cores = (EngineSpec("fake"), 0) if own is None or device == ANYWHERE else own
        wanted = spec, max(cores, device.least if cores else 0), os.getcwd()
        for may_reconnect in (True, False):  # a connection may turn out to be lost only when it is used
            connection, number = self._standing(), next(self._numbers)
            connection.open(number)
            try:
                connection.send(number, "start", wanted, check=check)
                where = connection.answer(number, LEASE_SECONDS + NETWORK_SECONDS, check)
                break
            except (LinkLostError, TimeoutError) as error:
                connection.stop(number)
                if not may_reconnect or isinstance(error, TimeoutError):
                    told = str(error) or "it does not answer"
                    raise EngineUnavailable(f"no worker starts on {self._destination.host}: {told}") from error
        if isinstance(where, QdqtuneError):
            connection.stop(number)
            raise where
        assert isinstance(where, WorkerLocation)
        shown = replace(where, host=self._destination.host)
        return RemoteWorker(ConnectedLink(connection, number), shown, connection.sender)

    def _standing(self) -> Connection:
        """The connection, made again if it is known to be lost."""
        with self._lock:
            if self._connection.lost is not None:
                self._connection.close()
                self._connection = Connection(self._destination, self._execution)
            return self._connection

    def close(self) -> None:
        """End all workers there."""
        self._connection.close()


@contextmanager
def connected(on: str, execution: Execution = EXECUTION) -> Iterator[RemoteMachine]:
    """Connect to the machine that the option `on` names; `execution` limits the time to send constants and inputs.

    Raises:
        EngineUnavailable: see `Connection`.
    """
    machine = RemoteMachine(Destination.parsed(on), execution)
    try:
        yield machine
    finally:
        machine.close()


def facts_of(on: str) -> MachineFacts:
    """What is known of the machine that the option `on` names. Raises as `connected`."""
    with connected(on) as machine:
        return machine.facts


def why_not(destination: Destination, code: int, printed: list[str]) -> str:
    """Why no agent has started, and what to do, from the exit code of `ssh` or `adb` and what it has printed."""
    host, python = destination.host, destination.python
    named = f"{host}/PATH" if host.startswith("ssh://") else f"{host}:PATH"
    told = [line for line in printed if not NOISE.search(line)]
    last = told[-1] if told else f"exit code {code}"
    everything, install = "\n".join(told), f"pip install qdqtune=={__version__}"
    if destination.serial is not None and (
        found := re.search(r"^(?:adb|error): (.*?)[.\s]*$", everything, re.MULTILINE)
    ):
        todos = (todo for pattern, todo in ADB_REASONS.items() if re.search(pattern, found[1]))
        return f"adb to {host} fails ({one_line(found[1])}): {next(todos, 'see what `adb devices` says of it')}"
    if code == 255 and destination.serial is None:
        todo = f"try ssh -o BatchMode=yes {host}"
        if "Permission denied" in everything:
            todo = "it has to let you in by a key, without a password"
        elif "Host key verification failed" in everything:
            todo = f"run ssh {host} once, and accept its key"
        told_last = re.sub(r"^ssh: |[.\s]+$", "", one_line(last))
        return f"ssh to {host} fails ({told_last}): {todo}"
    if code in (126, 127):
        return f"{host} has no {python} that runs: name the Python that has qdqtune, as in `on` {named}"
    if re.search(r"No module named '?qdqtune", everything):
        return f"{python} on {host} has no qdqtune of this version: {install} there, or name its Python, {named}"
    if (missing := re.search(r"No module named '?([\w.]+)", everything)) is not None:
        return f"{python} on {host} lacks the package {missing[1]}: {install} there, or name its Python, {named}"
    if re.search("Unknown option: -P|unknown option -P", everything):
        return f"{python} on {host} is older than 3.11: name a newer one, as in `on` {named}"
    return f"no worker starts with {python} on {host}: {one_line(last)}"
