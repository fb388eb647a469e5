"""The conditions under which a result must hold: each number of threads of the deployment, with all workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.machine import MachineFacts, simulated
from qdqtune.engines.runner import as_workloads
from qdqtune.errors import BadOption
from qdqtune.types import Mix


@dataclass(frozen=True)
class View:
    """A condition under which a result must hold: a number of threads (None for an engine without threads). `shares`
    weight all workloads of a race for it; `alone` has the weights for each single one of several workloads."""

    threads: int | None
    shares: tuple[float, ...]
    alone: tuple[tuple[float, ...], ...] = ()


def counts_of(engine: EngineSpec, asked: Sequence[int] | None, machine: MachineFacts | None) -> tuple[int | None, ...]:
    """The numbers of threads at which a result must hold, the engine's own first: those `asked` for, by default the
    engine's. (None,) for an engine without CPU threads. Raises BadOption if the machine that measures (None: not known)
    has fewer cores."""
    own = threads_of(engine)
    if own is None:
        if asked is not None and len(asked) > 1:
            raise BadOption(f"`threads` is about the threads of a CPU, and {engine.name} is not told any here")
        return (None,)
    if asked is None:
        return (own,)
    if not asked or min(asked) < 1:
        raise BadOption("`threads` wants whole numbers from 1 on, such as 1,4,16")
    if machine is not None and engine.facts.is_threaded and max(asked) > (cores := machine.cores):
        usable = f"only {cores} core{'s' * (cores > 1)} can be used {machine.place}"
        raise BadOption(f"`threads` {max(asked)}: {usable}; give at most {cores}, or tune where there are more")
    return tuple(sorted(set(asked), key=lambda count: (count != own, count)))


def tuned_for(counts: Sequence[int | None], *, is_default: bool) -> str | None:
    """The numbers of threads that a result was tuned for, as text; None for an engine without threads."""
    numbers = [str(count) for count in counts if count is not None]
    if not numbers:
        return None
    by_default = ", the default here" if is_default else ""
    return f"{', '.join(numbers)} thread{'s' * (numbers != ['1'])}{by_default}; other numbers were not measured"


def at_each(mix: Mix, counts: Sequence[int | None]) -> Mix:
    """The workloads, repeated at each number of threads. A call at n threads gets n times the share, since it takes
    about 1/n of the time, and all numbers of threads should weigh alike."""
    return as_workloads(tuple(replace(w, threads=count, share=w.share * (count or 1)) for count in counts for w in mix))


def views_of(mix: Mix, counts: Sequence[int | None]) -> tuple[View, ...]:
    """The conditions for a race over the workloads of `at_each`, in the order of the numbers of threads."""
    calls = at_each(mix, counts)
    views = []
    for at, count in enumerate(counts):
        own = range(at * len(mix), (at + 1) * len(mix))
        total = sum(calls[place].share for place in own)
        shares = tuple(w.share / total if place in own else 0.0 for place, w in enumerate(calls))
        alone = tuple(tuple(float(n == place) for n in range(len(calls))) for place in own) if len(mix) > 1 else ()
        views.append(View(count, shares, alone))
    return tuple(views)


def busy(engine: EngineSpec, machine: MachineFacts) -> str | None:
    """A warning if the machine that measures has fewer cores than threads, or if other processes use them. None for the
    fake engine and simulators."""
    if engine.facts.is_modelled or simulated(engine.name, machine):
        return None
    threads, where = threads_of(engine) or 1, machine.where or "this machine"
    if threads > machine.cores:
        ours = f"{machine.cores} core{'s' * (machine.cores > 1)} of {where}"
        return f"`threads` {threads}: this process may use {ours}, so threads wait for each other, and times say little"
    cores = machine.all_cores
    if machine.load + threads <= cores + 0.5:
        return None
    share = f"{machine.load:.1f} processes want the {cores} core{'s' * (cores > 1)} of {where} beside this run"
    return f"the machine is busy ({share}): intervals will be wide; end other work, or tune at a quieter time"
