"""The run log, run.json: settings, machine, when each stage began and each trial ended, and the duration of the run."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import load, usable_cores
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.records import job_of, plain
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.summary import FORMAT
from qdqtune.types import Trial

ELSEWHERE = frozenset(
    {"model", "output_dir", "engine", "calibration", "config", "plan", "state_file", "command", "restart", "machine"}
)
"""Fields of the settings that stand elsewhere in the log, or make no difference to what was measured."""


class Machine(msgspec.Struct, frozen=True):
    """Where a run was measured; `load` is how many processes wanted the cores when it began and when it ended, `where`
    the name of the machine if it is another one (`on`)."""

    cores: int
    load: tuple[float | None, float | None]
    system: str
    where: str = ""


class LoggedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial in the order of the search, how it was judged, and when it ended, in seconds from the beginning of the
    session. Its origin and its rounds are in the `TrialRecord` with the same `of`."""

    of: str
    accepted: bool
    holds: bool | None
    metric: float | None
    seconds: float | None


class ReadSettings(TypedDict, total=False):
    """Settings in the log that other code reads; the log has only those that differ from the defaults."""

    calibration_data: str | None
    calibration_samples: int | None
    seed: int
    time_limit: float
    fix_inputs: dict[str, float | int | str]
    input_shapes: dict[str, list[int]]
    workloads: list[str]


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. Seconds count from the beginning of the session."""

    format: int = FORMAT
    begun: str
    command: tuple[str, ...]
    settings: dict[str, Any]
    engine: EngineSpec
    calibration: str
    machine: Machine
    plan: Plan
    proof: tuple[int, ...]
    stages: tuple[tuple[str, float], ...]
    trials: tuple[LoggedTrial, ...]
    notes: tuple[str, ...]
    seconds: float

    def __post_init__(self) -> None:
        msgspec.convert(self.settings, ReadSettings)  # raises if one has another type


class RunLogWriter(Silent):
    """An observer that records when each stage began and each trial ended, in seconds since it was made."""

    def __init__(self) -> None:
        self._begun, self._clock = datetime.now(UTC), time.monotonic()
        self._load = load()
        self._stages: list[tuple[str, float]] = []
        self._times: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds of this session."""
        return time.monotonic() - self._clock

    def stage(self, text: str) -> None:
        """Record when a stage begins."""
        self._stages.append((text, self.seconds))

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Record when a trial ends."""
        self._times[trial.number] = self.seconds

    def content(self, history: Sequence[Trial], run: Run, notes: tuple[str, ...]) -> Mapping[str, Any]:
        """The JSON values of run.json."""
        settings = run.settings
        log = RunLog(
            begun=self._begun.isoformat(timespec="seconds"),
            command=settings.command,
            settings=changed(settings),
            engine=settings.engine,
            calibration=f"{settings.calibration.method} on {run.subject.prepared.samples.origin}",
            machine=_measuring(settings, self._load),
            plan=settings.plan,
            proof=settings.proof,
            stages=tuple((text, round(seconds, 2)) for text, seconds in self._stages),
            trials=tuple(map(self._logged, history)),
            notes=notes,
            seconds=round(self.seconds, 2),
        )
        values: Mapping[str, Any] = plain(log)
        return values

    def _logged(self, trial: Trial) -> LoggedTrial:
        seconds = self._times.get(trial.number)
        return LoggedTrial(
            of=job_of(trial.placement.digest, trial.against.digest),
            accepted=trial.accepted,
            holds=trial.holds,
            metric=trial.metric,
            seconds=None if seconds is None else round(seconds, 2),
        )


def _measuring(settings: Settings, load_before: float | None) -> Machine:
    """The machine that measures. What else another one does is known from before the run only."""
    if (other := settings.machine) is not None:
        return Machine(other.cores, (other.load, None), other.system, other.where)
    return Machine(usable_cores(), (load_before, load()), platform.platform())


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    usual = Settings(settings.model)
    names = (f.name for f in fields(settings) if f.name not in ELSEWHERE)
    others = {name: value for name in names if (value := getattr(settings, name)) != getattr(usual, name)}
    if settings.workloads:
        others["workloads"] = [str(file) for file in settings.workloads]
    values: dict[str, Any] = plain(others)
    return values
