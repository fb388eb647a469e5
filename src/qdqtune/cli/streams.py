"""Standard output and error that never fail (they may be closed, full, or a pipe without a reader), and Ctrl-C.

Text may hold names from models, so control characters in it are escaped.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from types import FrameType
from typing import TextIO

from qdqtune.errors import escaped

STDOUT, STDERR = 1, 2
"""File descriptors of the standard streams."""

BEGUN = "qdqtune.begun"
"""The key in click's context for the start of the command, by `time.monotonic`."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

PARENT = "QDQTUNE_PARENT"
"""The environment variable with the descriptor of a pipe whose other end the parent process holds."""

ENDING_SECONDS = 30.0
"""How long a process may take to clean up when its parent is gone. Chosen, not measured."""

AT_ONCE = 0.2
"""Interrupts less than so many seconds apart count as one. Chosen, not measured."""

SHOW_CURSOR = b"\x1b[?25h"


def escaped_lines(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(escaped, text.split("\n")))


class SafeStream(io.TextIOBase):
    """A text stream that never fails, and escapes control characters. After an error, further text is dropped and
    `lost` holds the error, except for a closed pipe. `styled` is the same stream for text that is already escaped."""

    def __init__(self, stream: TextIO, *, is_styled: bool = False) -> None:
        self._stream, self._is_styled = stream, is_styled
        self.styled = self if is_styled else SafeStream(stream, is_styled=True)
        self._is_gone = False
        self.lost: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return not self._is_gone and self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        clean = text if self._is_styled else escaped_lines(text)
        encoding = self.encoding
        self._safely(self._stream.write, clean.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._safely(self._stream.flush)

    def _safely(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            if self._is_gone:
                return
            self._is_gone = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.lost = error
            with suppress(OSError, ValueError):  # or the interpreter would try it again at its end, and fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def guarded() -> Iterator[None]:
    """Replace standard output and standard error by safe streams, and restore them at the end.

    Standard output is for results only: what libraries write to its file descriptor goes to standard error. A stream
    with another descriptor, as in tests, keeps it.
    """
    for number in range(3):  # a file that is opened under such a number would get what libraries print
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (kept for what others write late)
    results, own = sys.stdout or nowhere, -1
    with suppress(OSError, ValueError):  # in memory, or closed
        if results.fileno() == STDOUT:
            results.flush()
            own = os.dup(STDOUT)
            os.dup2(STDERR, STDOUT)
            results = io.TextIOWrapper(io.FileIO(own, "w", closefd=False), results.encoding, results.errors)
    sys.stdout, sys.stderr = SafeStream(results), SafeStream(sys.stderr or nowhere)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
        if own >= 0:
            with suppress(OSError, ValueError):
                before[0].flush()
            ctypes.CDLL(None).fflush(None)  # what C has printed, and would write at its end
            os.dup2(own, STDOUT)
            os.close(own)


def styled(stream: TextIO) -> TextIO:
    """The stream for text that is already escaped and has colours."""
    return stream.styled if isinstance(stream, SafeStream) else stream  # type: ignore[return-value]


def lost_output() -> OSError | None:
    """The error because of which results were not written to standard output; None if there was none."""
    sys.stdout.flush()
    if not isinstance(sys.stdout, SafeStream):
        return None
    return sys.stdout.lost or sys.stdout.styled.lost


@contextmanager
def interrupts() -> Iterator[Event]:
    """Handle Ctrl-C: the first one sets the event and raises KeyboardInterrupt, which a library may turn into another
    error; a later one ends the process (one at once is the same: `timeout` sends each signal twice). Nothing changes
    outside of the main thread, or where interrupts are ignored, as in the background."""
    happened, before, first = Event(), signal.getsignal(signal.SIGINT), 0.0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if happened.is_set():
            if time.monotonic() - first < AT_ONCE:
                return
            with suppress(OSError):
                if os.isatty(2):
                    os.write(2, SHOW_CURSOR)
            os._exit(INTERRUPTED)
        first = time.monotonic()
        happened.set()
        raise KeyboardInterrupt

    is_ours = threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None)
    if is_ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield happened
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """Interrupt, or else end, this process when its parent is gone, if the parent has set `PARENT`."""
    pipe = os.environ.pop(PARENT, "")
    if pipe.isdigit():
        threading.Thread(target=_await_end, args=(int(pipe),), daemon=True).start()


def _await_end(pipe: int) -> None:
    with suppress(OSError):
        os.read(pipe, 1)  # nobody ever writes: it ends when the parent does
    os.kill(os.getpid(), signal.SIGINT)  # ends a call of the system as well that the main thread waits in
    time.sleep(ENDING_SECONDS)
    os._exit(INTERRUPTED)
