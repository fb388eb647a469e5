"""The program that SSH or adb starts on another machine: `python -m qdqtune.engines.remote.agent`.

It says first what machine this is. Then it reads messages `(number of a worker, kind, content)` from its standard
input: "start" a worker, a "request" for it, "stop" it; "content" to keep for all workers, or to "forget", and "ping".
It answers with `(number, result or QdqtuneError)`, and says every `PULSE_SECONDS` that it lives. When the input ends,
or nothing has come for `SILENT_SECONDS`, it ends all engine processes and removes its files; if it is killed, the
engine processes and the cleaner notice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from socket import gethostname
from typing import Any

import numpy as np

from qdqtune.engines.machine import this_machine
from qdqtune.engines.remote.actor import WorkerActor
from qdqtune.engines.remote.files import Receiver
from qdqtune.engines.remote.messages import Pipe
from qdqtune.errors import EngineUnavailable, QdqtuneError, one_line, writing
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array
from qdqtune.version import __version__

GREETING = b"qdqtune is here: "
"""What the agent's first line begins with: shells may print other lines before it."""

SILENT_SECONDS = 120.0
"""After so long without a message the other side is lost, though the connection seems to stand. Chosen, not
measured."""

PULSE_SECONDS = 10.0
"""How often each side tells the other that it lives. Chosen, not measured."""

CLOSING_SECONDS = 5.0
"""How long workers may take to remove their files before the cleaner does. Chosen, not measured."""


class Store:
    """Arrays by digest, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kinds: dict[str, tuple[Any, tuple[int, ...]]] = {}

    def put(self, digest: str, values: Array) -> None:
        """Keep an array. Where there is no room, `get` says so later."""
        path = self.folder / f"{digest}.bin"
        self._kinds[digest] = values.dtype, values.shape
        try:
            np.ascontiguousarray(values).tofile(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        except OSError:
            path.with_suffix(".part").unlink(missing_ok=True)

    def forget(self, digest: str) -> None:
        """Keep an array no longer."""
        (self.folder / f"{digest}.bin").unlink(missing_ok=True)

    def get(self, digest: str) -> Array:
        """The array of a digest.

        Raises:
            OutputError: there was no room for it.
        """
        path, (dtype, shape) = self.folder / f"{digest}.bin", self._kinds[digest]
        with writing(path, "it may be full"):
            return np.fromfile(path, dtype).reshape(shape)


class Served(threading.Thread):
    """One worker, and the thread that does what it is asked for."""

    def __init__(self, number: int, store: Store, pipe: Pipe) -> None:
        super().__init__(daemon=True)
        self.asked: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._number, self._store, self._pipe = number, store, pipe
        self._actor: WorkerActor | None = None

    def stop(self) -> None:
        """End the engine process, and then the thread."""
        if self._actor is not None:
            self._actor.end()
        self.asked.put(("stop", None))

    def run(self) -> None:
        """Answer until told to stop."""
        while (asked := self.asked.get())[0] != "stop":
            try:
                result = self._done(*asked)
            except QdqtuneError as error:
                result = error
            except Exception as error:  # noqa: BLE001  (a defect here must not look like an answer that never comes)
                traceback.print_exc()
                result = EngineUnavailable(f"the agent on {gethostname()} fails: {one_line(error)}")
            with suppress(OSError):  # then the input has ended as well
                self._pipe.send((self._number, result))
        if self._actor is not None:
            self._actor.close()
        for path in self._store.folder.glob(f"{self._number}-*"):  # of builds that it still had
            path.unlink(missing_ok=True)

    def _done(self, kind: str, content: tuple[Any, ...]) -> Any:
        if kind == "start":
            receiver = Receiver(self._store.folder, self._store.get, f"{self._number}-")
            spec, cores, folder = content
            self._actor = WorkerActor(spec, cores, self._store.get, folder, receiver)
            return self._actor.start()
        assert self._actor is not None
        return self._actor.request(*content)


def serve(pipe: Pipe, folder: Path) -> None:
    """Do what comes through the pipe until it ends."""
    store, workers, stopped = Store(folder), dict[int, Served](), list[Served]()
    with suppress(EOFError, OSError):
        while True:
            number, kind, content = pipe.receive()
            if kind == "content":
                store.put(*content)
            elif kind == "forget":
                store.forget(content)
            elif kind == "stop":
                if number in workers:
                    stopped.append(workers.pop(number))
                    stopped[-1].stop()
                stopped = [worker for worker in stopped if worker.is_alive()]
            elif kind != "ping":
                if number not in workers:
                    workers[number] = Served(number, store, pipe)
                    workers[number].start()
                workers[number].asked.put((kind, content))
    for worker in workers.values():
        worker.stop()
    ends = time.monotonic() + CLOSING_SECONDS
    for worker in (*workers.values(), *stopped):
        worker.join(max(0.0, ends - time.monotonic()))


def main() -> None:
    """Greet, and serve."""
    with suppress(OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reads, writes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nowhere:
        os.dup2(nowhere.fileno(), 0)
    os.dup2(2, 1)  # what anything prints must not come between messages
    pipe = Pipe(reads, writes, values_only=False)
    facts = {"version": __version__, "facts": asdict(this_machine())}
    writes.write(GREETING + json.dumps(facts).encode() + b"\n")
    writes.flush()
    scratch = temporary_folder()
    for endless in (_watch, _pulse):
        threading.Thread(target=endless, args=(pipe,), daemon=True).start()
    serve(pipe, scratch.path)
    scratch.close()
    sys.stderr.flush()
    os._exit(0)  # threads may still wait for engine processes


def _watch(pipe: Pipe) -> None:
    """End this process once nothing comes any more: its engine processes and its cleaner notice."""
    while time.monotonic() - pipe.heard < SILENT_SECONDS:
        time.sleep(SILENT_SECONDS / 10)
    os._exit(1)


def _pulse(pipe: Pipe) -> None:
    """Tell the other side that this one lives, whatever its other threads do."""
    with suppress(OSError):
        while True:
            time.sleep(PULSE_SECONDS)
            pipe.send((0, None))


if __name__ == "__main__":
    main()
