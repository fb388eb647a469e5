"""Whether a placement gains by channels that are made alike: see `calibration.equalizing`.

Where one channel's values set the range of all, values beyond those that calibration saw hardly ever come. Where all
channels reach its ends, any of them may: so neither factors nor ranges may come from the samples that judge them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.equalizing import equalizing
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.equalization import NORMALIZED_BY_CHANNEL, Factor, Site, scaled, sites
from qdqtune.graph.model import Model
from qdqtune.measurement.judging import CannotJudgeError, Outcome, Steps, judging
from qdqtune.types import Listener, NumericFormat, Placement, Sample

SAMPLES = 32
"""Samples that judge, at most: either half those numbers that the other half has been asked for."""

RUNS = 10
"""Inferences that one of these takes at most."""

BETTER_DB = 0.1
"""What factors must gain to be kept."""


def paying_factors(
    prepared: Prepared,
    numbers: NumericFormat,
    placed: Callable[[Ranges], Placement],
    most: int,
    is_late: Callable[[], bool],
    listener: Listener,
) -> tuple[Factor, ...]:
    """The factors by which the outputs of a placement come closer to the float model's, judged by `most` so many
    samples. Layers behind normalizations are tried apart from those behind others. The `listener` hears how far it is.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    model, found = prepared.shaped, sites(prepared.shaped)
    samples = prepared.calibration.spread(min(most, SAMPLES)) if found else []
    if len(samples) < 2 or is_late():
        return ()
    trial = _Trial(model, numbers, placed, samples, Steps(listener, RUNS * len(samples)).took)
    placement = placed(trial.ranges(0))
    readers = ((site, [model.nodes[r] for r in site.readers]) for site in found)
    used = [site for site, nodes in readers if any(node.into[0] in placement for node in nodes)]
    behind = [model.nodes[site.producer].op in NORMALIZED_BY_CHANNEL for site in used]
    kinds = [[s for s, is_behind in zip(used, behind, strict=True) if is_behind == kind] for kind in (True, False)]
    try:
        paying = [site for kind in kinds if kind and not is_late() and trial.gains(kind) for site in kind]
    except CannotJudgeError:
        return ()
    return equalizing(model, paying, prepared.calibration) if paying else ()


class _Trial:
    """Either half of some samples judges what the other half says."""

    def __init__(
        self, model: Model, numbers: NumericFormat, placed: Callable[[Ranges], Placement], samples: Sequence[Sample],
        ran: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._model, self._numbers, self._placed, self._ran = model, numbers, placed, ran
        halves = samples[::2], samples[1::2]
        self._folds = (halves, halves[::-1])
        self._ranges: dict[int, Ranges] = {}
        self._plain: dict[int, Outcome] = {}

    def ranges(self, fold: int) -> Ranges:
        """All values that the model, as it is, takes on one half of the samples."""
        if fold not in self._ranges:
            self._ranges[fold] = self._calibrated(self._model, self._folds[fold][0])
        return self._ranges[fold]

    def gains(self, found: Sequence[Site]) -> bool:
        """Whether equal channels at some sites gain: on either half, or it is luck."""
        before, after = [], []
        for number, (asked, judges) in enumerate(self._folds):
            factors = equalizing(self._model, found, asked)
            if not factors:
                return False
            if number not in self._plain:
                self._plain[number] = self._outcome(self._model, self.ranges(number), judges)
            before.append(self._plain[number])
            changed = scaled(self._model, factors)
            after.append(self._outcome(changed, self._calibrated(changed, asked), judges))
            if after[-1].db() <= before[-1].db():
                return False
        return _together(after).db() > _together(before).db() + BETTER_DB

    def _calibrated(self, model: Model, samples: Sequence[Sample]) -> Ranges:
        found = calibrate(model, samples, numbers=self._numbers)
        self._ran(len(samples))
        return found

    def _outcome(self, model: Model, ranges: Ranges, judges: Sequence[Sample]) -> Outcome:
        with judging(model, self._placed(ranges), self._numbers, ranges, judges, self._ran) as judge:
            return judge.outcome(ranges)


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    signal, noise = (np.concatenate([getattr(o, name) for o in outcomes]) for name in ("signal", "noise"))
    return Outcome(signal, noise, outcomes[0].parts)
