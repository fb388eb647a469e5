"""Workers in the process of the test: for all that is not about processes. They record what engines are asked for, and
let a test decide how builds go and how long inferences take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from qdqtune.engines import Built, Engine, EngineSpec, Launched, open_engine, threads_of
from qdqtune.engines.devices import Device
from qdqtune.engines.worker import Session
from qdqtune.errors import EngineFailure
from qdqtune.types import Layer, NumericFormat, QuantType, Tensors


@dataclass(frozen=True)
class Build:
    """What a worker is to build: the how manyth build that is, on which engine, from which file, with which log, for
    how many threads."""

    number: int
    engine: str
    path: Path
    log: Path
    threads: int | None = None


@dataclass
class Workers:
    """Starts workers: the `start` of a `Runner`."""

    opener: Callable[[EngineSpec], Engine] = open_engine
    refused: Callable[[Build], str | None] = lambda _: None
    """Called before each build, to look on, or to refuse it with what the engine says."""
    slower: Callable[[Build], float] = lambda _: 1.0
    """How many times longer inferences of a build take."""
    spend: Callable[[float], None] = lambda _: None
    """Told how many seconds inferences would take, so that a clock of the test's can move: those that are not timed
    `untimed` each."""
    untimed: float = 0.0
    drift: float = 1.0
    """How many times longer all inferences take from now on."""
    started: int = 0
    builds: list[Build] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    """Where each was opened."""
    runs: list[int] = field(default_factory=list)
    """Inferences of each timing."""

    def __call__(self, log: Path) -> InProcess:
        log.touch()
        self.started += 1
        return InProcess(self)


class InProcess:
    """Answers requests as the worker process does. What crashes or hangs is not for it."""

    alive = True
    location = ""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._session = workers, Session(partial(Watched, workers))

    def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        """`Worker.ask`; the limit does not hold."""
        if name == "open":  # of this process no core is reserved
            *arguments, device = arguments
            self._workers.devices.append(device)
        good, result = self._session.answer(name, *arguments)
        if good:
            return result
        raise result

    def end(self, seconds: float = 0.0) -> None:
        """`Worker.end`."""
        self._session = Session()


class Watched:
    """An engine on which `Workers` look."""

    def __init__(self, workers: Workers, spec: EngineSpec) -> None:
        self._workers = workers
        self._name, self._threads = spec.name, threads_of(spec)
        self._engine = workers.opener(spec)

    def describe(self) -> dict[str, str]:
        return self._engine.describe()

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return self._engine.numeric_format(quant_type)

    def build(self, model: Path, log: Path) -> Built:
        build = Build(len(self._workers.builds), self._name, model, log, self._threads)
        self._workers.builds.append(build)
        refusal = self._workers.refused(build)
        if refusal is not None:
            raise EngineFailure(refusal)
        return WatchedModel(self._workers, self._engine.build(model, log), self._workers.slower(build))


@dataclass(frozen=True)
class WatchedModel:
    """A model whose inferences are counted, and take longer."""

    workers: Workers
    built: Built
    factor: float

    def run(self, inputs: Tensors) -> dict[str, Any]:
        self.workers.spend(self.workers.untimed)
        return self.built.run(inputs)

    def time(self, inputs: Tensors, runs: int) -> float:
        self.workers.runs.append(runs)
        took = self.workers.drift * self.factor * self.built.time(inputs, runs)
        self.workers.spend(runs * took)
        return took

    def time_and_keep(self, inputs: Tensors, runs: int) -> float:
        return cast(Launched, self.built).time_and_keep(inputs, runs)

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        self.workers.spend(runs * self.workers.untimed)
        return self.built.layers(inputs, runs)

    def save(self, path: Path) -> None:
        self.built.save(path)

    def close(self) -> None:
        self.built.close()


@contextmanager
def in_process() -> Iterator[Workers]:
    """Every runner that is opened inside works in this process. Tests ask for the fixture `workers` instead."""
    workers = Workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqtune.engines.runner.start_worker", workers)
        yield workers
