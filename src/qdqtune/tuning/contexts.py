"""The contexts in which a result has to hold: the numbers of threads to deploy with, each with all workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from qdqtune.engines import THREADED, EngineSpec, threads_of
from qdqtune.engines.devices import physical_cores, usable_cores
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.runner import Runner, as_workloads
from qdqtune.errors import BadOption
from qdqtune.types import Measurement, Mix, Placement, Trial


@dataclass(frozen=True)
class Context:
    """Where files are compared: by `runner`, on the workloads `mix`, all at one number of threads (None for an engine
    that has none)."""

    threads: int | None
    runner: Runner
    mix: Mix

    @property
    def suffix(self) -> str:
        """Ends the keys of this context's records."""
        return "" if self.threads is None else f":{self.threads}t"

    @property
    def log_suffix(self) -> str:
        """Ends the names of build logs."""
        return self.suffix.replace(":", "_")


def usual_threads() -> int:
    """How many threads an engine uses by default: one for each physical core that this process may use. (ONNX Runtime
    counts those of the whole machine, even where the process is pinned to fewer.)"""
    return len(physical_cores())


def counts_of(
    engine: EngineSpec, asked: Sequence[int] | None, *, is_here: bool = True, machine: MachineFacts | None = None
) -> tuple[int | None, ...]:
    """The numbers of threads at which a result has to hold, that of the engine first: those `asked` for; by default the
    engine's and one, which is left out where it runs on any of several machines (not `is_here`). `machine` is the other
    one that it runs on. Just None for an engine that does not compute on a CPU's threads.

    Raises:
        BadOption: the engine has no threads to be told, or this process has no room for so many.
    """
    own = threads_of(engine)
    if own is None:
        if asked:
            raise BadOption(f"`deploy_threads` is about the threads of a CPU, and {engine.name} is not told any here")
        return (None,)
    is_real = engine.name in THREADED
    if asked is None:
        return tuple(dict.fromkeys((own, 1))) if is_real and is_here else (own,)
    if machine is not None and is_real and max(asked, default=0) > machine.cores:
        raise BadOption(f"{max(asked)} threads: {machine.where} has {machine.cores} cores for us")
    is_bound = is_real and is_here and machine is None
    check_counts(asked, usable_cores() if is_bound else max(asked, default=0))
    return tuple(sorted(set(asked), key=lambda count: (count != own, count)))


def check_counts(asked: Sequence[int], here: int) -> None:
    """Refuse numbers of threads below 1 or above the number of cores `here`.

    Raises:
        BadOption: there are none, or one is out of range.
    """
    if not asked or min(asked) < 1:
        raise BadOption("`deploy_threads` wants whole numbers from 1 on, such as 1,4,16")
    if max(asked) > here:
        raise BadOption(
            f"{max(asked)} threads: this process may use {here} core{'s' * (here > 1)} (what the machine has, "
            "or taskset or a container leaves): what holds at more threads has to be tried where there are as many"
        )


def at_each(mix: Mix, counts: Sequence[int | None]) -> Mix:
    """The workloads at each number of threads. A call at n threads counts n times: it takes about the n-th part of the
    time, and every number shall weigh alike."""
    return as_workloads(tuple(replace(w, threads=count, share=w.share * (count or 1)) for count in counts for w in mix))


@contextmanager
def open_contexts(counts: Sequence[int | None], runner: Runner, mix: Mix) -> Iterator[tuple[Context, ...]]:
    """A context for each of these numbers of threads, in this order. Afterwards the runner has its inputs again."""
    before = runner.mix
    try:
        yield tuple(Context(count, runner, at_each(mix, [count])) for count in counts)
    finally:
        runner.feed(before)


def shares_at(mix: Mix, counts: Sequence[int | None]) -> tuple[tuple[float, ...], ...]:
    """For each number of threads, the share of each part of a measurement in the times at that number; empty if there
    is one number."""
    every = at_each(mix, counts)
    if len(counts) == 1:
        return ()
    totals = {count: sum(w.share for w in every if w.threads == count) for count in counts}
    return tuple(tuple(w.share / totals[count] * (w.threads == count) for w in every) for count in counts)


def ratios_at(history: Sequence[Trial], mix: Mix, counts: Sequence[int | None]) -> dict[Placement, tuple[float, ...]]:
    """The median ratio of each placement without a failure to the float model, at each of these numbers of threads."""
    ratios = {Placement(): (1.0,) * len(counts)}
    for trial in history:
        if isinstance(trial.result, Measurement) and trial.against in ratios:
            own = [float(np.median(np.divide(m.b, m.a))) for m in measured_at(trial.result, mix, counts)]
            ratios[trial.placement] = tuple(a * b for a, b in zip(ratios[trial.against], own, strict=True))
    return ratios


def measured_at(measured: Measurement, mix: Mix, counts: Sequence[int | None]) -> tuple[Measurement, ...]:
    """The rounds at each of these numbers of threads, of rounds on all workloads at each number (see `at_each`)."""
    return tuple(map(measured.mean, shares_at(mix, counts))) or (measured,)
