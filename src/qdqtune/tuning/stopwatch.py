"""How long a run took, all its sessions together: one that was ended goes on, and its time counts."""

from __future__ import annotations

import json
import time
from math import isfinite

from qdqtune.system.writing import write_json
from qdqtune.tuning.folder import LOGS
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial

SECONDS = "seconds.json"
"""The file among the logs that holds what the sessions so far have taken."""

STEP = 1.0
"""Seconds between two updates of it, at the least."""


class Stopwatch(Silent):
    """An observer that keeps on disk how long the run has taken, whenever it hears of something."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.output_dir / LOGS / SECONDS
        self._begun = self._written = time.monotonic()
        goes_on = settings.state.exists() and not settings.restart
        self._earlier = self._read() if goes_on else 0.0

    @property
    def session(self) -> float:
        """Seconds of this session."""
        return time.monotonic() - self._begun

    @property
    def whole(self) -> float:
        """Seconds of all sessions."""
        return self._earlier + self.session

    def stage(self, text: str) -> None:
        """See `Observer`."""
        self._keep()

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        self._keep()

    def progress(self, done: int, total: int | None) -> None:
        """See `Observer`."""
        self._keep()

    def _keep(self) -> None:
        now = time.monotonic()
        if now - self._written >= STEP and self._path.parent.is_dir():
            write_json(self._path, {"seconds": round(self._earlier + now - self._begun, 1)})
            self._written = now

    def _read(self) -> float:
        try:
            told = json.loads(self._path.read_text(encoding="utf-8"))["seconds"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return 0.0  # damaged, or deleted
        return float(told) if isinstance(told, float | int) and isfinite(told) and told >= 0 else 0.0
