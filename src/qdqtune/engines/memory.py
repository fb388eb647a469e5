"""How much memory engine processes take: a budget for the builds that they hold.

Without a budget each process keeps all builds that it has loaded, which is fastest. For a model of several GB that
would be several times its size. With a budget, the builds that were unused for longest are freed, and made again when
they are needed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from math import inf

LARGE_MODEL, BUDGET_FACTOR = 2**30, 1.3
"""A model of at least `LARGE_MODEL` bytes gets a budget of `BUDGET_FACTOR` times its size: room for the float build,
and one with 8-bit weights, which take a quarter. Below 1 GiB several builds fit anyway."""

OUT_OF_RESOURCES = re.compile(
    r"out of ?memory|bad[ _]alloc|(failed|cannot|unable) to allocate|cannot allocate|no space left|disk quota"
    r"|file too large|too many open files",
    re.IGNORECASE,
)
"""How engines and systems say that memory or disk ran out, which says nothing about the model."""

Build = tuple[int, int]
"""The `id` of a runner, and its number of a build that it holds."""


class MemoryBudget:
    """The builds that runners hold, in the order of their last use, and how many bytes these may take: those that were
    unused for longest are freed. Not thread-safe."""

    def __init__(self, nbytes: float = inf) -> None:
        self._nbytes = nbytes
        self._held: dict[Build, tuple[int, Callable[[], None]]] = {}

    @classmethod
    def for_model(cls, nbytes: int) -> MemoryBudget | None:
        """The budget for builds of a model of `nbytes` bytes, quantized or not; None if the model is not large."""
        return cls(BUDGET_FACTOR * nbytes) if nbytes >= LARGE_MODEL else None

    def make_room(self, nbytes: int, needed: frozenset[Build]) -> None:
        """Free the builds that were unused for longest until `nbytes` more fit, but none that is `needed` now."""
        while sum(size for size, _ in self._held.values()) + nbytes > self._nbytes:
            build = next((build for build in self._held if build not in needed), None)
            if build is None:
                return
            _, free = self._held.pop(build)
            free()  # which may end a worker, and with it other builds

    def add(self, build: Build, nbytes: int, free: Callable[[], None]) -> None:
        self._held[build] = nbytes, free

    def use(self, build: Build) -> bool:
        """Whether a build is held. It is used now."""
        if build in self._held:
            self._held[build] = self._held.pop(build)
        return build in self._held

    def remove(self, build: Build) -> bool:
        """Whether a build was held, which is not any more."""
        return self._held.pop(build, None) is not None

    def end(self, runner: int) -> None:
        """Forget the builds of a runner: its worker has ended."""
        self._held = {build: held for build, held in self._held.items() if build[0] != runner}


def return_free_memory() -> None:
    """Return free memory to the system if the C library is glibc, which keeps free memory between blocks in use."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
