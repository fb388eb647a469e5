"""Two files against each other on the engine: a fresh build of each, then interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from qdqtune.engines.ahead import Need
from qdqtune.engines.crew import shared, to_spare
from qdqtune.engines.runner import Handle, Runner
from qdqtune.measurement.timing import BUILD_LOOKS, Plan, Ratio, Rounds, compare_pairs, ratio, wants_builds
from qdqtune.types import Failure, Listener, Measurement

S = TypeVar("S", contravariant=True)

FRESH = ("final_0", "final_1")
"""What the first builds of a proof are called."""

FEW = 4
"""Rounds until who measures alone looks again for stations that have nothing to do."""


class Beside(Protocol[S]):
    """Takes rounds of the same two files on another station, which builds both for it."""

    def __call__(self, station: S, /, *, first: int, count: int) -> Measurement | Failure:
        """`count` rounds from the number `first` on."""


def rounds_of(runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int) -> Rounds:
    """Rounds of two builds, for `timing.compare`."""
    return lambda first, count: runner.rounds(
        a, b, count, seed=seed, first_round=first, slot_seconds=plan.slot_seconds, warmup=plan.warmup
    )


def with_help(own: Rounds, beside: Beside[S], build_seconds: float, plan: Plan, *, is_ready: bool = False) -> Rounds:
    """Rounds of which stations that have nothing else to do take a part, as far as building both files leaves them time
    for it, unless it `is_ready` there when rounds begin; they are done here where nobody else has done them."""
    seconds = 4 * plan.slot_seconds  # what a round takes at the least

    def rounds(first: int, count: int) -> Measurement | Failure:
        """A few at a time: others may have become free by then."""
        total, end, lead = None, first + count, 0.0 if is_ready and first == 0 else build_seconds
        while first < end:
            left, share, helpers = end - first, 0, to_spare()
            if helpers and seconds:
                share = max(0, int((left - lead / seconds) / (1 + helpers)))
            mine = left - (helpers or 0) * share if share or helpers is None else min(left, FEW)
            starts = range(first + mine, end, share) if share else ()
            part = _in_parts(own, beside, first, mine, starts, share)
            if isinstance(part, Failure):
                return part
            total = part if total is None else total + part
            first += len(part.a)
        assert total is not None  # a look takes rounds
        return total

    return rounds


def _in_parts(
    own: Rounds, beside: Beside[S], first: int, mine: int, starts: Sequence[int], share: int
) -> Measurement | Failure:
    """Some rounds here, and parts of so many each beside them."""
    total, parts = shared(partial(own, first, mine), [partial(beside, first=start, count=share) for start in starts])
    for start, part in zip(starts, parts, strict=True):
        more = own(start, share) if part is None or isinstance(part, Failure) else part
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


def begin_pairs(runner: Runner, file: Path, log_names: Sequence[str], need: Need) -> None:
    """Have the builds of a file made ahead that `fresh_pairs` takes by these names."""
    for log_name in log_names:
        runner.ahead.begin(file, f"{log_name}_{file.stem}", need)


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
        runner.ahead.withdraw(Need.NOW)
        begin_pairs(runner, b, log_names[1:], Need.NOW)  # the first is built here
        begin_pairs(runner, a, log_names, Need.NOW)
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
