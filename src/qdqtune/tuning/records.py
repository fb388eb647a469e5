"""Values that a state file holds, where they are no types of other modules; msgspec packs and checks them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import msgspec

from qdqtune.calibration.scales import Ranges
from qdqtune.numerics.scores import NO_SCORES, Scores
from qdqtune.timing.ratios import Ratio
from qdqtune.types import Placement

Shipped = Literal["tuned", "baseline", "given"]
"""The content of optimized_final.onnx: the tuned model, the float model, or a copy of the user's file."""


class RangesRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ranges that calibration found. `hurried` are notes on what a time budget left out of it."""

    ranges: Ranges
    hurried: tuple[str, ...] = ()


def job_of(placement: str, against: str) -> str:
    """What a trial's key ends with: 16 hex digits made of the digests of the candidate's placement and of the
    placement `against` which it was timed. So it does not depend on the order of trials."""
    return hashlib.sha256(f"{placement}:{against}".encode()).hexdigest()[:16]


def proof_key(placement: Placement) -> str:
    """The key of the rounds that prove a placement."""
    return f"proof:{placement.digest}"


class FloatRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The float model: the seconds of one inference (roughly), of its build, and of starting a process, if each turn of
    a round starts one; the kinds of its outputs (NumPy's `dtype.kind`); and those that hold scores of classes, without
    the best class at each position.

    `turn_seconds` is a fourth of a round of two such builds: one inference of each workload at each number of threads;
    and half as much again with several workloads, because the shapes change.
    """

    seconds: float
    turn_seconds: float
    build_seconds: float
    start_seconds: float
    kinds: tuple[str, ...] = ()
    scores: Scores = NO_SCORES


Form = Literal["float", "pairs"]
"""How two models are compared: both in float, or both with pairs where the engine's rules place them."""


@dataclass(frozen=True)
class Tried:
    """A rewrite that was tried. `ratio`: the time with it over that without, None if it failed."""

    name: str
    form: Form
    ratio: Ratio | None
    kept: bool


@dataclass(frozen=True)
class TriedRewrites:
    """The rewrites that were tried before the search, in the order of trying, and the builds that they took. If
    `is_open`, time or an accident of the engine has cut that short: the next session tries them anew."""

    tried: tuple[Tried, ...] = ()
    builds: int = 0
    notes: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of rewrites that are kept."""
        return tuple(one.name for one in self.tried if one.kept)

    @property
    def ratio(self) -> float:
        """Time of the rewritten model over that without rewrites: the product of the ratios of the rewrites kept."""
        return prod(one.ratio.median for one in self.tried if one.kept and one.ratio)


NO_REWRITES = TriedRewrites()


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a script that times models by itself through ModelOpt's interface: latencies in ms (None where a
    model failed), the best placement, latencies by digest of the placement, and the patterns that were begun."""

    baseline_ms: float | None
    best: Placement
    best_ms: float | None
    measured: dict[str, float | None]
    patterns: tuple[dict[str, Any], ...]
