"""The contexts in which a result has to hold: the numbers of threads to deploy with, each with all workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from qdqtune.engines import THREADED, EngineSpec, threads_of
from qdqtune.engines.allocation import first_difference
from qdqtune.engines.devices import ANYWHERE, Device, physical_cores, usable_cores
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.types import Mix


@dataclass(frozen=True)
class Context:
    """Where files are compared: by `runner`, at a number of threads (None for an engine that has none), on the
    workloads that the runner was given. `is_search` where the search measured in it, too."""

    threads: int | None
    runner: Runner
    is_search: bool = True

    @property
    def suffix(self) -> str:
        """Ends the keys of this context's records; empty for that of the search."""
        return "" if self.is_search else f":{self.threads}t"

    @property
    def log_suffix(self) -> str:
        """Ends the names of build logs."""
        return self.suffix.replace(":", "_")


def usual_threads() -> int:
    """How many threads an engine uses by default: one for each physical core that this process may use. (ONNX Runtime
    counts those of the whole machine, even where the process is pinned to fewer.)"""
    return len(physical_cores())


def counts_of(engine: EngineSpec, asked: Sequence[int] | None, *, is_here: bool = True) -> tuple[int | None, ...]:
    """The numbers of threads at which a result is proven, that of the search first: those `asked` for; by default that
    of the search and, where it runs on this machine (`is_here`), the usual one. Just None for an engine that does not
    compute on a CPU's threads.

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
        return tuple(dict.fromkeys((own, usual_threads()))) if is_real and is_here else (own,)
    check_counts(asked, usable_cores() if is_real and is_here else max(asked, default=0))
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
            f"`deploy_threads` {max(asked)}: this process may use {here} core{'s' * (here > 1)} (what the machine has, "
            "or taskset or a container leaves): what holds at more threads has to be tried where there are as many"
        )


@contextmanager
def open_contexts(
    engine: EngineSpec, counts: Sequence[int | None], search: Runner, mix: Mix
) -> Iterator[tuple[Context, ...]]:
    """A context for each of these numbers of threads, in this order. That of the search uses its runner; each other one
    has a process of its own, not pinned here and on as many cores on a cluster, that starts when it is first used. If
    the runner of the search has a device of its own, the processes of all other contexts end before one starts.

    Raises:
        EngineUnavailable: a context would be on another kind of machine than the search, or none is free.
    """
    with ExitStack() as stack:
        found = []
        for count in counts:
            if count is None or count == threads_of(engine):
                found.append(Context(count, search))
                continue
            spec = replace(engine, options={**engine.options, "threads": count})
            runner = stack.enter_context(search.on_device(spec, Device(f"{count}_threads", least=count)))
            runner.feed(mix)
            found.append(Context(count, runner, is_search=False))
        if search.device != ANYWHERE:
            for context in found:
                others = [other.runner for other in found if other is not context]
                stack.callback(setattr, context.runner, "before_start", context.runner.before_start)
                context.runner.before_start = partial(_close, others)
        if search.device != ANYWHERE and not search.device.cores:  # with cores, it was allocated on this machine
            _check_machines(found)
        yield tuple(found)


def _check_machines(found: Sequence[Context]) -> None:
    runners = [context.runner for context in found]
    descriptions = [
        {name: value for name, value in runner.describe().items() if name != "threads"} for runner in runners
    ]
    if (difference := first_difference(runners, descriptions)) is not None:
        raise EngineUnavailable(f"`deploy_threads` wants machines that are alike: {difference}")


def _close(runners: Sequence[Runner]) -> None:
    """End their processes, so that the devices are free."""
    for runner in runners:
        runner.close()
