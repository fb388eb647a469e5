"""What earlier runs have learned of prices, for units that the run at hand has not built yet.

A price travels as a share of the float time of its unit: milliseconds drift from run to run and differ with what else a
machine does, and every run times its own float build. Units are known by a digest of their kind, so that nothing of a
model travels but sizes and times. What the run at hand has measured itself always counts before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Seen = tuple[str, str, str]
"""Digest of a unit's kind, its state or the name of the storage of its weights, and what it reads; see `prices`."""

Split = frozenset[int]
"""Which inner edges of a fusion group carry pairs, by their position."""

DISTURBED = "disturbed"
"""In place of a state: what a float unit takes more among pairs."""

LARGEST = 100.0
"""Shares beyond are no prices but accidents."""

LOW = 0.25
"""Which quantile of the shares of equal operators stands for one that was not seen."""

MOST = 20_000
"""Rows of each sort that are kept, the latest: some megabytes."""


@dataclass(frozen=True)
class Prior:
    """Shares of float time by what was seen, the operators of each kind, the ms of conversions by what they stand
    between (with the bytes of the tensor), and the shares that fusion groups took as they were divided."""

    shares: Mapping[Seen, float] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    conversions: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    splits: Mapping[str, Mapping[Split, float]] = field(default_factory=dict)
    per_consumer: bool = False

    def __bool__(self) -> bool:
        return bool(self.shares)

    @cached_property
    def usual(self) -> Mapping[Seen, float]:
        """Shares by operators in place of a kind: less than most kinds of these have taken, so that it is tried."""
        found: dict[Seen, list[float]] = {}
        for (kind, how, behind), share in self.shares.items():
            found.setdefault((self.operators[kind], how, behind), []).append(share)
        return {key: float(np.quantile(shares, LOW)) for key, shares in found.items()}

    @cached_property
    def sizes(self) -> tuple[tuple[float, float], ...]:
        """Bytes and ms of the conversions that ran by themselves."""
        return tuple((size, ms) for size, ms in self.conversions.values() if ms > 0)

    def updated(self, newer: Prior) -> Prior:
        """With what a later run has learned; of too much the oldest is forgotten."""
        shares = _latest(self.shares, newer.shares)
        known = {kind for kind, _, _ in shares}
        operators = {k: v for k, v in {**self.operators, **newer.operators}.items() if k in known}
        splits = {**self.splits, **{k: {**self.splits.get(k, {}), **v} for k, v in newer.splits.items()}}
        return Prior(
            shares,
            operators,
            _latest(self.conversions, newer.conversions),
            dict(list(splits.items())[-MOST:]),
            self.per_consumer or newer.per_consumer,
        )


NOTHING = Prior()


def _latest(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both, what is new last."""
    kept = {key: value for key, value in old.items() if key not in new}
    return dict(list({**kept, **new}.items())[-MOST:])


def digest(kind: str) -> str:
    """16 hex digits that stand for a kind of unit."""
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


def between(producer: str, users: Iterable[str]) -> str:
    """What a conversion stands between, by the kinds of the units: empty ones for the graph."""
    return digest("\n".join([producer, *sorted(users)]))


def packed(prior: Prior) -> dict[str, Any]:
    """A prior as JSON values, in rows from the oldest to the latest."""
    return {
        "units": [[kind, prior.operators[kind], *rest, share] for (kind, *rest), share in prior.shares.items()],
        "conversions": [[*key, size, ms] for key, (size, ms) in prior.conversions.items()],
        "splits": [
            [kind, sorted(split), share] for kind, shares in prior.splits.items() for split, share in shares.items()
        ],
        "per_consumer": prior.per_consumer,
    }


def unpacked(content: Mapping[str, Sequence[Any]]) -> Prior:
    """The prior of `packed`, whose form was checked; numbers that cannot be prices are left out."""
    units = [row for row in content["units"] if 0 <= row[4] <= LARGEST]
    splits: dict[str, dict[Split, float]] = {}
    for kind, split, share in content["splits"]:
        if 0 <= share <= LARGEST:
            splits.setdefault(kind, {})[frozenset(split)] = share
    return Prior(
        {(kind, how, behind): share for kind, _, how, behind, share in units},
        {row[0]: row[1] for row in units},
        {(op, where): (size, ms) for op, where, size, ms in content["conversions"] if size >= 0 and ms >= 0},
        splits,
        bool(content["per_consumer"]),
    )
