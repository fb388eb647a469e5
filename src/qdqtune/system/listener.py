"""Who is told of the progress of long work."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Receives the progress of long work."""

    def stage(self, text: str) -> None:
        """A new stage begins."""
        return

    def progress(self, done: int, total: int | None) -> None:
        """`done` steps of the stage are done; `total` is None if their number is unknown."""
        return


class Deaf(Listener):
    """A listener that ignores everything."""
