"""Another machine over SSH or adb: each of its workers is a command that begins with `ssh` or `adb`.

The system's `ssh` is used, so that names, keys and jumps of ~/.ssh/config hold, or its `adb`. It asks for nothing.
"""

from __future__ import annotations

import re
import shlex
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

SSH_ADVICE = {
    "Permission denied": "it has to let you in by a key, without a password",
    "Host key verification failed": "run ssh {host} once, and accept its key",
    "": "try ssh -o BatchMode=yes {host}",
}
"""What to do, by a pattern of what `ssh` prints."""

ADB_ADVICE = {
    "no devices|not found": "connect it, and look whether `adb devices` lists it",
    "more than one": "name one that `adb devices` lists, as in `on` adb:SERIAL",
    "unauthorized": "accept the key of this computer on the device",
    "permission": "this user may not open the USB device: see the udev rules of adb",
    "PTY|shell_v2": "its adbd is too old: use SSH",
    "": "see what `adb devices` says of it",
}
"""What to do, by a pattern of what `adb` prints."""

PYTHON_REASONS = {
    r"No module named '?qdqtune": "has no qdqtune of this version: {install} there, or name its Python, {named}",
    r"No module named '?([\w.]+)": "lacks the package {0}: {install} there, or name its Python, {named}",
    "Unknown option: -P|unknown option -P": "is older than 3.11: name a newer one, as in `on` {named}",
}
"""What is wrong with a Python, by a pattern of what it prints."""

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

    def command(self, module: str) -> list[str]:
        """The command that runs a module there. The path of the Python is relative to the home folder there."""
        words = f"exec {shlex.quote(self.python.removeprefix('~/'))} -P -m {module}"
        if self.serial is None:
            return [*SSH, "--", self.host, words]
        return ["adb", *(("-s", self.serial) if self.serial else ()), "shell", "-T", words]

    @property
    def serial(self) -> str | None:
        """The serial number of a device that `adb` reaches, "" for the only one; None for SSH."""
        return self.host.removeprefix("adb:") if self.host.startswith("adb:") else None

    def start(self, log: Path, device: Device, cores: int = 0) -> FarWorker:
        """A worker there: a `StartWorker`. `cores` has each worker on a device other than `ANYWHERE` for itself.

        Raises:
            EngineUnavailable: there is no way, no Python, or no qdqtune of this version.
        """
        program, _ = self._started(log)
        return FarWorker(program, self.host, max(cores, device.least) if cores and device != ANYWHERE else 0)

    def facts(self) -> MachineFacts:
        """What is known of the machine. Raises as `start`."""
        with temporary_folder() as folder:
            program, facts = self._started(folder / "greeting.log")
            program.end(ENDING_SECONDS)
        return facts

    def _started(self, log: Path) -> tuple[Program, MachineFacts]:
        command = self.command("qdqtune.engines.remote.far")
        try:
            program = Program(log, args=command)
        except OSError as error:
            raise EngineUnavailable(f"`on` needs the program {command[0]}: {one_line(error)}") from error
        try:
            words = greeting(program, START_SECONDS)
            check_version(words, self.host)
            return program, replace(msgspec.convert(words["facts"], MachineFacts), where=self.host)
        except TimeoutError:
            program.end()
            raise EngineUnavailable(f"{self.host} does not answer within {START_SECONDS:.0f} s") from None
        except (EOFError, OSError, msgspec.ValidationError):
            code = program.exit_code(ENDING_SECONDS)
            reason = why_not(self, code or 0, program.printed().splitlines())
            program.end()
            raise EngineUnavailable(reason) from None
        except BaseException:
            program.end(ENDING_SECONDS)
            raise


def facts_of(on: str) -> MachineFacts:
    """What is known of the machine that the option `on` names. Raises as `Destination.start`."""
    return Destination.parsed(on).facts()


def why_not(destination: Destination, code: int, printed: list[str]) -> str:
    """Why no worker has started, and what to do, from the exit code of `ssh` or `adb` and what it has printed."""
    host, python = destination.host, destination.python
    named = f"{host}/PATH" if host.startswith("ssh://") else f"{host}:PATH"
    told = [line for line in printed if not NOISE.search(line)]
    last, text = one_line(told[-1] if told else f"exit code {code}"), "\n".join(told)
    program, said, advice = "ssh", re.sub(r"^ssh: |[.\s]+$", "", last), SSH_ADVICE
    if destination.serial is not None:
        found = re.search(r"^(?:adb|error): (.*?)[.\s]*$", text, re.MULTILINE)
        program, said, advice = "adb", one_line(found[1]) if found else "", ADB_ADVICE
    if said and (program == "adb" or code == 255):
        todo = next(todo for pattern, todo in advice.items() if re.search(pattern, said if program == "adb" else text))
        return f"{program} to {host} fails ({said}): {todo.format(host=host)}"
    if code in (126, 127):
        return f"{host} has no {python} that runs: name the Python that has qdqtune, as in `on` {named}"
    for pattern, reason in PYTHON_REASONS.items():
        if (found := re.search(pattern, text)) is not None:
            install = f"pip install qdqtune=={__version__}"
            return f"{python} on {host} {reason.format(*found.groups(), install=install, named=named)}"
    return f"no worker starts with {python} on {host}: {last}"
