"""What rounding does to the outputs, estimated before anything is built: for each tensor alone, and for placements.

Noise is the power of the output error divided by the power of the outputs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np

from qdqtune.calibration.scales import Quantization, Ranges, rounded_weight
from qdqtune.errors import EngineRefused
from qdqtune.graph.model import Model
from qdqtune.numerics.simulation import How, Sensitivities, quantization, sensitivities
from qdqtune.placement.possible import weight_at
from qdqtune.search.costs.output_noise import Noise
from qdqtune.tuning.observer import SEARCHING
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import SENSITIVITY, Caveat
from qdqtune.types import Accuracy, Edge, NumericFormat, Placement, WeightFormat

Key = TypeVar("Key")
Found = TypeVar("Found")

NEGLIGIBLE_SHARE = 0.01
"""Tensors that together cause a smaller share of the allowed noise are not measured singly. Chosen, not measured."""

TIME_SHARE = 0.15
"""Share of the remaining time for measuring the noise of single tensors. Chosen, not measured."""

LEAST_SECONDS = 300.0
"""Its seconds without a time budget, or `TIME_SHARE` of all builds' time if that is more. Chosen, not measured."""

SAMPLED = 64
"""Output channels of a weight on which the error of its weight format is computed."""

STEPS_IN_ONE = 257
"""Steps of 16-bit values in one of 8-bit values: 65535 / 255."""

TINY = 1e-12

FRONT_FLOOR = 1e-7
"""Noise (70 dB) of tensors that for a front need not be measured one by one. Chosen, not measured."""


class LazyMapping(Mapping[Key, Found]):
    """A mapping that is computed as a whole when a value is first read."""

    def __init__(self, find: Callable[[], Mapping[Key, Found]]) -> None:
        self._find = cache(find)

    def __getitem__(self, key: Key) -> Found:
        return self._find()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


def binding_noise_of(run: Run) -> Noise | None:
    """`noise_of(run)`, for searches that need it at once; also None if there is time for few candidates only, or if
    even the fullest placements are predicted to meet the limits, so that noise does not matter."""
    if not run.budget.can_learn:
        return None
    limits, shares = run.limits, run.format_shares
    if (noise := noise_of(run)) is None or run.settings.front or limits.max_drop is not None:
        return noise
    run.observer.stage("predicting what rounding does to the outputs")
    dynamic = ((edge, s) for edge, of_edge in shares.items() for s in of_edge if s.dynamic)
    coarsest = ((edge, _coarsest(of_edge)) for edge, of_edge in shares.items())
    fullest = Placement(run.subject.possible), Placement.of((), coarsest), Placement.of((), dynamic)
    accuracies = (predicted_accuracy(run, p) for p in fullest if p)
    is_harmless = all(f is not None and limits.is_exact_enough(f) for f in accuracies)
    run.observer.stage(SEARCHING)
    return None if is_harmless else noise


def _coarsest(shares: Iterable[WeightFormat]) -> WeightFormat:
    return min(shares, key=lambda s: (s.bytes_per_weight, s.name))


MISSED = 1.1
"""The assumed noise of a placement that misses a limit on single samples or on top-1 classes, as a multiple of the
noise allowed for all samples. Chosen, not measured."""


def noise_of(run: Run) -> Noise | None:
    """The noise estimates for a search; None if nothing limits noise and no front is asked for.

    Measuring single tensors is slow on large models and not needed for the first builds: it is done when a search first
    reads the values, and then stored. If ONNX Runtime cannot run the model, or no time is left, all tensors get equal
    noise.
    """
    subject, limits, is_front = run.subject, run.limits, run.settings.front
    if run.budget.is_late or (not limits.are_set and not is_front):
        return None
    coarsest = {edge: _coarsest(shares) for edge, shares in run.format_shares.items()}
    alone = _Alone(run, FRONT_FLOOR if is_front else _floor(run), TIME_SHARE / 2 if coarsest else TIME_SHARE)
    tensors = sorted({e.tensor for e in subject.possible})
    weights = [(e.tensor, weight_format.name) for e, shares in run.format_shares.items() for weight_format in shares]

    def noise_at(placement: Placement) -> float | None:
        accuracy = predicted_accuracy(run, placement)
        return accuracy.noise if accuracy is not None and is_front else _counted(run, accuracy)

    def tensor_noise() -> Mapping[str, float]:
        return dict.fromkeys(tensors, 1.0) if run.budget.is_late else alone.tensors()

    def weight_noise() -> Mapping[tuple[str, str], float]:
        return dict.fromkeys(weights, 1.0) if run.budget.is_late or not coarsest else alone.weights(coarsest)

    if is_front:  # its search needs all values from the start
        return Noise(subject.shaped, tensor_noise(), limits.max_noise, simulate=noise_at, weight_noise=weight_noise())
    of_tensors, of_weights = LazyMapping(tensor_noise), LazyMapping(weight_noise)
    return Noise(subject.shaped, of_tensors, limits.max_noise, simulate=noise_at, weight_noise=of_weights)


