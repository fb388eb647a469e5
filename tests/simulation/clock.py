"""Clocks that only move when something takes time, or when they are told to jump."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo

import pytest

BEGIN = 1.7e9
"""Seconds since 1970 at which all begins."""


class Clock:
    """The clock that never goes back (`monotonic`), and the one on the wall, which anybody may set."""

    def __init__(self) -> None:
        self.now, self.wall = 1000.0, BEGIN

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(seconds, 0.0)
        self.wall += max(seconds, 0.0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have Python's clocks be these."""
        clock = self

        class Dates(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.fromtimestamp(clock.wall, tz or UTC)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("monotonic", "perf_counter"):
                patch.setattr(time, name, lambda: self.now)
            patch.setattr(time, "time", lambda: self.wall)
            patch.setattr(time, "sleep", self.advance)
            patch.setattr("qdqtune.tuning.result.datetime", Dates)
            yield
