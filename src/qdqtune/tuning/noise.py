"""What rounding does to the outputs, foretold before the search: each tensor alone, and whole placements."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np

from qdqtune.calibration.equalization import scaled
from qdqtune.calibration.rounding import LazyMapping, store
from qdqtune.calibration.scales import Quantization, Ranges
from qdqtune.engines.cpu import cores
from qdqtune.graph.loading import files_of
from qdqtune.graph.model import Model
from qdqtune.numerics.sensitivity import StoredWeight, quantization, sensitivities, stored_weights
from qdqtune.placement.possible import weight_at
from qdqtune.search.costs.noise import Noise
from qdqtune.tuning.observer import SEARCHING
from qdqtune.tuning.records import NoiseRecord, PredictionRecord, WeightNoiseRecord
from qdqtune.tuning.run import Run
from qdqtune.types import Accuracy, Edge, Failure, NumericFormat, Placement, WeightFormat

NOTHING = 0.01
"""Share of the noise that a limit allows, below which a block is not worth dividing."""


SHARE = 0.25
"""Of the time that is left, what finding the noise of single tensors may take."""

LONG = 300.0
"""Seconds that it may take in any case; without a time budget beyond that `SHARE` of what the search's builds take."""

MEMORY = 2**30
"""Bytes of models that are held side by side to find the noise of single tensors, if one alone is not larger."""

SAMPLED = 64
"""Outputs of a weight that tell how much a weight format takes from it."""

TINY = 1e-12

FINE = 1e-7
"""Relative noise (70 dB) down to which a front tells tensors apart."""


def foresee(run: Run) -> Noise | None:
    """`noise_of` a run, for searches that need it at once: None as well if even the placement of all pairs holds the
    limits."""
    noise = noise_of(run)
    return None if noise is None or noise.is_harmless else noise


def noise_of(run: Run) -> Noise | None:
    """What the search knows about noise without building anything. Unless a front is asked for, None if nothing limits
    noise.

    Noise of single tensors takes long to measure on a large model, and what is built first does not ask for it: it is
    found when a search does, and then read from the store. Where ONNX Runtime does not run the model with switches, or
    no time is left, all values count the same, and the builds tell the rest.
    """
    subject, limits = run.subject, run.limits
    loudest = {edge: min(shares, key=lambda s: (s.bytes_per_weight, s.name)) for edge, shares in run.ways.items()}
    is_front = run.settings.front
    if run.budget.is_late or (not limits.are_set and not is_front):
        return None
    floor = FINE if is_front else NOTHING * limits.max_noise if limits.max_noise is not None else 0.0
    share = SHARE / 2 if loudest else SHARE
    tensors = sorted({e.tensor for e in subject.possible})
    stored = [(e.tensor, weight_format.name) for e, shares in run.ways.items() for weight_format in shares]

    def brought(placement: Placement) -> float | None:
        accuracy = foretold(run, placement)
        return None if accuracy is None else accuracy.noise

    def harmless() -> bool:
        if is_front or limits.max_drop is not None or run.budget.is_late:
            return False
        run.observer.stage("foretelling what rounding does to the outputs")
        fullest = (foretold(run, p) for p in (Placement(subject.possible), Placement.of((), loudest.items())) if p)
        holds = all(f is not None and limits.is_exact_enough(f) for f in fullest)
        run.observer.stage(SEARCHING)
        return holds

    def of_values() -> Mapping[str, float]:
        return dict.fromkeys(tensors, 1.0) if run.budget.is_late else _of_values(run, tensors, floor, share)

    def of_weights() -> Mapping[tuple[str, str], float]:
        if run.budget.is_late or not loudest:
            return dict.fromkeys(stored, 1.0)
        return _of_weights(run, loudest, floor, share)

    if is_front:  # whose points are offered by it
        return Noise(subject.shaped, of_values(), limits.max_noise, brought, of_weights())
    alone, of_storages = LazyMapping(tensors, of_values), LazyMapping(stored, of_weights)
    return Noise(subject.shaped, alone, limits.max_noise, brought, of_storages, harmless)


