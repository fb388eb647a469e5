"""Two files against each other on the engine: a fresh build of each, then interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from qdqtune.engines.build_queue import Urgency
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Handle, Runner
from qdqtune.timing.ratios import BUILD_LOOKS, Plan, Ratio, Rounds, compare_pairs, ratio, wants_builds
from qdqtune.types import Failure, Listener, Measurement

W = TypeVar("W", contravariant=True)

FRESH = ("final_0", "final_1")
"""What the first builds of a proof are called."""

FEW = 4
"""Rounds that a worker takes before it looks again for idle ones, where there are none."""


class RoundsElsewhere(Protocol[W]):
    """Takes rounds of the same two files on another worker, which builds both for it."""

    def __call__(self, worker: W, /, *, first: int, count: int) -> Measurement | Failure:
        """`count` rounds from the number `first` on."""


def rounds_of(runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int) -> Rounds:
    """Rounds of two builds, for `timing.compare`."""
    return lambda first, count: runner.rounds(
        a, b, count, seed=seed, first_round=first, slot_seconds=plan.slot_seconds, warmup=plan.warmup
    )


def shared_rounds(
    own: Rounds,
    elsewhere: RoundsElsewhere[W],
    pool: WorkerPool[W],
    build_seconds: float,
    plan: Plan,
    *,
    is_built: bool = False,
) -> Rounds:
    """Rounds of which idle workers of the pool take a part, if that pays: building both files, if not `is_built` there
    when rounds begin, costs each of them `build_seconds`. Rounds that none of them has taken are taken by `own`."""
    seconds = 4 * plan.slot_seconds  # the least that a round takes

    def rounds(first: int, count: int) -> Measurement | Failure:
        """A few at a time, so that workers that have become idle can help with the next ones."""
        total, end, lead = None, first + count, 0.0 if is_built and first == 0 else build_seconds
        while first < end:
            left, share, helpers = end - first, 0, pool.idle_per_task()
            if helpers and seconds:
                share = max(0, int((left - lead / seconds) / (1 + helpers)))
            mine = left - helpers * share if share else min(left, FEW)
            starts = range(first + mine, end, share) if share else range(0)
            part = _in_parts(own, elsewhere, pool, first, mine, starts, share)
            if isinstance(part, Failure):
                return part
            total = part if total is None else total + part
            first += len(part.a)
        assert total is not None  # a look takes rounds
        return total

    return rounds


def _in_parts(
    own: Rounds, elsewhere: RoundsElsewhere[W], pool: WorkerPool[W], first: int, mine: int, starts: range, share: int
) -> Measurement | Failure:
    """The rounds from `first` on: `mine` here, and `share` of them from each of `starts` on other workers."""
    parts = [partial(elsewhere, first=start, count=share) for start in starts]
    total, others = pool.shared(partial(own, first, mine), parts)
    for start, other in zip(starts, others, strict=True):
        more = own(start, share) if other is None or isinstance(other, Failure) else other
        if isinstance(total, Failure) or isinstance(more, Failure):
            return total if isinstance(total, Failure) else more
        total += more
    return total


@contextmanager
def fresh_builds(runner: Runner, a: Path, b: Path, log_name: str) -> Iterator[tuple[Handle, Handle] | Failure]:
    """One build of each file, beside whatever is loaded of them; b first: what reading it takes is free again when a
    comes, which is the float model as a rule, and the larger one."""
    with ExitStack() as stack:
        handles: list[Handle] = []
        for file in (b, a):
            handle = runner.load(file, f"{log_name}_{file.stem}", fresh=True)
            if isinstance(handle, Failure):
                yield handle
                return
            stack.callback(runner.unload, handle)
            handles.append(handle)
        yield handles[1], handles[0]


def begin_pairs(runner: Runner, file: Path, log_names: Sequence[str], urgency: Urgency) -> None:
    """Have the builds of a file made ahead that `fresh_pairs` takes by these names."""
    for log_name in log_names:
        runner.build_queue.add(file, f"{log_name}_{file.stem}", urgency)


def fresh_pairs(
    runner: Runner,
    a: Path,
    b: Path,
    plan: Plan,
    seeds: Sequence[int],
    log_names: Sequence[str],
    is_late: Callable[[], bool] = lambda: False,
    listener: Listener | None = None,
    *,
    to_decide: bool = False,
) -> list[Measurement] | Failure:
    """Several builds of both files side by side, each pair with a seed and a name, compared in turns until all are
    decided: see `timing.compare_pairs`. `listener` hears of each turn."""
    with ExitStack() as stack:
        runner.build_queue.withdraw(Urgency.NOW)
        begin_pairs(runner, b, log_names[1:], Urgency.NOW)  # the first is built here
        begin_pairs(runner, a, log_names, Urgency.NOW)
        pairs = []
        for seed, log_name in zip(seeds, log_names, strict=True):
            pair = stack.enter_context(fresh_builds(runner, a, b, log_name))
            if isinstance(pair, Failure):
                return pair
            pairs.append(rounds_of(runner, *pair, plan, seed))
        return compare_pairs(pairs, plan, is_late=is_late, listener=listener, to_decide=to_decide)


def as_many_pairs_as_needed(
    measure: Callable[[Sequence[int]], list[Measurement] | Failure],
    plan: Plan,
    is_enough: Callable[[Sequence[Ratio]], bool] = lambda _: False,
) -> list[Measurement] | Failure:
    """What `measure` gives for pairs of builds by number: more of them where those so far say that builds matter, if
    they are not enough."""
    measured: list[Measurement] = []
    for count in BUILD_LOOKS:
        more = measure(range(len(measured), count))
        if isinstance(more, Failure):
            return more
        measured += more
        ratios = [ratio(m, plan) for m in measured]
        if not wants_builds(ratios, plan) or is_enough(ratios):
            break
    return measured
