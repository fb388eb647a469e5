"""Races: several models timed in the same rounds, and what their times show.

In each round every model runs once, in a new random order, so that drift cancels in ratios of times from one round. In
a race between files, each file is built several times and all builds run in the same rounds: builds of one file differ
lastingly, for example by memory layout, and the race shows by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qdqtune.engines.runner import Handle, Runner
from qdqtune.timing.ratios import (
    BLOCK_LOOKS,
    EARLY_ROUNDS,
    Plan,
    Ratio,
    Spread,
    build_margin,
    is_futile,
    is_wide,
    on_these_builds,
    ratio,
    settled,
)
from qdqtune.types import Measurement, Tensors, Times, Turn

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation (MAD)."""

Take = Callable[[Sequence[int], range], Times]
"""A function that runs the rounds with the given numbers for some models (by index), and returns their times."""

Leave = Callable[[Times, Sequence[int]], Collection[int]]
"""A rule for which of the models still running (by index) need no more rounds, from the times so far."""


def race(
    take: Take,
    models: int,
    looks: Sequence[int],
    leave: Leave,
    is_late: Callable[[], bool] = lambda: False,
) -> Times:
    """Time models in the same rounds, up to `looks[-1]` of them. After each number of rounds in `looks`, `leave` drops
    models. The race ends early with one model left, or when `is_late` says that time is short."""
    running, done = list(range(models)), 0
    times: Times | None = None
    for look in looks:
        later = take(running, range(done, look))
        times = later if times is None else times.extended(later, running)
        done = look
        gone = leave(times, running)
        running = [model for model in running if model not in gone]
        if len(running) < 2 or (look < looks[-1] and is_late()):
            break
    assert times is not None  # there is at least one look
    return times


def race_candidates(take: Take, models: int, plan: Plan, is_late: Callable[[], bool] = lambda: False) -> Times:
    """A race of candidates (models 1, 2, ...) against model 0. A candidate leaves when the comparison is decided or
    shows no gain; after a few rounds already if it is clearly slower."""

    def leave(times: Times, running: Sequence[int]) -> Collection[int]:
        is_early = len(times.seconds[0]) < plan.looks[0]
        ratios = {model: ratio(times.pair(0, model), plan) for model in running[1:]}
        return [model for model, seen in ratios.items() if seen.verdict == "slower" or (settled(seen) and not is_early)]

    looks = (EARLY_ROUNDS, *plan.looks) if plan.looks[0] > EARLY_ROUNDS else plan.looks
    return race(take, models, looks, leave, is_late)


def taking_rounds(
    runner: Runner, builds: Sequence[Handle], plan: Plan, seed: int, samples: Sequence[Tensors] = ()
) -> Take:
    """The function that runs rounds of these builds, for `race`; `samples` as in `Runner.rounds`."""
    turns: list[Turn] = []

    def take(places: Sequence[int], rounds: range) -> Times:
        if not turns:
            turns.extend(runner.turns(builds, plan.turn_seconds))
        running = [builds[place] for place in places]
        warmups = plan.warmups(max(turn.seconds for turn in turns))
        return runner.rounds(running, rounds, seed=seed, turns=turns, warmup=warmups, samples=samples)

    return take


def compare_builds(
    runner: Runner,
    a: Handle,
    b: Handle,
    plan: Plan,
    seed: int,
    decided: Callable[[Ratio], bool],
) -> Measurement:
    """Time two builds until `decided` accepts their ratio b/a, or `plan` ends."""

    def leave(times: Times, _: Sequence[int]) -> tuple[int, ...]:
        return (1,) if decided(ratio(times.pair(0, 1), plan)) else ()

    return race(taking_rounds(runner, [a, b], plan, seed), 2, plan.looks, leave).pair(0, 1)


# ---------------------------------------------------------------- files, each with several builds


