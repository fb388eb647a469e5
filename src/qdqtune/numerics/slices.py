"""Which part of an output lost its content, where the SQNR of the whole does not show it.

Boxes up to 1,000 and scores up to 1 in one output: with one scale for both all scores become 0, and the whole has
40 dB. So outputs are compared by slices as well: along each axis behind the first (the batch), one for each index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from qdqtune.types import Accuracy, Array

# The limits below are chosen, not measured, unless they say so.

LOST_DB = 6.0
"""Below this SQNR a slice is lost, if the whole output has `HIDING_DB` or more: its error is half of it."""

HIDING_DB, FAR_DB = 20.0, 16.0
"""The SQNR from which on an output seems healthy as a whole, and how far below it a lost slice lies. In healthy files
of nine trained models for four engines, the worst slice was at most 13.6 dB below the whole."""

MOST_SLICES = 4096
"""Axes with more indices hold positions, and no parts."""

LEAST_VALUES = 16
"""A slice tells something if it has so many values in all samples together."""

RESOLVED = 1e-6
"""What is smaller than this share of the rest is rounding of floats, as where a channel is never used."""

VARIES = 1e-5
"""Values vary if their standard deviation is more than this share of their size."""

ANOTHER_SIZE = 30.0
"""A gap by this factor between slices ordered by size separates quantities, such as pixels and scores. One scale in 8
bits destroys only what is about 100 times smaller. The largest gap seen within one output of a trained model is 27,
between two states of a healthy file."""

LEAST_SHARE = 1 / 16
"""Smaller slices are a quantity of their own if they are at least this share of all; fewer are channels that are hardly
used. Of a box, ten coordinates of landmarks and a score, the score is one of 15."""

NEVER = 0.01
"""A probability that never exceeds this is that of a class that the samples do not have."""


@dataclass(frozen=True)
class Slice:
    """A slice of an output, or neighbours that are all lost, and the least SQNR of them in dB; see `worst_slice`."""

    name: str
    db: float
    is_lost: bool


def worst_slice(name: str, pairs: Sequence[tuple[Array, Array]]) -> Slice | None:
    """The slice of an output with the least SQNR, from its values in the float model and in another, sample by sample;
    a lost one before all others. None where no slice tells anything, or the output has no parts.

    A slice that is smaller than others of its quantity counts as large as these are on average: against nearly nothing
    every error is large. Of a slice that became constant the variation counts, not the values.
    """
    first = pairs[0][0]
    if any(array.ndim != first.ndim for pair in pairs for array in pair):
        return None
    axes = [axis for axis in range(1, first.ndim) if 1 <= first.shape[axis] <= MOST_SLICES]
    axes = [axis for axis in axes if all(array.shape[axis] == first.shape[axis] for pair in pairs for array in pair)]
    sums = [_Sums(first.shape[axis]) for axis in axes]
    for exact, actual in pairs:
        wide = exact.astype(np.float64)
        error = wide - actual
        for axis, along in zip(axes, sums, strict=True):
            shape = prod(exact.shape[:axis]), exact.shape[axis], prod(exact.shape[axis + 1 :])
            along.add(wide.reshape(shape), error.reshape(shape), exact.reshape(shape), actual.reshape(shape))
    found = list[Slice]()
    for axis, along in zip(axes, sums, strict=True):
        if (span := along.worst()) is None:
            continue
        start, stop, db, is_lost = span
        index = [":"] * first.ndim
        index[axis] = str(start) if stop == start + 1 else f"{start}:{stop}"
        found.append(Slice(f"{name}[{', '.join(index)}]", db, is_lost))
    return min(found, key=lambda one: (not one.is_lost, one.db), default=None)


def loss_of_slice(accuracy: Accuracy) -> str | None:
    """One line for users about a part that is lost; None if none is."""
    if not accuracy.slice_is_lost or accuracy.slice_db is None or accuracy.sqnr_db is None:
        return None
    hidden = f"hidden in an output SQNR of {accuracy.sqnr_db:.1f} dB"
    return f"{accuracy.slice_name} lost its values: {accuracy.slice_db:.1f} dB, {hidden}"


class _Sums:
    """What is known of the slices along one axis: an entry for each, whatever the size of the output."""

    def __init__(self, slices: int) -> None:
        self.count = 0
        self.signal, self.noise, self.total = np.zeros((3, slices))
        self.least, self.most = np.full(slices, np.inf), np.full(slices, -np.inf)
        """The extremes in the float model."""
        self.low, self.high = np.full(slices, np.inf), np.full(slices, -np.inf)
        """The extremes in the other one."""

    def add(self, wide: Array, error: Array, exact: Array, actual: Array) -> None:
        """Add a sample, each array with the shape [before, slices, behind]."""
        if not wide.size:
            return
        self.count += wide.shape[0] * wide.shape[2]
        self.signal += np.einsum("ijk,ijk->j", wide, wide)
        self.noise += np.einsum("ijk,ijk->j", error, error)
        self.total += wide.sum((0, 2))
        self.least, self.most = np.minimum(self.least, exact.min((0, 2))), np.maximum(self.most, exact.max((0, 2)))
        self.low, self.high = np.minimum(self.low, actual.min((0, 2))), np.maximum(self.high, actual.max((0, 2)))

    def worst(self) -> tuple[int, int, float, bool] | None:
        """Start and stop of the worst slices, the least SQNR of them in dB, and whether they are lost."""
        if self.count < LEAST_VALUES or not self.noise.any():
            return None
        size = np.sqrt(self.signal / self.count)
        is_absent = (self.least >= 0) & (self.most <= NEVER)
        judged = np.flatnonzero((size > RESOLVED * size.max()) & ~is_absent)
        if not judged.size:
            return None
        variation = np.maximum(self.signal - np.square(self.total) / self.count, 0)
        is_constant = (self.low == self.high) & (variation > VARIES**2 * self.signal)
        level = np.full(len(size), np.inf)
        for members in self._quantities(judged, size):
            level[members] = np.maximum(self.signal[members], self.signal[members].mean())
            stuck = members[is_constant[members]]
            level[stuck] = np.maximum(variation[stuck], variation[members].mean())
        with np.errstate(divide="ignore", invalid="ignore"):
            db = 10 * (np.log10(level) - np.log10(self.noise))
            whole_db = 10 * np.log10(self.signal.sum() / self.noise.sum())
        is_hidden = (whole_db >= HIDING_DB) & (db <= whole_db - FAR_DB)
        is_lost = (db < LOST_DB) & (is_constant | is_hidden)
        worst = int(np.argmin(np.where(is_lost, db, np.inf) if is_lost.any() else db))
        if not np.isfinite(db[worst]):  # only what is not judged differs
            return None
        if not is_lost[worst]:
            return (worst, worst + 1, float(db[worst]), False) if len(size) > 1 else None
        start, stop = worst, worst + 1
        while start > 0 and is_lost[start - 1]:
            start -= 1
        while stop < len(size) and is_lost[stop]:
            stop += 1
        return start, stop, float(db[worst]), True

    def _quantities(self, judged: Array, size: Array) -> list[Array]:
        """The slices by quantity, the largest one first."""
        if self.least.min() >= 0 and self.most.max() <= 1:  # probabilities or pixels: one quantity
            return [judged]
        judged = judged[np.argsort(-size[judged], kind="stable")]
        gaps = 1 + np.flatnonzero(size[judged[:-1]] > ANOTHER_SIZE * size[judged[1:]])
        groups = list[Array]()
        for group in np.split(judged, gaps):
            if groups and len(group) < LEAST_SHARE * len(judged):
                groups[-1] = np.concatenate([groups[-1], group])
            else:
                groups.append(group)
        return groups
