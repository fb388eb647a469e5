"""The run log, run.json: what was asked, on which machine, and what became of each candidate, in order."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from qdqtune.engines import devices
from qdqtune.tuning.bench import job_of
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.records import plain
from qdqtune.tuning.run import Run
from qdqtune.tuning.run_files import LoggedTrial, Machine, RunLog
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial

OWN_FORM = {"model", "output_dir", "engine", "calibration", "config", "plan", "state_file", "command", "restart"}
"""Fields of the settings that stand elsewhere in the log, or say nothing of what was measured."""


class RunLogWriter(Silent):
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

    def content(self, history: Sequence[Trial], run: Run, notes: tuple[str, ...], seconds: float) -> Mapping[str, Any]:
        """What run.json holds."""
        settings = run.settings
        method = settings.calibration.chosen(run.subject.ranges).method
        log = RunLog(
            begun=self._begun.isoformat(timespec="seconds"),
            command=settings.command,
            settings=_chosen(settings),
            engine=settings.engine,
            calibration=f"{method} on {run.subject.prepared.samples.origin}",
            machine=Machine(devices.usable_cores(), (self._load, _load()), platform.platform()),
            plan=settings.plan,
            proof=settings.proof,
            stages=tuple((text, round(seconds, 2)) for text, seconds in self._stages),
            trials=tuple(map(self._logged, history)),
            notes=notes,
            seconds=round(seconds, 2),
        )
        told: Mapping[str, Any] = plain(log)
        return told

    def _logged(self, trial: Trial) -> LoggedTrial:
        seconds, replayed = self._times.get(trial.number, (None, False))
        return LoggedTrial(
            of=job_of(trial.placement, trial.against),
            origin=trial.proposal.origin,
            predicted=trial.proposal.predicted,
            accepted=trial.accepted,
            holds=trial.holds,
            metric=trial.metric,
            seconds=None if seconds is None else round(seconds, 2),
            replayed=replayed,
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._clock


def _chosen(settings: Settings) -> dict[str, Any]:
    """What was asked for beside the defaults."""
    usual = Settings(settings.model)
    names = (f.name for f in fields(settings) if f.name not in OWN_FORM)
    chosen = {name: value for name in names if (value := getattr(settings, name)) != getattr(usual, name)}
    if settings.workloads:
        chosen["workloads"] = [str(file) for file in settings.workloads]
    told: dict[str, Any] = plain(chosen)
    return told


def _load() -> float | None:
    """How many processes wanted the cores in the last minute; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None
