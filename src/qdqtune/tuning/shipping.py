"""Results of comparing two files, and what follows from them: which candidate a search accepts, which file ships; also
as sentences. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from qdqtune.errors import Failure
from qdqtune.search import ratios_to_float
from qdqtune.timing.ratios import (
    BUILD_LOOKS,
    PAIRS,
    UNSEEN,
    Plan,
    Ratio,
    Spread,
    across_builds,
    judge,
    overlap,
    ratio,
    spread_of,
)
from qdqtune.types import Measurement, Mix, Placement, Trial

LOOKS = (1, *BUILD_LOOKS)
"""After how many pairs of builds the files of a front are judged. One pair can decide there if other files have two,
which show how much builds differ."""


@dataclass(frozen=True)
class Compared:
    """File b against file a in one context.

    `ratio` is the time of b to that of a. `a_seconds` is the median per inference, `b_seconds` that times the ratio:
    the machine drifts while both are timed, so two medians may contradict the ratio, which rounds give. `threads` is
    the context's number, None where the engine has none; `measured` are the rounds of each pair of builds.
    `by_workload` has a comparison for each of several workloads alone, in the order of the mix.
    """

    ratio: Ratio
    a_seconds: float
    b_seconds: float
    threads: int | None = None
    measured: tuple[Measurement, ...] = ()
    by_workload: tuple[Compared, ...] = ()

    @classmethod
    def of(
        cls,
        measured: Sequence[Measurement],
        plan: Plan,
        threads: int | None = None,
        *,
        seen: Spread = UNSEEN,
        looks: int = len(BUILD_LOOKS),
    ) -> Self:
        """Judge pairs of builds at one of so many looks; `seen` is how much builds are known to differ."""
        both = across_builds([ratio(m, plan) for m in measured], plan, seen, looks)
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        workloads = zip(*(m.parts for m in measured), strict=True)
        parts = tuple(cls.of(same, plan, threads, seen=seen, looks=looks) for same in workloads)
        return cls(both, a_seconds, a_seconds * both.median, threads, tuple(measured), parts)

    @property
    def builds(self) -> int:
        """The number of builds: for each pair, one of each file."""
        return 2 * len(self.measured)

    @property
    def figures(self) -> dict[str, Any]:
        """Ratio and times for summary.json, where a is the float model and b the final one."""
        return {
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "verdict": self.ratio.verdict,
            "baseline_ms": 1e3 * self.a_seconds,
            "final_ms": 1e3 * self.b_seconds,
        }


def judged_together(
    measured: Sequence[Sequence[Measurement | Failure]], plan: Plan, threads: int | None = None
) -> list[Compared | None]:
    """Judge several files that were compared with the same builds of one file, a row of pairs for each; None where a
    pair failed. How much builds differ is learned from the rows of the other files."""
    parts = [[m for m in row if isinstance(m, Measurement)] for row in measured]
    rows = [[ratio(m, plan) for m in row[:PAIRS]] for row in parts]
    found = list[Compared | None]()
    for at, (row, known) in enumerate(zip(parts, measured, strict=True)):
        others = [other for number, other in enumerate(rows) if number != at and len(other) == PAIRS]
        is_whole = 0 < len(row) == len(known)
        seen = spread_of(others)
        found.append(Compared.of(row, plan, threads, seen=seen, looks=len(LOOKS)) if is_whole else None)
    return found


def first_faster(contexts: Sequence[Compared]) -> Compared:
    """The context whose figures a result is shown with: the first in which b is faster, else the first."""
    return next((one for one in contexts if one.ratio.verdict == "faster"), contexts[0])


def rows_by_threads(contexts: Sequence[Compared]) -> list[dict[str, Any]]:
    """The rows `by_threads` of summary.json; none for an engine that has no number of threads."""
    return [{"threads": one.threads} | one.figures for one in contexts if one.threads is not None]


def rows_by_workload(contexts: Sequence[Compared], mix: Mix) -> list[dict[str, Any]]:
    """The rows `workloads` of summary.json: names and shares, with figures where something is proven."""
    named = [{"name": w.name, "share": w.share} for w in mix]
    if not contexts:
        return named
    return [row | one.figures for row, one in zip(named, first_faster(contexts).by_workload, strict=False)]


ALIKE = 1.01
"""Medians within this factor, whose intervals overlap, are taken for equal. Chosen, not measured."""

SLOWER = 1.01
"""A median above this counts as slower in a context, even if the rounds have not decided it. Chosen, not measured."""

CLEARLY_FASTER = 0.95
"""A file that takes less than this share of the time of another is clearly faster: a placement is then worth a proof,
and one with rewrites need not be compared with these alone. Chosen, not measured."""

FINALISTS, MOST_FINALISTS = 2, 5
"""How many placements are tried for shipping whatever the results of those before; and how many in all if one was
faster in one context but slower in another. Chosen, not measured."""


# ---------------------------------------------------------------- which candidate of a batch is the best so far


def is_alike(ratio: Ratio, fastest: Ratio) -> bool:
    """Whether a ratio is equal to that of the fastest as far as rounds can tell."""
    return ratio.median <= ALIKE * fastest.median and overlap(ratio, fastest)


def accepted(
    trials: Sequence[Trial], plan: Plan, best: Trial | None = None, slower: Collection[Placement] = ()
) -> list[Trial]:
    """The trials of one batch, at most one of them marked as accepted: the fastest that won, or the most accurate of
    those that are equal to it. If none won: a trial that is more accurate than the `best` so far, and not slower as far
    as the rounds can tell. None of the placements that are `slower` than float in a context."""
    able = [t for t in trials if t.holds is True and t.placement not in slower]
    judged = [(ratio, t) for t in able if (ratio := judge(t, plan))]
    alike = [(ratio, t) for ratio, t in judged if ratio.verdict == "faster"]
    if alike:
        fastest, _ = min(alike, key=lambda pair: (pair[0].median, -pair[1].number))
        alike = [(r, t) for r, t in alike if is_alike(r, fastest)]
    elif best is not None:
        even = [(r, t) for r, t in judged if r.verdict == "undecided" and r.median <= 1]
        alike = [(r, t) for r, t in even if round(t.exactness) > round(best.exactness)]
    if not alike:
        return list(trials)
    # Whole dB: less is no reason to prefer one to another.
    _, chosen = min(alike, key=lambda pair: (-round(pair[1].exactness), pair[0].median, -pair[1].number))
    return [replace(t, accepted=t is chosen) for t in trials]


# ---------------------------------------------------------------- whether a file may ship


def is_slower(compared: Compared) -> bool:
    """Whether a file is slower in a context, or seems to be by more than `SLOWER`."""
    ratio = compared.ratio
    return ratio.verdict == "slower" or (ratio.verdict == "undecided" and ratio.median > SLOWER)


def is_proven(contexts: Sequence[Compared]) -> bool:
    """Whether a file is slower in no context, and faster in one."""
    return not any(map(is_slower, contexts)) and first_faster(contexts).ratio.verdict == "faster"


@dataclass(frozen=True)
class InContext:
    """A file that may ship, compared in one context with the user's own file (`given`; a failure if the engine does not
    run that), and with `baseline`, the float model as we write it, unless the user's file is the float model."""

    given: Compared | Failure
    baseline: Compared | None = None

    @property
    def to_float(self) -> Compared:
        found = self.baseline or self.given
        assert isinstance(found, Compared)  # one of both was run
        return found

    @property
    def to_given(self) -> Ratio | None:
        """The ratio of the file to the user's file; None if the engine does not run that."""
        return None if isinstance(self.given, Failure) else self.given.ratio

    @property
    def builds(self) -> int:
        return sum(one.builds for one in (self.given, self.baseline) if isinstance(one, Compared))


