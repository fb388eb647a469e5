"""Takes rounds on the engine: of two builds, shared with idle workers, or of fresh builds of two files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from qdqtune.engines.execution import Check
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Handle, Runner
from qdqtune.system.listener import Listener
from qdqtune.timing.ratios import PAIRS, Plan, Ratio, Rounds, compare, compare_pairs
from qdqtune.types import Failure, Measurement, Tensors

W = TypeVar("W", contravariant=True)

FRESH = tuple(f"final_{number}" for number in range(PAIRS))
"""The log names of the first builds of a proof."""

FEW = 4
"""Rounds that are taken until the next look for idle workers, if there are none. Chosen, not measured."""


class RoundsElsewhere(Protocol[W]):
    """Takes rounds of the same two files on another worker, which builds both."""

    def __call__(self, worker: W, /, *, first: int, count: int) -> Measurement | Failure:
        """`count` rounds from the number `first` on."""


def rounds_of(runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int, samples: Sequence[Tensors] = ()) -> Rounds:
    """A function that takes rounds of two builds, for `ratios.compare`; for `samples` see `Runner.rounds`."""
    return lambda first, count: runner.rounds(
        a,
        b,
        count,
        seed=seed,
        first_round=first,
        turn_seconds=plan.turn_seconds,
        warmup=plan.warmup,
        samples=samples,
    )


def compare_builds(
    runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int, decided: Callable[[Ratio], bool] | None = None
) -> Measurement | Failure:
    """Rounds of two builds until a look decides: see `ratios.compare`."""
    return compare(rounds_of(runner, a, b, plan, seed), plan, decided=decided)


def shared_rounds(
    own: Rounds,
    elsewhere: RoundsElsewhere[W],
    pool: WorkerPool[W],
    build_seconds: float,
    plan: Plan,
    *,
    check: Check | None = None,
    is_built: bool = False,
) -> Rounds:
    """Rounds of which idle workers of the pool take a part, if that is faster: each has to build both files, which
    takes `build_seconds`, unless they are built there (`is_built`) when rounds begin. `own` takes all other rounds.
    `check` can cancel them."""
    seconds = 4 * plan.turn_seconds  # the least that a round takes

    def rounds(first: int, count: int) -> Measurement | Failure:
        """A few at a time, so that workers that have become idle can take a part of the next ones."""
        total, end, lead = None, first + count, 0.0 if is_built and first == 0 else build_seconds
        while first < end:
            left, share, helpers = end - first, 0, pool.idle_per_task()
            if helpers and seconds:
                share = max(0, int((left - lead / seconds) / (1 + helpers)))
            mine = left - helpers * share if share else min(left, FEW)
            starts = range(first + mine, end, share) if share else range(0)
            parts = [partial(elsewhere, first=start, count=share) for start in starts]
            here, others = pool.shared(partial(own, first, mine), parts, check)
            part = _sum(own, here, dict(zip(starts, others, strict=True)), share)
            if isinstance(part, Failure):
                return part
            total = part if total is None else total + part
            first += len(part.a)
        assert total is not None  # a look takes rounds
        return total

    return rounds


def _sum(
    own: Rounds, total: Measurement | Failure, others: Mapping[int, Measurement | Failure | None], share: int
) -> Measurement | Failure:
    """Rounds taken here, and after them `share` of each of the `others`, by the number of their first one. `own` takes
    those that no other worker has taken."""
    for start, other in others.items():
        more = own(start, share) if other is None or isinstance(other, Failure) else other
        if isinstance(total, Failure) or isinstance(more, Failure):
            return total if isinstance(total, Failure) else more
        total += more
    return total


@contextmanager
def fresh_builds(runner: Runner, a: Path, b: Path, log_name: str) -> Iterator[tuple[Handle, Handle] | Failure]:
    """A new build of each file, even if others are loaded. b comes first: the memory to read it is free again when a,
    usually the float model and larger, is read."""
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


def fresh_pairs(
    runner: Runner,
    a: Path,
    b: Path,
    plan: Plan,
    seeds: Sequence[int],
    log_names: Sequence[str],
    is_late: Callable[[], bool] = lambda: False,
    listener: Listener | None = None,
) -> list[Measurement] | Failure:
    """Build both files several times, each pair with a seed and a name, and compare all pairs in turns until they are
    decided: see `ratios.compare_pairs`."""
    with ExitStack() as stack:
        pairs = []
        for seed, log_name in zip(seeds, log_names, strict=True):
            pair = stack.enter_context(fresh_builds(runner, a, b, log_name))
            if isinstance(pair, Failure):
                return pair
            pairs.append(rounds_of(runner, *pair, plan, seed))
        return compare_pairs(pairs, plan, is_late=is_late, listener=listener)
