"""Decides from comparisons of two files which candidate a search accepts and which file ships, and writes both as
sentences. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Self

import numpy as np

from qdqtune.numerics.accuracy import APART_DB
from qdqtune.search import ratios_to_float
from qdqtune.timing.race import Block, between_files, wants_more_builds
from qdqtune.timing.ratios import BLOCK_LOOKS, Plan, Ratio, overlap, speed, with_ratios
from qdqtune.tuning.contexts import View
from qdqtune.types import Measurement, Mix, Placement, Trial


@dataclass(frozen=True)
class Compared:
    """File b compared with file a under one condition.

    `ratio` is the latency of b divided by that of a. `a_seconds` is the median per inference, `b_seconds` that times
    the ratio, as two medians could contradict the ratio because of drift. `threads` is the condition's number, None for
    an engine without threads; `measured` are the rounds of each block. `by_workload` has a comparison for each of
    several workloads alone, in order. `wants_builds`: more builds, for which there was no time, might decide it.
    """

    ratio: Ratio
    a_seconds: float
    b_seconds: float
    threads: int | None = None
    measured: tuple[Measurement, ...] = ()
    by_workload: tuple[Compared, ...] = ()
    wants_builds: bool = False

    @classmethod
    def of(cls, blocks: Sequence[Block], a: int, b: int, plan: Plan, view: View) -> Self:
        seen = [block.at(view.shares) for block in blocks]
        found = between_files(seen, a, b, plan)
        measured = tuple(block.pair(a, b) for block in seen)
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        by_workload = tuple(cls.of(blocks, a, b, plan, View(view.threads, shares)) for shares in view.alone)
        wants_builds = len(blocks) < BLOCK_LOOKS[-1] and wants_more_builds(seen, [(a, b)], plan)
        return cls(found, a_seconds, a_seconds * found.median, view.threads, measured, by_workload, wants_builds)

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "verdict": self.ratio.verdict,
            "baseline_ms": 1e3 * self.a_seconds,
            "final_ms": 1e3 * self.b_seconds,
        }


def first_faster(contexts: Sequence[Compared]) -> Compared:
    """The comparison to show first: the first in which b is faster, else the first of all."""
    return next((one for one in contexts if one.ratio.verdict == "faster"), contexts[0])


def narrower(contexts: tuple[Compared, ...], earlier: tuple[Compared, ...] | None) -> tuple[Compared, ...]:
    """The comparison with the narrower interval, of two of the same files; the later one if they contradict."""
    if earlier is None or not all(overlap(a.ratio, b.ratio) for a, b in zip(contexts, earlier, strict=True)):
        return contexts
    return min(contexts, earlier, key=lambda each: max(one.ratio.width for one in each))


def worst_of(contexts: Sequence[Compared]) -> Compared:
    return max(contexts, key=lambda one: one.ratio.median)


def rows_by_threads(contexts: Sequence[Compared]) -> list[dict[str, Any]]:
    """The rows `by_threads` of summary.json; none for an engine without a number of threads."""
    return [{"threads": one.threads} | one.figures for one in contexts if one.threads is not None]


def rows_by_workload(contexts: Sequence[Compared], mix: Mix) -> list[dict[str, Any]]:
    """The rows `workloads` of summary.json; none without a proof."""
    parts = first_faster(contexts).by_workload if contexts else ()
    return [{"name": w.name, "share": w.share} | one.figures for w, one in zip(mix, parts, strict=False)]


ALIKE = 1.02
"""Medians within this factor count as equal. Chosen, not measured."""

CLEARER_DB, SMALLER = 1.0, 0.9
"""Of equally fast files, one is clearly more accurate if its output SQNR is higher by so many dB, and clearly smaller
if it takes at most this share of the bytes. Chosen, not measured."""

SLOWER = 1.01
"""A median ratio above this counts as slower under a condition even if undecided. Chosen, not measured."""

CLEARLY_FASTER = 0.95
"""A placement that takes less than this share of float's time in the search is worth proving. Chosen, not measured."""

FINALISTS, MOST_FINALISTS = 2, 5
"""How many placements race together in the proof, and how many are tried in all if one is faster under one condition
but slower under another. Chosen, not measured."""

NEAR_BEST = 1.05
"""Placements within this factor of the best one's latency race with it in the proof. Chosen, not measured."""


# ---------------------------------------------------------------- which candidate is the best so far, and ties


