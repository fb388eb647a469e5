"""Another machine over SSH or adb: each of its workers is a command that begins with `ssh` or `adb`.

The system's `ssh` is used, so that names, keys and jumps of ~/.ssh/config hold, or its `adb`. It asks for nothing.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from qdqtune.engines.devices import ANYWHERE, Device
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.process import Program
from qdqtune.engines.remote.worker import ENDING_SECONDS, FarWorker, check_version, greeting
from qdqtune.errors import BadOption, EngineUnavailable, one_line
from qdqtune.system.writing import temporary_folder
from qdqtune.version import __version__

SSH = (
    "ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ClearAllForwardings=yes",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""The program: no password prompt that nobody sees, and an end where the network is gone for a minute."""

SHARING = ("-oControlMaster=auto", "-oControlPersist=10")
"""One connection for all workers, which ends by itself some seconds after the last of them."""

LONGEST_SOCKET = 80
"""Characters of a path with which SSH's temporary name of a socket fits into the 104 that systems allow."""

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

    def command(self, module: str, shared: Path) -> list[str]:
        """The command that runs a module there. The path of the Python is relative to the home folder there. The
        connection of SSH goes through the socket `shared`, where its path is not too long for one."""
        words = f"exec {shlex.quote(self.python.removeprefix('~/'))} -P -m {module}"
        if self.serial is None:
            path = str(shared).replace("%", "%%")
            sharing = [f"-oControlPath={path}", *SHARING] if len(os.fsencode(path)) <= LONGEST_SOCKET else []
            return [*SSH, *sharing, "--", self.host, words]
        return ["adb", *(("-s", self.serial) if self.serial else ()), "shell", "-T", words]

    @property
    def serial(self) -> str | None:
        """The serial number of a device that `adb` reaches, "" for the only one; None for SSH."""
        return self.host.removeprefix("adb:") if self.host.startswith("adb:") else None


class RemoteMachine:
    """Starts workers on another machine. Those of SSH share a connection, and make it again where it was lost."""

    def __init__(self, destination: Destination) -> None:
        """Ask the machine for its facts.

        Raises:
            EngineUnavailable: there is no way, no Python, or no qdqtune of this version.
        """
        self._destination = destination
        self._folder = temporary_folder()
        try:
            program, self.facts = self._start(self._folder.path / "greeting.log")
            program.end(ENDING_SECONDS)
        except BaseException:
            self.close()
            raise

    def start(self, log: Path, device: Device, cores: int = 0) -> FarWorker:
        """A worker there: a `StartWorker`. `cores` has each worker on a device other than `ANYWHERE` for itself.

        Raises:
            EngineUnavailable: the machine cannot be reached any more.
        """
        own = max(cores, device.least) if cores and device != ANYWHERE else 0
        try:
            program, _ = self._start(log)
        except EngineUnavailable:  # the shared connection may have ended a moment ago
            program, _ = self._start(log)
        return FarWorker(program, self._destination.host, own)

    def command(self, module: str) -> list[str]:
        """The command that runs a module there over the shared connection."""
        return self._destination.command(module, self._folder.path / "ssh")

    def _start(self, log: Path) -> tuple[Program, MachineFacts]:
        host, command = self._destination.host, self.command("qdqtune.engines.remote.far")
        try:
            program = Program(log, args=command)
        except OSError as error:
            raise EngineUnavailable(f"`on` needs the program {command[0]}: {one_line(error)}") from error
        try:
            words = greeting(program, START_SECONDS)
            check_version(words, host)
            return program, replace(msgspec.convert(words["facts"], MachineFacts), where=host)
        except TimeoutError:
            program.end()
            raise EngineUnavailable(f"{host} does not answer within {START_SECONDS:.0f} s") from None
        except (EOFError, OSError, msgspec.ValidationError):
            code = program.exit_code(ENDING_SECONDS)
            reason = why_not(self._destination, code or 0, program.printed().splitlines())
            program.end()
            raise EngineUnavailable(reason) from None
        except BaseException:
            program.end(ENDING_SECONDS)
            raise

    def close(self) -> None:
        """Remove the files of the connection."""
        self._folder.close()


@contextmanager
def connected(on: str) -> Iterator[RemoteMachine]:
    """Connect to the machine that the option `on` names.

    Raises:
        EngineUnavailable: see `RemoteMachine`.
    """
    machine = RemoteMachine(Destination.parsed(on))
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
