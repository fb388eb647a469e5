"""Objects between two processes over a socket; large arrays in shared memory, which is many times as fast.

A process that is stopped reads nothing and answers nothing, so each send and each receive may have a deadline.

One inference that shows all inner tensors of a model gives half a gigabyte. New memory may take longer to get than the
inference does, so the memory of arrays that are gone is used again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qdqtune.engines.execution import Deadline

SHARED = 2**20
"""Bytes of arrays from which on a message takes them through shared memory. Chosen, not measured."""

ALIGNMENT = 64
"""Each array begins at a multiple of so many bytes, as NumPy and engines like them."""

CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

LENGTH = struct.Struct(">Q")
"""The length of a message, in front of it."""

T = TypeVar("T")


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
    def __init__(self, fd: int) -> None:
        """Take over the descriptor of a connected socket."""
        self._socket = socket.socket(fileno=fd)
        self._own: list[int] = []  # descriptors of the files that this side writes, and of those that it reads
        self._others: dict[int, int] = {}
        self._free: list[int] = []
        self._freed: deque[int] = deque()

    def send(self, message: object, deadline: Deadline | None = None) -> None:
        """Send an object. Its arrays may change as soon as this returns.

        Raises:
            TimeoutError: the other end has not taken all of it; nothing can be sent any more.
            OSError: the other end has closed, or there is no memory to share.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [buffer.raw() for buffer in buffers]
        freed = tuple(self._freed.popleft() for _ in range(len(self._freed)))
        if sum(part.nbytes for part in parts) < SHARED:
            self._send(_Message(pickle.dumps(message, protocol=5) if parts else data, freed), deadline)
            return
        if is_new := not self._free:
            self._own.append(_shared_file())
        number = len(self._own) - 1 if is_new else self._free.pop()
        places = _write(self._own[number], parts)
        self._send(_Message(data, freed, number, is_new, places), deadline)
        if is_new:
            self._in_time(lambda: socket.send_fds(self._socket, [b"."], [self._own[number]]), deadline)

    def recv(self, deadline: Deadline | None = None) -> Any:
        """Wait for an object. Its large arrays lie in memory that is used again when all of them are gone.

        Raises:
            TimeoutError: not all of it has come; nothing can be received any more.
            EOFError, OSError: the other end has closed.
        """
        (length,) = LENGTH.unpack(self._received(LENGTH.size, deadline))
        message: _Message = pickle.loads(self._received(length, deadline))
        self._free += message.freed
        if message.file is None:
            return pickle.loads(message.data)
        if message.is_new:
            _, descriptors, _, _ = self._in_time(lambda: socket.recv_fds(self._socket, 1, 1, CLOSE_ON_EXEC), deadline)
            if not descriptors:
                raise EOFError
            self._others[message.file] = descriptors[0]
        # A private copy: the arrays may be written to.
        shared = mmap.mmap(self._others[message.file], 0, access=mmap.ACCESS_COPY)
        weakref.finalize(shared, self._freed.append, message.file)
        view = memoryview(shared)
        return pickle.loads(message.data, buffers=[view[start : start + size] for start, size in message.places])

    def close(self) -> None:
        """Close this end. Arrays that it has received stay."""
        self._socket.close()
        descriptors = *self._own, *self._others.values()
        self._own, self._others, self._free = [], {}, []
        for descriptor in descriptors:
            os.close(descriptor)

    def _send(self, message: _Message, deadline: Deadline | None) -> None:
        content = pickle.dumps(message, protocol=5)
        for part in (LENGTH.pack(len(content)), content):
            left = memoryview(part)
            while left:
                left = left[self._in_time(lambda: self._socket.send(left), deadline) :]  # noqa: B023

    def _received(self, length: int, deadline: Deadline | None) -> bytearray:
        content = bytearray(length)
        left = memoryview(content)
        while left:
            count = self._in_time(lambda: self._socket.recv_into(left), deadline)  # noqa: B023
            if not count:
                raise EOFError
            left = left[count:]
        return content

    def _in_time(self, step: Callable[[], T], deadline: Deadline | None) -> T:
        """The result of a call of the socket, which is made again until it succeeds or the time is over."""
        while True:
            try:
                self._socket.settimeout(None if deadline is None else deadline.pause)
                return step()
            except TimeoutError:
                if deadline is None:  # the connection itself has timed out
                    raise
                deadline.after_pause()


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
