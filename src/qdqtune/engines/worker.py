"""The worker process, which holds an engine: `python -m qdqtune.engines.worker`.

It reads requests `(name of a Session method, arguments)` from standard input, and answers each with `(True, result)` or
`(False, QdqtuneError)`. Any other exception is a defect: it ends the process, with a traceback in its log. Engines may
print to standard output. The process ends when its input closes, however its parent died. It needs POSIX.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from qdqtune.engines import Built, Engine, EngineSpec, Launched, builds_for, open_engine, threads_of
from qdqtune.engines.devices import ANYWHERE, Device, leased
from qdqtune.engines.memory import return_free_memory
from qdqtune.engines.process import Channel
from qdqtune.errors import EngineFailure, QdqtuneError
from qdqtune.system.interpreter import end_group
from qdqtune.types import Array, Layer, Mix, NumericFormat, QuantType, Tensors, Times, Turn, Workload

ENDING_SECONDS = 1.0
"""Seconds that a worker whose input has closed may take to end by itself. Chosen, not measured."""

LAUNCH_SECONDS = 2.0
"""Assumed seconds to start a process for a turn, before one was timed. Chosen, not measured."""

PROBES, PROBE_SECONDS = 3, 0.2
"""A model's speed is that of the fastest of `PROBES` inferences, fewer after `PROBE_SECONDS`. Chosen, not measured."""


@dataclass
class Model:
    """A model file and its builds by number of threads (None: the engine's default)."""

    path: Path
    log: Path
    builds: dict[int | None, Built] = field(default_factory=dict)


