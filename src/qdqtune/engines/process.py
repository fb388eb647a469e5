"""Processes that answer messages over two pipes: a length, a pickled object, and arrays as raw bytes.

Each message has a time limit, as a stopped process neither reads nor answers. The side that asks unpickles harmless
classes only: an answer from another machine must not run code here.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from qdqtune.engines.execution import wait_for
from qdqtune.errors import EngineUnavailable, QdqtuneError, writing
from qdqtune.system.interpreter import end_group, python
from qdqtune.system.writing import WORKERS, Scratch

MARK = b"qdqtune is here: "
"""Comes before the first answer, as shells may print other lines before it."""

LONGEST_WELCOME = 2**16
"""Bytes that a shell may print before the mark. Chosen, not measured."""

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


def ends_of(limit: float | None) -> float | None:
    """The time (by `time.monotonic`) at which a wait of so many seconds ends; None without a limit."""
    return None if limit is None else time.monotonic() + limit


class Channel:
    """One end of two unbuffered pipes. With `asks`, it accepts plain values only, and needs limits: the most seconds
    that a message may take."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes], *, asks: bool) -> None:
        self._reads, self._writes = reads, writes
        self._unpickler = _Values if asks else pickle.Unpickler
        for pipe in (reads, writes):
            os.set_blocking(pipe.fileno(), not asks)
        self._mark = MARK if asks else b""
        if not asks:
            writes.write(MARK)
        else:
            with contextlib.suppress(AttributeError, OSError):
                fcntl.fcntl(reads, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: object, limit: float | None = None) -> None:
        """Send an object.

        Raises:
            TimeoutError: not all of it was sent; the channel is unusable.
            OSError: the other end is closed.
        """
        arrays: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(data), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        ends = ends_of(limit)
        self._write(memoryview(struct.pack(f">{1 + len(sizes)}Q", len(sizes), *sizes)), ends)
        for part in parts:
            self._write(part, ends)

    def recv(self, limit: float | None = None) -> Any:
        """Wait for an object.

        Raises:
            TimeoutError: not all of it came; the channel is unusable.
            EOFError, OSError: the other end is closed, or sent no valid message.
        """
        text, ends = b"", ends_of(limit)
        while not text.endswith(self._mark):
            if len(text) > LONGEST_WELCOME:
                raise EOFError("no greeting")
            text += self._read(1, ends)
        self._mark = b""
        (count,) = struct.unpack(">Q", self._read(8, ends))
        try:
            sizes = struct.unpack(f">{count}Q", self._read(8 * count, ends))
            data, *arrays = [self._read(size, ends) for size in sizes]
            return self._unpickler(io.BytesIO(data), buffers=arrays).load()
        except (OSError, QdqtuneError):  # the wait has ended, or is cancelled
            raise
        except Exception as error:  # bytes from elsewhere: to read them may raise anything
            raise EOFError(f"what came is no answer: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._writes.close()
        self._reads.close()

    def _write(self, left: memoryview, ends: float | None) -> None:
        while left:
            self._await(self._writes, select.POLLOUT, ends)
            left = left[self._writes.write(left) or 0 :]

    def _read(self, size: int, ends: float | None) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            self._await(self._reads, select.POLLIN, ends)
            count = os.readv(self._reads.fileno(), [left])
            if not count:
                raise EOFError("the other end has closed")
            left = left[count:]
        return content

    @staticmethod
    def _await(pipe: IO[bytes], event: int, ends: float | None) -> None:
        if ends is not None:
            poll = select.poll()
            poll.register(pipe, event)
            wait_for(lambda seconds: poll.poll(1e3 * seconds), ends - time.monotonic())


class _Values(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and (name in VALUES.get(module, ()) or module in CLASSES):
            value = super().find_class(module, name)
            if module in VALUES or (isinstance(value, type) and value.__module__ == module):
                return value
        raise pickle.UnpicklingError(f"{module}.{name} is no value")


NODE_LOST = (
    "the Ray node that the run was connected through is lost, and the run with it: the same command goes on from what "
    "was measured"
)


class Worker(Protocol):
    """A process that answers messages."""

    location: str
    """Host and device of the worker, for messages; "" on this host."""

    @property
    def alive(self) -> bool:
        """False once the process has ended, and its builds are lost."""

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        """Call a method of the worker's session (`worker.Session`; `open` comes first), and return its result.

        Raises:
            QdqtuneError: what the method raises.
            TimeoutError: no answer within `limit` seconds.
            EOFError: the worker has ended; the text says how.
        """

    def end(self, seconds: float = 0.0) -> None:
        """End the worker and all processes that it started; it has `seconds` to end by itself."""


StartWorker = Callable[[Path], Worker]
"""Starts a worker; what it prints is appended to the log file."""


class Program:
    """A running command that answers messages over standard input and output; a `Worker`. It leads its own process
    group, so that Ctrl-C does not reach it, and one kill ends all that it started. Its output is appended to a log."""

    location = ""

    def __init__(self, log: Path, **command: Any) -> None:
        """Start it; `command` are arguments for `subprocess.Popen`.

        Raises:
            OutputError: the log cannot be written.
            OSError: the system starts no process.
        """
        with writing(log):
            output = log.open("ab")
        with output:
            streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "bufsize": 0}
            process: Any = subprocess.Popen(**command, **streams, process_group=0)
        self._process: subprocess.Popen[bytes] = process
        self.channel = Channel(process.stdout, process.stdin, asks=True)
        self.held = contextlib.ExitStack()  # closed when the process has ended

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        try:
            self.channel.send((name, arguments), limit)
            good, result = self._answer(limit)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            code = self.exit_code(5.0)
            if code is None:
                raise EOFError("a closed connection") from error
            raise EOFError(f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}") from error
        if good:
            return result
        raise result

    def _answer(self, limit: float) -> tuple[bool, Any]:
        answer = self.channel.recv(limit)
        if not (isinstance(answer, tuple) and len(answer) == 2 and (answer[0] or isinstance(answer[1], Exception))):
            raise EOFError("what came is no answer")
        return answer

    def end(self, seconds: float = 0.0) -> None:
        with self.held:  # also where Ctrl-C comes meanwhile
            self.channel.close()  # by which it knows that it is to end
            if self.exit_code(seconds) is None:
                end_group(self._process.pid)
            self._process.wait()

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The exit code, or minus the number of a signal; None if the process still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None


def start_worker(log: Path) -> Program:
    """Start a worker on this host; its temporary files are removed when it ends. See `StartWorker`."""
    with contextlib.ExitStack() as held:
        with writing(log):
            folder = held.enter_context(Scratch(log.parent, WORKERS))
        try:
            program = Program(log, **python("-m", "qdqtune.engines.worker", TMPDIR=str(folder)))
        except OSError as error:
            raise EngineUnavailable(f"no process for the engine can be started: {error.strerror}") from error
        program.held = held.pop_all()
    return program
