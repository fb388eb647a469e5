"""The numbers of a placement: ranges and biases that keep its outputs close to the float model's.

All is decided before anything is timed, so that what a search measures is what ships; none of it moves a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from qdqtune.calibration.methods import Calibration
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.graph.model import Model
from qdqtune.measurement.simulation import Simulation
from qdqtune.placement.bias_correction import bias_shifts
from qdqtune.placement.insertion import Inserter
from qdqtune.types import Failure, NumericFormat, Placement, Sample

SAMPLES = 16
"""Samples of calibration that numbers are judged by at most."""

BETTER_DB = 0.1
"""What a change of numbers must gain to be kept: less may be luck."""

BLOCKS = 12
"""Parts of the graph that may get ranges of different methods: each costs a build for each other method."""


def fitted(
    prepared: Prepared, how: Calibration, numbers: NumericFormat, placed: Callable[[Ranges], Placement]
) -> Ranges:
    """Ranges by `how`, and bias corrections where these bring the outputs closer to the float model's.

    `placed` gives the placement that the numbers are for, of the ranges: partial ones of it take their part of them.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    found = prepared.ranges_by_every_method(how, numbers)
    seen = next((ranges for ranges in found if ranges.method == "minmax"), None)
    candidates = [with_known_ranges(prepared.shaped, ranges, numbers, seen or ranges) for ranges in found]
    placement = placed(candidates[0])
    if not placement.edges or (len(candidates) == 1 and not how.bias_correction):
        return candidates[0]
    with _Judge(prepared.shaped, candidates[0], numbers, placement, prepared.calibration.first(SAMPLES)) as judge:
        reached, best = judge.mixed(candidates)
        if how.bias_correction:
            corrected = replace(best, shifts=bias_shifts(prepared, placement, best, numbers))
            best = corrected if judge.db(corrected) > reached + BETTER_DB else best
    return best


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


class _Judge(Simulation):
    """What ranges do to the outputs of one placement, on samples that calibration has seen."""

    def __init__(
        self, model: Model, ranges: Ranges, numbers: NumericFormat, placement: Placement, samples: Sequence[Sample]
    ) -> None:
        super().__init__(Inserter(model, ranges, numbers), samples)
        self._model, self._numbers, self._placement = model, numbers, placement

    def db(self, ranges: Ranges) -> float:
        """Their SQNR; infinite where nothing is lost, or where all is: the model does not run."""
        found = self.accuracy(self._placement, Inserter(self._model, ranges, self._numbers))
        if isinstance(found, Failure):
            return -math.inf
        return math.inf if found.sqnr_db is None else found.sqnr_db

    def mixed(self, candidates: Sequence[Ranges]) -> tuple[float, Ranges]:
        """The best of several, and then for each block of neighbouring tensors the one that the outputs gain most by;
        and the SQNR that it reaches.

        Blocks come in graph order, and each is tried with what those before it have been given. The placement's pairs
        see the method of the block; all other tensors keep that of the whole.
        """
        reached, best = max(((self.db(ranges), -i) for i, ranges in enumerate(candidates)))
        chosen = candidates[-best]
        for block in self._blocks():
            for other in candidates:
                changed = {t: other.activations[t] for t in block if t in other.activations}
                if all(chosen.activations[t] == found for t, found in changed.items()):
                    continue
                tried = replace(chosen, activations={**chosen.activations, **changed})
                gained = self.db(tried)
                if gained > reached + BETTER_DB:
                    reached, chosen = gained, replace(tried, method="auto")
        return reached, chosen

    def _blocks(self) -> list[list[str]]:
        """Activations that carry pairs, in graph order, in `BLOCKS` parts of about the same number."""
        model, paired = self._model, {e.tensor for e in self._placement}
        ordered = [t for t in (*model.inputs, *(o for n in model.nodes for o in n.outputs)) if t in paired]
        count = min(BLOCKS, len(ordered))
        return [ordered[len(ordered) * i // count : len(ordered) * (i + 1) // count] for i in range(count)]