class Session:
    """An engine and its loaded models, by a number that the parent process chose.

    A model is built for each number of threads in the workloads. Builds may share this process, as idle ones do not
    disturb the timed one (benchmarks/findings.md).
    """

    def __init__(self, opener: Callable[[EngineSpec], Engine] = open_engine) -> None:
        self._opener = opener
        self._engines: dict[int | None, Engine] = {}
        self._models: dict[int, Model] = {}
        self._lease = ExitStack()
        self._turn_seconds = LAUNCH_SECONDS

    def answer(self, name: str, *arguments: Any) -> Any:
        """Call the method `name`: `(True, result)`, or `(False, error)`. A file that cannot be written, as on a full
        disk, counts as a failure of the engine."""
        try:
            return True, getattr(self, name)(*arguments)
        except QdqtuneError as error:
            return False, error
        except OSError as error:
            if error.errno is None:  # raised by a program, not by the system
                raise
            return False, EngineFailure(f"the engine process cannot use {error.filename or 'a file'}: {error.strerror}")

    def open(self, spec: EngineSpec, mix: Mix = (), device: Device = ANYWHERE) -> None:
        """Reserve the device until this process ends, and open the engine there."""
        taken, _ = self._lease.enter_context(leased(device, spec))
        os.environ.update(taken.environment)
        self._spec, self._is_launched = spec, spec.facts.is_launched
        self._mix: Mix = mix or (Workload({}),)
        self._engines = {None: self._opener(spec)}

    def describe(self) -> dict[str, str]:
        return self._engines[None].describe()

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return self._engines[None].numeric_format(quant_type)

    def feed(self, mix: Mix) -> None:
        """Set the workloads that `rounds`, `probe` and `layers` run."""
        self._mix = mix

    def build(self, number: int, path: Path, log: Path) -> float:
        """Build a model and keep it under a number; returns the seconds of the build."""
        start, self._models[number] = time.perf_counter(), Model(path, log)
        try:
            for workload in self._mix:
                self._built(number, workload.threads)
        except (QdqtuneError, OSError):
            self.unload(number)
            raise
        seconds = time.perf_counter() - start
        return_free_memory()
        return seconds

    def _built(self, number: int, threads: int | None = None) -> Built:
        """A model's build for a number of threads, made if there is none."""
        model, count = self._models[number], None if threads == threads_of(self._spec) else threads
        if count not in model.builds:
            if count not in self._engines:
                options = {**self._spec.options, "threads": count}
                self._engines[count] = self._opener(replace(self._spec, options=options))
            model.builds[count] = self._engines[count].build(model.path, model.log)
        return model.builds[count]

    def unload(self, number: int) -> None:
        for built in self._models.pop(number).builds.values():
            built.close()
        return_free_memory()

    def run(self, number: int, samples: Sequence[Tensors], at_once: int) -> list[dict[str, Array]]:
        """`Built.run` on each sample, `at_once` of them in parallel threads."""
        built = self._built(number)
        if at_once == 1:
            return [built.run(sample) for sample in samples]
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(built.run, samples))

    def layers(self, number: int, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`; with several workloads, times are the mean over calls."""
        builds = [self._built(number, workload.threads) for workload in self._mix]
        reports = [built.layers(w.inputs, runs) for built, w in zip(builds, self._mix, strict=True)]
        return_free_memory()
        return average_layers(self._mix, reports)

    def save(self, number: int, path: Path) -> None:
        self._built(number).save(path)

    def probe(self, numbers: Sequence[int], turn_seconds: float) -> list[Turn]:
        """The turn of each workload, in which the slowest of these models fills its part of `turn_seconds`."""
        if self._is_launched:  # the process chooses how often it runs the model
            return [Turn.of(0.0, 0.0, self._turn_seconds)] * len(self._mix)
        slowest = [max(_quickest(self._built(n, w.threads), w.inputs) for n in set(numbers)) for w in self._mix]
        return [Turn.of(seconds, turn_seconds / len(self._mix)) for seconds in slowest]

    def rounds(
        self,
        numbers: Sequence[int],
        seed: int,
        rounds: range,
        turns: Sequence[Turn],
        warmup: int,
        samples: Sequence[Tensors] = (),
    ) -> Times:
        """Time models in rounds, see `Runner.rounds`."""
        builds = [[self._built(number, workload.threads) for number in numbers] for workload in self._mix]
        if warmup and not self._is_launched:
            for workload, together in zip(self._mix, builds, strict=True):
                for built in together:
                    built.time(workload.inputs, warmup)
        changes_shapes = len(self._mix) > builds_for(self._mix) and not self._is_launched
        seconds: list[list[tuple[float, ...]]] = [[] for _ in numbers]
        for at, number in enumerate(rounds):
            order, calls = order_of(seed, number, len(numbers)), []
            kept = samples[at] if at < len(samples) else None
            if kept is not None and [_sizes(kept)] != [_sizes(workload.inputs) for workload in self._mix]:
                kept = None
            for workload, together, turn in zip(self._mix, builds, turns, strict=True):
                if changes_shapes:  # untimed: engines prepare for other shapes
                    for built in together:
                        built.time(workload.inputs, 1)
                inputs = workload.inputs if kept is None else kept
                begun = time.perf_counter()
                calls.append(_turns(together, order, inputs, turn, is_kept=kept is not None))
                self._turn_seconds = (time.perf_counter() - begun) / (turn.per_round * len(order))
            for own, times in zip(seconds, zip(*calls, strict=True), strict=True):
                own.append(times)
        return Times(tuple(map(tuple, seconds)), tuple(workload.share for workload in self._mix))


def _sizes(inputs: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in inputs.items()}


def order_of(seed: int, number: int, models: int) -> list[int]:
    order: list[int] = np.random.default_rng((seed, number)).permutation(models).tolist()
    return order


def _quickest(model: Built, inputs: Tensors) -> float:
    model.time(inputs, 1)  # the first inference allocates
    samples = [model.time(inputs, 1)]
    while len(samples) < PROBES and sum(samples) < PROBE_SECONDS:
        samples.append(model.time(inputs, 1))
    return min(samples)


def _turns(builds: Sequence[Built], order: Sequence[int], inputs: Tensors, turn: Turn, *, is_kept: bool) -> list[float]:
    """Seconds per inference of each model in one round: in `order` and, if turns are two per round, in reverse too. If
    `is_kept`, all models but the first keep their outputs."""
    seconds = [0.0] * len(builds)
    for place in [*order, *reversed(order)][: turn.per_round * len(order)]:
        built = builds[place]
        time_of = cast(Launched, built).time_and_keep if is_kept and place > 0 else built.time
        seconds[place] += time_of(inputs, turn.runs) / turn.per_round
    return seconds


def average_layers(mix: Mix, reports: Sequence[tuple[Layer, ...]]) -> tuple[Layer, ...]:
    """Merge one layer report per workload; times are the mean over calls, by the workloads' shares.

    If workloads run different layers, the result has those of the workload with the largest share of the time.
    """
    shares = [workload.share for workload in mix]
    names = [[(layer.name, layer.nodes) for layer in report] for report in reports]
    if all(each == names[0] for each in names):
        averaged = []
        for together in zip(*reports, strict=True):
            times = tuple(layer.time_ms for layer in together if layer.time_ms is not None)
            is_whole = len(times) == len(mix)
            mean = float(np.dot(shares, times)) if is_whole else None
            averaged.append(replace(together[0], time_ms=mean, parts=times if is_whole and len(mix) > 1 else ()))
        return tuple(averaged)
    spent = [sum(layer.time_ms or 0.0 for layer in report) for report in reports]
    return reports[int(np.argmax(np.multiply(shares, spent)))]


def serve(session: Session, folder: Path | None = None) -> None:
    """Answer the parent's messages over standard input and output until it is gone; then end this process, its children
    and `folder`.

    Anything printed meanwhile goes to standard error, so that it does not come between messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    faulthandler.enable()
    reads, writes = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _end_with_input(reads.fileno(), folder)
    channel = Channel(reads, writes, asks=False)
    while True:
        try:
            name, arguments = channel.recv()
        except (EOFError, OSError):  # the parent is gone
            break
        if name == "rounds":  # garbage is collected before them, not while they are timed
            gc.collect()
            gc.disable()
        answer = session.answer(name, *arguments)
        try:
            channel.send(answer)
        except OSError:
            break
        gc.enable()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    end_group(0)


def _end_with_input(descriptor: int, folder: Path | None) -> None:
    """Start a helper process that kills this one and its group, even if it hangs or is stopped, once its input has
    closed; then it removes `folder`."""
    worker = os.getpid()
    with warnings.catch_warnings(action="ignore"):  # of threads: the new process only waits
        if os.fork():
            return
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))  # and its end, which is always reported
    poll.poll()
    time.sleep(ENDING_SECONDS)
    os.setpgid(0, 0)  # until now no other group could get that number
    end_group(worker)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    serve(Session())
