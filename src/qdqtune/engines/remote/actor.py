"""A worker on another machine: it holds a device there, and passes the requests of one runner to an engine process."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import ANYWHERE, LEASE_SECONDS, allot
from qdqtune.engines.process import WorkerProcess
from qdqtune.engines.remote.files import Get, Receiver
from qdqtune.engines.remote.messages import Reply, WorkerLocation
from qdqtune.errors import BadOption, EngineUnavailable, OutputError
from qdqtune.system.writing import temporary_folder

FILES = "files"
"""Name of the folder for model files, within the temporary folder of an actor."""


class WorkerActor:
    """Answers the requests of one runner on a device of this host: on cores of its own, `cores_each` of them, or with
    `cores_each` 0 wherever the system puts it. It ends together with the process that created it, Ray's or the agent of
    SSH; the engine process then ends too, and the files of both are removed. File names in the engine's options are
    relative to `folder`, if this host has that folder. `receiver` writes model files; by default one with `get` into a
    folder of its own."""

    def __init__(
        self, spec: EngineSpec, cores_each: int | None, get: Get, folder: str, receiver: Receiver | None = None
    ) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._asked = spec, cores_each
        self._scratch = temporary_folder()
        self._folder = self._scratch.path
        (self._folder / FILES).mkdir()
        self._receiver = receiver or Receiver(self._folder / FILES, get)
        self._worker: WorkerProcess | None = None

    def start(self) -> WorkerLocation:
        """Start an engine process on free cores of this host, and on a free GPU if the engine needs one.

        Raises:
            BadOption, EngineUnavailable: there are too few within `LEASE_SECONDS`.
        """
        end = monotonic() + LEASE_SECONDS
        while True:
            try:
                (device,) = (ANYWHERE,) if self._asked[1] == 0 else allot(self._asked[0], 1, self._asked[1])
                self._worker = WorkerProcess(self._folder / "worker.log", device)
                return WorkerLocation(socket.gethostname(), device)
            except (BadOption, EngineUnavailable):  # its last process is still ending, or another worker took it
                if monotonic() > end:
                    raise
                sleep(0.1)

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> Reply:
        """Pass on one request for `worker.Session`. A model file comes as `SentModel`; a saved file is returned as its
        content."""
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
        except (EOFError, ConnectionError):
            return Reply("ended", text=self._worker.exit_reason())
        except OutputError as error:  # other hosts may have room, so only this worker is lost
            return Reply("answer", False, EngineUnavailable(f"on {socket.gethostname()}: {error}"))
        if name == "unload" and good:
            self._receiver.remove(arguments[0])
        content = wanted.read_bytes() if wanted is not None and wanted.is_file() else b""
        return Reply("answer", good, result, _text(log) if name == "build" else "", content)

    def end(self) -> None:
        """End the engine process, also while another thread waits for its answer."""
        if self._worker is not None:
            self._worker.end()

    def close(self) -> None:
        """End the engine process, and remove all files."""
        if self._worker is not None:
            self._worker.kill()
        self._scratch.close()


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