@dataclass(frozen=True)
class Block:
    """Rounds of several fresh builds of some files; model f * `builds` + i of `times` is build i of file f."""

    times: Times
    builds: int = 1

    def at(self, shares: Sequence[float]) -> Block:
        """The same rounds, with workloads weighted by other shares, such as only those at one number of threads."""
        return replace(self, times=replace(self.times, shares=tuple(shares)))

    def pair(self, a: int, b: int) -> Measurement:
        """The rounds of files a and b; the time of a file is the geometric mean over its builds."""
        if self.builds == 1:
            return self.times.pair(a, b)
        times_a, times_b = self._logs(a), self._logs(b)
        count = min(times_a.shape[1], times_b.shape[1])
        means = [np.exp(times[:, :count].mean(axis=0)).tolist() for times in (times_a, times_b)]
        return Measurement(tuple(means[0]), tuple(means[1]))

    def spread(self, file: int) -> Spread:
        """How much the builds of one file differ, as a contribution to the variance of log ratios between two files."""
        logs = self._logs(file)
        levels = np.median(logs - logs.mean(axis=0), axis=1)
        return Spread(2 * float(np.sum((levels - levels.mean()) ** 2)), self.builds - 1)

    def round_deviation(self, a: int, b: int) -> float:
        """Standard deviation between rounds of the log ratio of one build of each file, estimated from the median
        absolute deviation."""
        pair = self.pair(a, b)
        logs = np.log(np.asarray(pair.b) / np.asarray(pair.a))
        return NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))) * np.sqrt(self.builds))

    def _logs(self, file: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Logarithms of the seconds of a file's builds, as an array [build, round]."""
        models = self.times.seconds[file * self.builds : (file + 1) * self.builds]
        count = min(len(rounds) for rounds in models)
        seconds = np.array([rounds[:count] for rounds in models])  # [build, round, call]
        logs: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.log(seconds @ np.array(self.times.shares))
        return logs


def between_files(blocks: Sequence[Block], a: int, b: int, plan: Plan) -> Ratio:
    """Estimate the time ratio b/a of two files for builds in general, from blocks of builds, with an interval.

    The estimate is the geometric mean of the blocks' medians. The interval covers differences between builds
    (`build_margin`) and the noise of rounds, and holds at all `BLOCK_LOOKS` together.
    """
    ratios = [ratio(block.pair(a, b), plan) for block in blocks]
    these = on_these_builds(ratios)
    logs = np.log([one.median for one in ratios])
    pairs = sum(block.builds for block in blocks)
    parts = [Spread(blocks[0].builds * float(np.sum((logs - logs.mean()) ** 2)), len(blocks) - 1)]
    for file in (a, b):
        parts.append(sum((block.spread(file) for block in blocks), Spread(0.0, 0)))
    of_rounds = float(np.mean([block.round_deviation(a, b) for block in blocks]))
    margin = build_margin(parts, pairs, plan.error / len(BLOCK_LOOKS), of_rounds)

    def wider(end: float | None, side: int) -> float | None:
        if end is None:
            return None
        return these.median * float(np.exp(side * np.hypot(margin, np.log(end / these.median))))

    return Ratio(these.median, wider(these.low, -1), wider(these.high, 1))


Comparisons = Sequence[tuple[int, int]]
"""The pairs (a, b) of files to compare, by index."""


def decided_files(comparisons: Comparisons, builds: int, plan: Plan, views: Sequence[Sequence[float]]) -> Leave:
    """The rule for a race of files: a file's builds leave once no comparison with it needs more rounds.

    A comparison needs none if it is decided, shows that the files are equal, or will hardly be decided by the rounds
    that are left. This must hold under each weighting of the workloads in `views`.
    """

    def is_settled(block: Block, a: int, b: int) -> bool:
        measured = block.pair(a, b)
        found = ratio(measured, plan)
        return found.verdict != "undecided" or found.is_close or is_futile(found, len(measured.a), plan)

    def leave(times: Times, running: Sequence[int]) -> Collection[int]:
        blocks = [Block(replace(times, shares=tuple(shares)), builds) for shares in views]
        needed = set[int]()
        for a, b in comparisons:
            if not all(is_settled(block, a, b) for block in blocks):
                needed |= {a, b}
        return [model for model in running if model // builds not in needed]

    return leave


def wants_more_builds(blocks: Sequence[Block], comparisons: Comparisons, plan: Plan) -> bool:
    """Whether more builds might decide a comparison: these differ enough, but builds in general may not."""
    for a, b in comparisons:
        these = on_these_builds([ratio(block.pair(a, b), plan) for block in blocks])
        is_worth_it = these.verdict != "undecided" and not these.is_close
        if is_worth_it and between_files(blocks, a, b, plan).verdict == "undecided":
            return True
    return False


def is_imprecise(blocks: Sequence[Block], comparisons: Comparisons, plan: Plan) -> bool:
    """Whether the interval of any comparison is wide (`is_wide`); those that end as slower do not count."""
    found = [between_files(blocks, a, b, plan) for a, b in comparisons]
    return any(one.verdict != "slower" and is_wide(one) for one in found)
