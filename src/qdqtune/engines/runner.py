"""The one door to an engine: builds and runs happen in a worker process that may crash, hang or be killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from qdqtune.engines import EngineSpec
from qdqtune.errors import EngineFailure, EngineUnavailable, QdqtuneError, writing
from qdqtune.types import Failure, Layer, Measurement, NumericFormat, QuantType, Tensors

LOG_LINES = 50
SCRATCH = "worker-"
"""How the names of folders for temporary files begin."""
START_SECONDS = 120.0
"""Least time limit for opening an engine: how long a library takes to load says nothing about a candidate."""

SLACK = 5.0
"""How much longer than expected rounds may take: a shared machine slows down, but rarely that much for that long."""


@dataclass(frozen=True)
class Handle:
    """One build of a model file that the runner holds ready."""

    path: Path
    build: int
    build_seconds: float = field(compare=False)


class _WorkerLostError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Runner:
    """An engine in a worker process. A context manager; not for use by several threads at once.

    When the worker dies or takes too long, the call at hand returns a `Failure`, and the next call starts another
    worker, where the models that are still loaded are built again as they are needed. An interrupt while a call waits
    ends the worker too, and the runner stays usable.

    `time_limit_s` holds for each build, each inference of `outputs`, and each probe. Rounds may take that, and `SLACK`
    times what the probe makes us expect in addition.
    """

    def __init__(self, spec: EngineSpec, *, time_limit_s: float, log_dir: Path) -> None:
        self.engine_seconds = 0.0
        """Wall time that callers have spent waiting for the engine."""
        self._spec = spec
        self._limit = time_limit_s
        self._log_dir = log_dir
        self._worker: _Worker | None = None
        self._inputs: Tensors | None = None
        self._numbers = itertools.count()
        self._logs: dict[Handle, Path] = {}
        self._present: set[int] = set()
        self._slots: dict[tuple[frozenset[Handle], float], tuple[int, float]] = {}
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
        self._present.clear()

    def describe(self) -> dict[str, str]:
        """`Engine.describe`.

        Raises:
            BadOption, EngineUnavailable: the engine cannot be opened.
        """
        description: dict[str, str] = self._ask("describe")
        return description

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """`Engine.numeric_format`.

        Raises:
            BadOption, EngineUnavailable: the engine cannot be opened, or has no kernels for that type.
        """
        numbers: NumericFormat = self._ask("numeric_format", quant_type)
        return numbers

    def feed(self, inputs: Tensors) -> None:
        """Set the sample that `rounds` uses, for all loaded models."""
        self._inputs = {name: np.asarray(array) for name, array in inputs.items()}
        self._slots.clear()
        if self._worker is not None:
            self._ask("feed", self._inputs)

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
        log = self._log_dir / f"{log_name or f'{path.stem}-{number}'}.log"
        seconds = self._build(number, path, log)
        if isinstance(seconds, Failure):
            return seconds
        handle = Handle(path, number, seconds)
        self._logs[handle] = log
        return handle

    def unload(self, handle: Handle) -> None:
        """Free one build. Does nothing if that has been done."""
        self._logs.pop(handle, None)
        self._slots = {key: slot for key, slot in self._slots.items() if handle not in key[0]}
        if handle.build in self._present:
            self._present.discard(handle.build)
            if self._worker is not None and self._worker.alive:
                with contextlib.suppress(_WorkerLostError):  # then the memory is free as well
                    self._exchange(self._worker, "unload", (handle.build,), "unloading a model", self._limit)

    def outputs(self, handle: Handle, samples: Iterable[Tensors]) -> list[dict[str, npt.NDArray[Any]]] | Failure:
        """The graph outputs for each sample. They may hold NaN: that is the caller's to judge."""
        results = []
        for sample in samples:
            result = self._ready([handle]) or self._try("run", handle.build, sample, what=f"running {handle.path.name}")
            if isinstance(result, Failure):
                return result
            results.append(result)
        return results

    def layers(self, handle: Handle, runs: int) -> tuple[Layer, ...] | Failure:
        """`Built.layers` on the sample that was fed."""
        what = f"profiling {handle.path.name}"
        result: tuple[Layer, ...] | Failure = self._ready([handle]) or self._try(
            "layers", handle.build, runs, what=what, extra=SLACK * self._limit
        )
        return result

    def report(self, model: Path, sample: Tensors, runs: int, log_name: str) -> tuple[Layer, ...] | Failure:
        """Build a file and report its layers, the sample fed."""
        self.feed(sample)
        handle = self.load(model, log_name)
        return handle if isinstance(handle, Failure) else self.layers(handle, runs)

    def save(self, handle: Handle, path: Path) -> Failure | None:
        """`Built.save`."""
        failure: Failure | None = self._ready([handle]) or self._try(
            "save", handle.build, path.absolute(), what=f"saving {handle.path.name}"
        )
        return failure

    def rounds(
        self, a: Handle, b: Handle, count: int, *, seed: int, first_round: int, slot_seconds: float, warmup: int
    ) -> Measurement | Failure:
        """Time two models against each other on the sample that was fed, in one exchange with the worker.

        Round r runs A B B A or B A A B, by a coin of (seed, r), and gives the mean of each side's two slots in seconds
        per inference. A slot is a number of back-to-back inferences, the same for both sides and for all rounds of
        this pair, that keeps the slower one busy for `slot_seconds`. Before the first round come `warmup` inferences
        of each.
        """
        if self._inputs is None:
            raise ValueError("rounds need a sample: call feed first")
        what = f"timing {a.path.name} against {b.path.name}"
        if failure := self._ready([a, b]):
            return failure
        key = frozenset({a, b}), slot_seconds
        if key not in self._slots:
            probed = self._try("probe", a.build, b.build, slot_seconds, what=what)
            if isinstance(probed, Failure):
                return probed
            self._slots[key] = probed
        runs, seconds = self._slots[key]
        numbers = range(first_round, first_round + count)
        allowance = SLACK * seconds * (2 * warmup + 4 * count * runs)
        result: Measurement | Failure = self._try(
            "rounds", a.build, b.build, seed, numbers, runs, warmup, what=what, extra=allowance
        )
        return result

    def _build(self, number: int, path: Path, log: Path) -> float | Failure:
        result: float | Failure = self._try("build", number, path, log, what=f"building {path.name}", log=log)
        if not isinstance(result, Failure):
            self._present.add(number)
        return result

    def _ready(self, handles: list[Handle]) -> Failure | None:
        """Build again what a worker that died has taken with it."""
        self._start()
        for handle in handles:
            if handle not in self._logs:
                raise ValueError(f"{handle.path} is not loaded")
            if handle.build not in self._present:
                result = self._build(handle.build, handle.path, self._logs[handle])
                if isinstance(result, Failure):
                    return result
        return None

    def _try(self, name: str, *arguments: Any, what: str, log: Path | None = None, extra: float = 0.0) -> Any:
        """The result of a request, or the failure of engine or worker."""
        try:
            return self._call(name, *arguments, what=what, log=log, extra=extra)
        except _WorkerLostError as death:
            return death.failure
        except EngineFailure as error:
            return Failure("build" if name == "build" else "run", str(error), _tail(log) if log else "")

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The result of a request that no model can be blamed for."""
        try:
            return self._call(name, *arguments, what="answering")
        except _WorkerLostError as death:
            raise EngineUnavailable(f"engine {self._spec.name!r} does not work here: {death.failure.reason}") from death

    def _call(self, name: str, *arguments: Any, what: str, log: Path | None = None, extra: float = 0.0) -> Any:
        return self._exchange(self._start(), name, arguments, what, self._limit + extra, log)

    def _start(self) -> _Worker:
        """The worker, with the engine open and the sample fed."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        self.close()
        worker = self._worker = _Worker(self._log_dir / "worker.log")
        limit = max(self._limit, START_SECONDS)
        spec = EngineSpec(self._spec.name, dict(self._spec.options))
        try:
            self._exchange(worker, "open", (spec,), "opening the engine", limit)
            if self._inputs is not None:
                self._exchange(worker, "feed", (self._inputs,), "taking the sample", limit)
        except _WorkerLostError as death:
            raise EngineUnavailable(f"engine {self._spec.name!r} does not work here: {death.failure.reason}") from death
        except QdqtuneError:
            self.close()
            raise
        return worker

    def _exchange(
        self, worker: _Worker, name: str, arguments: tuple[Any, ...], what: str, limit: float, log: Path | None = None
    ) -> Any:
        start = monotonic()
        answered = False
        try:
            good, result = worker.request(name, arguments, limit)
            answered = True
        except TimeoutError:
            reason = f"{what} took longer than {limit:.4g} s"
            raise _WorkerLostError(Failure("timeout", reason, _tail(log, worker.printed()))) from None
        except (EOFError, OSError):
            reason = f"the engine process ended with {worker.exit_reason()} while {what}"
            raise _WorkerLostError(Failure("crash", reason, _tail(log, worker.printed()))) from None
        finally:
            self.engine_seconds += monotonic() - start
            if not answered:  # also when the wait is interrupted: a late answer must not meet the next request
                self.close()
        if not good:
            raise result
        return result


