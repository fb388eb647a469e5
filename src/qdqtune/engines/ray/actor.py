"""The Ray actor of one worker: it holds a device of its host, and passes requests on to an engine process there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import LEASE_SECONDS, Device, allot
from qdqtune.engines.process import WorkerProcess
from qdqtune.engines.ray.file_transfer import Get, Receiver
from qdqtune.errors import BadOption, EngineUnavailable, OutputError
from qdqtune.system.cleanup import cleaner
from qdqtune.system.writing import temporary_folder
from qdqtune.version import __version__

FILES = "files"
"""The folder of model files in that of temporary ones."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a request: an answer (a result if `good`, else a QdqtuneError), a timeout, or an ended process.

    `text` is what the engine has printed, or why the process has ended; `content` that of a file which was asked for.
    """

    kind: Literal["answer", "timeout", "ended"]
    good: bool = False
    result: Any = None
    text: str = ""
    content: bytes = b""


@dataclass(frozen=True)
class WorkerLocation:
    """The host and the device of a worker, and the version of qdqtune there."""

    host: str
    device: Device
    version: str

    def __str__(self) -> str:
        cores = f"cores {','.join(map(str, self.device.cores))}" if self.device.cores else ""
        return " ".join(filter(None, (self.host, cores, self.device.gpu and f"GPU {self.device.gpu}")))


class WorkerActor:
    """Answers the requests of one runner on a device of this host. Ray ends it with the process that created it; the
    engine process ends with it and removes the files of both. Names of files in the options of the engine are relative
    to `folder`, where this host has that too."""

    def __init__(self, spec: EngineSpec, cores_each: int | None, get: Get, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        cleaner().start()
        self._asked = spec, cores_each
        self._scratch = temporary_folder()
        self._folder = self._scratch.path
        (self._folder / FILES).mkdir()
        self._receiver = Receiver(self._folder / FILES, get)
        self._worker: WorkerProcess | None = None

    def start(self) -> WorkerLocation:
        """Start an engine process on cores, and a GPU where the engine needs one, that no other worker holds.

        Raises:
            QdqtuneError: none are free.
        """
        end = monotonic() + LEASE_SECONDS
        while True:
            try:
                (device,) = allot(self._asked[0], 1, self._asked[1])
                self._worker = WorkerProcess(self._folder / "worker.log", device)
                return WorkerLocation(socket.gethostname(), device, __version__)
            except (BadOption, EngineUnavailable):  # its last owner is still ending, or another worker was quicker
                if monotonic() > end:
                    raise
                sleep(0.1)

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> Reply:
        """One request of `worker.Session`. Model files come as `SentModel`; a saved file goes back as its content."""
        assert self._worker is not None
        log, wanted = self._folder / "build.log", None
        try:
            if name == "build":
                number, sent, _ = arguments
                log.unlink(missing_ok=True)
                arguments = (number, self._receiver.model(sent, number), log)
            elif name == "save":
                wanted = self._folder / "saved"
                arguments = (arguments[0], wanted)
            elif name == "feed":
                arguments = (tuple(replace(w, inputs=self._receiver.arrays(w.inputs)) for w in arguments[0]),)
            elif name == "run":
                arguments = (arguments[0], self._receiver.arrays(arguments[1]))
            good, result = self._worker.request(name, arguments, limit)
        except TimeoutError:
            text = _text(log) + self._worker.printed()
            self._worker.kill()
            return Reply("timeout", text=text)
        except (EOFError, BrokenPipeError, ConnectionError):
            return Reply("ended", text=self._worker.exit_reason())
        except OutputError as error:  # others may have room: this one is lost
            return Reply("answer", False, EngineUnavailable(f"on {socket.gethostname()}: {error}"))
        content = wanted.read_bytes() if wanted is not None and wanted.is_file() else b""
        return Reply("answer", good, result, _text(log) if name == "build" else "", content)

    def close(self) -> None:
        """End the engine process, and remove all files."""
        if self._worker is not None:
            self._worker.kill()
        self._scratch.close()


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
