"""Two files against each other on the engine: a fresh build of each, then interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qdqtune.engines.runner import Handle, Runner
from qdqtune.measurement.timing import Plan, Ratio, Rounds, compare
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
