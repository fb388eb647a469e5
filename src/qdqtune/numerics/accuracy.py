"""How far a model's outputs are from the float model's, as numbers and as text, for all commands and reports.

The SQNR of a whole output can hide that a part of it is destroyed. Say it holds boxes with values up to 1,000 and
scores up to 1: with one scale for both, all scores become 0, and yet the SQNR is 40 dB. So outputs are also compared
slice by slice: one slice for each index of every axis but the first (the batch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from qdqtune.errors import EngineRefused, Failure
from qdqtune.numerics.scores import Scores, agrees, independent, scores_of
from qdqtune.types import Accuracy, Array

FLOOR_DB = 20.0
"""Output SQNR in dB below which a model is not to be trusted: an error of a tenth of the signal. Quantized classifiers
above 25 dB lose no top-1 accuracy on average; from 20 to 25 dB 0.2 points (at most 0.7), from 15 to 20 dB 0.9 (2.5);
below that all lose more (benchmarks/labels.py). The default of `min_sqnr`, and the level for warnings."""

APART_DB = 10.0
"""How far the SQNR of a single sample may be below that of all together, in dB. Chosen, not measured."""

MOST_EQUAL = 0.98
"""The least share of best classes, and of integers in outputs, that must be as in float. Of 212 quantized classifiers
above it, none surely lost more than 0.3 points of top-1 accuracy, and none on average; at 95 to 98 % the mean loss was
0.5. A limit of 0.99 would refuse half of the files with almost no loss (benchmarks/labels.py)."""

NOT_FINITE = Failure("output", "the outputs hold NaN or infinite values")

Outputs = Sequence[Mapping[str, Array]]


def concern(accuracy: Accuracy) -> str | None:
    """A warning in one line if outputs are not to be trusted; else None."""
    return "; ".join(filter(None, (of_other_shapes(accuracy), _doubt(accuracy)))) or None


def _doubt(accuracy: Accuracy) -> str | None:
    if (part := loss_of_slice(accuracy)) is not None:
        return part
    lost = accuracy.sqnr_db
    if lost is not None and lost < FLOOR_DB:
        measured = f"the output SQNR is {lost:.1f} dB, an error of {10 ** (-lost / 20):.0%} of the outputs"
        return f"{measured}: below {FLOOR_DB:g} dB a model is usually worse than in float"
    if accuracy.agreement is not None and accuracy.agreement < MOST_EQUAL:
        return f"only {accuracy.agreement:.1%} of the integers in the outputs are those of the float model"
    lowest = accuracy.lowest_db
    if lost is not None and lowest is not None and lowest < min(FLOOR_DB / 2, lost - APART_DB):
        of_all = f"one of {accuracy.samples} samples has an output SQNR of {lowest:.1f} dB, where all together have "
        return f"{of_all}{lost:.1f} dB: look whether it matters there"
    if not agrees(accuracy, MOST_EQUAL):
        return f"only {accuracy.top1:.1%} of the {accuracy.choices:,} best classes are those of the float model"
    return None


def is_finite(outputs: Outputs) -> bool:
    return all(np.isfinite(a).all() for sample in outputs for a in sample.values() if a.dtype.kind == "f")


def check_finite(outputs: Outputs) -> None:
    """Raise EngineRefused with `NOT_FINITE` if outputs hold NaN or infinite values."""
    if not is_finite(outputs):
        raise EngineRefused(NOT_FINITE)


def accuracy(reference: Outputs, outputs: Outputs, scores: Scores | None = None) -> Accuracy:
    """The accuracy of outputs, compared sample by sample with `reference`, those of the float model. If `outputs` has
    fewer samples, only these count, and `at_most_db` is the most that all samples can reach. `scores` says which
    outputs hold scores of classes; None: their values decide.

    The SQNR of an output is 10 log10(sum(reference^2) / sum((reference - output)^2)) over all samples. One that holds
    quantities of different sizes (`_quantities`) counts as several. The result is that of the worst output, with its
    least and largest SQNR of a single sample, and the worst slice of all outputs.
    Where shapes depend on values and differ (numbers of boxes, say), no value of that sample counts as right.
    """
    scores = scores or scores_of(reference)
    count = len(outputs)
    if 0 < count < len(reference):
        first = accuracy(reference[:count], outputs, scores.first(count))
        return replace(first, at_most_db=sqnr_db(reference, [*outputs, *reference[count:]]))
    floats, agreements = _paired(reference, outputs), []
    for name in reference[0].keys() - floats.keys():
        arrays = [(exact[name], other[name]) for exact, other in zip(reference, outputs, strict=True)]
        total = sum(max(exact.size, other.size) for exact, other in arrays)
        equal = sum(int((exact == other).sum()) for exact, other in arrays if exact.shape == other.shape)
        share = equal / total if total else 1.0
        if share < 1 or name not in scores.copies:  # equal copies of inputs prove nothing
            agreements.append(share)
    powers, part = _powers(floats), worst_slice(floats)
    worst = min(powers.values(), key=_sqnr, default=None)
    single: list[float] = []
    if worst is not None:
        # Outputs that are smaller than those of the other samples, as of silence, count as large as these are on
        # average: against nearly nothing every error is large.
        signal, noise = worst
        signal = np.maximum(signal, signal.mean())
        single = [_db(s, n) for s, n in zip(signal.tolist(), noise.tolist(), strict=True) if n > 0]
    top1, choices, alike = _choices(outputs, scores)
    by_output: dict[str, float | None] = {name + part: _sqnr(own) for (name, part), own in powers.items()}
    by_output |= {name: None for name in floats if all(name != differing for differing, _ in powers)}
    return Accuracy(
        None if worst is None else _sqnr(worst),
        min(single, default=None),
        max(single) if single and len(single) == len(reference) else None,
        min(agreements, default=None),
        top1,
        len(reference),
        choices,
        alike,
        slice_name=None if part is None else part.name,
        slice_db=None if part is None else part.db,
        slice_is_lost=part is not None and part.is_lost,
        by_output=by_output if len(by_output) > 1 else {},
        other_shapes=count_of_other_shapes(reference, outputs),
    )


def count_of_other_shapes(reference: Outputs, outputs: Outputs) -> int:
    """The number of samples of which some output has another shape than in `reference`."""
    samples = zip(reference, outputs, strict=True)
    return sum(any(exact[name].shape != other[name].shape for name in exact) for exact, other in samples)


def of_other_shapes(accuracy: Accuracy) -> str:
    """For example: 3 of 20 samples gave outputs of another shape, which count as wrong; empty if none did."""
    if not accuracy.other_shapes:
        return ""
    return f"{accuracy.other_shapes} of {accuracy.samples} samples gave outputs of another shape, which count as wrong"


def noisiest(reference: Outputs, outputs: Outputs, count: int) -> list[int]:
    """Indices of the `count` samples with the largest errors in the worst output, ascending."""
    worst = min(_powers(_paired(reference, outputs)).values(), key=_sqnr, default=None)
    noise = np.zeros(len(reference)) if worst is None else worst[1]
    return sorted(np.argsort(-noise, kind="stable")[:count].tolist())


def sqnr_db(reference: Outputs, outputs: Outputs) -> float | None:
    """The SQNR in dB of the worst output (see `accuracy`); None if no float output differs."""
    return min(map(_sqnr, _powers(_paired(reference, outputs)).values()), default=None)


Pairs = Sequence[tuple[Array, Array]]
"""One output, as the float model and as another model gives it for each sample."""


def _paired(reference: Outputs, outputs: Outputs) -> dict[str, Pairs]:
    """The arrays of each float output."""
    names = [name for name, exact in reference[0].items() if exact.dtype.kind == "f"]
    samples = list(zip(reference, outputs, strict=True))
    return {name: [(exact[name], other[name]) for exact, other in samples] for name in names}


def _powers(pairs: Mapping[str, Pairs]) -> dict[tuple[str, str], Array]:
    """Signal and noise power of each sample, [2, samples], by name of each float output that differs, and by words for
    each of its quantities (see `_quantities`), "" for a single one."""
    powers = dict[tuple[str, str], Array]()
    for name, arrays in pairs.items():
        axis, quantities = _quantities(arrays)
        for words, members in quantities.items():
            parts = arrays if not words else [(a.take(members, axis), b.take(members, axis)) for a, b in arrays]
            powers[name, words] = np.array([(power(exact), power(exact, other)) for exact, other in parts]).T
    return {key: each for key, each in powers.items() if each[1].sum() > 0}


def _quantities(arrays: Pairs) -> tuple[int, Mapping[str, Array]]:
    """The axis along which an output holds quantities of different sizes, as boxes in pixels and scores up to 1, and
    the indices of each, by words for them. Axis 0 and one quantity, "", where there is but one."""
    floats = [exact for exact, _ in arrays]
    are_probabilities = all(exact.min(initial=0.0) >= 0 and exact.max(initial=0.0) <= 1 for exact in floats)
    for axis in () if are_probabilities else _axes(arrays):
        length, others = floats[0].shape[axis], tuple(i for i in range(floats[0].ndim) if i != axis)
        count = sum(exact.size for exact in floats) // length
        size = np.sqrt(sum(np.square(exact, dtype=np.float64).sum(others) for exact in floats) / max(1, count))
        groups = _by_size(np.flatnonzero(size > RESOLVED * size.max()), size)
        if count >= LEAST_VALUES and len(groups) > 1:
            larger = np.sort(groups[0])
            return axis, {
                ", larger values": larger,
                ", smaller values": np.setdiff1d(np.arange(length), larger),
            }
    return 0, {"": np.arange(1)}


def _axes(arrays: Pairs) -> list[int]:
    """The axes of an output, but the first, that have the same moderate length in all samples."""
    shapes = [array.shape for array in chain.from_iterable(arrays)]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return []
    lengths = [{shape[axis] for shape in shapes} for axis in range(len(shapes[0]))]
    return [
        axis for axis in range(1, len(lengths)) if len(lengths[axis]) == 1 and 1 <= max(lengths[axis]) <= MOST_SLICES
    ]


def _sqnr(powers: Array) -> float:
    return _db(powers[0].sum(), powers[1].sum())


def power(values: Array, others: Array | None = None) -> float:
    """The sum of squares, or of squared differences, in float64. Of arrays of unlike shapes all values are errors."""
    if others is not None and others.shape != values.shape:
        return power(values) + power(others)
    exact = values.astype(np.float64) if others is None else np.subtract(values, others, dtype=np.float64)
    return float(np.square(exact).sum())


def _db(signal: float, noise: float) -> float:
    """`signal` / `noise` in dB; finite even without signal or with infinite noise."""
    least = np.finfo(np.float64).tiny
    return float(10 * np.log10(max(signal / noise, least)))


def _choices(outputs: Outputs, scores: Scores) -> tuple[float | None, int, float | None]:
    """For the output whose best classes most surely fall short of `MOST_EQUAL`: the share that agrees, the number of
    positions, and how many independent ones tell as much (None: all). Where the shape differs, none agrees."""
    shares = list[tuple[float, int, float]]()
    for name, axis in scores.axis.items():
        best = scores.best[name]
        told = [scores.chosen(name, sample[name]) for sample in outputs]
        equal = [
            (a == b).ravel() if a.shape == b.shape else np.zeros(max(a.size, b.size), bool)
            for a, b in zip(best, told, strict=True)
        ]
        same = np.concatenate(equal)
        if same.size:
            are_rows = axis == 1 and best[0].size == len(best[0])  # [rows, classes]: each for itself
            alike = independent(np.array([e.sum() for e in equal]), np.array([e.size for e in equal]))
            shares.append((float(same.mean()), same.size, same.size if are_rows else alike))
    share, count, alike = min(shares, key=lambda one: (one[0] - MOST_EQUAL) * one[2] ** 0.5, default=(None, 0, 0))
    return share, count, None if alike == count else alike


def decibels(sqnr_db: float | None) -> str:
    return "exact" if sqnr_db is None else f"{sqnr_db:.1f} dB"


def integers_differ(sqnr_db: float | None, equal: float | None) -> bool:
    """Whether only integer outputs differ (`equal` is the share of equal ones), so that there is no SQNR."""
    return sqnr_db is None and equal is not None and equal < 1


def closeness(sqnr_db: float | None, equal: float | None) -> str:
    """How close outputs are, as text: in dB; or the share of `equal` integers, where only integer outputs differ."""
    return f"{equal:.1%} of the integers equal" if integers_differ(sqnr_db, equal) else decibels(sqnr_db)


def closeness_cell(sqnr_db: float | None, equal: float | None) -> str:
    """An SQNR for a table column in dB, without the unit; empty where only integer outputs differ."""
    return "" if integers_differ(sqnr_db, equal) else decibels(sqnr_db).removesuffix(" dB")


def slice_cell(accuracy: Accuracy | None) -> str:
    """The worst slice of an output, for example: boxes[:, :, 3] 17.5 dB; empty without one."""
    if accuracy is None or accuracy.slice_name is None:
        return ""
    return f"{accuracy.slice_name} {decibels(accuracy.slice_db)}{' (lost)' if accuracy.slice_is_lost else ''}"


def closeness_of(accuracy: Accuracy) -> str:
    """Every measure in one line, such as 24.1 dB (18.3 to 31.0 over 16 samples), 99.0% of the best classes equal."""
    shares = (accuracy.agreement, "integers"), (accuracy.top1, "best classes")
    parts = [f"{share:.1%} of the {what} equal" for share, what in shares if share is not None]
    parts += [text for text in [of_other_shapes(accuracy)] if text]
    if integers_differ(accuracy.sqnr_db, accuracy.agreement):
        return ", ".join(parts)
    spread = spread_of(accuracy)
    return ", ".join([f"{decibels(accuracy.sqnr_db)}{spread and f' ({spread})'}", *parts])


def spread_of(accuracy: Accuracy) -> str:
    """The SQNR of single samples, such as: 18.3 to 31.0 over 16 samples; empty for one sample or equal outputs."""
    if accuracy.samples < 2 or accuracy.sqnr_db is None:
        return ""
    most = "equal" if accuracy.highest_db is None else f"{accuracy.highest_db:.1f}"
    return f"{accuracy.lowest_db:.1f} to {most} over {accuracy.samples} samples"


# The limits below are chosen, not measured, unless they say so.

LOST_DB = 6.0
"""A slice counts as destroyed below this SQNR (an error of half its values), if the whole output has `HIDING_DB` or
more."""

HIDING_DB, FAR_DB = 20.0, 16.0
"""The SQNR from which an output looks healthy as a whole, and how far below it a destroyed slice is. In healthy files
of nine trained models for four engines, the worst slice was at most 13.6 dB below the whole."""

MOST_SLICES = 4096
"""Axes with more indices than this are positions, not parts, and are not compared slice by slice."""

LEAST_VALUES = 16
"""Slices with fewer values in all samples together are not judged."""

RESOLVED = 1e-6
"""Slices whose values are smaller than this share of the largest are float rounding errors, as of unused channels."""

VARIES = 1e-5
"""Values vary if their standard deviation is more than this share of their size."""

ANOTHER_SIZE = 30.0
"""A gap by this factor between slices ordered by size separates quantities, such as pixels and scores. One scale in 8
bits destroys only what is about 100 times smaller. The largest gap seen within one output of a trained model is 27,
between two states of a healthy file."""

LEAST_SHARE = 1 / 16
"""Slices of smaller size are a quantity of their own if they are at least this share of all; fewer are channels that
are hardly used. In a box with ten coordinates of landmarks and a score, the score is one of 15."""

NEVER = 0.01
"""The class of a probability that never exceeds this is not in the samples."""


class Slice(NamedTuple):
    """A slice of an output (or several neighbouring ones that are all destroyed), and their least SQNR in dB."""

    name: str
    db: float
    is_lost: bool


def worst_slice(pairs: Mapping[str, Pairs]) -> Slice | None:
    """The slice with the least SQNR in all outputs, a destroyed one before all others; None if no slice tells more than
    the whole. `pairs` has the values in the float model and in the other one, sample by sample.

    A slice whose values are smaller than usual for its quantity is treated as if they had the usual size, since
    compared with values near zero every error is large. Of a constant slice, only variation counts as signal.
    """
    slices = list[Slice]()
    for name, all_arrays in pairs.items():
        arrays = [(exact, actual) for exact, actual in all_arrays if exact.shape == actual.shape]
        axes = _axes(arrays) if arrays else []
        sums: dict[int, list[tuple[Array, Array]]] = {axis: [] for axis in axes}
        for exact, actual in arrays:
            wide = exact.astype(np.float64)
            error = wide - actual
            for axis in axes if exact.size else ():
                sums[axis].append(
                    _sums(*(a.reshape(prod(a.shape[:axis]), a.shape[axis], -1) for a in (exact, actual, wide, error)))
                )
        total = sum(exact.size for exact, _ in arrays)
        for axis, own in sums.items():
            span = _worst_slices(own, total // arrays[0][0].shape[axis])
            if span is not None:
                start, stop, db, is_lost = span
                index = [":"] * arrays[0][0].ndim
                index[axis] = str(start) if stop == start + 1 else f"{start}:{stop}"
                slices.append(Slice(f"{name}[{', '.join(index)}]", db, is_lost))
    return min(slices, key=lambda part: (not part.is_lost, part.db), default=None)


def loss_of_slice(accuracy: Accuracy) -> str | None:
    """A warning in one line about a destroyed part of an output; None if there is none."""
    if not accuracy.slice_is_lost or accuracy.slice_db is None or accuracy.sqnr_db is None:
        return None
    hidden = f", hidden in an output SQNR of {accuracy.sqnr_db:.1f} dB" if accuracy.sqnr_db >= HIDING_DB else ""
    return f"{accuracy.slice_name} lost its values: {accuracy.slice_db:.1f} dB{hidden}"


def _sums(exact: Array, actual: Array, wide: Array, error: Array) -> tuple[Array, Array]:
    """Statistics of each slice [before, slices, behind] of one sample. First array: signal, noise and sum; second: the
    least and the negated largest value, in the float model and then in the other one."""
    squares = (np.einsum("ijk,ijk->j", values, values) for values in (wide, error))
    ends = exact.min((0, 2)), -exact.max((0, 2)), actual.min((0, 2)), -actual.max((0, 2))
    return np.array([*squares, wide.sum((0, 2))]), np.array(ends)


def _worst_slices(sums: Sequence[tuple[Array, Array]], count: int) -> tuple[int, int, float, bool] | None:
    """Start and stop of the worst slices along an axis, their least SQNR in dB, and whether they are destroyed; from
    the `_sums` of all samples, in which a slice has `count` values."""
    if count < LEAST_VALUES:
        return None
    powers: Array = sum((powers for powers, _ in sums), np.zeros(1))
    signal, noise, total = powers
    if not noise.any():
        return None
    least, negative_most, low, negative_high = np.min([ends for _, ends in sums], axis=0)
    size = np.sqrt(signal / count)
    judged = np.flatnonzero((size > RESOLVED * size.max()) & ~((least >= 0) & (-negative_most <= NEVER)))
    if not judged.size:
        return None
    variation = np.asarray(np.maximum(signal - np.square(total) / count, 0))
    is_constant = (low == -negative_high) & (variation > VARIES**2 * signal)
    level = np.full(len(size), np.inf)
    are_alike = least.min() >= 0 and negative_most.min() >= -1  # probabilities or pixels
    for members in [judged] if are_alike else _by_size(judged, size):
        level[members] = np.maximum(signal[members], signal[members].mean())
        stuck = members[is_constant[members]]
        level[stuck] = np.maximum(variation[stuck], variation[members].mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        db = 10 * (np.log10(level) - np.log10(noise))
        whole_db = 10 * np.log10(signal.sum() / noise.sum())
    is_hidden = (whole_db >= HIDING_DB) & (db <= whole_db - FAR_DB)
    is_lost = (db < LOST_DB) & (is_constant | is_hidden)
    worst = int(np.argmin(np.where(is_lost, db, np.inf) if is_lost.any() else db))
    if not np.isfinite(db[worst]):  # only what is not judged differs
        return None
    if not is_lost[worst]:
        return (worst, worst + 1, float(db[worst]), False) if len(size) > 1 else None
    others = np.flatnonzero(~is_lost)
    start, stop = others[others < worst].max(initial=-1) + 1, others[others > worst].min(initial=len(size))
    return int(start), int(stop), float(db[worst]), True


def _by_size(slices: Array, size: Array) -> list[Array]:
    """The indices of slices in groups of similar size (pixels, scores ...), that of the largest values first."""
    slices = slices[np.argsort(-size[slices], kind="stable")]
    gaps = 1 + np.flatnonzero(size[slices[:-1]] > ANOTHER_SIZE * size[slices[1:]])
    groups = list[Array]()
    for group in np.split(slices, gaps):
        if groups and len(group) < LEAST_SHARE * len(slices):
            groups[-1] = np.concatenate([groups[-1], group])
        else:
            groups.append(group)
    return groups
