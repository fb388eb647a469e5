"""What goes between a run and its workers on other machines, and how it goes through pipes.

The run sends any objects. It takes back values only: what a device answers must not run code here.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import IO, Any, Literal

from qdqtune.engines.channel import LENGTH
from qdqtune.engines.devices import Device
from qdqtune.engines.execution import Check, Deadline
from qdqtune.types import Array
from qdqtune.version import __version__

CHUNK = 2**16
"""Bytes that are read at once, so that a long message shows that the other side lives. Chosen, not measured."""

VALUES = {
    "numpy": ("ndarray", "dtype"),
    **dict.fromkeys(("numpy._core.multiarray", "numpy.core.multiarray"), ("_reconstruct", "scalar")),
    **dict.fromkeys(("numpy._core.numeric", "numpy.core.numeric"), ("_frombuffer",)),
}
"""Names of NumPy, by module, that arrays are made of."""

CLASSES = frozenset({"qdqtune.types", "qdqtune.errors", "qdqtune.engines.devices", __name__, "ml_dtypes"})
"""Modules whose classes hold values and do nothing."""


def _takes_bytes(pipe: int, seconds: float) -> bool:
    """Whether a pipe takes `PIPE_BUF` bytes at once, now or within so many seconds."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return bool(poll.poll(1e3 * seconds))


@dataclass(frozen=True)
class StoredArray:
    """An array in the store of the other side, and the digest of its content."""

    digest: str
    reference: Any


@dataclass(frozen=True)
class SentModel:
    """A model file to send: its name, the bytes of its ModelProto, and by name the files that hold its constants."""

    name: str
    proto: StoredArray | Array
    constants: Mapping[str, StoredArray]


@dataclass(frozen=True)
class Reply:
    """The outcome of a request: an answer (a result if `good`, else a QdqtuneError), a timeout, or an ended process.

    `text` is what the engine has printed, or why the process has ended. `content` is that of a saved file.
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
    version: str = __version__

    def __str__(self) -> str:
        cores = f"cores {','.join(map(str, self.device.cores))}" if self.device.cores else ""
        return " ".join(filter(None, (self.host, cores, self.device.gpu and f"GPU {self.device.gpu}")))


class Pipe:
    """Messages over two files, one for each direction. Several threads may send, one receives. With `values_only`
    nothing is received but values."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes], *, values_only: bool) -> None:
        self._reads, self._writes, self._load = reads, writes, _values if values_only else pickle.loads
        self._lock, self._is_cut = threading.Lock(), False
        self.heard = monotonic()
        """When something last came from the other side."""
        self.is_receiving = False
        """Whether a part of a message has come, and not yet all of it."""

    def send(self, message: object, limit: float | None = None, check: Check | None = None) -> None:
        """Send an object, after those of other threads. What `check` raises ends the wait.

        Raises:
            TimeoutError: the other side has taken nothing for `limit` seconds; nothing can be sent any more.
            OSError: the other side has closed, or an earlier message was cut.
        """
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            if self._is_cut:
                raise BrokenPipeError("an earlier message was not taken")
            self._is_cut = True  # until all of this one is
            if limit is None:
                self._writes.write(LENGTH.pack(len(data)))
                self._writes.write(data)
                self._writes.flush()
            else:
                for part in (LENGTH.pack(len(data)), data):
                    self._send_in_time(part, limit, check)
            self._is_cut = False

    def _send_in_time(self, data: bytes, limit: float, check: Check | None) -> None:
        left, deadline = memoryview(data), Deadline(limit, check)
        while left:
            if _takes_bytes(self._writes.fileno(), deadline.pause):
                left = left[os.write(self._writes.fileno(), left[: select.PIPE_BUF]) :]
                deadline = Deadline(limit, check)  # a slow network takes long, but does not stop
            else:
                deadline.after_pause()

    def receive(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError, OSError: the other side has closed.
            pickle.UnpicklingError: it is no value.
        """
        self.is_receiving = False
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        self.is_receiving = True
        return self._load(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray()
        while len(data) < length:
            part = self._reads.read(min(CHUNK, length - len(data)))
            if not part:
                raise EOFError
            data += part
            self.heard = monotonic()
        return data


class _Values(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and (name in VALUES.get(module, ()) or module in CLASSES):
            found = super().find_class(module, name)
            if module in VALUES or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no value")


def _values(data: bytearray) -> Any:
    return _Values(io.BytesIO(data)).load()
