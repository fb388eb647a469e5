"""Which few of many parts spoil a whole: adaptive group testing on the damage that any set of parts does together.

The damage need not add up: one part alone may spoil everything (then a second one makes it no worse), and parts may do
harm in company only, as the pairs around an operator do that an engine fuses wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

HEALED = 0.5
"""Taking parts out heals if no more than this share of the damage is left: 3 dB."""

Parts = tuple[int, ...]
Damage = Callable[[Parts], float]
"""Power of the error at the outputs, relative to the signal, with these parts in place and no others.

Without any part there may be some too, which is nobody's fault; it is asked for only where no part alone heals."""


@dataclass(frozen=True)
class Culprit:
    """A part that spoils the company in which it was found: with it `damage` is done there, without it `without`."""

    part: int
    damage: float
    without: float
    company: int


@dataclass(frozen=True)
class BisectionResult:
    """The culprits in the order in which they were found, and the damage that the `rest` of the parts does.

    If that is above the limit, no single one of the rest is to blame.
    """

    culprits: tuple[Culprit, ...]
    rest: Parts
    damage: float


def culprits(parts: Sequence[int], damage: Damage, limit: float) -> BisectionResult:
    """Find culprits one after another, until what is left does no more damage than `limit`, or none stands out.

    `parts` come in an order in which those that work together are neighbours. One culprit among n > 1 parts takes at
    most 1 + 2 log2(n) calls of `damage`, no set is asked for twice. A culprit leaves at most `HEALED` of the damage
    when it is taken out of company that does at least that share of all damage, or does more than `limit` by itself.
    """
    asked = cache(damage)
    rest, found = tuple(parts), list[Culprit]()
    while rest and asked(rest) > limit:
        culprit = _one(rest, asked, limit, is_quick=True) or _one(rest, asked, limit, is_quick=False)
        if culprit is None:
            break
        found.append(culprit)
        rest = _without(rest, (culprit.part,))
    return BisectionResult(tuple(found), rest, asked(rest))


def _one(parts: Parts, damage: Damage, limit: float, *, is_quick: bool) -> Culprit | None:
    """The part in whose absence a broken company is whole; the company shrinks where there are several such parts.

    The quick way goes into the first half whose absence heals, the other one into the half whose absence heals more:
    what comes before a culprit can make its harm worse, so that the absence of the innocent heals a little as well.
    """
    company = suspects = parts
    whole = damage(parts)
    while len(suspects) > 1:
        halves = suspects[: (len(suspects) + 1) // 2], suspects[(len(suspects) + 1) // 2 :]
        bound = HEALED * damage(company)
        quick = is_quick and damage(_without(company, halves[0])) <= bound
        healing = halves[0] if quick else min(halves, key=lambda half: damage(_without(company, half)))
        if damage(_without(company, healing)) <= bound:
            suspects = healing
            continue
        if damage(()) > limit:
            return None
        louder = max(halves, key=damage)
        if damage(louder) <= limit and damage(louder) < HEALED * whole:
            return None
        company = suspects = louder
    if damage(company) < HEALED * whole and damage(suspects) <= limit:
        return None
    without = damage(_without(company, suspects))
    if without > HEALED * damage(company):
        return None
    return Culprit(suspects[0], damage(company), without, len(company))


def _without(parts: Parts, others: Parts) -> Parts:
    gone = frozenset(others)
    return tuple(p for p in parts if p not in gone)
