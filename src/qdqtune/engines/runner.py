"""Uses an engine in a worker process, which may crash, hang or be killed. All other modules use engines through it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from qdqtune.engines import EngineSpec, builds_for
from qdqtune.engines.devices import ANYWHERE, Device
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.facts import facts_of
from qdqtune.engines.memory import OUT_OF_RESOURCES, MemoryBudget
from qdqtune.engines.process import StartWorker, Worker, start_worker
from qdqtune.errors import (
    BadModel,
    EngineFailure,
    EngineRefused,
    EngineUnavailable,
    Failure,
    Stage,
    rewording,
    writing,
)
from qdqtune.graph.loading import load, nbytes
from qdqtune.system.writing import atomic_write, temporary_folder
from qdqtune.types import Array, Layer, Mix, NumericFormat, QuantType, Tensors, Times, Turn, Workload

SLACK = 5.0
"""Rounds may exceed their limit by this multiple of the time expected for them: machines rarely slow down more."""

START_SECONDS = 120.0
"""Least time limit for opening an engine: a library that loads slowly says nothing about a candidate."""

LOG_LINES = 50
"""The most lines of a log that a `Failure` quotes. Chosen, not measured."""

T = TypeVar("T")

AHEAD = 4
"""Samples that are sent per thread in one request. Chosen, not measured."""


@dataclass(eq=False)
class Handle:
    """One build of a model file that a runner holds, and the runner's number for it."""

    path: Path
    build: int
    log: Path
    build_seconds: float = 0.0


