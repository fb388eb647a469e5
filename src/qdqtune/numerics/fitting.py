"""Ranges and biases of a placement that keep its outputs close to the float model's.

They are decided before anything is timed, so that what a search measures is what ships; no pair moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, takewhile
from typing import Any

from qdqtune.calibration.calibrate import calibrate, calibrate_by_every_method, tensors_with_pairs, unknown_ranges
from qdqtune.calibration.equalization import Factor, scaled, sites
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import AUTO, Calibration, Range, Ranges
from qdqtune.engines.reused_workers import reused_workers
from qdqtune.graph.model import Model
from qdqtune.graph.operators import work
from qdqtune.numerics.adjustable import (
    BETTER_DB,
    AdjustablePlacement,
    NotRunnableError,
    OutputNoise,
    adjustable_placement,
    together,
)
from qdqtune.numerics.equalizing import EQUALIZING_RUNS, EQUALIZING_SAMPLES, paying_factors
from qdqtune.numerics.sessions import InferenceCount
from qdqtune.system.listener import Deaf, Listener
from qdqtune.types import NumericFormat, Placement

JUDGING_SAMPLES = 64
"""Samples of calibration that ranges are judged by, if `WORK` allows so many; `LEAST_SAMPLES` in any case."""

LEAST_SAMPLES = 4

MIXING_SAMPLES = 16
"""How many of the judging samples decide about each step towards a mixture of methods: there are many steps."""

FIRST_SAMPLES = 2
"""How many of these are run first: most steps gain nothing. Chosen, not measured."""

MOST_BLOCKS = 12
"""The most blocks of tensors that get ranges of different methods: each costs a run for each other method. With 24 the
outputs of four of nine networks were worse, by 0.1 to 1.4 dB, and those of one better, by 0.3."""

WORK = 6e11
"""Multiplications that all runs together may take: ten to thirty seconds on two cores."""

OVERHEAD = 1e6
"""Multiplications in the time that an operator with a pair takes to start and to round."""


def fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    is_late: Callable[[], bool] = lambda: False,
    listener: Listener | None = None,
    *,
    only_placed: bool = False,
) -> Ranges:
    """Ranges by `how`, with factors of channels and corrected biases where these bring the outputs closer to the float
    model's.

    `placed` gives the placement for ranges; a placement of fewer pairs uses the same ranges. With `only_placed` no
    other tensors need have ranges, which saves time. Nothing further is tried once it `is_late`. The `listener` is told
    stages and progress.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    factors, listener = tuple[Factor, ...](), listener or Deaf()
    with reused_workers(prepared.execution) as execution:
        prepared = replace(prepared, execution=execution)
        if how.equalization and sites(prepared.shaped):
            listener.stage("trying to make channels alike")
            most = _Budget(prepared.shaped, 1, how.bias_correction).halves
            factors = paying_factors(prepared, numbers, placed, most, is_late, listener)
            prepared = replace(prepared, shaped=scaled(prepared.shaped, factors))
        model = prepared.shaped
        tensors = tensors_with_pairs(model, placed(unknown_ranges(model))) if only_placed else None
        return replace(_fitted(prepared, how, numbers, placed, tensors, is_late, listener), factors=factors)


def with_wide(prepared: Prepared, found: Ranges, numbers: NumericFormat) -> Ranges:
    """The ranges with those of activations in 16 bits, where an engine has them: all values that samples show."""
    if numbers.wide is None:
        return found
    model = scaled(prepared.shaped, found.factors)
    whole = calibrate(model, prepared.calibration, Calibration("minmax"), execution=prepared.execution)
    return replace(found, wide=whole.activations)


def _fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    tensors: Sequence[str] | None,
    is_late: Callable[[], bool],
    listener: Listener,
) -> Ranges:
    """`fitted` without factors, with ranges of these `tensors` (None: of all)."""
    model = prepared.shaped
    listener.stage(f"calibrating on {prepared.samples.origin}")
    by_method = partial(calibrate_by_every_method, model, prepared.calibration, how, numbers=numbers)
    found = by_method(tensors=tensors, execution=prepared.execution)
    if tensors and not all(
        tensor in found[0].activations for tensor in tensors
    ):  # rules may place others in their stead
        found = by_method(execution=prepared.execution)
    seen = next((ranges for ranges in found if ranges.method == "minmax"), None)
    candidates = [with_known_ranges(model, ranges, numbers, seen or ranges) for ranges in found]
    placement = placed(candidates[0])
    if not placement.edges or (len(candidates) == 1 and not how.bias_correction) or is_late():
        return candidates[0]
    budget = _Budget(model, len(candidates), how.bias_correction)
    samples = prepared.calibration.spread(budget.samples)
    listener.stage("comparing ways to calibrate")
    blocks = _blocks(model, placement, budget.blocks(len(samples)))
    ran = InferenceCount(listener, budget.comparing(len(samples), len(blocks))).add
    try:
        run = samples, ran, prepared.execution
        with adjustable_placement(model, placement, numbers, candidates[0], *run) as adjustable:
            return _best(adjustable, candidates, blocks, how.bias_correction, is_late)
    except NotRunnableError:
        return candidates[0]


