"""What rewrites of the float model gave: which were tried before the search, in which form, and which were kept."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from qdqtune.measurement.timing import Ratio
from qdqtune.tuning.store import Record

Form = Literal["float", "pairs"]
"""How two models meet: both in float, or both with pairs where the engine's rules place them."""


@dataclass(frozen=True)
class Tried:
    """A rewrite, on top of those kept before it, and its ratio to the model without it; None where it failed."""

    name: str
    form: Form
    ratio: Ratio | None
    kept: bool

    @property
    def row(self) -> dict[str, Any]:
        """For machines."""
        ends = self.ratio or Ratio(1.0, None, None)
        known = {"ratio": ends.median, "low": ends.low, "high": ends.high} if self.ratio else {"ratio": None}
        return {"name": self.name, "form": self.form, **known, "kept": self.kept}


@dataclass(frozen=True)
class Found:
    """The rewrites that pay, in the order in which they are made, and all that were tried."""

    tried: tuple[Tried, ...] = ()
    builds: int = 0
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are kept."""
        return tuple(one.name for one in self.tried if one.kept)

    @property
    def gave(self) -> float:
        """The ratio of the rewritten model to the user's, as each was measured."""
        return prod(one.ratio.median for one in self.tried if one.kept and one.ratio)


NO_REWRITES = Found()


def pack_found(found: Found) -> Record:
    """What rewrites gave, as JSON values."""
    return {"tried": [one.row for one in found.tried], "builds": found.builds, "notes": list(found.notes)}


def unpack_found(record: Record) -> Found:
    """What `pack_found` has packed."""
    tried = [
        Tried(
            row["name"],
            row["form"],
            None if row["ratio"] is None else Ratio(row["ratio"], row["low"], row["high"]),
            row["kept"],
        )
        for row in record["tried"]
    ]
    return Found(tuple(tried), record["builds"], tuple(record["notes"]))