class Runner:
    """An engine in a worker process. A context manager, for one thread at a time.

    If the worker crashes, the request is repeated once, since the system may have killed it. If it crashes again, or
    takes too long, the call raises EngineRefused. The next request starts another worker, which builds loaded models
    again when they are needed. An interrupt ends the worker too; the runner stays usable.

    Args:
        execution: its `seconds` limit each build, each inference of `outputs` and each probe; rounds may take `SLACK`
            times the expected time in addition.
        start: starts a worker; by default a process on this host.
        unpacked: bytes of memory that a build takes beyond the size of its file, for weights held as floats.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        log_dir: Path,
        execution: Execution = EXECUTION,
        start: StartWorker | None = None,
        device: Device = ANYWHERE,
        unpacked: int = 0,
    ) -> None:
        self.log_dir, self.device, self.memory = log_dir, device, execution.memory
        self._spec, self._execution, self._unpacked = spec, execution, unpacked
        self._start = start or start_worker
        self._worker: Worker | None = None
        self._log, self._log_start = log_dir / f"{device.name or 'worker'}.log", 0
        self.mix: Mix = ()  # the inputs of `rounds` and `layers`
        self._numbers = itertools.count()
        self._loaded: list[Handle] = []
        self._builds = self.memory or MemoryBudget()  # those that workers hold; others are built again when needed
        with writing(log_dir):
            log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker. The runner may be used again, and then builds loaded models again."""
        worker, self._worker = self._worker, None
        for handle in self._loaded:
            self._builds.remove(handle)
        if worker is not None:
            worker.end()

    @property
    def location(self) -> str:
        return " on ".join(filter(None, (self.device.name, "" if self._worker is None else self._worker.location)))

    def on_same_device(self, spec: EngineSpec, log_dir: Path) -> Runner:
        """A runner for another engine on the same device, with the same memory budget.

        If this runner has a device of its own, its worker ends; do not use it again before the other is closed.
        """
        if self.device != ANYWHERE:
            self.close()
        return Runner(spec, log_dir=log_dir, execution=self._execution, start=self._start, device=self.device)

    # The engine

    def describe(self) -> dict[str, str]:
        return dict(self._ask("describe"))

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return cast(NumericFormat, self._ask("numeric_format", quant_type))

    def feed(self, given: Tensors | Mix) -> None:
        """Set the inputs that `rounds` and `layers` run on: one sample, or several workloads."""
        self.mix = as_workloads(given)
        if self._worker is not None:
            self._ask("feed", self.mix)

    @property
    def starts_processes(self) -> bool:
        """Whether each turn of a model starts a process; single inferences cannot be timed then."""
        return self._spec.facts.is_launched

    # Builds

    def load(self, path: Path, log_name: str | None = None, *, fresh: bool = False) -> Handle:
        """Build the model in a file, which must not change until it is unloaded.

        A file that is loaded already is built again only if `fresh`. The engine's output goes to `<log_name>.log` in
        the log folder.

        Raises:
            EngineRefused: the engine does not build it. Methods below that need a build raise this too.
        """
        path = path.absolute()
        loaded = [handle for handle in self._loaded if handle.path == path]
        if loaded and not fresh:
            return loaded[-1]
        number = next(self._numbers)
        handle = Handle(path, number, self.log_dir / f"{log_name or f'{path.stem}-{number}'}.log")
        handle.build_seconds = _twice(lambda: self._build(handle))
        self._loaded.append(handle)
        return handle

    @contextlib.contextmanager
    def loaded(self, path: Path, log_name: str | None = None, *, fresh: bool = False) -> Iterator[Handle]:
        """`load`, and `unload` at the end of the block."""
        handle = self.load(path, log_name, fresh=fresh)
        try:
            yield handle
        finally:
            self.unload(handle)

    def unload(self, handle: Handle) -> None:
        if handle in self._loaded:
            self._loaded.remove(handle)
        if self._builds.remove(handle):
            self._free(handle)

    def save(self, handle: Handle, path: Path) -> None:
        self._ask_of([handle], "save", handle.build, path.absolute(), what=f"saving {handle.path.name}")

    # Inferences

    def outputs(self, handle: Handle, samples: Iterable[Tensors], at_once: int = 1) -> list[dict[str, Array]]:
        """The graph outputs for each sample; values may be NaN. ONNX Runtime can run several samples `at_once`."""
        results: list[dict[str, Array]] = []
        waiting, what = iter(samples), f"running {handle.path.name}"
        while part := list(itertools.islice(waiting, 1 if at_once == 1 else AHEAD * at_once)):
            extra = (len(part) - 1) * self._execution.seconds
            results += self._ask_of([handle], "run", handle.build, part, at_once, what=what, extra=extra)
        return results

    def outputs_of(self, path: Path, samples: Iterable[Tensors], at_once: int = 1) -> list[dict[str, Array]]:
        """The outputs of the model in a file for each sample. Its build is freed afterwards."""
        with self.loaded(path) as handle:
            return self.outputs(handle, samples, at_once)

    @property
    def start_seconds(self) -> float:
        """Seconds that starting a process takes in each turn, on an engine that starts one; else 0."""
        return float(self._ask("probe", (), 0.0)[0].start) if self.starts_processes else 0.0

    def layers(self, handle: Handle, runs: int) -> tuple[Layer, ...]:
        """`Built.layers` on the inputs set by `feed`; with several workloads, times are the mean over calls."""
        what, extra = f"profiling {handle.path.name}", SLACK * self._execution.seconds
        return cast(tuple[Layer, ...], self._ask_of([handle], "layers", handle.build, runs, what=what, extra=extra))

    def report(self, model: Path, given: Tensors | Mix, runs: int, log_name: str) -> tuple[Layer, ...]:
        """The layers of the model in a file for the inputs `given` (as in `feed`). Its build is freed afterwards."""
        self.feed(given)
        with self.loaded(model, log_name, fresh=True) as handle:
            return self.layers(handle, runs)

    def turns(self, handles: Sequence[Handle], turn_seconds: float) -> list[Turn]:
        """Probe how many inferences a turn needs, for each workload set by `feed`: all models get the same number, with
        which the slowest runs for its part of `turn_seconds`."""
        builds = tuple(handle.build for handle in handles)
        return list(self._ask_of(handles, "probe", builds, turn_seconds, what=f"timing {_names(handles)}"))

    def rounds(
        self,
        handles: Sequence[Handle],
        numbers: range,
        *,
        seed: int,
        turns: Sequence[Turn],
        warmup: int,
        samples: Sequence[Tensors] = (),
    ) -> Times:
        """Time models against each other on the inputs set by `feed`, in one request to the worker.

        Round r runs the models in a random order, seeded by (seed, r); if inferences are short, also in reverse, as in
        A B C C B A. Its times are means over each model's turns, in seconds per inference. A round runs all workloads,
        one after the other. Before the first round, each model runs `warmup` inferences.

        Engines that start a process for each turn are not warmed up. With a single workload, round r then runs on
        `samples[r]`, if that exists and has the same shapes, and keeps outputs of all models but the first for
        `outputs`.
        """
        these = samples[numbers.start : numbers.stop] if self.starts_processes else ()
        builds = tuple(handle.build for handle in handles)
        each = sum(warmup * turn.seconds + len(numbers) * turn.round_seconds for turn in turns)
        request = ("rounds", builds, seed, numbers, turns, warmup, these)
        extra = SLACK * len(handles) * each
        return cast(Times, self._ask_of(handles, *request, what=f"timing {_names(handles)}", extra=extra))

    def timed(self, handle: Handle, count: int, turn_seconds: float) -> Times:
        """The times of one model alone in `count` rounds; the shorter its turns, the longer an inference takes."""
        turns = self.turns([handle], turn_seconds)
        return self.rounds([handle], range(count), seed=0, turns=turns, warmup=0)

    # Requests to the worker

    def _ask(self, name: str, *arguments: Any) -> Any:
        with rewording(f"engine {self._spec.name!r} does not work here", EngineUnavailable):
            return self._ask_of((), name, *arguments, what="answering")

    def _ask_of(self, handles: Sequence[Handle], name: str, *arguments: Any, what: str, extra: float = 0.0) -> Any:
        """Send a request that needs these builds; those that are not held any more are built again first."""

        def ask() -> Any:
            self._open()
            for handle in handles:
                if handle not in self._loaded:
                    raise ValueError(f"{handle.path} is not loaded")
                if not self._builds.use(handle):
                    self._build(handle, handles)
            return self._exchange(name, *arguments, what=what, extra=extra)

        return _twice(ask)

    def _build(self, handle: Handle, needed: Sequence[Handle] = ()) -> float:
        size = 0 if self.memory is None else builds_for(self.mix) * (nbytes(handle.path) + self._unpacked)
        self._builds.make_room(size, needed)
        self._open()  # now, as a worker may end while it frees a build
        request = ("build", handle.build, handle.path, handle.log)
        seconds: float = self._exchange(*request, what=f"building {handle.path.name}", log=handle.log)
        self._builds.add(handle, size, lambda: self._free(handle))
        return seconds

    def _free(self, handle: Handle) -> None:
        if self._is_open:
            with contextlib.suppress(EngineRefused):  # then the memory is free as well
                self._exchange("unload", handle.build, what="unloading a model")

    def _printed(self) -> str:
        """What the worker has printed outside of builds."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace") if self._log.exists() else ""

    @property
    def _is_open(self) -> bool:
        return self._worker is not None and self._worker.alive

    def _open(self) -> None:
        if self._is_open:
            return
        self.close()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0  # an earlier worker has printed that
        self._worker = self._start(self._log)
        spec = EngineSpec(self._spec.name, dict(self._spec.options))
        extra = max(0.0, START_SECONDS - self._execution.seconds)
        try:
            self._exchange("open", spec, self.mix, self.device, what="opening the engine", extra=extra)
        except EngineRefused as refused:
            self.close()
            if refused.failure.stage in ("timeout", "crash"):
                raise EngineUnavailable(f"engine {self._spec.name!r} does not work here: {refused}") from refused
            raise

    def _exchange(self, name: str, *arguments: Any, what: str, log: Path | None = None, extra: float = 0.0) -> Any:
        """Send a request to the worker and return its answer. `what` describes the request in messages, `log` is the
        log of a build, `extra` is added to the time limit in seconds.

        Raises:
            EngineRefused: the engine refuses, or the worker gives no answer.
            QdqtuneError: any other error in the worker's answer. The worker has ended.
        """
        assert self._worker is not None
        limit = self._execution.within_budget(self._execution.seconds + extra)
        try:
            return self._worker.ask(name, arguments, limit)
        except EngineFailure as error:
            stage: Stage = "build" if name == "build" else "run"
            if OUT_OF_RESOURCES.search(str(error)):
                stage = "resources"
            raise EngineRefused(Failure(stage, str(error), _last_lines(log))) from error
        except BaseException as error:
            self.close()  # also after an interrupt: its late answer must not be taken for that of the next request
            if isinstance(error, TimeoutError):
                stage, reason = "timeout", f"{what} took longer than {limit:.4g} s"
            elif isinstance(error, EOFError | OSError):
                stage, reason = "crash", f"the engine process ended with {error} while {what}"
            else:
                raise
            raise EngineRefused(Failure(stage, reason, _last_lines(log, self._printed()))) from None


def _twice(ask: Callable[[], T]) -> T:
    """The result of `ask`, which is repeated once if the worker crashes: the system may have killed it."""
    try:
        return ask()
    except EngineRefused as refused:
        if refused.failure.stage != "crash":
            raise
    return ask()


def _last_lines(log: Path | None, more: str = "") -> str:
    """The last `LOG_LINES` lines of a log, if it exists, and of what follows it."""
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    return "\n".join((text + more).splitlines()[-LOG_LINES:])


def _names(handles: Sequence[Handle]) -> str:
    return " against ".join(dict.fromkeys(handle.path.name for handle in reversed(handles)))


def as_workloads(given: Tensors | Mix) -> Mix:
    """Workloads with their shares scaled to add up to 1. A mapping of inputs by name becomes a single workload."""
    mix = (Workload(given),) if isinstance(given, Mapping) else given
    total = sum(workload.share for workload in mix)
    return tuple(
        replace(w, inputs={name: np.asarray(array) for name, array in w.inputs.items()}, share=w.share / total)
        for w in mix
    )


def check_same_kind(runners: Sequence[Runner]) -> None:
    """Start all engines, and refuse devices of different kinds: their latencies cannot be compared."""
    with ThreadPoolExecutor(len(runners)) as threads:
        first, *others = [started.result() for started in [threads.submit(runner.describe) for runner in runners]]
    for runner, other in zip(runners[1:], others, strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise EngineUnavailable(
                    f"workers are not alike: {runner.location} has {name} {other.get(name)}, {runners[0].location} has "
                    f"{first.get(name)}; latencies compare on equal devices only, so give a run devices of one kind"
                )


@contextlib.contextmanager
def temporary_runner(spec: EngineSpec, execution: Execution) -> Iterator[Runner]:
    """A runner on the device of `execution`; its logs are deleted at the end."""
    with (
        temporary_folder() as folder,
        Runner(spec, execution=execution, log_dir=folder, start=execution.device) as runner,
    ):
        yield runner


@contextlib.contextmanager
def checked_output(output: Path, engine: str, execution: Execution, *, is_run: bool = False) -> Iterator[Path]:
    """Yield a path to write a model to. At the end the file is checked and renamed to `output`: its engine loads it, or
    ONNX's checker reads it where the engine is not installed or builds for minutes.

    `is_run`: the block itself has run the file on ONNX Runtime, so it need not be loaded there again.
    """
    with atomic_write(output, "model") as fresh:
        yield fresh
        loader = facts_of(engine).loaded_by
        if is_run and loader in ("", "onnxruntime"):
            return
        if loader:
            with contextlib.suppress(EngineUnavailable), temporary_runner(EngineSpec(loader), execution) as runner:
                with rewording(f"{engine} does not load what was written, so nothing was kept"):
                    runner.load(fresh)
                return
        try:
            load(fresh)
        except BadModel as error:
            raise EngineFailure(f"what was written is no sound model, so nothing was kept: {error}") from error
