"""What rounding does to the outputs, foretold before the search: each tensor alone, and whole placements."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from qdqtune.calibration.blocks import store
from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.engines.cpu import cores
from qdqtune.graph.equalization import scaled
from qdqtune.graph.loading import files_of
from qdqtune.graph.model import Model
from qdqtune.measurement.sensitivity import quantization, sensitivities, stored_weight
from qdqtune.placement.possible import weight_at
from qdqtune.search.costs.noise import Noise
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import Record, pack_accuracy, pack_result, unpack_accuracy
from qdqtune.types import Accuracy, Edge, Failure, NumericFormat, Placement, Storage

NOTHING = 0.01
"""Share of the noise that a limit allows, below which a block is not worth dividing."""


SHARE = 0.25
"""Of the time that is left, what finding the noise of single tensors may take."""

MEMORY = 2**30
"""Bytes of models that are held side by side to find the noise of single tensors, if one alone is not larger."""

SAMPLED = 64
"""Outputs of a weight that tell how much a storage takes from it."""

TINY = 1e-12

FINE = 1e-7
"""Relative noise (70 dB) down to which a front tells tensors apart."""


def foresee(run: Run) -> Noise | None:
    """What the search knows about noise before it builds anything; found once, then read from the store. Unless a front
    is asked for, None if nothing limits noise, or if even the placement of all pairs holds the limits.

    Where ONNX Runtime does not run the model with switches, all values count the same, and the builds tell the rest.
    """
    subject, limits, loudest = run.subject, run.limits, _loudest(run)
    is_front = run.settings.front
    if run.budget.is_late or (not limits.are_set and not is_front):
        return None
    if limits.max_drop is None and not is_front:
        run.observer.stage("foretelling what rounding does to the outputs")
        fullest = [foretold(run, p) for p in (Placement(subject.possible), Placement.of((), loudest.items())) if p]
        if all(f is not None and limits.is_exact_enough(f) for f in fullest):
            return None
    floor = FINE if is_front else NOTHING * limits.max_noise if limits.max_noise is not None else 0.0
    key = f"noise:{floor:.3g}"
    record = run.store.get(key)
    if record is None:
        run.observer.stage("measuring what rounding each tensor does to the outputs")
        model = scaled(subject.shaped, subject.ranges.factors)  # whose values the ranges are of
        values = each_value(model, subject.ranges, subject.numbers, subject.possible)
        share = SHARE / 2 if loudest else SHARE
        alone = sensitivities(
            model,
            values,
            subject.accuracy,
            floor=floor,
            listener=run.observer,
            deadline=_latest(run, share),
            side_by_side=_side_by_side(run),
        )
        failed: Record = pack_result(alone) if isinstance(alone, Failure) else {}
        if isinstance(alone, Failure):
            alone = dict.fromkeys(sorted({e.tensor for e in subject.possible}), 1.0)
        record = run.store.put(key, {"alone": alone, **failed})

    def brought(placement: Placement) -> float | None:
        accuracy = foretold(run, placement)
        return None if accuracy is None else accuracy.noise

    return Noise(subject.shaped, record["alone"], limits.max_noise, brought, _of_weights(run, loudest, floor))


def _side_by_side(run: Run) -> int:
    """How many processes of the model with switches may run on this host: as many as there are workers, on whose cores
    nothing is measured meanwhile, but no more than there are cores, or than `MEMORY` has room for."""
    size = sum(file.stat().st_size for file in files_of(run.settings.model))
    return max(1, min(1 + len(run.others), cores(), MEMORY // max(size, 1)))


def _latest(run: Run, share: float) -> float | None:
    """When measuring noise has to end that may take a share of the time that is left; None without a time budget."""
    deadline, now = run.bench.deadline, time.monotonic()
    return None if deadline is None else now + share * (deadline - now)


def _loudest(run: Run) -> dict[Edge, Storage]:
    """The storage of each weight that keeps least of it."""
    return {edge: min(shares, key=lambda s: (s.bytes_per_weight, s.name)) for edge, shares in run.ways.items()}


def _of_weights(run: Run, loudest: Mapping[Edge, Storage], floor: float) -> dict[tuple[str, str], float]:
    """What weights that alone are quantized do to the outputs, by tensor and name of the storage: measured in the one
    that keeps least, and in the others as much less as the weights themselves lose less."""
    model, key = run.subject.shaped, f"noise of weights:{floor:.3g}"
    if not loudest:
        return {}
    record = run.store.get(key)
    if record is None:
        run.observer.stage("measuring what storing each weight in fewer bits does to the outputs")
        weights = {edge: stored_weight(model, edge, storage) for edge, storage in loudest.items()}
        latest = _latest(run, SHARE / 2)
        alone = sensitivities(
            model,
            weights,
            run.subject.accuracy,
            floor=floor,
            listener=run.observer,
            deadline=latest,
            side_by_side=_side_by_side(run),
        )
        failed: Record = pack_result(alone) if isinstance(alone, Failure) else {}
        if isinstance(alone, Failure):
            alone = {edge.tensor: lost(model, edge, storage) for edge, storage in loudest.items()}
        stored = [
            [
                edge.tensor,
                storage.name,
                alone[edge.tensor] * lost(model, edge, storage) / lost(model, edge, loudest[edge]),
            ]
            for edge, shares in run.ways.items()
            for storage in shares
        ]
        record = run.store.put(key, {"stored": stored, **failed})
    return {(tensor, name): noise for tensor, name, noise in record["stored"]}


def lost(model: Model, edge: Edge, storage: Storage) -> float:
    """The power of what a storage takes from a weight over that of the weight, by some of its outputs."""
    weight = weight_at(model, edge)
    assert weight is not None  # only weights have storages
    values = np.asarray(weight.array(), np.float32)
    values = values[:, :: max(1, values.shape[1] // SAMPLED)]
    power = float(np.square(values).sum())
    return max(float(np.square(store(values, storage).values() - values).sum()) / max(power, TINY), TINY)


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
