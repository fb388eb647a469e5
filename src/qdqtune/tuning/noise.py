"""What rounding each tensor alone does to the outputs, found before the search."""

from __future__ import annotations

from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.graph.model import Model
from qdqtune.measurement.sensitivity import quantization, sensitivities
from qdqtune.search.costs.noise import Noise
from qdqtune.tuning.run import Run
from qdqtune.types import Edge, Failure, NumericFormat

NOTHING = 0.01
"""Share of the noise that a limit allows, below which a block is not worth dividing."""


def foresee(run: Run) -> Noise | None:
    """What the search knows about noise before it builds anything; found once, then read from the store. None if
    nothing limits noise.

    Where ONNX Runtime does not run the model with switches, all values count the same, and the builds tell the rest.
    """
    subject, limits = run.subject, run.limits
    if not limits.are_set:
        return None
    floor = NOTHING * limits.max_noise if limits.max_noise is not None else 0.0
    key = f"noise:{floor:.3g}"
    record = run.store.get(key)
    if record is None:
        run.observer.stage("measuring what rounding each tensor does to the outputs")
        values = each_value(subject.shaped, subject.ranges, subject.numbers, subject.possible)
        alone = sensitivities(subject.shaped, values, subject.accuracy, floor=floor)
        if isinstance(alone, Failure):
            alone = dict.fromkeys(sorted({e.tensor for e in subject.possible}), 1.0)
        record = run.store.put(key, {"alone": alone})
    return Noise(subject.shaped, record["alone"], limits.max_noise)


def each_value(
    model: Model, ranges: Ranges, numbers: NumericFormat, possible: frozenset[Edge]
) -> dict[Edge, Quantization]:
    """A pair on each value, for `sensitivities`: that of the first tensor which holds it."""
    aliases = Noise(model, {}).aliases
    return {e: quantization(model, ranges, numbers, e) for e in possible if e.tensor not in aliases}
