"""The diary of a run: what was asked, on which machine, and what became of each candidate, in order. It is run.json."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines import cpu
from qdqtune.tuning.bench import job_key
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial

FORMAT = 1

OWN_FORM = {"model", "output_dir", "engine", "calibration", "config", "plan", "state_file", "command", "restart"}
"""Fields of the settings that stand elsewhere in the diary, or say nothing of what was measured."""


class Diary(Silent):
    """An observer that keeps when each stage and each trial came, in seconds since it was made."""

    def __init__(self) -> None:
        self._begun, self._clock = datetime.now(UTC), time.monotonic()
        self._load = _load()
        self._stages: list[tuple[str, float]] = []
        self._times: dict[int, tuple[float, bool]] = {}

    def stage(self, text: str) -> None:
        """See `Observer`."""
        self._stages.append((text, self._seconds()))

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        self._times[trial.number] = self._seconds(), state.replayed

    def content(self, history: Sequence[Trial], run: Run) -> Mapping[str, Any]:
        """What run.json holds. Rounds and layers of a trial lie in the state file, under the key of the trial."""
        settings = run.settings
        return {
            "format": FORMAT,
            "begun": self._begun.isoformat(timespec="seconds"),
            "command": list(settings.command),
            "settings": _chosen(settings),
            "calibration": f"{settings.calibration.chosen(run.subject.ranges).method} "
            f"on {run.subject.prepared.samples.origin}",
            "machine": {"cores": cpu.cores(), "load": [self._load, _load()], "system": platform.platform()},
            "plan": asdict(settings.plan) | {"proof": list(settings.proof)},
            "stages": [[text, round(seconds, 2)] for text, seconds in self._stages],
            "trials": [self._row(trial) for trial in history],
        }

    def _row(self, trial: Trial) -> dict[str, Any]:
        seconds, replayed = self._times.get(trial.number, (None, False))
        return {
            "key": job_key("trial", trial.placement, trial.against),
            "origin": trial.proposal.origin,
            "predicted": trial.proposal.predicted,
            "accepted": trial.accepted,
            "holds": trial.holds,
            "metric": trial.metric,
            "seconds": None if seconds is None else round(seconds, 2),
            "replayed": replayed,
        }

    def _seconds(self) -> float:
        return time.monotonic() - self._clock


def _chosen(settings: Settings) -> dict[str, Any]:
    """What was asked for beside the defaults."""
    usual = Settings(settings.model)
    chosen = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in OWN_FORM}
    return {name: _plain(value) for name, value in chosen.items() if value != getattr(usual, name)}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path | WorkloadFile) else value


def _load() -> float | None:
    """How many processes wanted the cores in the last minute; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None
