"""Two files against each other on the engine: a fresh build of each, then interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from qdqtune.engines.runner import Handle, Runner
from qdqtune.measurement.timing import BUILD_LOOKS, Plan, Ratio, Rounds, compare, compare_pairs, ratio, wants_builds
from qdqtune.types import Failure, Measurement


def start_inferences(plan: Plan) -> int:
    """Inferences that come before the first round of two slow models: each is warmed up, and timed twice to find how
    many fill a slot."""
    return 2 * plan.warmup + 4


def rounds_of(runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int) -> Rounds:
    """Rounds of two builds, for `timing.compare`."""
    return lambda first, count: runner.rounds(
        a, b, count, seed=seed, first_round=first, slot_seconds=plan.slot_seconds, warmup=plan.warmup
    )


def fresh_pair(
    runner: Runner,
    a: Path,
    b: Path,
    plan: Plan,
    seed: int,
    log_name: str,
    decided: Callable[[Ratio], bool] = lambda _: False,
) -> Measurement | Failure:
    """Build both files, beside whatever is loaded of them, and compare them. By default all rounds are taken."""
    first = runner.load(a, f"{log_name}_{a.stem}", fresh=True)
    if isinstance(first, Failure):
        return first
    second = runner.load(b, f"{log_name}_{b.stem}", fresh=True)
    if isinstance(second, Failure):
        runner.unload(first)
        return second
    result = compare(rounds_of(runner, first, second, plan, seed), plan, decided=decided)
    runner.unload(first)
    runner.unload(second)
    return result


def fresh_pairs(
    runner: Runner,
    a: Path,
    b: Path,
    plan: Plan,
    seeds: Sequence[int],
    log_names: Sequence[str],
    is_late: Callable[[], bool] = lambda: False,
) -> list[Measurement] | Failure:
    """Several builds of both files side by side, each pair with a seed and a name, compared in turns until all are
    decided: see `timing.compare_pairs`."""
    with ExitStack() as stack:
        pairs = []
        for seed, log_name in zip(seeds, log_names, strict=True):
            handles = []
            for file in (a, b):
                handle = runner.load(file, f"{log_name}_{file.stem}", fresh=True)
                if isinstance(handle, Failure):
                    return handle
                stack.callback(runner.unload, handle)
                handles.append(handle)
            pairs.append(rounds_of(runner, handles[0], handles[1], plan, seed))
        return compare_pairs(pairs, plan, is_late=is_late)


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
