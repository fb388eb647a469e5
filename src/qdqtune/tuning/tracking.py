"""Experiment trackers that receive a run: MLflow, Weights & Biases, OpenTelemetry. Each is imported if it is named.

Where they keep it, and with which credentials, is for their own environment variables to say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qdqtune.errors import BadOption
from qdqtune.system.tracing import NAME, span
from qdqtune.tuning.folder import PLACEMENT, SUMMARY
from qdqtune.tuning.observer import Observer, Observers, Silent, State
from qdqtune.tuning.result import Result
from qdqtune.tuning.run_log import changed
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial


class Tracker(Silent):
    """Writes the numbers of each candidate with `log`, in steps by its number. `finish` gets the result's numbers, the
    settings and engine that they hold for, and the files to keep."""

    def __init__(
        self,
        log: Callable[[dict[str, float], int], object],
        finish: Callable[[dict[str, float], list[Path]], object],
    ) -> None:
        self._log, self._finish = log, finish

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Write the numbers of a candidate."""
        self._log(_numbers(trial, state), trial.number)

    def finished(self, result: Result, folder: Path) -> None:
        """Write the numbers of summary.json under their names, and keep the small files of the run."""
        numbers = {key: float(v) for key, v in result.summary.items() if isinstance(v, int | float)}
        self._finish(numbers, [path for name in (SUMMARY, PLACEMENT) if (path := folder / name).is_file()])


def _numbers(trial: Trial, state: State) -> dict[str, float]:
    """Speeds are times as fast as float. A candidate that failed has neither speed nor accuracy."""
    found = {
        "candidate_speedup": None if state.ratio is None else 1 / state.ratio.median,
        "best_speedup": 1 / state.best_ratio,
        "candidate_sqnr_db": trial.sqnr_db if state.judged else None,
        "candidate_pairs": len(trial.placement.edges),
        "builds_spent": state.builds,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


@contextmanager
def _mlflow(settings: Settings) -> Iterator[Tracker]:
    mlflow = _imported("mlflow", "mlflow")

    def finish(numbers: dict[str, float], files: list[Path]) -> None:
        mlflow.log_metrics(numbers)
        for file in files:
            mlflow.log_artifact(str(file))

    with mlflow.start_run(run_name=settings.model.stem, nested=mlflow.active_run() is not None):
        mlflow.log_params(_parameters(settings))
        yield Tracker(lambda numbers, step: mlflow.log_metrics(numbers, step=step), finish)


@contextmanager
def _wandb(settings: Settings) -> Iterator[Tracker]:
    wandb = _imported("wandb", "wandb")
    with wandb.init(name=settings.model.stem, config=_parameters(settings)) as run:

        def finish(numbers: dict[str, float], files: list[Path]) -> None:
            run.summary.update(numbers)
            for file in files:
                run.save(str(file), base_path=str(file.parent), policy="now")

        yield Tracker(lambda numbers, step: run.log(numbers, step=step), finish)


class _Stages(Tracker):
    """A span for each stage, in which those of builds and rounds lie (see `system.tracing`)."""

    def __init__(self, trace: Any, stages: ExitStack) -> None:
        super().__init__(self._candidate, self._result)
        self._trace, self._stages = trace, stages

    def stage(self, text: str) -> None:
        """End the span of the last stage, and begin one."""
        self._stages.close()
        self._stages.enter_context(span(text))

    def _candidate(self, numbers: dict[str, float], step: int) -> None:
        self._trace.get_current_span().add_event("candidate", {"number": step, **numbers})

    def _result(self, numbers: dict[str, float], files: list[Path]) -> None:
        self._stages.close()
        self._trace.get_current_span().set_attributes(numbers)


@contextmanager
def _otel(settings: Settings) -> Iterator[Tracker]:
    trace = _imported("opentelemetry.trace", "otel")
    with span(f"{NAME} tune", **_parameters(settings)), ExitStack() as stages:
        yield _Stages(trace, stages)


TRACKERS: Mapping[str, Callable[[Settings], AbstractContextManager[Tracker]]] = {
    "mlflow": _mlflow,
    "wandb": _wandb,
    "otel": _otel,
}
"""What opens a tracker for a run, by its name, which is that of the extra as well."""


@contextmanager
def tracked(
    names: Sequence[str], settings: Settings, observer: Observer
) -> Iterator[tuple[Observer, Callable[[Result], None]]]:
    """Open the trackers of these names. Yields an observer that tells them and `observer` of events, and what to call
    with the result. What ends the block ends them: a run that failed is marked as such.

    Raises:
        BadOption: a tracker is unknown, or not installed.
    """
    if unknown := [name for name in names if name not in TRACKERS]:
        raise BadOption(f"`track` knows {', '.join(TRACKERS)}, not {unknown[0]!r}")
    with ExitStack() as stack:
        trackers = [stack.enter_context(TRACKERS[name](settings)) for name in names]

        def finished(result: Result) -> None:
            for tracker in trackers:
                tracker.finished(result, settings.output_dir)

        yield Observers((observer, *trackers)) if trackers else observer, finished


def _parameters(settings: Settings) -> dict[str, Any]:
    """Model, engine, and the settings that differ from the defaults; what is no number is text."""
    told = {"model": str(settings.model), "engine": settings.engine.name, **settings.engine.options}
    told |= changed(settings)
    return {name: v if isinstance(v, int | float | str) else str(v) for name, v in told.items()}


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadOption(f"`track` {name} needs a package: pip install 'qdqtune[{name}]'") from error