AttemptVerdict = Literal[
    "ships",
    "is float",
    "pairs do not pay",
    "slower elsewhere",
    "not faster than given",
    "not faster",
    "misses the limits",
]
"""What became of a file that might ship; of several reasons against it the first."""


@dataclass(frozen=True)
class Terms:
    """What a run demands of a file that ships.

    `beats_given`: it has to be faster than the user's file, too, because that has pairs or other inputs.
    `is_rewritten`: the float model is not the user's but rewritten, or in another precision; rewrites take the share
    `rewrites_ratio` of its time. It may ship without pairs.
    """

    beats_given: bool = False
    is_rewritten: bool = False
    rewrites_ratio: float = 1.0


@dataclass(frozen=True)
class Attempt:
    """A placement that was tried for shipping: its file was compared in one context after the other until it was slower
    in one, which took `seconds`; and where needed with the rewritten float model (`without_pairs`). `missed` is the
    limit on accuracy that it misses, in words."""

    placement: Placement
    contexts: tuple[InContext, ...]
    verdict: AttemptVerdict
    without_pairs: Compared | None = None
    seconds: float = 0.0
    missed: str = ""

    @property
    def to_float(self) -> tuple[Compared, ...]:
        """The file against the float model in each context."""
        return tuple(one.to_float for one in self.contexts)

    @property
    def to_given(self) -> tuple[Ratio, ...]:
        """Its ratio to the user's file in each context in which that runs."""
        return tuple(one.to_given for one in self.contexts if one.to_given is not None)

    @property
    def builds(self) -> int:
        return sum(one.builds for one in self.contexts) + (self.without_pairs.builds if self.without_pairs else 0)