def limiting_db(trial: Trial) -> float:
    """The output SQNR in dB of all samples, or if lower, that of the worst sample plus `APART_DB`: its limit is lower
    by that."""
    lowest = None if trial.accuracy is None else trial.accuracy.lowest_db
    return trial.exactness if lowest is None else min(trial.exactness, lowest + APART_DB)


def is_more_accurate(one: Trial, other: Trial) -> bool:
    """Whether a candidate is clearly more accurate than another by `limiting_db`, and not less by the user's metric; by
    the metric alone where SQNRs are equal."""
    gain = limiting_db(one) - limiting_db(other)
    if one.metric is not None and other.metric is not None and (gain == 0 or one.metric < other.metric):
        return one.metric > other.metric
    return gain >= CLEARER_DB


def preferred(alike: Sequence[Trial], nbytes: Sequence[int] = ()) -> int:
    """The rule for ties: the index of the one to take of candidates that are equally fast, given the fastest first.

    A clearly more accurate one is taken before the fastest. With `nbytes`, the sizes of their files, a clearly smaller
    one is taken before that, unless it is clearly less accurate.
    """
    best = 0
    for at, trial in enumerate(alike):
        if is_more_accurate(trial, alike[best]):
            best = at
    if not nbytes:
        return best
    as_exact = [at for at, trial in enumerate(alike) if not is_more_accurate(alike[best], trial)]
    smallest = min(as_exact, key=nbytes.__getitem__)
    return smallest if nbytes[smallest] <= SMALLER * nbytes[best] else best


def accepted(
    trials: Sequence[Trial],
    plan: Plan,
    best: Trial | None = None,
    slower: Collection[Placement] = (),
    to_best: float = 1.0,
) -> list[Trial]:
    """The trials of one batch, with at most one marked as accepted: the `preferred` winner. Without a winner: a trial
    more accurate than the `best` so far, if it does not seem slower. A trial less accurate than the best must be
    clearly faster. Placements that are `slower` than float under some condition are never accepted. `to_best` is the
    latency of the trials' opponent relative to the best, where that is another placement."""
    held = with_ratios([t for t in trials if t.holds is True and t.placement not in slower], plan)
    able = [(t, r.scaled(to_best)) for t, r in held]
    alike = [(t, r) for t, r in able if r.verdict == "faster"]
    if best is not None:
        alike = [(t, r) for t, r in alike if ALIKE * r.median < 1 or limiting_db(t) >= limiting_db(best)]
    if not alike and best is not None:
        even = [(t, r) for t, r in able if r.verdict == "undecided" and r.median <= 1]
        alike = [(t, r) for t, r in even if is_more_accurate(t, best)]
    if not alike:
        return list(trials)
    alike.sort(key=lambda pair: (pair[1].median, -pair[0].number))
    equal = [t for t, r in alike if r.median <= ALIKE * alike[0][1].median]
    chosen = equal[preferred(equal)]
    return [replace(t, accepted=t is chosen) for t in trials]


# ---------------------------------------------------------------- whether a file may ship


def is_slower(compared: Compared) -> bool:
    """Whether a file is slower under a condition, or seems so by more than `SLOWER`."""
    ratio = compared.ratio
    return ratio.verdict == "slower" or (ratio.verdict == "undecided" and ratio.median > SLOWER)


def is_proven(contexts: Sequence[Compared]) -> bool:
    """Whether a file is slower under no condition, and faster under one."""
    return not any(map(is_slower, contexts)) and first_faster(contexts).ratio.verdict == "faster"


AttemptVerdict = Literal[
    "ships", "pairs do not pay", "slower elsewhere", "not faster than given", "not faster", "misses the limits"
]
"""What became of a file that might ship; if several reasons speak against it, the first."""


