"""The numbers of a placement: ranges and biases that keep its outputs close to the float model's.

All is decided before anything is timed, so that what a search measures is what ships; none of it moves a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from qdqtune.calibration.calibrate import calibrate_by_every_method
from qdqtune.calibration.equalization import Factor, scaled, sites
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import AUTO, Calibration, Range, Ranges
from qdqtune.graph.model import Model
from qdqtune.graph.operators import work
from qdqtune.numerics import equalizing
from qdqtune.numerics.judging import CannotJudgeError, Judge, Steps, judging
from qdqtune.types import Deaf, Listener, NumericFormat, Placement

SAMPLES = 64
"""Samples of calibration that numbers are judged by, if `WORK` allows so many; `LEAST` in any case."""

LEAST = 4

FEWER = 16
"""Of these, how many judge each step towards a mixture, of which there are many."""

BETTER_DB = 0.1
"""What a change of numbers must gain to be kept: less may be luck."""

BLOCKS = 24
"""Parts of the graph that may get ranges of different methods, at most: each costs a run for each other method."""

WORK = 6e11
"""Multiplications that all runs together may take: ten to thirty seconds on two cores."""

OVERHEAD = 1e6
"""Multiplications in the time that an operator with a pair takes to begin, and its numbers take to be computed."""


def fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    is_late: Callable[[], bool] = lambda: False,
    listener: Listener | None = None,
) -> Ranges:
    """Ranges by `how`; factors of channels and bias corrections where these bring the outputs closer to the float
    model's.

    `placed` gives the placement that the numbers are for, of the ranges: partial ones of it take their part of them.
    Nothing further is tried once it `is_late`. The `listener` hears of what takes long, and how far it is.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    factors, listener = tuple[Factor, ...](), listener or Deaf()
    if how.equalization and sites(prepared.shaped):
        listener.stage("trying to make channels alike")
        most = _Budget(prepared.shaped, 1, how.bias_correction).halves
        factors = equalizing.paying_factors(prepared, numbers, placed, most, is_late, listener)
        prepared = replace(prepared, shaped=scaled(prepared.shaped, factors))
    return replace(_fitted(prepared, how, numbers, placed, is_late, listener), factors=factors)


def _fitted(
    prepared: Prepared,
    how: Calibration,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    is_late: Callable[[], bool],
    listener: Listener,
) -> Ranges:
    """See `fitted`; channels stay as they are."""
    model = prepared.shaped
    listener.stage(f"calibrating on {prepared.samples.origin}")
    found = calibrate_by_every_method(model, prepared.calibration, how, numbers=numbers)
    seen = next((ranges for ranges in found if ranges.method == "minmax"), None)
    candidates = [with_known_ranges(model, ranges, numbers, seen or ranges) for ranges in found]
    placement = placed(candidates[0])
    if not placement.edges or (len(candidates) == 1 and not how.bias_correction) or is_late():
        return candidates[0]
    budget = _Budget(model, len(candidates), how.bias_correction)
    samples = prepared.calibration.spread(budget.samples)
    listener.stage("comparing ways to calibrate")
    blocks = _blocks(model, placement, budget.blocks(len(samples)))
    mixing = len(blocks) * (len(candidates) - 1) * min(len(samples), FEWER)
    ran = Steps(listener, len(samples) * budget.runs + mixing).took
    try:
        with judging(model, placement, numbers, candidates[0], samples, ran) as judge:
            return _best(judge, candidates, blocks, how.bias_correction, is_late)
    except CannotJudgeError:
        return candidates[0]


def inferences(model: Model, how: Calibration, samples: int) -> int:
    """How many inferences of the model with its pairs `fitted` takes at most after it has seen that many samples."""
    methods = len(AUTO) if how.method == "auto" else 1
    budget = _Budget(model, methods, how.bias_correction)
    halves = equalizing.RUNS * min(samples, budget.halves) if how.equalization and sites(model) else 0
    if methods == 1 and not how.bias_correction:
        return halves
    samples = max(1, min(samples, budget.samples))
    mixing = budget.blocks(samples) * (methods - 1) * min(samples, FEWER)
    return halves + samples * budget.runs + mixing


