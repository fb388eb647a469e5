"""How far a model's outputs are from the float model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qdqtune.types import Array

Outputs = Sequence[Mapping[str, Array]]


def is_finite(outputs: Outputs) -> bool:
    """Whether no float output holds a NaN or an infinite value."""
    return all(np.isfinite(a).all() for sample in outputs for a in sample.values() if a.dtype.kind == "f")


def sqnr_db(reference: Outputs, outputs: Outputs) -> float | None:
    """Signal to quantization noise ratio of the worst float output, in dB, over all samples.

    10 log10(sum(reference^2) / sum((reference - output)^2)). None if the outputs are equal, or none is float.
    """
    ratios = []
    for name in reference[0]:
        signal = noise = 0.0
        for expected, found in zip(reference, outputs, strict=True):
            if expected[name].dtype.kind == "f":
                exact = expected[name].astype(np.float64)
                signal += float(np.square(exact).sum())
                noise += float(np.square(exact - found[name].astype(np.float64)).sum())
        if noise > 0:
            ratios.append(10 * np.log10(max(signal, np.finfo(np.float64).tiny) / noise))
    return float(min(ratios)) if ratios else None


def cosine(reference: Outputs, outputs: Outputs) -> float | None:
    """Cosine of the angle between the outputs and the reference, for the worst float output, over all samples.

    sum(reference * output) / sqrt(sum(reference^2) sum(output^2)). None if no output is float, or one is all zeros.
    """
    found = []
    for name in reference[0]:
        product = first = second = 0.0
        for expected, given in zip(reference, outputs, strict=True):
            if expected[name].dtype.kind == "f":
                a, b = expected[name].astype(np.float64), given[name].astype(np.float64)
                product += float((a * b).sum())
                first += float(np.square(a).sum())
                second += float(np.square(b).sum())
        if first > 0 and second > 0:
            found.append(product / np.sqrt(first * second))
    return float(min(found)) if found else None
