"""The worker process on another machine: `python -m qdqtune.engines.remote.far`, which SSH, adb or Ray starts there.

It greets with what is known of the machine. Then it answers three kinds of messages: `missing` asks which of some
contents it lacks, `put` brings one, and `ask` is a request as for `engines.worker`, whose large arrays and constants
are named by their content. It ends, and removes its files, when its input closes.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from time import monotonic, sleep
from typing import Any

import numpy as np

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import LEASE_SECONDS, Device, allot, leased, usable_cores
from qdqtune.engines.machine import this_machine
from qdqtune.engines.worker import Session, answer, answer_undisturbed, parent, received
from qdqtune.errors import BadOption, EngineUnavailable, OutputError, writing
from qdqtune.system.interpreter import end_group
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array
from qdqtune.version import __version__

GREETING = b"qdqtune is here: "
"""What comes before the first message: shells may print lines before it."""

MOST_KEPT = 2**30
"""Bytes of contents that are kept though no build has them. Chosen, not measured."""


class Contents:
    """Bytes in files that are named by a digest of them. Those that were not used for longest are forgotten."""

    def __init__(self, folder: Path, most: int = MOST_KEPT) -> None:
        self._folder, self._most = folder, most
        self._sizes: dict[str, int] = {}  # in the order of their last use
        self._reason = ""

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Those that are not here. The others are used now."""
        for digest in digests:
            if digest in self._sizes:
                self._sizes[digest] = self._sizes.pop(digest)
        return [digest for digest in digests if digest not in self._sizes]

    def put(self, digest: str, values: Array) -> None:
        """Keep bytes. Where there is no room, `path` says so later."""
        try:
            (self._folder / digest).write_bytes(values.data)
            self._sizes[digest] = values.nbytes
        except OSError as error:
            self._reason = error.strerror or ""
            (self._folder / digest).unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """The file of some bytes.

        Raises:
            OutputError: there was no room for it.
        """
        if digest not in self._sizes:
            raise OutputError(f"cannot write to {self._folder}: {self._reason or 'a file is gone'}; it may be full")
        return self._folder / digest

    def forget(self, needed: set[str]) -> None:
        """Remove the oldest that are not needed until those that stay are within the bound."""
        spare = [digest for digest in self._sizes if digest not in needed]
        total = sum(self._sizes[digest] for digest in spare)
        for digest in spare:
            if total <= self._most:
                return
            total -= self._sizes.pop(digest)
            (self._folder / digest).unlink(missing_ok=True)


class FarSession(Session):
    """A session whose files come by content, on a device of this host."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self.contents = folder, Contents(folder)
        self._constants: dict[int, tuple[str, ...]] = {}
        self._device: Device | None = None
        self._lease = ExitStack()

    def ask(self, request: bytes, digests: Sequence[str] = ()) -> tuple[bool, Any]:
        """Answer a request in pickle's form, whose large arrays have these digests."""
        try:
            arrays = [np.fromfile(self.contents.path(digest), np.uint8) for digest in digests]
            reply = answer_undisturbed(self, *pickle.loads(request, buffers=arrays))
        except OutputError as error:
            reply = False, error
        self.contents.forget(set().union(*self._constants.values()))
        if isinstance(reply[1], OutputError):  # other hosts may have room, so only this worker is lost
            return False, EngineUnavailable(str(reply[1]))
        return reply

    def open_on(self, cores: int, folder: str, spec: EngineSpec, *more: Any) -> str:
        """Open an engine (see `Session.open`) on free cores of this host, and on a free GPU if it needs one; with 0
        cores wherever the system puts it. File names in its options are relative to `folder`, if there is one here.
        Returns the device in words.

        Raises:
            BadOption, EngineUnavailable: there are too few cores or GPUs within `LEASE_SECONDS`.
        """
        with suppress(OSError):
            os.chdir(folder)
        if cores and self._device is None:
            self._device = self._free_device(spec, cores)
            os.environ.update(self._device.environment)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, set(self._device.cores))
        self.open(spec, *more)
        if self._device is None:
            return ""
        gpu = f" GPU {self._device.gpu}" if self._device.gpu else ""
        return f" cores {','.join(map(str, self._device.cores))}{gpu}"

    def _free_device(self, spec: EngineSpec, cores: int) -> Device:
        end = monotonic() + LEASE_SECONDS
        while True:
            try:
                (device,) = allot(spec, 1, cores)
                self._lease.enter_context(leased(device, 0.0))
                return device
            except (BadOption, EngineUnavailable) as error:  # its last process is still ending, or another has it
                if monotonic() > end and cores <= usable_cores():  # other hosts may have some: this worker is lost
                    raise EngineUnavailable(str(error)) from error
                if monotonic() > end:
                    raise
                sleep(0.1)

    def build_from(self, number: int, name: str, proto: bytes, constants: tuple[str, ...]) -> tuple[str, bool, Any]:
        """Build a model. Returns what the engine has printed, with the answer."""
        for digest in constants:
            self.contents.path(digest)
        path, log = self._folder / f"{number}-{name}", self._folder / "build.log"
        log.unlink(missing_ok=True)
        with writing(path, "it may be full"):
            path.write_bytes(proto)
        self._constants[number] = constants
        good, result = answer(self, "build", (number, path, log))
        return log.read_text(errors="replace") if log.exists() else "", good, result

    def unload(self, number: int) -> None:
        """Free a model, and remove its file; its constants may serve others."""
        super().unload(number)
        self._constants.pop(number, None)
        for path in self._folder.glob(f"{number}-*"):
            path.unlink()


def main() -> None:
    """Greet, and answer until the input ends."""
    with suppress(OSError):
        os.setsid()
    scratch = temporary_folder()
    os.write(1, GREETING)
    channel = parent(scratch.path)
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch.path)
    channel.send({"version": __version__, "host": gethostname(), "facts": asdict(this_machine())})
    session = FarSession(scratch.path)
    contents = session.contents
    answers: dict[str, Callable[..., Any]] = {"missing": contents.missing, "put": contents.put, "ask": session.ask}
    for kind, *content in received(channel):
        channel.send(answers[kind](*content))
    scratch.close()
    end_group(0)


if __name__ == "__main__":
    main()