@dataclass(frozen=True)
class Attempt:
    """A placement whose file was raced against the float model under every condition; the empty placement is the
    rewritten float model without pairs.

    `to_given` compares it with the user's file, if that has pairs or other inputs. It `must_beat_given` if those pairs
    meet the limits, or if inputs were fixed. `to_rewritten` compares it with the rewritten float model without pairs,
    `to_rivals` with each other placement of the same race. `trial` is its measurement if it may ship, `missed` a
    message about the limit that it misses.
    """

    placement: Placement
    to_float: tuple[Compared, ...]
    to_given: tuple[Compared, ...] = ()
    must_beat_given: bool = False
    to_rewritten: tuple[Compared, ...] = ()
    missed: str | None = None
    trial: Trial | None = None
    to_rivals: Mapping[Placement, tuple[Compared, ...]] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def ratio(self) -> Ratio:
        """The latency relative to float under the condition that is shown first."""
        return first_faster(self.to_float).ratio

    def is_as_fast(self, fastest: Attempt) -> bool:
        """Whether it takes at most `ALIKE` longer than the fastest file, in the same rounds if there are any."""
        if fastest.placement not in self.to_rivals:
            pairs = zip(self.to_float, fastest.to_float, strict=True)
            return all(own.ratio.median <= ALIKE * other.ratio.median for own, other in pairs)
        return all(compared.ratio.median <= ALIKE for compared in self.to_rivals[fastest.placement])

    @property
    def verdict(self) -> AttemptVerdict:
        """Whether it may ship. With rewrites, pairs must gain by themselves, as they cost accuracy."""
        if not is_proven(self.to_float):
            is_elsewhere = self.ratio.verdict == "faster" and is_slower(worst_of(self.to_float))
            return "slower elsewhere" if is_elsewhere else "not faster"
        against_given = {one.ratio.verdict for one in self.to_given}
        if self.must_beat_given and against_given and ("faster" not in against_given or "slower" in against_given):
            return "not faster than given"
        if self.missed is not None:
            return "misses the limits"
        if self.to_rewritten and not any(one.ratio.verdict == "faster" for one in self.to_rewritten):
            return "pairs do not pay"
        return "ships"


# ---------------------------------------------------------------- which files are tried, and which ships


@dataclass(frozen=True)
class Finalists:
    """Placements that may ship, in the order of trying: the `first` ones until one ships, the others only after one
    that is slower under some condition or misses the limits. If they `are_points` of a front, all are tried."""

    placements: tuple[Placement, ...] = ()
    first: int = 0
    are_points: bool = False

    def next(self, attempts: Sequence[Attempt]) -> tuple[Placement, ...]:
        """The placements to race next, all in one race; empty if there is none."""
        tried = [attempt for attempt in attempts if attempt.placement]
        verdicts = {attempt.verdict for attempt in tried}
        if verdicts & {"ships", "pairs do not pay"} and not self.are_points:
            return ()
        if len(tried) < self.first:
            return self.placements[len(tried) : self.first]
        if verdicts & {"slower elsewhere", "misses the limits"}:
            return self.placements[len(tried) : len(tried) + 1]
        return ()


def finalists(history: Sequence[Trial], plan: Plan, slower: Collection[Placement] = ()) -> Finalists:
    """Choose the placements for the proof: the last accepted one, the one `preferred` of those about as fast, then
    those clearly faster than float, the fastest first; none that misses the limits or is `slower` under some condition.
    Those about as fast as the first race with it. A metric still missing is computed before one ships."""
    ratios = ratios_to_float(history, plan)
    trials = {t.placement: t for t in history if t.placement in ratios and t.holds is not False}
    able = {p: ratios[p] for p in trials if p and p not in slower}
    accepted_last = [t.placement for t in reversed(history) if t.accepted and t.placement in able][:1]
    others = [p for p in sorted(able, key=able.__getitem__) if able[p] < CLEARLY_FASTER]
    ordered = list(dict.fromkeys([*accepted_last, *others]))
    near = [p for p in ordered if able[p] <= NEAR_BEST * able[ordered[0]]]
    if not near:
        return Finalists()
    first, exact = near[0], near[preferred([trials[p] for p in near])]
    if trials[exact].holds and able[exact] <= ALIKE * able[first]:  # there may be time for one only
        first, exact = exact, first
    return Finalists(tuple(dict.fromkeys([first, exact, *ordered]))[:MOST_FINALISTS], min(len(near), FINALISTS))