@dataclass(frozen=True)
class _Budget:
    """What `WORK` allows: half of it for so many methods as they are, the rest for mixtures of them."""

    model: Model
    methods: int
    bias_correction: bool

    @property
    def _inferences(self) -> float:
        return WORK / sum(work(self.model, node) + OVERHEAD for node in self.model.nodes)

    @property
    def runs(self) -> int:
        """Float model, methods, their mixture, and two for each of them with biases."""
        return 2 + self.methods + 2 * (self.methods + 1) * self.bias_correction

    @property
    def samples(self) -> int:
        """On how many samples numbers are judged."""
        return min(max(int(self._inferences / (2 * self.runs)), LEAST), SAMPLES)

    @property
    def halves(self) -> int:
        """How many samples judge whether channels are made alike."""
        return min(max(int(self._inferences / (4 * equalizing.RUNS)), LEAST), equalizing.SAMPLES)

    def blocks(self, samples: int) -> int:
        """How many parts of the graph are tried, with so many samples at hand."""
        left = (self._inferences - samples * self.runs) / min(samples, FEWER)
        return max(0, min(BLOCKS, int(left / (self.methods - 1)))) if self.methods > 1 else 0


@dataclass(frozen=True)
class _Fit:
    """Numbers, and the SQNR that they reach."""

    db: float
    ranges: Ranges


def _best(
    judge: Judge,
    candidates: Sequence[Ranges],
    blocks: Sequence[Sequence[str]],
    bias_correction: bool,
    is_late: Callable[[], bool],
) -> Ranges:
    """The best of: each candidate, and the mixture of them; each with and without corrected biases. Of those that there
    was time for."""
    if not judge.can_tell:
        return candidates[0]
    in_time = takewhile(lambda ranges: ranges is candidates[0] or not is_late(), candidates)
    tried = [_Fit(judge.outcome(ranges).db(), ranges) for ranges in in_time]
    best = max(tried, key=lambda fit: fit.db)
    mixed = _mixed(judge, best.ranges, candidates, [] if is_late() else blocks, is_late)
    if mixed is not best.ranges:
        tried.append(_Fit(judge.outcome(mixed).db(), mixed))
        best = tried[-1] if tried[-1].db > best.db + BETTER_DB else best
    if bias_correction and judge.layers and not is_late():
        corrected = max((_corrected(judge, fit.ranges) for fit in tried), key=lambda fit: fit.db)
        best = corrected if corrected.db > best.db else best
    return best.ranges


def _corrected(judge: Judge, ranges: Ranges) -> _Fit:
    """Biases corrected as all samples ask for it. Each judges what the others say, so that luck gains nothing."""
    moves = judge.moves(ranges)
    return _Fit(judge.outcome(ranges, moves).db(), replace(ranges, shifts=judge.shifts(moves)))


def _mixed(
    judge: Judge,
    start: Ranges,
    candidates: Sequence[Ranges],
    blocks: Sequence[Sequence[str]],
    is_late: Callable[[], bool],
) -> Ranges:
    """From one of several, for each block of neighbouring tensors the one that the outputs gain most by.

    Blocks come in graph order, and each is tried with what those before it have been given. The placement's pairs
    see the method of the block; all other tensors keep that of the whole. What gains must do so on either half of
    the samples, or it is luck.
    """
    best = start
    reached = judge.outcome(best, at_most=FEWER) if blocks else None
    for block in blocks:
        for other in candidates:
            changed = {t: other.activations[t] for t in block if t in other.activations}
            if reached is None or is_late() or all(best.activations[t] == found for t, found in changed.items()):
                continue
            tried = replace(best, activations={**best.activations, **changed}, method="auto")
            outcome = judge.outcome(tried, at_most=FEWER)
            halves = [slice(i, None, 2) for i in range(2 if len(outcome.noise) > 1 else 1)]
            if outcome.db() > reached.db() + BETTER_DB and all(outcome.db(h) > reached.db(h) for h in halves):
                best, reached = tried, outcome
    return best


def _blocks(model: Model, placement: Placement, most: int) -> list[list[str]]:
    """Activations that carry pairs, in graph order, in at most so many parts of about the same number."""
    paired = {e.tensor for e in placement}
    ordered = [t for t in (*model.inputs, *(o for n in model.nodes for o in n.outputs)) if t in paired]
    count = min(most, len(ordered))
    return [ordered[len(ordered) * i // count : len(ordered) * (i + 1) // count] for i in range(count)]


def with_known_ranges(model: Model, ranges: Ranges, numbers: NumericFormat, seen: Ranges) -> Ranges:
    """`ranges` with [0, 1] for what a Softmax makes where samples came at least half way, in uint8: scale 1/255.

    A probability of 1 that no sample showed would be cut off, and a method that looks at all values alike cuts off
    those that matter, since most are next to zero. Where attention is spread over hundreds of positions no value
    comes near 1, and steps of 1/255 would leave nothing of them. `seen` holds the largest values of the samples.
    """
    if numbers.symmetric:
        return ranges
    made = {n.outputs[0] for n in model.nodes if n.op == "Softmax" and not n.domain} & ranges.activations.keys()
    known = {t: Range(0.0, 1.0) for t in made if t in seen.activations and seen.activations[t].high >= 0.5}
    return replace(ranges, activations={**ranges.activations, **known})
