"""Room: how many bytes of models all engine processes of a run may hold together.

Without it each process keeps what it has loaded, which is fastest. For a model of several GB that would be several
times its size; there a build makes room for the next one, and is made again when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SHORT = re.compile(
    r"out of ?memory|bad[ _]alloc|(failed|cannot|unable) to allocate|cannot allocate|no space left|disk quota"
    r"|file too large|too many open files",
    re.IGNORECASE,
)
"""How engines and systems say that memory or disk was short, which is no word about the model."""

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
