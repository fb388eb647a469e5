"""Room: how many bytes of models all engine processes of a run may hold together.

Without it each process keeps what it has loaded, which is fastest. For a model of several GB that would be several
times its size; there a build makes room for the next one, and is made again when it is needed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

SHORT = re.compile(
    r"out of ?memory|bad[ _]alloc|(failed|cannot|unable) to allocate|cannot allocate|no space left|disk quota"
    r"|file too large|too many open files",
    re.IGNORECASE,
)
"""How engines and systems say that memory or disk was short, which is no word about the model."""

_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)
"""What sets how the C library takes memory, where that is glibc."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of malloc.h: how much may be free at the end of the heap, and from which size on a block is a mapping of its own."""

APART, USUAL = 2**18, 2**25
"""Such sizes: where memory is scarce, and the one that glibc arrives at by itself in a process that frees large blocks.
What these leave free in the heap stays with the process: weights that a build repacks take twice to four times their
size until it is done."""

Build = tuple[int, int]
"""Who holds it, and its number there."""


class Room:
    """Builds in the order of their last use, with their bytes and what frees each of them."""

    def __init__(self, nbytes: float) -> None:
        self._nbytes = nbytes
        self._held: dict[Build, tuple[int, Callable[[], None]]] = {}

    def make(self, nbytes: int, needed: frozenset[Build]) -> None:
        """Free the builds that were not used for longest until `nbytes` more fit; but none that is `needed` now."""
        for build in [b for b in self._held if b not in needed]:
            if sum(size for size, _ in self._held.values()) + nbytes <= self._nbytes:
                return
            _, free = self._held.pop(build)
            free()

    def hold(self, build: Build, nbytes: int, free: Callable[[], None]) -> None:
        """A build is there."""
        self._held[build] = nbytes, free

    def use(self, build: Build) -> None:
        """A build is used again."""
        self._held[build] = self._held.pop(build)

    def leave(self, build: Build) -> None:
        """A build is gone."""
        self._held.pop(build, None)


_room: ContextVar[Room | None] = ContextVar("room", default=None)


@contextmanager
def bounded_memory(nbytes: float | None) -> Iterator[None]:
    """What runners that are made meanwhile hold together takes at most `nbytes` bytes of model files, or what one
    request needs; None: no bound."""
    token = _room.set(None if nbytes is None else Room(nbytes))
    try:
        yield
    finally:
        _room.reset(token)


def current_room() -> Room | None:
    """The room of `bounded_memory`."""
    return _room.get()


_is_scarce: ContextVar[bool] = ContextVar("memory is scarce", default=False)


@contextmanager
def scarce_memory() -> Iterator[None]:
    """Builds made meanwhile give back at once what they free on their way, and are to hold no weight twice."""
    token = _is_scarce.set(True)
    _set({MMAP_THRESHOLD: APART})
    try:
        yield
    finally:  # inferences take memory as they do in other processes
        _set({MMAP_THRESHOLD: USUAL, TRIM_THRESHOLD: 2 * USUAL})
        _is_scarce.reset(token)


def is_scarce() -> bool:
    """Whether an engine is called in `scarce_memory`."""
    return _is_scarce.get()


def _set(sizes: Mapping[int, int]) -> None:
    if _MALLOPT is not None:
        for parameter, size in sizes.items():
            _MALLOPT(parameter, size)
