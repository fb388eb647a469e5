"""The worker process, which holds an engine: `python -m qdqtune.engines.worker FD`, started by `Runner`.

Requests `(name of a Session method, arguments)` come in on socket FD, and each is answered by `(True, result)` or
`(False, QdqtuneError)`. Any other exception is a defect: it ends the process, with a traceback in its log. Standard
output belongs to the engines. The process ends when the other end of the socket closes, however its parent died. It
needs POSIX.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, cast

import numpy as np

from qdqtune.engines import Built, Compiler, Engine, EngineSpec, open_engine, workloads
from qdqtune.engines.memory import scarce_memory
from qdqtune.errors import QdqtuneError
from qdqtune.types import Array, Layer, Measurement, Mix, NumericFormat, QuantType, Slot, Tensors, Workload

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""What gives free memory back to the system, where the C library is glibc."""

PROBES = 3
PROBE_SECONDS = 0.2
"""A model that takes this long is not probed again."""


class Session:
    """An engine and the models that it holds, each under a number that the parent gave it."""

    def __init__(self, spec: EngineSpec, opener: Callable[[EngineSpec], Engine] = open_engine) -> None:
        self._engine = opener(spec)
        self._models: dict[int, Built] = {}
        self._mix: Mix = (Workload({}),)
        self._building: Callable[[], AbstractContextManager[None]] = nullcontext

    def describe(self) -> dict[str, str]:
        """`Engine.describe`."""
        return self._engine.describe()

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """`Engine.numeric_format`."""
        return self._engine.numeric_format(quant_type)

    def feed(self, mix: Mix) -> None:
        """Keep the workloads to time and profile with."""
        self._mix = mix

    def save_memory(self) -> None:
        """Build with `scarce_memory` from now on."""
        self._building = scarce_memory

    def compile(self, path: Path, log: Path, plan: Path) -> float:
        """`Compiler.compile`; the seconds that took."""
        start = perf_counter()
        cast(Compiler, self._engine).compile(path, log, plan)
        return perf_counter() - start

    def build(self, number: int, path: Path, log: Path, plan: Path | None = None) -> float:
        """Build a model, or load its plan, and keep it; the seconds that took."""
        start, engine = perf_counter(), self._engine
        with self._building():
            self._models[number] = (
                engine.build(path, log) if plan is None else cast(Compiler, engine).load(plan, path, log)
            )
        seconds = perf_counter() - start
        _give_back()
        return seconds

    def unload(self, number: int) -> None:
        """Free a model."""
        self._models.pop(number).close()
        _give_back()

    def run(self, number: int, inputs: Tensors) -> dict[str, Array]:
        """`Built.run`; of what ZipMap makes the numbers, [entries, classes]."""
        outputs: dict[str, Any] = self._models[number].run(inputs)
        return {name: _unzipped(value) for name, value in outputs.items()}

    def layers(self, number: int, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`, of the average call."""
        model = self._models[number]
        with self._building():  # many engines build the model once more for it
            reports = [model.layers(workload.inputs, runs) for workload in self._mix]
        _give_back()
        return workloads.average_layers(self._mix, reports)

    def save(self, number: int, path: Path) -> None:
        """`Built.save`."""
        self._models[number].save(path)

    def probe(self, a: int, b: int, slot_seconds: float) -> list[Slot]:
        """The slot of each workload, so that the slower model is busy for its part of `slot_seconds`."""
        models, part = [self._models[n] for n in dict.fromkeys((a, b))], slot_seconds / len(self._mix)
        slower = [max(_quickest(model, workload.inputs) for model in models) for workload in self._mix]
        return [Slot.of(seconds, part) for seconds in slower]

    def rounds(self, a: int, b: int, seed: int, numbers: range, slots: Sequence[Slot], warmup: int) -> Measurement:
        """Paired rounds: each workload in its slots."""
        first, second = self._models[a], self._models[b]
        coins = [bool(np.random.default_rng((seed, number)).integers(2)) for number in numbers]
        if warmup:
            for workload in self._mix:
                first.time(workload.inputs, warmup)
                second.time(workload.inputs, warmup)
        rounds: list[list[tuple[float, float]]] = []
        for coin in coins:
            rounds.append([])
            for workload, slot in zip(self._mix, slots, strict=True):
                if len(self._mix) > 1:  # engines make ready for other shapes, which is no part of a call
                    first.time(workload.inputs, 1)
                    second.time(workload.inputs, 1)
                rounds[-1].append(_round(first, second, workload.inputs, slot, a_is_first=coin))
        return workloads.measurement(self._mix, rounds)


def _give_back() -> None:
    """Return free memory to the system: glibc keeps what lies between blocks that are in use."""
    if _TRIM is not None:
        _TRIM(0)


def _quickest(model: Built, inputs: Tensors) -> float:
    model.time(inputs, 1)  # the first inference allocates
    samples = [model.time(inputs, 1)]
    while len(samples) < PROBES and sum(samples) < PROBE_SECONDS:
        samples.append(model.time(inputs, 1))
    return min(samples)


def _round(a: Built, b: Built, inputs: Tensors, slot: Slot, *, a_is_first: bool) -> tuple[float, float]:
    """Seconds of an inference of each: A B B A or B A A B, or the first half of these."""
    first, second = (a, b) if a_is_first else (b, a)
    seconds = [model.time(inputs, slot.runs) for model in (first, second, second, first)[: 2 * slot.turns]]
    outside, inside = (sum(seconds[0::3]) / slot.turns, sum(seconds[1:3]) / slot.turns)
    return (outside, inside) if a_is_first else (inside, outside)


def main() -> None:
    """Answer requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    faulthandler.enable()
    channel: Connection[Any, Any] = Connection(int(sys.argv[1]))
    requests: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    threading.Thread(target=_receive, args=(channel, requests), daemon=True).start()
    session: Session | None = None
    while True:
        name, arguments = requests.get()
        try:
            if session is None:
                session, result = Session(*arguments), None  # the first request opens the engine
            else:
                with _no_collection() if name == "rounds" else nullcontext():
                    result = getattr(session, name)(*arguments)
        except QdqtuneError as error:
            channel.send((False, error))
        else:
            channel.send((True, result))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector of this process out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _receive(channel: Connection[Any, Any], requests: SimpleQueue[Any]) -> None:
    """Pass requests on. A thread of its own notices that the parent is gone even while the engine hangs."""
    while True:
        try:
            requests.put(channel.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # this process and what the engine may have started


def _unzipped(value: Any) -> Array:
    """An output as an array: classifiers of scikit-learn give a list of {class: probability}."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return np.array([list(entry.values()) for entry in value], np.float32)
    array: Array = value
    return array


if __name__ == "__main__":
    main()
