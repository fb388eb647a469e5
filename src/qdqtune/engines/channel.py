"""Objects between two processes over a socket; large arrays in shared memory, which is many times as fast.

One inference that shows all inner tensors of a model gives half a gigabyte. New memory may take longer to get than the
inference does, so the memory of arrays that are gone is used again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SHARED = 2**20
"""Bytes of arrays from which on a message takes them through shared memory. Chosen, not measured."""

ALIGNMENT = 64
"""Each array begins at a multiple of so many bytes, as NumPy and engines like them."""

CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True)
class _Message:
    """An object in pickle's form. If it has large arrays, these lie in the shared file with the number `file`, at
    `places` (start and size in bytes); a file that `is_new` follows the message. `freed` are the numbers of files of
    the other side that it may use again."""

    data: bytes
    freed: tuple[int, ...]
    file: int | None = None
    is_new: bool = False
    places: tuple[tuple[int, int], ...] = ()


class Channel:
    """One end of a socket between two processes of this host. It sends and receives any object that pickle takes."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor of a connected socket; on Windows, its handle."""
        self._connection: Connection[Any, Any] = Connection(fd)
        self._own: list[int] = []  # descriptors of the files that this side writes, and of those that it reads
        self._others: dict[int, int] = {}
        self._free: list[int] = []
        self._freed: deque[int] = deque()

    def send(self, message: object) -> None:
        """Send an object. Its arrays may change as soon as this returns.

        Raises:
            OSError: the other end has closed, or there is no memory to share.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        freed = tuple(self._freed.popleft() for _ in range(len(self._freed)))
        if sum(part.nbytes for part in parts) < SHARED or sys.platform == "win32":  # which sends no open files
            self._connection.send(_Message(pickle.dumps(message, protocol=5) if parts else data, freed))
            return
        if is_new := not self._free:
            self._own.append(_shared_file())
        number = len(self._own) - 1 if is_new else self._free.pop()
        places = _write(self._own[number], parts)
        self._connection.send(_Message(data, freed, number, is_new, places))
        if is_new:
            with self._socket() as own:
                socket.send_fds(own, [b"."], [self._own[number]])

    def recv(self) -> Any:
        """Wait for an object. Its large arrays lie in memory that is used again when all of them are gone.

        Raises:
            EOFError, OSError: the other end has closed.
        """
        message: _Message = self._connection.recv()
        self._free += message.freed
        if message.file is None or sys.platform == "win32":
            return pickle.loads(message.data)
        if message.is_new:
            with self._socket() as own:
                _, descriptors, _, _ = socket.recv_fds(own, 1, 1, CLOSE_ON_EXEC)
            if not descriptors:
                raise EOFError
            self._others[message.file] = descriptors[0]
        # A private copy: the arrays may be written to.
        shared = mmap.mmap(self._others[message.file], 0, access=mmap.ACCESS_COPY)
        weakref.finalize(shared, self._freed.append, message.file)
        view = memoryview(shared)
        return pickle.loads(message.data, buffers=[view[start : start + size] for start, size in message.places])

    def poll(self, seconds: float) -> bool:
        """Whether an object, or the end, arrives within so many seconds."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Close this end. Arrays that it has received stay."""
        self._connection.close()
        descriptors = *self._own, *self._others.values()
        self._own, self._others, self._free = [], {}, []
        for descriptor in descriptors:
            os.close(descriptor)

    def _socket(self) -> socket.socket:
        """The socket under a descriptor of its own."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))


def _shared_file() -> int:
    """The descriptor of a new file without a name, in memory where the system can."""
    if sys.platform == "linux":
        return os.memfd_create("qdqtune")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(fd: int, parts: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
    """Write all parts to a file from its start; where each one lies, and its bytes."""
    places, at = [], 0
    for part in parts:
        places.append((at, part.nbytes))
        written = 0
        os.lseek(fd, at, os.SEEK_SET)
        while written < part.nbytes:
            written += os.write(fd, part[written:])
        at += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    if os.fstat(fd).st_size < at:
        os.ftruncate(fd, at)
    return tuple(places)
