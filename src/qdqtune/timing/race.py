"""Races: models that are timed in the same rounds, and what their times tell.

In each round every model runs once, in an order drawn anew, so that what drifts between rounds cancels in ratios of
times of one round. Where a race is about files, each file has several builds that run in the same rounds: two builds of
one file differ for good, for example by memory layout, and how much they differ is seen within the race.
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
"""The standard deviation of normal values over their median absolute deviation."""

Take = Callable[[Sequence[int], range], Times]
"""Takes rounds with these numbers of some of the models, which are given by their places in the race."""

Leave = Callable[[Times, Sequence[int]], Collection[int]]
"""Which of the models that still run leave the race, as the times so far tell all that is asked of them."""


def race(
    take: Take,
    models: int,
    looks: Sequence[int],
    leave: Leave,
    is_late: Callable[[], bool] = lambda: False,
) -> Times:
    """Time models in the same rounds, look by look, until all but one have left, it `is_late`, or the looks end."""
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
    """The race of a search, where model 0 is what candidates have to beat: a candidate leaves once it is decided, or
    shows no gain; one that is clearly slower after a few rounds."""

    def leave(times: Times, running: Sequence[int]) -> Collection[int]:
        is_early = len(times.seconds[0]) < plan.looks[0]
        ratios = {model: ratio(times.pair(0, model), plan) for model in running[1:]}
        return [model for model, seen in ratios.items() if seen.verdict == "slower" or (settled(seen) and not is_early)]

    looks = (EARLY_ROUNDS, *plan.looks) if plan.looks[0] > EARLY_ROUNDS else plan.looks
    return race(take, models, looks, leave, is_late)


def taking_rounds(
    runner: Runner, builds: Sequence[Handle], plan: Plan, seed: int, samples: Sequence[Tensors] = ()
) -> Take:
    """A function that takes rounds of some of the builds, for `race`; for `samples` see `Runner.rounds`."""
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

    def leave(times: Times, _: Sequence[int]) -> tuple[int, ...]:
        return (1,) if decided(ratio(times.pair(0, 1), plan)) else ()

    return race(taking_rounds(runner, [a, b], plan, seed), 2, plan.looks, leave).pair(0, 1)


# ---------------------------------------------------------------- files, each with several builds


@dataclass(frozen=True)
class Block:
    """Rounds of fresh builds of some files: the build number i of file f is model f * `builds` + i of `times`."""

    times: Times
    builds: int = 1

    def at(self, shares: Sequence[float]) -> Block:
        """The same rounds with other shares of the calls, such as those at one number of threads."""
        return replace(self, times=replace(self.times, shares=tuple(shares)))

    def pair(self, a: int, b: int) -> Measurement:
        """The rounds of two files: of each the geometric mean over its builds."""
        if self.builds == 1:
            return self.times.pair(a, b)
        times_a, times_b = self._logs(a), self._logs(b)
        count = min(times_a.shape[1], times_b.shape[1])
        means = [np.exp(times[:, :count].mean(axis=0)).tolist() for times in (times_a, times_b)]
        return Measurement(tuple(means[0]), tuple(means[1]))

    def spread(self, file: int) -> Spread:
        """How much the builds of a file differ: of the logarithm of the ratio of two files whose builds differ so."""
        logs = self._logs(file)
        levels = np.median(logs - logs.mean(axis=0), axis=1)
        return Spread(2 * float(np.sum((levels - levels.mean()) ** 2)), self.builds - 1)

    def round_deviation(self, a: int, b: int) -> float:
        """The standard deviation, from round to round, of the logarithm of the ratio of one build of each file, from
        the median absolute deviation."""
        pair = self.pair(a, b)
        logs = np.log(np.asarray(pair.b) / np.asarray(pair.a))
        return NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs))) * np.sqrt(self.builds))

    def _logs(self, file: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Logarithms of the seconds of a file's builds, [build, round]."""
        models = self.times.seconds[file * self.builds : (file + 1) * self.builds]
        count = min(len(rounds) for rounds in models)
        seconds = np.array([rounds[:count] for rounds in models])  # [build, round, call]
        logs: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.log(seconds @ np.array(self.times.shares))
        return logs


def between_files(blocks: Sequence[Block], a: int, b: int, plan: Plan) -> Ratio:
    """The ratio b/a that other builds of two files would have, at one of `BLOCK_LOOKS`, estimated from some blocks.

    The estimate is the mean of the blocks' medians. Its interval covers the differences between builds (`build_margin`)
    and the uncertainty of the rounds.
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
"""The pairs (a, b) of files that are to be compared."""


def decided_files(comparisons: Comparisons, builds: int, plan: Plan, views: Sequence[Sequence[float]]) -> Leave:
    """The rule of a race of files: the builds of a file leave once each of its comparisons is decided, shows that the
    files are equal, or is unlikely to be decided by the rounds to come; in each of the `views`, the shares of calls in
    which files have to be compared."""

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
    """Whether more builds might decide a comparison: those so far show a difference worth having, but one that may come
    from differences between builds."""
    for a, b in comparisons:
        these = on_these_builds([ratio(block.pair(a, b), plan) for block in blocks])
        is_worth_it = these.verdict != "undecided" and not these.is_close
        if is_worth_it and between_files(blocks, a, b, plan).verdict == "undecided":
            return True
    return False


def is_imprecise(blocks: Sequence[Block], comparisons: Comparisons, plan: Plan) -> bool:
    """Whether a comparison that does not end as slower is told with a wide interval."""
    found = [between_files(blocks, a, b, plan) for a, b in comparisons]
    return any(one.verdict != "slower" and is_wide(one) for one in found)