class _Worker:
    """The child process and the socket to it. The child ends when this end of the socket closes.

    What it writes to the folder of temporary files is gone with it.
    """

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self._log = log
        self._scratch = _Scratch(log.parent)
        with theirs, log.open("ab") as output:
            self._log_start = output.tell()
            # A process group of its own: Ctrl-C in a terminal reaches the parent only, and one kill reaches whatever
            # the engine has started. The search path is ours, the current folder only if it is on ours.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "qdqtune.engines.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()], process_group=0,
                env=os.environ | {
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "TMPDIR": str(self._scratch.path),
                },
            )  # fmt: skip
        self._channel: Connection[Any, Any] = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        self._channel.send((name, arguments))
        if not self._channel.poll(limit):
            raise TimeoutError
        answer: tuple[bool, Any] = self._channel.recv()
        return answer

    def kill(self) -> None:
        self._channel.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone in between
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._scratch.close()

    def exit_reason(self) -> str:
        """Exit code or signal of a process whose end of the socket has closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        if code is None:
            return "a closed connection"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def printed(self) -> str:
        """What this worker has printed outside of builds."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


class _Scratch:
    """A folder in `parent` for temporary files. It is locked, so that one whose process was killed is known as left
    over; such folders are removed when the next one is made.
    """

    def __init__(self, parent: Path) -> None:
        for left in parent.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError):  # locked, or gone already
                os.close(_locked(left))
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent)).absolute()
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove the folder; does nothing if that has been done."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)  # what the worker had started may still write there
            os.close(self._lock)
        self._lock = -1


def _locked(folder: Path) -> int:
    """A descriptor of the folder, which holds a lock on it until it is closed.

    Raises:
        OSError: another one has the lock, or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _tail(log: Path | None, more: str = "") -> str:
    """The last lines of a build's log and of what came after it."""
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    return "\n".join((text + more).splitlines()[-LOG_LINES:])


@contextlib.contextmanager
def unlogged(spec: EngineSpec, *, time_limit_s: float) -> Iterator[Runner]:
    """A runner whose logs are gone when it ends."""
    with (
        tempfile.TemporaryDirectory(prefix="qdqtune-") as folder,
        Runner(spec, time_limit_s=time_limit_s, log_dir=Path(folder)) as runner,
    ):
        yield runner
