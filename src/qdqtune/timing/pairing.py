"""Takes rounds of builds on the engine, for races."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qdqtune.engines.runner import Handle, Runner
from qdqtune.timing.race import Take, race
from qdqtune.timing.ratios import Plan, Ratio, ratio, settled
from qdqtune.types import Measurement, Tensors, Times, Turn


def taking_rounds(
    runner: Runner, builds: Sequence[Handle], plan: Plan, seed: int, samples: Sequence[Tensors] = ()
) -> Take:
    """A function that takes rounds of some of the builds, for `race`; for `samples` see `Runner.rounds`."""
    turns: list[Turn] = []

    def take(places: Sequence[int], rounds: range) -> Times:
        if not turns:
            turns.extend(runner.turns(builds, plan.turn_seconds))
        running = [builds[place] for place in places]
        return runner.rounds(running, rounds, seed=seed, turns=turns, warmup=plan.warmup, samples=samples)

    return take


def compare_builds(
    runner: Runner,
    a: Handle,
    b: Handle,
    plan: Plan,
    seed: int,
    decided: Callable[[Ratio], bool] = settled,
    is_late: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Rounds of two builds, look by look, until it is `decided` or late: by default until b is faster or slower, or
    shows no gain."""

    def leave(times: Times, _: Sequence[int]) -> tuple[int, ...]:
        return (1,) if decided(ratio(times.pair(0, 1), plan)) else ()

    return race(taking_rounds(runner, [a, b], plan, seed), 2, plan, leave, is_late).pair(0, 1)
