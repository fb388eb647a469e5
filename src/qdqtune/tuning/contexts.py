"""The contexts in which a result has to hold: the numbers of threads to deploy with, each with all workloads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.devices import load, usable_cores
from qdqtune.engines.machine import MachineFacts, simulated
from qdqtune.engines.runner import as_workloads
from qdqtune.errors import BadOption
from qdqtune.types import Mix


@dataclass(frozen=True)
class View:
    """A context in which a result has to hold: a number of threads (None for an engine that has none). `shares` are
    those of all calls of a race in this context, and `alone` those of each of several workloads in it."""

    threads: int | None
    shares: tuple[float, ...]
    alone: tuple[tuple[float, ...], ...] = ()


def counts_of(
    engine: EngineSpec, asked: Sequence[int] | None, *, is_here: bool = True, machine: MachineFacts | None = None
) -> tuple[int | None, ...]:
    """The numbers of threads at which a result has to hold, that of the engine first: those `asked` for, by default the
    engine's. It may run on any of several machines (not `is_here`), or on another `machine`. Just None for an engine
    that does not compute on a CPU's threads."""
    own = threads_of(engine)
    if own is None:
        if asked is not None and len(asked) > 1:
            raise BadOption(f"`threads` is about the threads of a CPU, and {engine.name} is not told any here")
        return (None,)
    if asked is None:
        return (own,)
    if not asked or min(asked) < 1:
        raise BadOption("`threads` wants whole numbers from 1 on, such as 1,4,16")
    cores = usable_cores() if machine is None else machine.cores
    if engine.facts.is_threaded and (is_here or machine is not None) and max(asked) > cores:
        where = "here" if machine is None else f"on {machine.where}"
        usable = f"only {cores} core{'s' * (cores > 1)} can be used {where}"
        raise BadOption(f"`threads` {max(asked)}: {usable}; give at most {cores}, or tune where there are more")
    return tuple(sorted(set(asked), key=lambda count: (count != own, count)))


def tuned_for(counts: Sequence[int | None], *, is_default: bool) -> str | None:
    """The numbers of threads that a result was tuned for, in words; None for an engine that has none."""
    numbers = [str(count) for count in counts if count is not None]
    if not numbers:
        return None
    by_default = ", the default here" if is_default else ""
    return f"{', '.join(numbers)} thread{'s' * (numbers != ['1'])}{by_default}; other numbers were not measured"


def at_each(mix: Mix, counts: Sequence[int | None]) -> Mix:
    """The workloads at each number of threads. A call at n threads counts n times: it takes about the n-th part of the
    time, and every number shall weigh alike."""
    return as_workloads(tuple(replace(w, threads=count, share=w.share * (count or 1)) for count in counts for w in mix))


def views_of(mix: Mix, counts: Sequence[int | None]) -> tuple[View, ...]:
    """The contexts of a race on the calls of `at_each`, in the order of the numbers of threads."""
    calls = at_each(mix, counts)
    views = []
    for at, count in enumerate(counts):
        own = range(at * len(mix), (at + 1) * len(mix))
        total = sum(calls[place].share for place in own)
        shares = tuple(w.share / total if place in own else 0.0 for place, w in enumerate(calls))
        alone = tuple(tuple(float(n == place) for n in range(len(calls))) for place in own) if len(mix) > 1 else ()
        views.append(View(count, shares, alone))
    return tuple(views)


def busy(engine: EngineSpec, machine: MachineFacts | None = None) -> str | None:
    """Advice if a run has fewer cores than threads, or if other processes use those of this machine, or of another
    `machine` that measures; None for the fake engine, and where times mean nothing."""
    if engine.facts.is_modelled or simulated(engine.name, machine):
        return None
    threads = engine.options.get("threads", 1)
    if machine is None:
        usable, cores, processes, where = usable_cores(), os.cpu_count() or 1, load() or 0.0, "this machine"
    else:
        usable, cores, processes, where = machine.cores, machine.cores, machine.load or 0.0, machine.where
    if isinstance(threads, int) and threads > usable:
        ours = f"{usable} core{'s' * (usable > 1)} of {where}"
        return f"`threads` {threads}: this process may use {ours}, so threads wait for each other, and times say little"
    if processes + threads <= cores + 0.5:
        return None
    share = f"{processes:.1f} processes want the {cores} core{'s' * (cores > 1)} of {where} beside this run"
    return f"the machine is busy ({share}): intervals will be wide; end other work, or tune at a quieter time"