def verdict_of(placement: Placement, contexts: Sequence[InContext], terms: Terms) -> AttemptVerdict:
    """Whether the file of a placement may ship, before its pairs are compared with none."""
    to_float = [one.to_float for one in contexts]
    to_given = [one.to_given for one in contexts if one.to_given is not None]
    if not placement and not terms.is_rewritten:
        return "is float"
    if is_proven(to_float):
        return "ships" if not terms.beats_given or _beats(to_given) else "not faster than given"
    first = first_faster(to_float)
    is_elsewhere = first is not to_float[-1] and first.ratio.verdict == "faster" and is_slower(to_float[-1])
    return "slower elsewhere" if is_elsewhere else "not faster"


def _beats(ratios: Sequence[Ratio]) -> bool:
    """Whether a file is faster than the user's in some context and slower in none; True if that ran in none."""
    verdicts = {ratio.verdict for ratio in ratios}
    return not ratios or ("faster" in verdicts and "slower" not in verdicts)


def may_owe_it_to_rewrites(attempt: Attempt, terms: Terms) -> bool:
    """Whether a file with pairs may be no faster than the rewritten model without any. Then both are compared: pairs
    cost accuracy, and must not ship for a gain that rewrites alone give."""
    if attempt.verdict != "ships" or not attempt.placement or not terms.is_rewritten:
        return False
    return first_faster(attempt.to_float).ratio.median > CLEARLY_FASTER * terms.rewrites_ratio


def within_limits(attempt: Attempt, trial: Trial, missed: str | None) -> Attempt:
    """The attempt, refused if the judged trial of its placement does not hold the limits: it `missed` one."""
    return attempt if trial.holds else replace(attempt, verdict="misses the limits", missed=missed or "")


def with_comparison_without_pairs(attempt: Attempt, without_pairs: Compared) -> Attempt:
    """The attempt, judged by the comparison with the rewritten model, too."""
    verdict: AttemptVerdict = "ships" if without_pairs.ratio.verdict == "faster" else "pairs do not pay"
    return replace(attempt, without_pairs=without_pairs, verdict=verdict)


# ---------------------------------------------------------------- which files are tried, and which ships


@dataclass(frozen=True)
class Finalists:
    """Placements that may ship, in the order of trying: the `first` of them until one ships, the others after one that
    is slower in another context or misses the limits. The float model is tried last, if `tries_float`."""

    placements: tuple[Placement, ...] = ()
    first: int = 0
    tries_float: bool = True


def finalists(
    history: Sequence[Trial],
    plan: Plan,
    *,
    is_bounded: bool,
    tries_float: bool,
    slower: Collection[Placement] = (),
) -> Finalists:
    """The placements that the search accepted, the last one first (only that one if the run's time `is_bounded`); then
    those that were clearly faster than float, the fastest first, without those that miss the limits or were `slower`
    in a context. If none was accepted, the rounds may have been too few: the fastest is tried. A metric that was not
    computed is computed before one ships."""
    if is_bounded and not history:
        return Finalists(tries_float=False)
    first = [t.placement for t in reversed(history) if t.accepted][: 1 if is_bounded else FINALISTS]
    ratios = ratios_to_float(history, plan)
    able = {t.placement: ratios[t.placement] for t in history if t.placement in ratios and t.holds is not False}
    able = {p: ratio for p, ratio in able.items() if p not in slower}
    others = [p for p in sorted(able, key=able.__getitem__) if p and able[p] < CLEARLY_FASTER]
    tried_first = len(first) or len(others[:1])
    return Finalists(tuple(dict.fromkeys([*first, *others]))[:MOST_FINALISTS], tried_first, tries_float)


