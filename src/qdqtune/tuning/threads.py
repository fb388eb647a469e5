"""The numbers of threads that a result has to hold at: those that it may be deployed with."""

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

SLOWER = 1.01
"""A median above this counts as slower at a number of threads, though the rounds may not have decided it."""


@dataclass(frozen=True)
class Place:
    """Where files meet: an engine at a number of threads, None where it has none of its own. `is_home` where the search
    measured there."""

    threads: int | None
    runner: Runner
    is_home: bool = True

    @property
    def suffix(self) -> str:
        """What tells the records of this place from those of others."""
        return "" if self.is_home else f":{self.threads}t"

    @property
    def mark(self) -> str:
        """The same in names of files."""
        return self.suffix.replace(":", "_")

    @property
    def told(self) -> str:
        """This place in a sentence."""
        return "" if self.threads is None else f" at {self.threads} thread{'s' * (self.threads > 1)}"


def usual_threads() -> int:
    """How many threads an engine takes that nobody tells a number: one for each physical core that this process may
    use. ONNX Runtime counts those of the whole machine, also where the process is pinned to fewer."""
    return len(physical_cores())


def counts_of(engine: EngineSpec, asked: Sequence[int] | None, *, is_here: bool = True) -> tuple[int | None, ...]:
    """The numbers of threads to prove a result at, that of the search first: those asked for, or by default that of the
    search and, where the machines are not others than this one (`is_here`), the usual one. None alone for an engine
    that does not compute on a CPU's threads.

    Raises:
        BadOption: the engine has no threads to be told, or this process has no room for so many.
    """
    own = threads_of(engine)
    if own is None:
        if asked:
            raise BadOption(f"--deploy-threads is about the threads of a CPU, and {engine.name} is not told any here")
        return (None,)
    is_real = engine.name in THREADED
    if asked is None:
        return tuple(dict.fromkeys((own, usual_threads()))) if is_real and is_here else (own,)
    check_counts(asked, usable_cores() if is_real and is_here else max(asked, default=0))
    return tuple(sorted(set(asked), key=lambda count: (count != own, count)))


def check_counts(asked: Sequence[int], here: int) -> None:
    """Refuse numbers of threads that nothing can be proven at on so many cores.

    Raises:
        BadOption: there are none, or fewer cores than that.
    """
    if not asked or min(asked) < 1:
        raise BadOption("--deploy-threads wants whole numbers from 1 on, such as 1,4,16")
    if max(asked) > here:
        raise BadOption(
            f"--deploy-threads {max(asked)}: this process may use {here} core{'s' * (here > 1)} (what the machine has, "
            "or taskset or a container leaves): what holds at more threads has to be tried where there are as many"
        )


@contextmanager
def places(engine: EngineSpec, counts: Sequence[int | None], home: Runner, mix: Mix) -> Iterator[tuple[Place, ...]]:
    """The places of these numbers of threads, each with a process of its own but for the one of the search; none is
    pinned here, and on a cluster each has as many cores. A process starts when something is asked of it; where the one
    of the search has a device of its own, the others have ended then.

    Raises:
        EngineUnavailable: one is on a machine unlike that of the search, or none is free.
    """
    with ExitStack() as stack:
        found = []
        for count in counts:
            if count is None or count == threads_of(engine):
                found.append(Place(count, home))
                continue
            spec = replace(engine, options={**engine.options, "threads": count})
            runner = stack.enter_context(home.on_device(spec, Device(f"{count}_threads", least=count)))
            runner.feed(mix)
            found.append(Place(count, runner, is_home=False))
        if home.device != ANYWHERE:
            for place in found:
                others = [other.runner for other in found if other is not place]
                stack.callback(setattr, place.runner, "before_start", place.runner.before_start)
                place.runner.before_start = partial(_close, others)
        if home.device != ANYWHERE and not home.device.cores:  # where it is, others have decided
            _check_machines(found)
        yield tuple(found)


def _check_machines(found: Sequence[Place]) -> None:
    runners = [place.runner for place in found]
    told = [{name: what for name, what in runner.describe().items() if name != "threads"} for runner in runners]
    if (difference := first_difference(runners, told)) is not None:
        raise EngineUnavailable(f"--deploy-threads wants machines that are alike: {difference}")


def _close(runners: Sequence[Runner]) -> None:
    """Leave their devices to others."""
    for runner in runners:
        runner.close()
