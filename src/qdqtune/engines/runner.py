"""The only way to use an engine: builds and runs happen in a worker process that may crash, hang or be killed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self, TypeVar

from qdqtune.engines import EngineSpec
from qdqtune.engines.build_queue import BuildQueue
from qdqtune.engines.devices import ANYWHERE, Device
from qdqtune.engines.memory import SHORT, MemoryBudget
from qdqtune.engines.process import StartWorker, Worker, WorkerProcess, finish_log, last_lines
from qdqtune.engines.workloads import as_workloads
from qdqtune.errors import EngineFailure, EngineUnavailable, QdqtuneError, writing
from qdqtune.graph.saving import nbytes
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Failure, Layer, Measurement, Mix, NumericFormat, QuantType, Slot, Tensors

START_SECONDS = 120.0
"""Least time limit for opening an engine: how long a library takes to load says nothing about a candidate."""

SLACK = 5.0
"""How much longer than expected rounds may take: a shared machine slows down, but rarely that much for that long."""


@dataclass(frozen=True)
class Handle:
    """One build of a model file that a runner holds."""

    path: Path
    build: int
    build_seconds: float = field(compare=False)


start_worker: StartWorker = WorkerProcess
"""The default of `Runner`."""


TIME_LIMIT = 600.0
"""Seconds that a build or an inference may take where nobody says otherwise."""

_limit: ContextVar[tuple[float, float | None]] = ContextVar("time limit", default=(TIME_LIMIT, None))

T = TypeVar("T")


@contextlib.contextmanager
def time_limit(seconds: float, ends: float | None = None) -> Iterator[None]:
    """What the user allows one request to an engine, for all runners made meanwhile that are not told otherwise: those
    of calibration, sensitivity and checks as well; and one pass over samples that are opened meanwhile, which have to
    come before the run `ends` by `time.monotonic`."""
    token = _limit.set((seconds, ends))
    try:
        yield
    finally:
        _limit.reset(token)


def current_limit() -> tuple[float, float | None]:
    """The seconds of `time_limit`, and when the run ends, if it has to."""
    return _limit.get()


class _WorkerLostError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Runner:
    """An engine in a worker process. A context manager; not for use by several threads at once.

    When the worker dies, which the system may have caused, the request is repeated once. When it dies again or takes
    too long, the call returns a `Failure`. The next request starts another worker, where loaded models are built again
    when they are needed. An interrupt while a call waits ends the worker too, and the runner stays usable.

    `time_limit_s`, by default that of `time_limit`, holds for each build, each inference of `outputs`, and each probe.
    Rounds may take that, and `SLACK` times what the probe makes us expect in addition. `start` gives another worker
    than a process, on `device`. `unpacked` are bytes that a build takes beside its file: weights written out. `memory`
    bounds what this runner and others of the same thread hold together; without it all that is loaded stays loaded.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        log_dir: Path,
        time_limit_s: float | None = None,
        start: StartWorker | None = None,
        device: Device = ANYWHERE,
        unpacked: int = 0,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.engine_seconds = 0.0
        """Wall time that callers have spent waiting for the engine."""
        self._spec = spec
        self._limit = _limit.get()[0] if time_limit_s is None else time_limit_s
        self.log_dir = log_dir
        self._start_worker = start or start_worker
        self.device, self._unpacked, self.memory = device, unpacked, memory
        self.build_queue = BuildQueue()
        """Builds that other processes make for it."""
        self.before_start: Callable[[], None] = lambda: None
        """Called before a worker starts."""
        self._own_log = log_dir / f"{device.name or 'worker'}.log"
        self._worker: Worker | None = None
        self._mix: Mix = ()
        self._numbers = itertools.count()
        self._logs: dict[Handle, Path] = {}
        self._present: set[int] = set()
        self._slots: dict[tuple[frozenset[Handle], float], list[Slot]] = {}
        with writing(log_dir):
            log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker at once. Loaded models are rebuilt if the runner is used again."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
        for number in list(self._present):
            self._forget(number)

    @property
    def place(self) -> str:
        """Its device and host, for messages."""
        where = "" if self._worker is None else self._worker.place
        return " on ".join(filter(None, (self.device.name, where)))

    def in_place(self, spec: EngineSpec, log_dir: Path, *, has_budget: bool = True) -> Runner:
        """Another engine in place of this one, on the same device and, if it `has_budget`, with the same memory budget.
        This one's worker ends, and starts again when it is asked, which should not be before the other is closed."""
        if self.device != ANYWHERE:
            self.close()
        return self._like(spec, log_dir, self.device, has_budget=has_budget)

    def elsewhere(self, spec: EngineSpec, device: Device) -> Runner:
        """Another engine on another device, started in the same way as this one."""
        return self._like(spec, self.log_dir, device)

    def _like(self, spec: EngineSpec, log_dir: Path, device: Device, *, has_budget: bool = True) -> Runner:
        limit, start, memory = self._limit, self._start_worker, self.memory if has_budget else None
        return Runner(spec, log_dir=log_dir, time_limit_s=limit, start=start, device=device, memory=memory)

    def describe(self) -> dict[str, str]:
        """`Engine.describe`.

        Raises:
            BadOption, EngineUnavailable: the engine cannot be opened.
        """
        return dict(self._ask("describe"))

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """`Engine.numeric_format`.

        Raises:
            BadOption, EngineUnavailable: the engine cannot be opened, or has no kernels for that type.
        """
        numbers: NumericFormat = self._ask("numeric_format", quant_type)
        return numbers

    def feed(self, given: Tensors | Mix) -> None:
        """Set the inputs of `rounds` and `layers`: one sample, or several workloads."""
        self._mix = as_workloads(given)
        self._slots.clear()
        if self._worker is not None:
            self._ask("feed", self._mix)

    def load(self, path: Path, log_name: str | None = None, *, fresh: bool = False) -> Handle | Failure:
        """Build the model in a file, which must not change until it is unloaded.

        A file that is loaded already is not built again, unless `fresh` asks for one more build beside the first.
        What the engine prints goes to `<log_name>.log` in the log folder.
        """
        path = path.absolute()
        loaded = [handle for handle in self._logs if handle.path == path]
        if loaded and not fresh:
            return loaded[-1]
        number = next(self._numbers)
        log = self.log_dir / f"{log_name or f'{path.stem}-{number}'}.log"
        seconds = _twice(lambda: self._build(number, path, log))
        finish_log(log, path, seconds)
        if isinstance(seconds, Failure):
            return seconds
        handle = Handle(path, number, seconds)
        self._logs[handle] = log
        return handle

    def compile(self, path: Path, log: Path, plan: Path) -> float | Failure:
        """Write the part of a build that another process goes on from to the file `plan`; the seconds that took."""
        return _twice(lambda: self._try("compile", path, log, plan, what=f"building {path.name}", log=log))

    def unload(self, handle: Handle) -> None:
        """Free one build, if it is loaded."""
        self._logs.pop(handle, None)
        self._slots = {key: slot for key, slot in self._slots.items() if handle not in key[0]}
        if handle.build in self._present:
            self._free(handle.build)

    def outputs(self, handle: Handle, samples: Iterable[Tensors]) -> list[dict[str, Array]] | Failure:
        """The graph outputs for each sample. They may hold NaN."""
        results = []
        for sample in samples:
            result = self._asked([handle], "run", handle.build, sample, what=f"running {handle.path.name}")
            if isinstance(result, Failure):
                return result
            results.append(result)
        return results

    def outputs_of(self, path: Path, samples: Iterable[Tensors]) -> list[dict[str, Array]] | Failure:
        """`outputs` of a file, of a build that is freed afterwards."""
        handle = self.load(path)
        if isinstance(handle, Failure):
            return handle
        outputs = self.outputs(handle, samples)
        self.unload(handle)
        return outputs

    def layers(self, handle: Handle, runs: int) -> tuple[Layer, ...] | Failure:
        """`Built.layers` on what was fed, with the times of the average call."""
        what = f"profiling {handle.path.name}"
        result: tuple[Layer, ...] | Failure = self._asked(
            [handle], "layers", handle.build, runs, what=what, extra=SLACK * self._limit
        )
        return result

    def report(self, model: Path, given: Tensors | Mix, runs: int, log_name: str) -> tuple[Layer, ...] | Failure:
        """`layers` of a file on these inputs (see `feed`), of a build that is freed afterwards."""
        self.feed(given)
        handle = self.load(model, log_name, fresh=True)
        if isinstance(handle, Failure):
            return handle
        layers = self.layers(handle, runs)
        self.unload(handle)
        return layers

    def save(self, handle: Handle, path: Path) -> Failure | None:
        """`Built.save`."""
        failure: Failure | None = self._asked(
            [handle], "save", handle.build, path.absolute(), what=f"saving {handle.path.name}"
        )
        return failure

    def rounds(
        self, a: Handle, b: Handle, count: int, *, seed: int, first_round: int, slot_seconds: float, warmup: int
    ) -> Measurement | Failure:
        """Time two models against each other on what was fed, in one exchange with the worker.

        Round r runs A B B A or B A A B, by a coin of (seed, r), of long inferences A B or B A, and gives the mean of
        each side's slots in seconds per inference. A `Slot` is the same for both sides and for all rounds of this
        pair; several workloads have their turns in each round, and share `slot_seconds`. Before the first round come
        `warmup` inferences of each.
        """
        if not self._mix:
            raise ValueError("rounds need a sample: call feed first")
        what = f"timing {a.path.name} against {b.path.name}"
        key = frozenset({a, b}), slot_seconds
        if key not in self._slots:
            probed = self._asked([a, b], "probe", a.build, b.build, slot_seconds, what=what)
            if isinstance(probed, Failure):
                return probed
            self._slots[key] = probed
        slots = self._slots[key]
        numbers = range(first_round, first_round + count)
        allowance = SLACK * sum(2 * (warmup + count) * slot.seconds + count * slot.round_seconds for slot in slots)
        result: Measurement | Failure = self._asked(
            [a, b], "rounds", a.build, b.build, seed, numbers, slots, warmup, what=what, extra=allowance
        )
        return result

    def _build(self, number: int, path: Path, log: Path, needed: Iterable[int] = ()) -> float | Failure:
        """Build a file within the memory budget; builds that are `needed` now are not freed."""
        size = 0 if self.memory is None else nbytes(path) + self._unpacked
        if self.memory is not None:
            self.memory.make_room(size, frozenset((id(self), build) for build in needed))
        before, begun = self.engine_seconds, monotonic()
        made = self.build_queue.take(path, log, self.compile)
        self.engine_seconds = before + monotonic() - begun
        if isinstance(made, Failure):
            return made
        plan, seconds = made or (None, 0.0)
        result: float | Failure = self._try("build", number, path, log, plan, what=f"building {path.name}", log=log)
        if plan is not None:
            plan.unlink(missing_ok=True)
        if not isinstance(result, Failure):
            self._present.add(number)
            if self.memory is not None:
                self.memory.add((id(self), number), size, lambda: self._free(number))
            result += seconds
        return result

    def _free(self, number: int) -> None:
        """Free a build in the worker. A loaded one is made again when it is needed."""
        self._forget(number)
        if self._worker is not None and self._worker.alive:
            with contextlib.suppress(_WorkerLostError):  # then the memory is free as well
                self._exchange(self._worker, "unload", (number,), "unloading a model", self._limit)

    def _forget(self, number: int) -> None:
        self._present.discard(number)
        if self.memory is not None:
            self.memory.remove((id(self), number))

    def _ready(self, handles: list[Handle]) -> Failure | None:
        """Build again what was lost with a worker, or freed for other builds."""
        self._start()
        needed = [handle.build for handle in handles]
        for handle in handles:
            if handle not in self._logs:
                raise ValueError(f"{handle.path} is not loaded")
            if handle.build not in self._present:
                result = self._build(handle.build, handle.path, self._logs[handle], needed)
                if isinstance(result, Failure):
                    return result
            elif self.memory is not None:
                self.memory.use((id(self), handle.build))
        return None

    def _asked(self, handles: list[Handle], name: str, *arguments: Any, what: str, extra: float = 0.0) -> Any:
        """The result of a request about loaded builds, or the failure of engine or worker."""
        return _twice(lambda: self._ready(handles) or self._try(name, *arguments, what=what, extra=extra))

    def _try(self, name: str, *arguments: Any, what: str, log: Path | None = None, extra: float = 0.0) -> Any:
        """The result of a request, or the failure of engine or worker."""
        try:
            return self._exchange(self._start(), name, arguments, what, self._limit + extra, log)
        except _WorkerLostError as death:
            return death.failure
        except EngineFailure as error:
            printed = last_lines(log) if log else ""
            if SHORT.search(str(error)):
                return Failure("resources", str(error), printed)
            return Failure("build" if name == "build" else "run", str(error), printed)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The result of a request that concerns no model.

        Raises:
            EngineUnavailable: there is none.
        """
        result = _twice(lambda: self._try(name, *arguments, what="answering"))
        if isinstance(result, Failure):
            raise EngineUnavailable(f"engine {self._spec.name!r} does not work here: {result.reason}")
        return result

    def _start(self) -> Worker:
        """The worker, started if there is none, with its engine open and its inputs set."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        self.close()
        self.before_start()
        worker = self._worker = self._start_worker(self._own_log, self.device)
        limit = max(self._limit, START_SECONDS)
        spec = EngineSpec(self._spec.name, dict(self._spec.options))
        try:
            self._exchange(worker, "open", (spec,), "opening the engine", limit)
            if self.memory is not None:
                self._exchange(worker, "save_memory", (), "opening the engine", limit)
            if self._mix:
                self._exchange(worker, "feed", (self._mix,), "taking the sample", limit)
        except _WorkerLostError as death:
            raise EngineUnavailable(f"engine {self._spec.name!r} does not work here: {death.failure.reason}") from death
        except QdqtuneError:
            self.close()
            raise
        return worker

    def _exchange(
        self, worker: Worker, name: str, arguments: tuple[Any, ...], what: str, limit: float, log: Path | None = None
    ) -> Any:
        start = monotonic()
        answered = False
        try:
            good, result = worker.request(name, arguments, limit)
            answered = True
        except TimeoutError:
            reason = f"{what} took longer than {limit:.4g} s"
            raise _WorkerLostError(Failure("timeout", reason, last_lines(log, worker.printed()))) from None
        except (EOFError, OSError):
            reason = f"the engine process ended with {worker.exit_reason()} while {what}"
            raise _WorkerLostError(Failure("crash", reason, last_lines(log, worker.printed()))) from None
        finally:
            self.engine_seconds += monotonic() - start
            if not answered:  # also when the wait is interrupted: a late answer must not meet the next request
                self.close()
        if not good:
            raise result
        return result


def _twice(ask: Callable[[], T | Failure]) -> T | Failure:
    """What `ask` returns, or what it returns the second time if the worker has crashed: it may have been killed."""
    result = ask()
    return ask() if isinstance(result, Failure) and result.stage == "crash" else result


def insist(result: T | Failure, otherwise: str, error: type[QdqtuneError] = EngineFailure) -> T:
    """A result that is no failure.

    Raises:
        EngineFailure: it is one: `otherwise`, and the reason. Or another `error`.
    """
    if isinstance(result, Failure):
        raise error(f"{otherwise}: {result.reason}")
    return result


@contextlib.contextmanager
def unlogged(spec: EngineSpec, *, time_limit_s: float | None = None) -> Iterator[Runner]:
    """A runner whose logs are gone when it ends."""
    with temporary_folder() as folder, Runner(spec, time_limit_s=time_limit_s, log_dir=folder) as runner:
        yield runner