def _side_by_side(run: Run) -> int:
    """How many processes of the model with switches may run on this host: as many as there are workers, on whose cores
    nothing is measured meanwhile, but no more than there are cores, or than `MEMORY` has room for."""
    size = sum(file.stat().st_size for file in files_of(run.settings.model))
    return max(1, min(1 + len(run.others), cores(), MEMORY // max(size, 1)))


def _latest(run: Run, share: float) -> float:
    """When measuring noise has to end that may take a share of the time that is left, or of the time of all builds."""
    deadline, now = run.bench.deadline, time.monotonic()
    if deadline is None:
        return now + max(LONG, share * run.budget.builds * run.bench.trial_seconds)
    return now + share * (deadline - now)


def _of_values(run: Run, tensors: Iterable[str], floor: float, share: float) -> Mapping[str, float]:
    """What rounding each value does to the outputs, measured where no run has."""
    subject, of = run.subject, f"{floor:.3g}"
    record = run.store.get(NoiseRecord, of)
    if record is None:
        model = scaled(subject.shaped, subject.ranges.factors)  # whose values the ranges are of
        values = each_value(model, subject.ranges, subject.numbers, subject.possible)
        alone, failure = _measured(run, "rounding each tensor", model, values, floor, share)
        told = dict.fromkeys(tensors, 1.0) if alone is None else alone
        record = run.store.put(NoiseRecord(of=of, alone=told, failure=failure))
    return record.alone


def _of_weights(
    run: Run, loudest: Mapping[Edge, WeightFormat], floor: float, share: float
) -> Mapping[tuple[str, str], float]:
    """What weights that alone are quantized do to the outputs, by tensor and name of the weight format: measured in the
    one that keeps least, and in the others as much less as the weights themselves lose less."""
    model, of = run.subject.shaped, f"{floor:.3g}"
    record = run.store.get(WeightNoiseRecord, of)
    if record is None:
        weights = stored_weights(model, loudest)
        alone, failure = _measured(run, "storing each weight in fewer bits", model, weights, floor, share)
        shares = {edge: lost(model, edge, weight_format) for edge, weight_format in loudest.items()}
        noise = shares if alone is None else {edge: alone[edge.tensor] for edge in loudest}
        stored = tuple(
            (edge.tensor, weight_format.name, noise[edge] * lost(model, edge, weight_format) / shares[edge])
            for edge, weight_formats in run.ways.items()
            for weight_format in weight_formats
        )
        record = run.store.put(WeightNoiseRecord(of=of, stored=stored, failure=failure))
    return {(tensor, name): noise for tensor, name, noise in record.stored}


def _measured(
    run: Run, what: str, model: Model, pairs: Mapping[Edge, Quantization | StoredWeight], floor: float, share: float
) -> tuple[dict[str, float] | None, Failure | None]:
    """What each of some tensors does to the outputs, within a share of the time that is left; None, and why, where
    ONNX Runtime does not tell."""
    run.observer.stage(f"measuring what {what} does to the outputs")

    def thinned(fewer: int, wanted: int, seconds: float) -> None:
        run.observer.note(
            f"what {what} does to the outputs is measured in {fewer} runs in place of {wanted}, as each takes "
            f"{seconds:.3g} s: tensors that are not told apart share what they do together"
        )

    alone = sensitivities(
        model,
        pairs,
        run.subject.accuracy,
        floor=floor,
        listener=run.observer,
        deadline=_latest(run, share),
        side_by_side=_side_by_side(run),
        budget=run.runner.memory,
        thinned=thinned,
    )
    run.observer.stage(SEARCHING)
    return (None, alone) if isinstance(alone, Failure) else (alone, None)


def lost(model: Model, edge: Edge, weight_format: WeightFormat) -> float:
    """The power of what a weight format takes from a weight over that of the weight, by some of its outputs."""
    weight = weight_at(model, edge)
    assert weight is not None  # only weights have weight formats
    values = np.asarray(weight.array(), np.float32)
    values = values[:, :: max(1, values.shape[1] // SAMPLED)]
    power = float(np.square(values).sum())
    return max(float(np.square(store(values, weight_format).values() - values).sum()) / max(power, TINY), TINY)


def foretold(run: Run, placement: Placement) -> Accuracy | None:
    """How far the outputs of a placement will be from the float model's, asked once; None where nothing can be said."""
    of = placement.digest
    record = run.store.get(PredictionRecord, of)
    if record is None and run.budget.is_late:
        return None
    if record is None:
        found = run.simulation.accuracy(placement)
        record = run.store.put(
            PredictionRecord(of=of, failure=found)
            if isinstance(found, Failure)
            else PredictionRecord(of=of, accuracy=found)
        )
    return record.accuracy


def each_value(
    model: Model, ranges: Ranges, numbers: NumericFormat, possible: frozenset[Edge]
) -> dict[Edge, Quantization]:
    """A pair on each value, for `sensitivities`: that of the first tensor which holds it."""
    aliases = Noise(model, {}).aliases
    return {e: quantization(model, ranges, numbers, e) for e in possible if e.tensor not in aliases}
