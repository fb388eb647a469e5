"""Prices that earlier runs have learned, for units that this run has not built yet.

A price is kept as a share of the float time of its unit: milliseconds differ from run to run with the load of a
machine, and every run times its own float build. Units are known by a digest of their kind, so that nothing of a model
is kept but sizes and times. Measurements of the present run always take precedence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

PriceKey = tuple[str, str, str]
"""Digest of a unit's kind; its state, or the weight format of its weights; and what it reads (see `prices`)."""

Split = frozenset[int]
"""Which inner edges of a fusion group carry pairs, by their position."""

DISTURBED = "disturbed"
"""Stands in a `PriceKey` in place of a state: the extra time of a float unit among pairs."""

MAX_SHARE = 100.0
"""Shares above this are measurement errors, not prices. Chosen, not measured."""

LOW_QUANTILE = 0.25
"""A kind without a measurement gets this quantile of the shares of kinds with the same operators: a low guess is tried
and corrected by its build, one that is too high never is. Chosen, not measured."""

DECIMALS = 5
"""Decimals of shares, ms and bytes in a file."""

MAX_ROWS = 20_000
"""The most rows that are kept of each table of a prior, the latest: some megabytes."""


@dataclass(frozen=True)
class Prior:
    """Shares of float time by `PriceKey`; the operators of each kind; the bytes and ms of conversions by operator and
    the units around them; and the shares that fusion groups took by how pairs split them."""

    shares: Mapping[PriceKey, float] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    conversions: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    splits: Mapping[str, Mapping[Split, float]] = field(default_factory=dict)
    per_consumer: bool = False

    def __bool__(self) -> bool:
        return bool(self.shares)

    @cached_property
    def by_operators(self) -> Mapping[PriceKey, float]:
        """Shares by operators in place of a kind: the `LOW_QUANTILE` of the kinds with these operators."""
        found: dict[PriceKey, list[float]] = {}
        for (kind, how, behind), share in self.shares.items():
            found.setdefault((self.operators[kind], how, behind), []).append(share)
        return {key: float(np.quantile(shares, LOW_QUANTILE)) for key, shares in found.items()}

    @cached_property
    def sizes(self) -> tuple[tuple[float, float], ...]:
        """Bytes and ms of the conversions that ran as layers of their own."""
        return tuple((size, ms) for size, ms in self.conversions.values() if ms > 0)

    def updated(self, newer: Prior) -> Prior:
        """The prior with what a later run has learned; beyond `MAX_ROWS` the oldest rows are dropped."""
        shares = _latest(self.shares, newer.shares)
        known = {kind for kind, _, _ in shares}
        operators = {k: v for k, v in {**self.operators, **newer.operators}.items() if k in known}
        splits = {**self.splits, **{k: {**self.splits.get(k, {}), **v} for k, v in newer.splits.items()}}
        return Prior(
            shares,
            operators,
            _latest(self.conversions, newer.conversions),
            dict(list(splits.items())[-MAX_ROWS:]),
            self.per_consumer or newer.per_consumer,
        )


NO_PRIOR = Prior()


def _latest(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both mappings, the new entries last, cut to the last `MAX_ROWS`."""
    kept = {key: value for key, value in old.items() if key not in new}
    return dict(list({**kept, **new}.items())[-MAX_ROWS:])


def digest(kind: str) -> str:
    """16 hex digits that stand for a kind of unit."""
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


class Prices(msgspec.Struct, frozen=True):
    """A prior as JSON: rows from the oldest to the latest.

    `units`: digest of the kind, operators, state, what it reads, share. `conversions`: operator, digest of the units
    around it, bytes, ms. `splits`: digest of the kind, edges with pairs, share.
    """

    units: tuple[tuple[str, str, str, str, float], ...]
    conversions: tuple[tuple[str, str, float, float], ...]
    splits: tuple[tuple[str, tuple[int, ...], float], ...]
    per_consumer: bool


def packed(prior: Prior) -> Prices:
    """A prior as rows for a JSON file."""
    return Prices(
        tuple((kind, prior.operators[kind], how, reads, _rounded(x)) for (kind, how, reads), x in prior.shares.items()),
        tuple((op, where, _rounded(size), _rounded(ms)) for (op, where), (size, ms) in prior.conversions.items()),
        tuple(
            (kind, tuple(sorted(split)), _rounded(share))
            for kind, shares in prior.splits.items()
            for split, share in shares.items()
        ),
        prior.per_consumer,
    )


def unpacked(prices: Prices) -> Prior:
    """The prior that `packed` made rows of; rows with numbers that cannot be prices are dropped."""
    units = [row for row in prices.units if 0 <= row[4] <= MAX_SHARE]
    splits: dict[str, dict[Split, float]] = {}
    for kind, split, share in prices.splits:
        if 0 <= share <= MAX_SHARE:
            splits.setdefault(kind, {})[frozenset(split)] = share
    return Prior(
        {(kind, how, reads): share for kind, _, how, reads, share in units},
        {row[0]: row[1] for row in units},
        {(op, where): (size, ms) for op, where, size, ms in prices.conversions if size >= 0 and ms >= 0},
        splits,
        prices.per_consumer,
    )


def _rounded(number: float) -> float:
    return round(float(number), DECIMALS)