def _floor(run: Run) -> float:
    most = run.limits.max_noise
    return 0.0 if most is None else NEGLIGIBLE_SHARE * most


def _counted(run: Run, accuracy: Accuracy | None) -> float | None:
    """The noise of a simulated accuracy; above the limit if one on single samples or top-1 classes is missed."""
    most = run.limits.max_noise
    if accuracy is None or most is None or run.limits.is_exact_enough(accuracy):
        return None if accuracy is None else accuracy.noise
    return max(accuracy.noise, MISSED * most)


def noise_of_bits(run: Run) -> Noise:
    """The noise of rounding each tensor alone to 8 and to 16 bits (none if the engine has no 16 bits). That of
    placements is simulated for up to `TIME_SHARE` of the time."""
    subject, alone, ends = run.subject, _Alone(run, _floor(run), TIME_SHARE), list[float]()

    def noise_at(placement: Placement) -> float | None:
        if not ends:
            ends.append(alone.deadline)
        return None if time.monotonic() > ends[0] else _counted(run, predicted_accuracy(run, placement))

    narrow = LazyMapping(alone.tensors)
    wide: Mapping[str, float] = {}
    if subject.numbers.wide is not None:
        wide = LazyMapping(lambda: alone.tensors(narrow))
    return Noise(subject.shaped, narrow, run.limits.max_noise, simulate=noise_at, wide_noise=wide)


WeightNoise = tuple[tuple[str, str, float], ...]
"""Rows of tensor, name of a weight format, and the output noise of storing the weight in it."""


