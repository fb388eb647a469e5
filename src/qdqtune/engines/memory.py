"""Limits the memory of engine processes, by a budget for the builds that they hold.

Without a budget each process keeps all builds that it has loaded, which is fastest, but takes several times the size of
the model. With a budget, the least recently used builds are freed, and built again when they are needed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection
from math import inf

LARGE_MODEL, BUDGET_FACTOR = 2**30, 1.3
"""A model of at least `LARGE_MODEL` bytes gets a budget of `BUDGET_FACTOR` times its size, enough for the float build
and one with 8-bit weights. Below 1 GiB several builds fit anyway."""

OUT_OF_RESOURCES = re.compile(
    r"out of ?memory|bad[ _]alloc|(failed|cannot|unable) to allocate|cannot allocate|no space left|disk quota"
    r"|file too large|too many open files",
    re.IGNORECASE,
)
"""Messages of engines and systems when memory or disk ran out, which is no fault of the model."""


class MemoryBudget:
    """The builds that runners hold, least recently used first, and how many bytes they may take. Not thread-safe."""

    def __init__(self, nbytes: float = inf) -> None:
        self._nbytes = nbytes
        self._held: dict[object, tuple[int, Callable[[], None]]] = {}

    @classmethod
    def for_model(cls, nbytes: int) -> MemoryBudget | None:
        """The budget for builds of a model of `nbytes` bytes, quantized or not; None if the model is not large."""
        return cls(BUDGET_FACTOR * nbytes) if nbytes >= LARGE_MODEL else None

    def make_room(self, nbytes: int, needed: Collection[object]) -> None:
        """Free the least recently used builds until `nbytes` more fit, but none of those in `needed`."""
        while sum(size for size, _ in self._held.values()) + nbytes > self._nbytes:
            build = next((build for build in self._held if build not in needed), None)
            if build is None:
                return
            _, free = self._held.pop(build)
            free()  # which may end a worker, and with it other builds

    def add(self, build: object, nbytes: int, free: Callable[[], None]) -> None:
        self._held[build] = nbytes, free

    def use(self, build: object) -> bool:
        """Whether a build is still held; if so, it now counts as used last."""
        if build in self._held:
            self._held[build] = self._held.pop(build)
        return build in self._held

    def remove(self, build: object) -> bool:
        """Forget a build; False if it was not held."""
        return self._held.pop(build, None) is not None


def return_free_memory() -> None:
    """Make glibc, which keeps freed memory for itself, return it to the system; nothing with another C library."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
