"""Decides which candidates of a front are compared further, become points, or ship: pure functions of values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qdqtune.search.front import DISTANCE_UNITS, Tradeoff
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import PAIRS, Plan, Ratio, on_these_builds, ratio
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.shipping import Compared, first_faster, is_alike, judged_together
from qdqtune.types import Failure, Measurement, Placement, Trial

OBVIOUS = 0.8
"""A candidate that takes at most this share of the float model's time is expected to prove faster on one build. Chosen,
not measured."""


@dataclass(frozen=True)
class FrontTerms:
    """What a run demands of its front.

    `plan` is that of the proof, `builds` is the number left after the search. `rewrites_ratio` is the ratio of the
    search's float model to the user's file. `kept` is a placement that counts as unbeaten, because the search chose it
    by the user's metric.
    """

    plan: Plan
    limits: Limits
    builds: int
    rewrites_ratio: float = 1.0
    kept: Placement | None = None


@dataclass(frozen=True)
class FrontCandidate:
    """A placement whose file was compared with the user's.

    `expected` is the trade-off that the search or its prices predicted, `tradeoff` what the comparisons show, with the
    ratio to the float model of the search. `measured` are the rounds of each pair of builds, `seems` their ratio, None
    where one failed. `is_exact`: its outputs hold the limits. `is_new`: the search had not built it.
    """

    trial: Trial
    expected: Tradeoff
    measured: tuple[Measurement | Failure, ...]
    seems: Ratio | None
    tradeoff: Tradeoff
    is_exact: bool
    is_new: bool

    @property
    def placement(self) -> Placement:
        """The placement of the candidate."""
        return self.trial.placement

    @property
    def is_faster(self) -> bool:
        """Whether its builds so far are faster than the user's file."""
        return self.seems is not None and self.seems.verdict == "faster"

    @property
    def is_slower(self) -> bool:
        """Whether its builds so far are slower than the user's file, or one failed."""
        return self.seems is None or self.seems.verdict == "slower"

    @property
    def is_obvious(self) -> bool:
        """Whether it is expected to prove faster on one build."""
        return self.seems is not None and self.seems.median <= OBVIOUS

    @property
    def taken(self) -> tuple[Tradeoff, ...]:
        """Trade-offs that other candidates are to be far from: its own, and if it is not faster the expected one."""
        return (self.tradeoff,) if self.is_faster else (self.tradeoff, self.expected)


def judged(
    trial: Trial, expected: Tradeoff, measured: Sequence[Measurement | Failure], terms: FrontTerms, *, is_new: bool
) -> FrontCandidate:
    """The candidate of a trial, judged by its pairs of builds so far."""
    ratios = [ratio(m, terms.plan) for m in measured if isinstance(m, Measurement)]
    seems = on_these_builds(ratios) if len(ratios) == len(measured) else None
    is_known = seems is not None and trial.accuracy is not None
    tradeoff = Tradeoff(seems.median / terms.rewrites_ratio, trial.exactness) if seems and is_known else expected
    return FrontCandidate(
        trial, expected, tuple(measured), seems, tradeoff, terms.limits.is_exact_enough(trial.accuracy), is_new
    )


def promising(candidates: Collection[FrontCandidate], kept: Placement | None) -> list[FrontCandidate]:
    """The candidates that are faster than the user's file and that no other one beats; `kept` counts as unbeaten."""
    faster = [c for c in candidates if c.is_faster]
    return [c for c in faster if c.placement == kept or not any(o.tradeoff.beats(c.tradeoff) for o in faster)]


def may_ship(points: Sequence[FrontCandidate]) -> list[FrontCandidate]:
    """Of promising candidates, those that hold the limits and are as fast as the fastest of these, or nearly so."""
    holding = [c for c in points if c.is_exact]
    least = min((c.tradeoff.ratio for c in holding), default=0.0)
    return [c for c in holding if c.tradeoff.ratio <= least * (1 + DISTANCE_UNITS[0])]


def to_compare_again(
    candidates: Collection[FrontCandidate], terms: FrontTerms, few: int, many: int, *, spent: int, to_open: int
) -> list[FrontCandidate]:
    """The candidates to compare on `many` pairs of builds that were compared on `few`: those that may ship and need a
    second pair, then those that `few` pairs do not decide, the nearest to a decision first. Only as many as builds are
    left for, where `spent` were used so far and the user's file has to be built `to_open` times."""
    points = promising(candidates, terms.kept)
    together = zip(points, judged_together([c.measured for c in points], terms.plan), strict=True)
    known = [(c, found.ratio) for c, found in together if found is not None and len(c.measured) == few]
    undecided = [(r.high or r.median, c) for c, r in known if r.verdict == "undecided"]
    first = [c for c in may_ship(points) if len(c.measured) == few < PAIRS]
    ordered = [*first, *(c for _, c in sorted(undecided, key=lambda pair: pair[0]) if c not in first)]
    room = terms.builds - spent - to_open
    return ordered[: max(0, room // (many - few))]


def has_builds_for_another(
    candidates: Collection[FrontCandidate], terms: FrontTerms, *, spent: int, to_open: int
) -> bool:
    """Whether builds are left for one more candidate beside what the others still need: a second pair where one is not
    enough, and the usual proof if no point may ship."""
    points = promising(candidates, terms.kept)
    again = [*may_ship(points), *(c for c in points if not c.is_obvious)]
    waiting = {c.placement for c in again if len(c.measured) < PAIRS}
    is_usual = bool(candidates) and not any(c.is_exact for c in points)
    needed = to_open + 1 + len(waiting) + 1
    return needed + (PROOF_BUILDS if is_usual else 0) <= terms.builds - spent


# ---------------------------------------------------------------- points


@dataclass(frozen=True)
class ProvenPoint:
    """A point of the front: a file that was compared with the user's in each of `contexts`, on so many `pairs` of
    builds. `metric` is the user's own, `holds` whether it holds the limits on accuracy, `content` a
    digest of the file."""

    trial: Trial
    contexts: tuple[Compared, ...]
    pairs: int
    holds: bool
    metric: float | None = None
    name: str = ""
    content: str = ""

    @property
    def shown(self) -> Compared:
        """The context whose figures users see."""
        return first_faster(self.contexts)

    @property
    def ratio(self) -> Ratio:
        """The ratio to the user's file in the context that is shown."""
        return self.shown.ratio

    @property
    def tradeoff(self) -> Tradeoff:
        """Its latency and accuracy."""
        return Tradeoff(self.ratio.median, self.trial.exactness)


def front_of(points: Sequence[ProvenPoint]) -> list[ProvenPoint]:
    """The points that no other one beats, the fastest first."""
    kept = (p for p in points if not any(other.tradeoff.beats(p.tradeoff) for other in points))
    return sorted(kept, key=lambda p: p.ratio.median)


def shipped_point(front: Sequence[ProvenPoint]) -> ProvenPoint | None:
    """The point that ships: the fastest that holds the limits, on two pairs of builds at least, or the most exact of
    those that are equal to it. None if no point may."""
    holding = [p for p in front if p.holds and p.pairs >= PAIRS]
    alike = [p for p in holding if is_alike(p.ratio, holding[0].ratio)]
    return max(alike, key=lambda p: (round(p.trial.exactness), -p.ratio.median), default=None)
