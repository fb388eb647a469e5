"""Finds the few parts of many that cause damage, by adaptive group testing: the damage of any set can be measured.

Damage need not add up: one part alone may cause all of it, so that a second one adds none, and parts may cause damage
only together, as the pairs around an operator do that an engine fuses wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

LEFT_SHARE = 0.5
"""A part is at fault if without it at most this share of the damage is left: 3 dB. Chosen, not measured."""

Parts = tuple[int, ...]
Damage = Callable[[Parts], float]
"""Power of the error at the outputs, relative to the signal, with these parts and no others. There may be damage
without any part; that is measured only if no single part is at fault."""


@dataclass(frozen=True)
class Culprit:
    """A part at fault in a set of `tested` parts, which has `damage` with it and `without` that part."""

    part: int
    damage: float
    without: float
    tested: int


@dataclass(frozen=True)
class BisectionResult:
    """The culprits in the order in which they were found, and the `damage` of the `rest` of the parts.

    If this damage is above the limit, no single part of the rest is at fault.
    """

    culprits: tuple[Culprit, ...]
    rest: Parts
    damage: float


def culprits(parts: Sequence[int], damage: Damage, limit: float) -> BisectionResult:
    """Find culprits one after another, until the rest has at most `limit` damage, or no single part is at fault.

    Parts that work together should be neighbours in `parts`. One culprit among n > 1 parts takes at most
    1 + 2 log2(n) calls of `damage`; no set is measured twice. Taking out a culprit leaves at most `LEFT_SHARE` of
    the damage of a set that has at least this share of all damage; or it has more than `limit` damage by itself.
    """
    asked = cache(damage)
    rest, found = tuple(parts), list[Culprit]()
    while rest and asked(rest) > limit:
        culprit = _single(rest, asked, limit, is_quick=True) or _single(rest, asked, limit, is_quick=False)
        if culprit is None:
            break
        found.append(culprit)
        rest = _without(rest, (culprit.part,))
    return BisectionResult(tuple(found), rest, asked(rest))


def _single(parts: Parts, damage: Damage, limit: float, *, is_quick: bool) -> Culprit | None:
    """A single part without which the damage is gone, found by halving; None if there is none.

    If `is_quick`, the search continues in the first half without which the damage is gone, else in the one without
    which less is left: parts in front of a culprit can increase its damage, so that less is left without them too. If
    the damage stays without either half, several parts are at fault, and the half with more damage is searched alone.
    """
    tested = suspects = parts
    whole = damage(parts)
    while len(suspects) > 1:
        halves = suspects[: (len(suspects) + 1) // 2], suspects[(len(suspects) + 1) // 2 :]
        bound = LEFT_SHARE * damage(tested)
        quick = is_quick and damage(_without(tested, halves[0])) <= bound
        faulty = halves[0] if quick else min(halves, key=lambda half: damage(_without(tested, half)))
        if damage(_without(tested, faulty)) <= bound:
            suspects = faulty
            continue
        if damage(()) > limit:
            return None
        worse = max(halves, key=damage)
        if damage(worse) <= limit and damage(worse) < LEFT_SHARE * whole:
            return None
        tested = suspects = worse
    if damage(tested) < LEFT_SHARE * whole and damage(suspects) <= limit:
        return None
    without = damage(_without(tested, suspects))
    if without > LEFT_SHARE * damage(tested):
        return None
    return Culprit(suspects[0], damage(tested), without, len(tested))


def _without(parts: Parts, others: Parts) -> Parts:
    gone = frozenset(others)
    return tuple(p for p in parts if p not in gone)