def corrected_for(prepared: Prepared, numbers: NumericFormat, ranges: Ranges, placement: Placement) -> Ranges:
    """`ranges` that were fitted with other numbers, with biases corrected for these; the same where no bias was
    corrected, or ONNX Runtime cannot run the model."""
    if not ranges.shifts:
        return ranges
    model, plain = scaled(prepared.shaped, ranges.factors), replace(ranges, shifts={})
    samples = prepared.calibration.spread(_Budget(model, 1, True).samples)
    how: dict[str, Any] = {"samples": samples, "execution": prepared.execution}
    try:
        with adjustable_placement(model, placement, numbers, plain, **how) as adjustable:
            return _corrected(adjustable, plain).ranges
    except NotRunnableError:
        return ranges


def inferences(model: Model, how: Calibration, samples: int) -> int:
    """About how many inferences of the model with its pairs `fitted` takes, beside calibration on that many
    samples."""
    methods = len(AUTO) if how.method == "auto" else 1
    budget = _Budget(model, methods, how.bias_correction)
    halves = EQUALIZING_RUNS * min(samples, budget.halves) if how.equalization and sites(model) else 0
    if methods == 1 and not how.bias_correction:
        return halves
    return halves + budget.comparing(max(1, min(samples, budget.samples)))


@dataclass(frozen=True)
class _Budget:
    """How many runs `WORK` allows: half of it is for single methods, the rest for mixtures of them."""

    model: Model
    methods: int
    bias_correction: bool

    @property
    def _inferences(self) -> float:
        return WORK / sum(work(self.model, node) + OVERHEAD for node in self.model.nodes)

    @property
    def runs(self) -> int:
        """Inferences for each sample: float model, methods, their mixture, and two more for each of them with
        biases."""
        return 2 + self.methods + 2 * (self.methods + 1) * self.bias_correction

    @property
    def samples(self) -> int:
        """How many samples judge the methods."""
        return min(max(int(self._inferences / (2 * self.runs)), LEAST_SAMPLES), JUDGING_SAMPLES)

    def comparing(self, samples: int, blocks: int | None = None) -> int:
        """About how many inferences compare ways to calibrate on so many samples, in so many blocks."""
        count = self.blocks(samples) if blocks is None else blocks
        methods = self.methods + (1 if count else 0)
        single = 1 + methods + 2 * methods * self.bias_correction
        return samples * single + (count * self.methods * _step(min(samples, MIXING_SAMPLES)) if count else 0)

    @property
    def halves(self) -> int:
        """How many samples judge the factors of channels."""
        return min(max(int(self._inferences / (4 * EQUALIZING_RUNS)), LEAST_SAMPLES), EQUALIZING_SAMPLES)

    def blocks(self, samples: int) -> int:
        """Into how many parts the graph is divided for a mixture that so many samples judge."""
        left = (self._inferences - samples * self.runs) / min(samples, MIXING_SAMPLES)
        return max(0, min(MOST_BLOCKS, int(left / (self.methods - 1)))) if self.methods > 1 else 0


@dataclass(frozen=True)
class _Fit:
    """Ranges, and the noise that they bring to the outputs on some samples."""

    ranges: Ranges
    noise: OutputNoise

    @cached_property
    def db(self) -> float:
        """The SQNR of the worst output."""
        return self.noise.db()


