"""The program trtexec: how it is found and called, its version, the flags that it takes, and its error messages."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.system.writing import append

OLDEST = (8, 6)

RESERVED = frozenset({
    "exportLayerInfo", "exportOutput", "exportProfile", "exportTimes", "help", "loadEngine", "loadInputs", "onnx",
    "saveEngine", "skipInference",
})  # fmt: skip
PROFILING = frozenset({"exportLayerInfo", "exportProfile", "profilingVerbosity", "separateProfileRun"})
REPEATABLE = frozenset({"dynamicPlugins", "plugins", "staticPlugins"})

TUNERS = re.compile(r"remoteAutoTuning\w*|(auto)?tun(e|er|ing)([A-Z]\w*)?|continue")
"""Flags that start searches of TensorRT itself: they build one file many times, or have another machine time it."""

FORMER = re.compile(r"--workspace=(\d+)")
"""A flag of trtexec up to 8, in MiB: trtexec 10 and later know its second name only, which 8.6 knows as well."""

UNKNOWN_OPTION = re.compile(r"Unknown option: -*(\w+)")
ERROR_LINE = re.compile(r"\[[EF]\] (?:\[TRT\] )?(.*)")


Launch = Callable[[Sequence[str], BinaryIO], int]
"""Runs a command, writes what it prints to the file, and returns the exit status, negative for a signal."""


def launch_process(command: Sequence[str], printed: BinaryIO) -> int:
    """Run a command as a `Launch`. The child stays in the process group of the worker, so that it is killed with it.

    Raises:
        OSError: the command cannot be started.
    """
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, check=False).returncode


def find(name: str, arguments: str, launch: Launch = launch_process) -> Program:
    """The program of that name or path, with the user's flags.

    Raises:
        BadOption: the flags cannot be read, or the user must not set one.
        EngineUnavailable: there is no such program, or it is no trtexec of 8.6 or later.
    """
    flags = _checked_flags(arguments)
    path = shutil.which(name)
    if path is None:
        raise EngineUnavailable(
            f"there is no program {name!r}: it comes with TensorRT (in its bin folder; in NVIDIA's containers "
            "/usr/src/tensorrt/bin/trtexec); give its place with `engine_options` trtexec=PATH"
        )
    return Program(path, _version(path, launch), flags, launch)


def _checked_flags(text: str) -> tuple[str, ...]:
    """The user's flags, each once: as in trtexec itself, the last value of a flag counts."""
    try:
        words = [FORMER.sub(r"--memPoolSize=workspace:\1", word) for word in shlex.split(text)]
    except ValueError as error:
        raise BadOption(f"trtexec_args cannot be read ({error}): {text!r}") from error
    for word in words:
        if not word.startswith("--"):
            raise BadOption(f"trtexec_args: {word!r} is no flag; write --name or --name=value")
        if flag_name(word) in RESERVED:
            raise BadOption(f"trtexec_args: --{flag_name(word)} is set by qdqtune; leave it out")
        if TUNERS.fullmatch(flag_name(word)):
            raise BadOption(
                f"trtexec_args: --{flag_name(word)} starts a search of TensorRT's own, in which no two builds are "
                "alike: leave it out here, and use it on optimized_final.onnx when this search is done"
            )
    return tuple({word if flag_name(word) in REPEATABLE else flag_name(word): word for word in words}.values())


def flag_name(flag: str) -> str:
    """The `name` in `--name=value` or `--name`."""
    return flag.removeprefix("--").partition("=")[0]


def _version(program: str, launch: Launch) -> Version:
    """The version in the program's banner: `[TensorRT v8601]`, from 10 on two digits for each part, `v100001`."""
    with tempfile.TemporaryFile() as file:
        try:
            status = launch([program, "--help"], cast(BinaryIO, file))
        except OSError as error:
            raise EngineUnavailable(f"{program} cannot be started: {error.strerror or error}") from error
        file.seek(0)
        printed = file.read().decode(errors="replace")
    banner = re.search(r"\[TensorRT v(\d+)\]", printed)
    if banner is None:
        words = one_line(printed.strip() or f"status {status}")
        raise EngineUnavailable(f"{program} --help tells no TensorRT version ({words:.200}): is it trtexec?")
    number = int(banner[1])
    major, rest = divmod(number, 10_000 if number >= 100_000 else 1000)
    version = Version(major, *divmod(rest, 100))
    if version < OLDEST:
        raise EngineUnavailable(f"{program} is of TensorRT {version}: 8.6 or later is needed")
    return version


class Version(NamedTuple):
    """A release of TensorRT."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


@dataclass
class Program:
    """The program, and the flags that the user adds to every call."""

    path: str
    version: Version
    arguments: tuple[str, ...]
    launch: Launch = launch_process
    profiles: bool = field(default=True, init=False)
    """Whether the program knows the flags of `PROFILING`; False after it has refused one."""
    start_seconds: float = field(default=2.0, init=False)
    """Seconds that the last timing of a model took; a guess before the first."""

    def run(self, flags: Iterable[str], log: Path) -> str:
        """Call the program, append what it prints to the log, and return it.

        A call that is refused for a profiling flag is repeated without profiling flags, and later calls omit them.

        Raises:
            EngineFailure: the call fails.
        """
        command = self._merged_flags(flags)
        status, printed = self._call(command, log)
        if status and self.profiles and PROFILING & set(UNKNOWN_OPTION.findall(printed)):
            self.profiles = False
            status, printed = self._call(self._merged_flags(flags), log)
        if status or re.search(r"^&&&& FAILED", printed, re.MULTILINE):
            raise EngineFailure(f"trtexec: {_reason(status, printed)}")
        return printed

    def _merged_flags(self, flags: Iterable[str]) -> list[str]:
        given = {flag_name(flag) for flag in self.arguments} - REPEATABLE
        both = [*(flag for flag in flags if flag_name(flag) not in given), *self.arguments]
        return [flag for flag in dict.fromkeys(both) if self.profiles or flag_name(flag) not in PROFILING]

    def _call(self, flags: Sequence[str], log: Path) -> tuple[int, str]:
        append(log, f"$ {shlex.join([self.path, *flags])}\n")
        with log.open("ab") as file:
            start = file.tell()
            status = self.launch([self.path, *flags], file)
        with log.open("rb") as file:
            file.seek(start)
            return status, file.read().decode(errors="replace")


def _reason(status: int, printed: str) -> str:
    """The first error, which is the cause, and the last, which names the stage."""
    if status < 0:
        return f"ended with signal {signal.Signals(-status).name}"
    errors = [text for text in ERROR_LINE.findall(printed) if text.strip()]
    lines = errors or [line for line in printed.splitlines() if line and not line.startswith("&&&&")]
    return one_line("; ".join(dict.fromkeys([lines[0], lines[-1]]))) if lines else f"exit status {status}"