@dataclass(frozen=True)
class _Alone:
    """The noise of single tensors, from the state file or measured in the `share` of the time; tensors that together
    cause less than `floor` are not measured one by one."""

    run: Run
    floor: float
    share: float

    @property
    def deadline(self) -> float:
        """The time at which measuring must end: after a share of the remaining time, or of the time for all builds."""
        deadline, now = self.run.budget.deadline, time.monotonic()
        if deadline is None:
            return now + max(LEAST_SECONDS, self.share * self.run.budget.builds * self.run.bench.trial_seconds)
        return now + self.share * (deadline - now)

    def tensors(self, narrow: Mapping[str, float] | None = None) -> Mapping[str, float]:
        """The noise of rounding each tensor to 8 bits; all equal if ONNX Runtime cannot run the model.

        With `narrow`, that result, it is the noise of rounding to 16 bits: for weights and what was not measured,
        computed from `narrow`, as noise grows with the square of the step.
        """
        subject, bits = self.run.subject, "" if narrow is None else " in 16 bits"

        def measured(caveat: Caveat) -> Sensitivities:
            wide = narrow is not None
            values = each_value(subject.shaped, subject.ranges, subject.numbers, subject.possible, wide=wide)
            found = self.measured(f"rounding each tensor{bits}", values, caveat) or Sensitivities({})
            if narrow is not None:
                scaled = {tensor: noise / STEPS_IN_ONE**2 for tensor, noise in narrow.items()}
                return replace(found, noise={**scaled, **found.noise})
            return found  # `explain` tells only what was measured

        found = self._stored(f"{SENSITIVITY}{bits}", Sensitivities, measured)
        return found.noise or dict.fromkeys((edge.tensor for edge in subject.possible), 1.0)

    def weights(self, coarsest: Mapping[Edge, WeightFormat]) -> Mapping[tuple[str, str], float]:
        """The noise of each weight in each weight format, by tensor and format name: measured in the coarsest format,
        and scaled by the weight's own error for others. For dynamic quantization it includes the noise of rounding the
        activation, divided among the products that read it."""
        run, model = self.run, self.run.subject.shaped

        def measured(caveat: Caveat) -> WeightNoise:
            is_dynamic = any(s.dynamic for shares in run.format_shares.values() for s in shares)
            part = replace(self, share=self.share / 2) if is_dynamic else self
            of_activation = part.activations(caveat) if is_dynamic else {}
            alone = part.measured("storing each weight in fewer bits", coarsest, caveat)
            shares = {edge: error_of(model, edge, weight_format) for edge, weight_format in coarsest.items()}
            rows = []
            for edge, weight_formats in run.format_shares.items():
                noise = shares[edge] if alone is None else alone.noise[edge.tensor]
                for weight_format in weight_formats:
                    own = noise * error_of(model, edge, weight_format) / shares[edge]
                    shared = of_activation.get(edge, 0.0) if weight_format.dynamic else 0.0
                    rows.append((edge.tensor, weight_format.name, own + shared))
            return tuple(rows)

        rows = self._stored("weight noise", WeightNoise, measured)
        return {(tensor, name): noise for tensor, name, noise in rows}

    def activations(self, caveat: Caveat) -> Mapping[Edge, float]:
        """For each weight that may have dynamic quantization, the noise of rounding its product's activation, divided
        equally among the products that read it. Empty if it cannot be measured.

        Weights stay float here: the large noise of 4-bit weights would hide this noise where several tensors are
        measured together.
        """
        model = self.run.subject.shaped
        able = (edge for edge, shares in self.run.format_shares.items() if any(s.dynamic for s in shares))
        inputs = {edge: model.node(edge.node).into[0] for edge in able}
        alone = self.measured("rounding activations at run time", dict.fromkeys(inputs.values()), caveat)
        readers = Counter(e.tensor for e in inputs.values())
        return {edge: alone.noise[i.tensor] / readers[i.tensor] for edge, i in inputs.items()} if alone else {}

    def measured(self, what: str, pairs: Mapping[Edge, How], caveat: Caveat) -> Sensitivities | None:
        """The noise of each tensor; None if ONNX Runtime cannot run the model. `what` describes it for the user.
        `caveat` is marked if time was too short to measure all tensors one by one."""
        run, deadline, is_thinned = self.run, self.deadline, list[bool]()
        run.observer.stage(f"measuring what {what} does to the outputs")
        try:
            alone = sensitivities(
                run.subject.shaped,
                pairs,
                run.subject.accuracy,
                floor=self.floor,
                listener=run.observer,
                deadline=deadline,
                execution=run.execution,
                on_fewer=lambda: is_thinned.append(True),
            )
        except EngineRefused as refused:
            caveat.is_lost |= refused.is_transient
            return None
        finally:
            run.observer.stage(SEARCHING)
        caveat.is_hurried |= run.budget.deadline is not None and (bool(is_thinned) or time.monotonic() > deadline)
        return alone

    def _stored(self, name: str, kind: type[Found], measured: Callable[[Caveat], Found]) -> Found:
        caveat = Caveat()
        return self.run.store.memo(f"{name}:{self.floor:.3g}", kind, partial(measured, caveat), caveat)


def error_of(model: Model, edge: Edge, weight_format: WeightFormat) -> float:
    """The error power of a weight in a weight format relative to the weight's power, on `SAMPLED` output channels."""
    weight = weight_at(model, edge)
    assert weight is not None  # only weights have weight formats
    values = np.asarray(weight.array(), np.float32)
    values = values[:, :: max(1, values.shape[1] // SAMPLED)]
    power = float(np.square(values).sum())
    return max(float(np.square(rounded_weight(values, weight_format).values() - values).sum()) / max(power, TINY), TINY)


def predicted_accuracy(run: Run, placement: Placement) -> Accuracy | None:
    """The simulated accuracy of a placement, maybe from the state file; None if time is over or it fails."""
    key = f"prediction:{placement.digest}"
    if run.budget.is_late and not run.store.has(key):
        return None
    try:
        return run.store.memo(key, Accuracy, lambda: run.simulation.accuracy(placement))
    except EngineRefused:
        return None


def each_value(
    model: Model, ranges: Ranges, numbers: NumericFormat, possible: frozenset[Edge], *, wide: bool = False
) -> dict[Edge, Quantization]:
    """The quantization of each possible edge, for `sensitivities`; of tensors that only rearrange each other's values,
    of the first alone. `wide`: in 16 bits, for activations only."""
    aliases = Noise(model, {}).aliases
    able = (e for e in possible if e.tensor not in aliases and not (wide and e.tensor in model.constants))
    return {e: quantization(model, ranges, numbers, e, wide=wide) for e in able}
