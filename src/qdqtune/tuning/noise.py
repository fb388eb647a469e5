"""What rounding does to the outputs, foretold before the search: each tensor alone, and whole placements."""

from __future__ import annotations

import time

from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.graph.model import Model
from qdqtune.measurement.sensitivity import quantization, sensitivities
from qdqtune.search.costs.noise import Noise
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import Record, pack_accuracy, pack_result, unpack_accuracy
from qdqtune.types import Accuracy, Edge, Failure, NumericFormat, Placement

NOTHING = 0.01
"""Share of the noise that a limit allows, below which a block is not worth dividing."""


SHARE = 0.25
"""Of the time that is left, what finding the noise of single tensors may take."""

FINE = 1e-7
"""Relative noise (70 dB) down to which a front tells tensors apart."""


def foresee(run: Run) -> Noise | None:
    """What the search knows about noise before it builds anything; found once, then read from the store. Unless a front
    is asked for, None if nothing limits noise, or if even the placement of all pairs holds the limits.

    Where ONNX Runtime does not run the model with switches, all values count the same, and the builds tell the rest.
    """
    subject, limits = run.subject, run.limits
    is_front = run.settings.front
    if run.budget.is_late or (not limits.are_set and not is_front):
        return None
    if limits.max_drop is None and not is_front:
        run.observer.stage("foretelling what rounding does to the outputs")
        fullest = foretold(run, Placement(subject.possible))
        if fullest is not None and limits.is_exact_enough(fullest):
            return None
    floor = FINE if is_front else NOTHING * limits.max_noise if limits.max_noise is not None else 0.0
    key = f"noise:{floor:.3g}"
    record = run.store.get(key)
    if record is None:
        run.observer.stage("measuring what rounding each tensor does to the outputs")
        values = each_value(subject.shaped, subject.ranges, subject.numbers, subject.possible)
        latest = (
            None if run.bench.deadline is None else time.monotonic() + SHARE * (run.bench.deadline - time.monotonic())
        )
        alone = sensitivities(
            subject.shaped, values, subject.accuracy, floor=floor, listener=run.observer, deadline=latest
        )
        failed: Record = pack_result(alone) if isinstance(alone, Failure) else {}
        if isinstance(alone, Failure):
            alone = dict.fromkeys(sorted({e.tensor for e in subject.possible}), 1.0)
        record = run.store.put(key, {"alone": alone, **failed})

    def brought(placement: Placement) -> float | None:
        accuracy = foretold(run, placement)
        return None if accuracy is None else accuracy.noise

    return Noise(subject.shaped, record["alone"], limits.max_noise, brought)


def foretold(run: Run, placement: Placement) -> Accuracy | None:
    """How far the outputs of a placement will be from the float model's, asked once; None where nothing can be said."""
    key = f"foretold:{placement.digest}"
    record = run.store.get(key)
    if record is None and run.budget.is_late:
        return None
    if record is None:
        accuracy = run.simulation.accuracy(placement)
        record = run.store.put(key, pack_result(accuracy) if isinstance(accuracy, Failure) else pack_accuracy(accuracy))
    return unpack_accuracy(record) if "sqnr_db" in record else None


def each_value(
    model: Model, ranges: Ranges, numbers: NumericFormat, possible: frozenset[Edge]
) -> dict[Edge, Quantization]:
    """A pair on each value, for `sensitivities`: that of the first tensor which holds it."""
    aliases = Noise(model, {}).aliases
    return {e: quantization(model, ranges, numbers, e) for e in possible if e.tensor not in aliases}