def shipped(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that ships: of those that may, the one `preferred` of the fastest and those equal to it; else the
    rewritten float model, if it may; else the first whose pairs do not pay off. None if there is none."""
    able = [a for a in attempts if a.verdict == "ships"]
    with_pairs = sorted((a for a in able if a.placement), key=lambda a: a.ratio.median)
    alike = [(a, a.trial) for a in with_pairs if a.trial is not None and a.is_as_fast(with_pairs[0])]
    if alike:
        return alike[preferred([trial for _, trial in alike], [a.nbytes for a, _ in alike])][0]
    return next(chain(able, (a for a in attempts if a.verdict == "pairs do not pay")), None)


# ---------------------------------------------------------------- what users read about it

LATE = "`time_budget`"
"""The beginning of notes on what time has ended."""

MORE_BUILDS, UNDECIDED = "builds differ too much for the time there was", "the interval is too wide to tell"
"""Why a file did not prove faster: the ends of notes on it."""

GOES_ON = "give more time: the same command goes on from what was measured"
ANEW = "`restart` with more time calibrates anew"
TO_DECIDE = "a quieter machine, or more rounds (`effort` extensive, `restart`), would decide"


def advise(notes: Iterable[str], *, is_cut_short: bool) -> tuple[str, ...]:
    """Each note once, without earlier advice; at the end, where more time or another try helps, one that says how.
    `is_cut_short`: calibration was."""
    told = [note for note in dict.fromkeys(notes) if not note.startswith((GOES_ON, ANEW, TO_DECIDE))]
    ways = []
    if any(note.startswith(LATE) or note.endswith(MORE_BUILDS) for note in told):
        ways.append(GOES_ON)
    elif any(note.endswith(UNDECIDED) for note in told):
        ways.append(TO_DECIDE)
    if is_cut_short:
        ways.append(ANEW)
    return (*told, "; ".join(ways)) if ways else tuple(told)


def notes_of(attempt: Attempt, history: Sequence[Trial], model: str, changes: str) -> Iterator[str]:
    """Why a file did not ship. `model` names the user's file; `changes` is that of `Subject`."""
    number = next((trial.number for trial in history if trial.placement == attempt.placement), None)
    tried = f"the float model {changes}" if not attempt.placement else f"candidate {number}" if number else "the result"
    first, last = first_faster(attempt.to_float), worst_of(attempt.to_float)
    match attempt.verdict:
        case "pairs do not pay":
            speedup = first_faster(attempt.to_rewritten).ratio.speedup
            yield f"{tried} did not prove more than its rewrites: {speedup} the speed without its pairs"
        case "slower elsewhere":
            here = f"{first.ratio.speedup} the speed of float{at_threads(first.threads)}"
            yield f"{tried} is no gain where it may run: {here}, but {last.ratio.speedup}{at_threads(last.threads)}"
        case "not faster than given":
            slowest = worst_of(attempt.to_given)
            yield f"{tried} did not prove faster than {model}: {unproven(slowest, model)}"
        case "misses the limits":
            yield f"{tried} proved faster, and was not taken: {attempt.missed}"
        case "not faster":
            yield f"{tried} did not prove faster on fresh builds: {unproven(first)}"


def beside_rules(shipped: Placement, rules: Placement, history: Sequence[Trial], plan: Plan) -> str | None:
    """A note if the placement by rules is what ships, or was as fast in the search and meets the limits; else None."""
    if shipped == rules:
        return "what ships are the pairs that `quantize` places"
    ratios = ratios_to_float([trial for trial in history if isinstance(trial.result, Measurement)], plan)
    holds = {trial.placement for trial in history if trial.holds}
    if rules not in ratios or rules not in holds or shipped not in ratios or ratios[rules] > ALIKE * ratios[shipped]:
        return None
    speeds = f"{speed(ratios[rules])} the speed of float, and what ships {speed(ratios[shipped])}"
    return f"the pairs that `quantize` places are as good here: in the search they had {speeds}"


def unproven(compared: Compared, of: str = "float") -> str:
    """How fast a model was that was not proven faster, and why."""
    speedup = f"{compared.ratio.speedup} the speed of {of}"
    if compared.ratio.verdict != "undecided":
        return speedup
    return f"{speedup}; {MORE_BUILDS if compared.wants_builds else UNDECIDED}"


def at_threads(count: int | None) -> str:
    """The phrase " at N threads"; empty if the engine has no number of threads."""
    return "" if count is None else f" at {count} thread{'s' * (count != 1)}"


def slower_workloads(contexts: Sequence[Compared], mix: Mix) -> Iterator[str]:
    """A line for each workload on which the shipped model is slower, with the condition where it is worst."""
    for number, workload in enumerate(mix if contexts and contexts[0].by_workload else ()):
        worst = worst_of([one.by_workload[number] for one in contexts])
        if is_slower(worst):
            at = at_threads(worst.threads) if len(contexts) > 1 else ""
            yield (
                f"{workload.name} alone ({workload.share:.0%} of the calls) got slower: {worst.ratio.speedup} the "
                f"speed of float{at}; the others gain more than it loses"
            )
