"""Messages between two processes over two pipes: a length, a pickled object, and arrays as raw bytes.

Each send and receive may have a deadline, as a stopped process neither reads nor answers. The side that asks unpickles
harmless classes only: an answer from another machine must not run code here.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import select
import struct
from contextlib import suppress
from typing import IO, Any

from qdqtune.engines.execution import Deadline
from qdqtune.errors import QdqtuneError

LONGEST_WELCOME = 2**16
"""Bytes that a shell may print before the greeting. Chosen, not measured."""

PIPE_BYTES = 2**20
"""Bytes that a pipe for answers holds, where Linux allows it: outputs of all tensors come twice as fast as in 64
KiB. Linux limits the bytes of all pipes of a user, so requests have to do with less."""

VALUES = {
    "numpy": ("ndarray", "dtype"),
    **dict.fromkeys(("numpy._core.multiarray", "numpy.core.multiarray"), ("_reconstruct", "scalar")),
    **dict.fromkeys(("numpy._core.numeric", "numpy.core.numeric"), ("_frombuffer",)),
}
"""The functions of NumPy, by module, that pickle calls to make arrays; allowed in answers."""

CLASSES = frozenset({"qdqtune.types", "qdqtune.errors", "ml_dtypes"})
"""Modules whose classes are plain values, allowed in answers."""


class Channel:
    """One end of two unbuffered pipes. With `asks`, it accepts plain values only, and needs deadlines."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes], *, asks: bool) -> None:
        self._reads, self._writes = reads, writes
        self._unpickler = _Values if asks else pickle.Unpickler
        for pipe in (reads, writes):
            os.set_blocking(pipe.fileno(), not asks)
        if asks:
            with suppress(AttributeError, OSError):
                fcntl.fcntl(reads, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: object, deadline: Deadline | None = None) -> None:
        """Send an object.

        Raises:
            TimeoutError: not all of it was sent in time; the channel is unusable.
            OSError: the other end is closed.
        """
        arrays: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(data), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        self._write(memoryview(struct.pack(f">{1 + len(sizes)}Q", len(sizes), *sizes)), deadline)
        for part in parts:
            self._write(part, deadline)

    def recv(self, deadline: Deadline | None = None) -> Any:
        """Wait for an object.

        Raises:
            TimeoutError: not all of it came in time; the channel is unusable.
            EOFError, OSError: the other end is closed, or sent no valid message.
        """
        (count,) = struct.unpack(">Q", self._read(8, deadline))
        try:
            sizes = struct.unpack(f">{count}Q", self._read(8 * count, deadline))
            data, *arrays = [self._read(size, deadline) for size in sizes]
            return self._unpickler(io.BytesIO(data), buffers=arrays).load()
        except (OSError, QdqtuneError):  # the wait has ended, or is cancelled
            raise
        except Exception as error:  # bytes from elsewhere: to read them may raise anything
            raise EOFError(f"what came is no answer: {type(error).__name__}: {error}") from error

    def skip_to(self, mark: bytes, deadline: Deadline) -> None:
        """Read and drop everything up to the first `mark`, such as lines that a shell prints. Raises as `recv`, and
        EOFError if too many bytes come before it."""
        text = b""
        while not text.endswith(mark):
            if len(text) > LONGEST_WELCOME:
                raise EOFError("no greeting")
            text += self._read(1, deadline)

    def close(self) -> None:
        self._writes.close()
        self._reads.close()

    def _write(self, left: memoryview, deadline: Deadline | None) -> None:
        while left:
            self._await(self._writes, select.POLLOUT, deadline)
            left = left[self._writes.write(left) or 0 :]
            if deadline is not None:
                deadline.renew()

    def _read(self, size: int, deadline: Deadline | None) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            self._await(self._reads, select.POLLIN, deadline)
            count = os.readv(self._reads.fileno(), [left])
            if not count:
                raise EOFError("the other end has closed")
            left = left[count:]
        return content

    @staticmethod
    def _await(pipe: IO[bytes], event: int, deadline: Deadline | None) -> None:
        if deadline is not None:
            poll = select.poll()
            poll.register(pipe, event)
            deadline.wait(lambda seconds: poll.poll(1e3 * seconds))


class _Values(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and (name in VALUES.get(module, ()) or module in CLASSES):
            value = super().find_class(module, name)
            if module in VALUES or (isinstance(value, type) and value.__module__ == module):
                return value
        raise pickle.UnpicklingError(f"{module}.{name} is no value")