def _best(
    adjustable: AdjustablePlacement,
    candidates: Sequence[Ranges],
    blocks: Sequence[Sequence[str]],
    bias_correction: bool,
    is_late: Callable[[], bool],
) -> Ranges:
    """The best of all candidates and their mixture, each with and without corrected biases, as far as time allows."""
    if not adjustable.has_outputs:
        return candidates[0]
    in_time = takewhile(lambda ranges: ranges is candidates[0] or not is_late(), candidates)
    tried = [_Fit(ranges, adjustable.noise(ranges)) for ranges in in_time]
    best = max(tried, key=lambda fit: fit.db)
    mixed = _mixed(adjustable, best, candidates, [] if is_late() else blocks, is_late)
    if mixed is not best.ranges:
        tried.append(_Fit(mixed, adjustable.noise(mixed)))
        best = tried[-1] if tried[-1].db > best.db + BETTER_DB else best
    if bias_correction and adjustable.layers and not is_late():
        corrected = max((_corrected(adjustable, fit.ranges) for fit in tried), key=lambda fit: fit.db)
        best = corrected if corrected.db > best.db else best
    return best.ranges


def _corrected(adjustable: AdjustablePlacement, ranges: Ranges) -> _Fit:
    """`ranges` with biases corrected by all samples; the noise is that of biases that each sample gets from the
    others."""
    offsets = adjustable.offsets(ranges)
    return _Fit(replace(ranges, shifts=adjustable.shifts(offsets)), adjustable.noise(ranges, offsets))


def _mixed(
    adjustable: AdjustablePlacement,
    start: _Fit,
    candidates: Sequence[Ranges],
    blocks: Sequence[Sequence[str]],
    is_late: Callable[[], bool],
) -> Ranges:
    """`start` with the ranges of another candidate for each block of neighbouring tensors that gains by them.

    Blocks are tried in graph order, with the ranges chosen for earlier ones.
    """
    spread = range(0, adjustable.count, -(-adjustable.count // MIXING_SAMPLES))
    samples = (*spread[::4], *spread[2::4], *spread[1::2])  # a half of neighbours behind the other
    best = _Fit(start.ranges, start.noise.of(samples))
    for block in blocks:
        for other in candidates:
            adjustable.tell(_step(len(samples)))
            changed = {t: other.activations[t] for t in block if t in other.activations}
            if is_late() or all(best.ranges.activations[t] == r for t, r in changed.items()):
                continue
            tried = replace(best.ranges, activations={**best.ranges.activations, **changed}, method="auto")
            best = _if_better(adjustable, tried, best, samples) or best
    return best.ranges


def _step(samples: int) -> int:
    """The inferences of a step towards a mixture, judged by so many samples, as they are told: steps that are not taken
    need fewer, the others more."""
    return min(samples, 2 * FIRST_SAMPLES)


def _if_better(adjustable: AdjustablePlacement, ranges: Ranges, best: _Fit, samples: Sequence[int]) -> _Fit | None:
    """`ranges`, if the outputs gain by them. The gain has to show on both halves of the samples: on one it may be
    chance. Where the first samples show none, the others are not run."""
    half, found = -(-len(samples) // 2), list[OutputNoise]()
    for start, end in pairwise(sorted({0, min(FIRST_SAMPLES, half), half, len(samples)})):
        found.append(adjustable.noise(ranges, chosen=samples[start:end]))
        if together(found).db() <= best.noise.of(range(end)).db():
            return None
    fit, second = _Fit(ranges, together(found)), range(half, len(samples))
    if second and fit.noise.of(second).db() <= best.noise.of(second).db():
        return None
    return fit if fit.db > best.db + BETTER_DB else None


def _blocks(model: Model, placement: Placement, most: int) -> list[list[str]]:
    """Activations with pairs, in graph order, in at most `most` parts of about the same size."""
    paired = {e.tensor for e in placement}
    ordered = [t for t in (*model.inputs, *(o for n in model.nodes for o in n.outputs)) if t in paired]
    count = min(most, len(ordered))
    return [ordered[len(ordered) * i // count : len(ordered) * (i + 1) // count] for i in range(count)]


def with_known_ranges(model: Model, ranges: Ranges, numbers: NumericFormat, seen: Ranges) -> Ranges:
    """`ranges` with [0, 1] for outputs of Softmax that reach 0.5 on the samples, in uint8: their scale is 1/255.

    A probability of 1 that no sample showed would be clipped, and since most values are near zero, methods clip the
    ones that matter. Where attention spreads over hundreds of positions no value comes near 1, and steps of 1/255
    would leave nothing of them. `seen` holds the largest values of the samples.
    """
    if numbers.symmetric:
        return ranges
    made = {n.outputs[0] for n in model.nodes if n.op == "Softmax" and not n.domain} & ranges.activations.keys()
    known = {t: Range(0.0, 1.0) for t in made if t in seen.activations and seen.activations[t].high >= 0.5}
    return replace(ranges, activations={**ranges.activations, **known})
