"""How many bytes of model files engine processes may hold together, and builds where memory is scarce.

Without a budget each process keeps what it has loaded, which is fastest. For a model of several GB that would be
several times its size; with a budget, builds that were not used for longest are freed, and made again when needed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

LARGE, ROOM = 2**30, 1.3
"""Bytes from which a model is large, and how many times its size may then be held: the float build, and one with
weights of 8 bits, which take a quarter of it."""

SHORT = re.compile(
    r"out of ?memory|bad[ _]alloc|(failed|cannot|unable) to allocate|cannot allocate|no space left|disk quota"
    r"|file too large|too many open files",
    re.IGNORECASE,
)
"""How engines and systems say that memory or disk was short, which says nothing about the model."""

_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)
"""Sets how the C library takes memory, where that is glibc."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of malloc.h: how much may be free at the end of the heap, and from which size on a block is a mapping of its own."""

APART, USUAL = 2**18, 2**25
"""Such sizes: where memory is scarce, and the one that glibc arrives at by itself in a process that frees large blocks.
What these leave free in the heap stays with the process: weights that a build repacks take twice to four times their
size until it is done."""

Build = tuple[int, int]
"""A runner that holds a build, and the number of the build there."""


class MemoryBudget:
    """Builds in the order of their last use, each with its bytes and a function that frees it. For one thread."""

    def __init__(self, nbytes: float) -> None:
        self._nbytes = nbytes
        self._held: dict[Build, tuple[int, Callable[[], None]]] = {}

    @classmethod
    def for_model(cls, nbytes: int) -> MemoryBudget | None:
        """The budget of engines that load versions of a model of that size; None for one that is not large."""
        return cls(ROOM * nbytes) if nbytes >= LARGE else None

    def make_room(self, nbytes: int, needed: frozenset[Build]) -> None:
        """Free the builds that were not used for longest until `nbytes` more fit, but none that is `needed` now."""
        for build in [b for b in self._held if b not in needed]:
            if sum(size for size, _ in self._held.values()) + nbytes <= self._nbytes:
                return
            _, free = self._held.pop(build)
            free()

    def add(self, build: Build, nbytes: int, free: Callable[[], None]) -> None:
        """Count a build that was made."""
        self._held[build] = nbytes, free

    def use(self, build: Build) -> None:
        """Note that a build was used."""
        self._held[build] = self._held.pop(build)

    def remove(self, build: Build) -> None:
        """Count a build no longer, if it is counted."""
        self._held.pop(build, None)


_is_scarce: ContextVar[bool] = ContextVar("memory is scarce", default=False)


@contextmanager
def scarce_memory() -> Iterator[None]:
    """Builds made meanwhile give back at once what they free, and hold no weight twice. Used by worker processes."""
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
