"""What Windows does otherwise than Linux and macOS: locks, groups of processes, what children inherit, interrupts.

Nothing has run on Windows yet; `mypy --platform win32` checks what stands here for it.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCKED_BYTE = 2**31 - 2
"""The byte that is locked on Windows, where others cannot read a byte that is locked: far behind the end of a file."""

SURELY_TAKEN: int = getattr(select, "PIPE_BUF", 512)
"""Bytes that a pipe takes at once if it takes any."""

REMOVES_OPEN_FILES = sys.platform != "win32"
"""Whether a file can be removed while it is open."""


def lock(descriptor: int) -> None:
    """Lock an open file until it is closed, which the end of the process does as well.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if sys.platform == "win32":
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_to_lock(folder: str | os.PathLike[str], mark: str) -> int:
    """A descriptor to lock a folder by: its own, or on Windows, which opens no folder, that of the file `mark` in it.

    Raises:
        OSError: there is no such folder.
    """
    if sys.platform == "win32":
        return os.open(os.path.join(folder, mark), os.O_RDWR | os.O_CREAT)
    return os.open(folder, os.O_RDONLY)


def own_group() -> dict[str, Any]:
    """Arguments of `subprocess.Popen`: the child leads a group of its own. Ctrl-C in a terminal does not reach it."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def end_group(leader: int) -> None:
    """End a process that was started with `own_group`, and what it has started. It may have ended by itself."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(leader)], capture_output=True, check=False)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def stop_group(leader: int) -> None:
    """Stop a process that was started with `own_group`, and what it has started, so that it gives no answer.

    Raises:
        OSError: the system has no such signal.
    """
    if sys.platform == "win32":
        raise OSError("Windows has no signal that stops a process")
    os.killpg(leader, signal.SIGSTOP)


def end_own_group() -> None:
    """End this process, which was started with `own_group`, and what it has started."""
    end_group(os.getpid() if sys.platform == "win32" else 0)
    os._exit(1)


def inherited(*handles: int) -> dict[str, Any]:
    """Arguments of `subprocess.Popen`: the child has sockets and pipes of these numbers as well (see `handle_of`)."""
    if sys.platform == "win32":
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        info = subprocess.STARTUPINFO()
        info.lpAttributeList = {"handle_list": [*handles]}
        return {"startupinfo": info}
    return {"pass_fds": handles}


def handle_of(descriptor: int) -> int:
    """The number by which a child can inherit a pipe; that of a socket is its `fileno`."""
    if sys.platform == "win32":
        return msvcrt.get_osfhandle(descriptor)
    return descriptor


def descriptor_of(handle: int) -> int:
    """The descriptor of a pipe that was inherited, to read from."""
    if sys.platform == "win32":
        return msvcrt.open_osfhandle(handle, os.O_RDONLY)
    return handle


def in_background(program: dict[str, Any], reads: int) -> None:
    """Start a program that outlives this process and reads from this descriptor. On Linux and macOS it has to fork, so
    that nobody waits for its end: see `leave_parent`."""
    nowhere = subprocess.DEVNULL
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS
        subprocess.Popen(**program, stdin=reads, stdout=nowhere, stderr=nowhere, creationflags=flags)
    else:
        subprocess.run(**program, stdin=reads, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False)


def leave_parent() -> None:
    """Go on without a parent: the first thing that a program does that was started by `in_background`."""
    if sys.platform != "win32" and os.fork():
        os._exit(0)


def interrupt(child: subprocess.Popen[Any]) -> None:
    """Interrupt a child that was started with `own_group`, as Ctrl-C does. It has called `on_interrupt`."""
    if sys.platform == "win32":
        child.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        child.send_signal(signal.SIGINT)


def on_interrupt(handler: Callable[..., Any] | int | None) -> None:
    """Set what happens when this process is interrupted."""
    signal.signal(signal.SIGINT, handler)
    if sys.platform == "win32":
        signal.signal(signal.SIGBREAK, handler)


def interrupt_self() -> None:
    """Interrupt the main thread of this process, from another one."""
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGINT)  # ends a call of the system as well that the main thread waits in


def c_library() -> ctypes.CDLL:
    """The functions of C's library that this process uses."""
    return ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)


def load() -> float | None:
    """How many processes wanted the cores in the last minute; None where the system does not say."""
    if sys.platform == "win32":
        return None
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def takes_bytes(pipe: int, seconds: float) -> bool:
    """Whether a pipe takes `SURELY_TAKEN` bytes at once, now or within so many seconds. Windows does not say: a write
    may wait there."""
    if sys.platform == "win32":
        return True
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return bool(poll.poll(1e3 * seconds))


def read_at(file: IO[bytes], length: int, offset: int) -> bytes:
    """So many bytes from a place of a file that is open for reading, which is left where it stands."""
    if sys.platform == "win32":
        position = file.seek(0, os.SEEK_CUR)
        file.seek(offset)
        found = file.read(length)
        file.seek(position)
        return found
    return os.pread(file.fileno(), length, offset)