def next_finalist(finalists: Finalists, attempts: Sequence[Attempt], *, lacks_time: bool) -> Placement | None:
    """The placement to try next, the empty one for the float model; None if there is none, or no time for it."""
    tried = 0
    for number in range(len(finalists.placements)):
        verdicts = {attempt.verdict for attempt in attempts[:number]}
        is_wanted = number < finalists.first or verdicts & {"slower elsewhere", "misses the limits"}
        if not is_wanted or verdicts & {"pairs do not pay", "ships"}:
            break
        if number == len(attempts):
            return None if number and lacks_time else finalists.placements[number]
        tried = number + 1
    if len(attempts) > tried or any(attempt.verdict == "ships" for attempt in attempts):
        return None
    return Placement() if finalists.tries_float and not lacks_time else None


def shipped(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that ships: the first with verdict "ships"; else the first whose pairs do not pay, as then the
    rewritten float model did not prove faster either. None if there is neither."""
    for verdict in ("ships", "pairs do not pay"):
        if (found := next((a for a in attempts if a.verdict == verdict), None)) is not None:
            return found
    return None


def given_to_float(attempts: Sequence[Attempt]) -> float | None:
    """The time of the user's file over that of the float model, as a file tells that was compared with both; None if
    there is none."""
    first = [attempt.contexts[0] for attempt in reversed(attempts)]
    return next((one.to_float.ratio.median / one.to_given.median for one in first if one.to_given is not None), None)


def keeps_given(attempts: Sequence[Attempt], terms: Terms, *, from_qdq: bool, pairs_hold: bool) -> bool:
    """If nothing is proven: whether the user's file ships, and not the float model as we write it, because that is
    slower or rewritten. A model that came with pairs (`from_qdq`) ships as it is if its pairs hold the limits."""
    if from_qdq:
        return pairs_hold
    to_given = attempts[-1].contexts[0].to_given if attempts else None
    return terms.is_rewritten or (to_given is not None and to_given.verdict == "slower")


# ---------------------------------------------------------------- what users read about it

CHANGES_ALONE = "no pair is worth its time here: what ships is the float model {}"

TO_DECIDE = "a quieter machine, or more rounds (`effort` extensive, `restart`), would decide"


def notes_of(attempt: Attempt, model: str, changes: str) -> Iterator[str]:
    """Why a file did not ship, and whether the user's file, named `model`, could not be compared with it. `changes` is
    what was done to that without pairs, see `Subject.changes`."""
    for one in attempt.contexts:
        if isinstance(one.given, Failure):
            yield f"the engine does not run {model} as it is, so it was not compared: {one.given.reason}"
    edges = f"a candidate of {len(attempt.placement)} edges" if attempt.placement else f"the float model {changes}"
    first, last = first_faster(attempt.to_float), attempt.to_float[-1]
    match attempt.verdict:
        case "pairs do not pay" if attempt.without_pairs is not None:
            speedup = attempt.without_pairs.ratio.speedup
            yield f"{edges} did not prove more than its rewrites: {speedup} the speed without its pairs"
        case "slower elsewhere":
            here = f"{first.ratio.speedup} the speed of float{at_threads(first.threads)}"
            yield f"{edges} is no gain where it may run: {here}, but {last.ratio.speedup}{at_threads(last.threads)}"
        case "not faster than given":
            slowest = max(attempt.to_given, key=lambda ratio: ratio.median)
            yield f"{edges} did not prove faster than {model}: {unproven(slowest, model)}"
        case "misses the limits":
            yield f"{edges} proved faster, and was not taken: {attempt.missed}"
        case "not faster":
            yield f"{edges} did not prove faster on fresh builds: {unproven(first.ratio)}"


def unproven(ratio: Ratio, of: str = "float") -> str:
    """How fast a model was that did not prove faster, and what would decide it."""
    known = f"{ratio.speedup} the speed of {of}"
    return f"{known}; {TO_DECIDE}" if ratio.verdict == "undecided" else known


def at_threads(count: int | None) -> str:
    """The phrase " at N threads"; empty if the engine has no number of threads."""
    return "" if count is None else f" at {count} thread{'s' * (count != 1)}"


def slower_workloads(contexts: Sequence[Compared], mix: Mix) -> Iterator[str]:
    """A line for each of several workloads that is slower in what ships, with the context in which that is worst."""
    for number, workload in enumerate(mix if contexts and contexts[0].by_workload else ()):
        alone = [one.by_workload[number] for one in contexts]
        worst = max(alone, key=lambda one: one.ratio.median)
        if is_slower(worst):
            at = at_threads(worst.threads) if len(contexts) > 1 else ""
            yield (
                f"{workload.name} alone ({workload.share:.0%} of the calls) got slower: {worst.ratio.speedup} the "
                f"speed of float{at}; the others gain more than it loses"
            )
