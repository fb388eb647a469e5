"""Estimates how much noise a placement adds to the model's outputs, from the noise of each quantized tensor.

Noise is relative: power of the output error divided by power of the output, 10^(-SQNR/10). Small errors are nearly
uncorrelated, so their powers add up. Engines fuse and round in their own way, so the sum is corrected by a factor that
the build with the noise nearest to the limit shows. Where placements can be simulated, two factors are learned: one
from builds with pairs, as engines may round at pairs more often than the file says; one from weight formats alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import inf, log

from qdqtune.graph.model import Model
from qdqtune.graph.operators import REARRANGES
from qdqtune.types import Edge, Placement, Trial, WeightFormat

RESERVE = 0.8
"""Share of the allowed noise that a search aims at first, since a candidate that just misses the limit is lost. Chosen,
not measured."""

DOUBT = 1.25
"""At the end, candidates predicted at up to this multiple of the allowed noise are tried, as predictions err. Chosen,
not measured."""

SHARES = (RESERVE, 1.0, DOUBT)
"""Shares of the allowed noise that a search aims at in turn."""

WITHIN_FACTOR = 0.1
"""Only builds whose noise is within this factor of the limit (a tenth to ten times) correct the estimate."""

LIMIT_SHARE = 0.98
"""Simulated noise may reach this share of the limit: engine and simulation differ by about a tenth of a dB."""

QUIETER_FACTOR = 4.0
"""While no trial met the limit on the metric, the next ones have this factor less noise. Chosen, not measured."""

BETWEEN = (0.5, 0.75, 0.875)
"""Then the next ones lie at these positions, on a logarithmic scale, between the largest noise that met the limit on
the metric and the smallest that missed it. Chosen, not measured."""


@dataclass(frozen=True)
class Noise:
    """Output noise caused by single tensors, and the user's limit.

    `value_noise` is the noise that quantizing a tensor alone adds to the worst output; tensors that only rearrange
    another one share its entry (`aliases`). `weight_noise` is the same for weights in a weight format, by tensor and
    name of the format; `wide_noise` for tensors in 16 bits. `limit` is the noise that the limit on the SQNR allows;
    None if only the user's metric is limited, so that trials must show how much noise it allows. `simulate` computes
    the noise of a placement without a build, or None. `pair_factor` and `weight_factor` correct the noise of pairs and
    of weight formats.
    """

    model: Model
    value_noise: Mapping[str, float]
    limit: float | None = None
    _: KW_ONLY
    simulate: Callable[[Placement], float | None] | None = field(default=None, compare=False)
    weight_noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    wide_noise: Mapping[str, float] = field(default_factory=dict)
    pair_factor: float = 1.0
    weight_factor: float = 1.0

    def value(self, tensor: str) -> str:
        """The tensor of which `tensor` is only a rearrangement (Reshape, Transpose and the like), or itself."""
        return self.aliases.get(tensor, tensor)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """For each tensor that only rearranges another (Reshape, Transpose and the like), the first of that chain."""
        first: dict[str, str] = {}
        for node in self.model.nodes:
            if node.op in REARRANGES and not node.domain and node.inputs[0] not in self.model.constants:
                first[node.outputs[0]] = first.get(node.inputs[0], node.inputs[0])
        return first

    def summed(self, placement: Placement) -> float:
        """The noise of a placement: the sum over its tensors."""
        narrow = {self.value(e.tensor) for e in placement.edges - placement.wide}
        wide = {self.value(e.tensor) for e in placement.wide} - narrow
        of_weights = sum(self.of_weight(edge, weight_format) for edge, weight_format in placement.weight_only)
        return sum(map(self.of_value, narrow)) + sum(map(self.of_wide, wide)) + of_weights

    def of_value(self, value: str) -> float:
        """The noise of a tensor with a pair, times `pair_factor`."""
        return self.pair_factor * self.value_noise.get(value, 0.0)

    def of_wide(self, value: str) -> float:
        """The noise of a tensor with a pair of 16 bits, times `pair_factor`."""
        return self.pair_factor * self.wide_noise.get(value, 0.0)

    def of_weight(self, edge: Edge, weight_format: WeightFormat) -> float:
        """The noise of a weight in a weight format, times `weight_factor`."""
        return self.weight_factor * self.weight_noise.get((edge.tensor, weight_format.name), 0.0)

    def expected(self, placement: Placement) -> float:
        """The simulated noise of a placement, corrected by the factors; `summed` if it cannot be simulated."""
        noise = None if self.simulate is None else self.simulate(placement)
        return self.summed(placement) if noise is None else noise * self._factor(placement)

    def _factor(self, placement: Placement) -> float:
        """The factor for a placement's simulated noise: the two factors, weighted by the share of pairs and of weight
        formats in the summed noise."""
        if self.pair_factor == self.weight_factor or not placement.weight_only:
            return self.pair_factor
        if not placement.edges:
            return self.weight_factor
        of_pairs, of_both = self.summed(Placement(placement.edges)), self.summed(placement)
        plain = of_pairs / self.pair_factor + (of_both - of_pairs) / self.weight_factor
        return of_both / plain if plain > 0 else max(self.pair_factor, self.weight_factor)

    def bound(self, history: Sequence[Trial]) -> float | None:
        """The largest `expected` noise that a placement may have; None without a simulation or SQNR limit, or once
        trials have a metric, which then decides."""
        if self.limit is None or self.simulate is None or any(t.metric is not None for t in history):
            return None
        return LIMIT_SHARE * self.limit

    def corrected(self, history: Sequence[Trial]) -> Noise:
        """A copy with `pair_factor` and `weight_factor` learned from builds near the limit: the largest ratio of
        measured to simulated noise, at least 1."""
        limit, worst = self.limit, {True: 1.0, False: 1.0}
        if limit is None or self.simulate is None:
            return self
        for trial in history:
            measured = 0.0 if trial.accuracy is None else trial.accuracy.noise
            is_near = WITHIN_FACTOR * limit < measured < limit / WITHIN_FACTOR
            simulated = self.simulate(trial.placement) if is_near else None
            if simulated is not None and WITHIN_FACTOR * limit < simulated < limit / WITHIN_FACTOR:
                kind = bool(trial.placement.edges)
                worst[kind] = max(worst[kind], measured / simulated)
        return replace(self, pair_factor=worst[True], weight_factor=worst[False])

    def fits(self, placement: Placement, history: Sequence[Trial]) -> bool:
        """Whether a placement is expected to meet the limits."""
        bound = self.bound(history)
        if bound is None:
            return self.summed(placement) <= self.allowed(history)
        return self.corrected(history).expected(placement) <= bound

    def allowed(self, history: Sequence[Trial]) -> float:
        """The largest `summed` noise that is expected to meet the limits, learned from trials; inf without limit."""
        return min(self._by_limit(history), RESERVE * self._by_metric(history)[1])

    def levels(self, history: Sequence[Trial]) -> tuple[float, ...]:
        """Values of `summed` to aim at, the most promising first: near the noise that the SQNR limit allows, or between
        noise that met the limit on the metric and noise that missed it."""
        bound = self._by_limit(history)
        held, failed = self._by_metric(history)
        if failed == inf:
            return tuple(share * bound for share in SHARES)
        held = held or failed / QUIETER_FACTOR**2
        return tuple(min(bound, held ** (1 - part) * failed**part) for part in BETWEEN)

    def _by_limit(self, history: Sequence[Trial]) -> float:
        limit = self.limit
        if limit is None:
            return inf
        measured = [(t, t.accuracy.noise, self.summed(t.placement)) for t in history if t.accuracy is not None]
        known = [(t, real, summed) for t, real, summed in measured if real > 0 and summed > 0]
        nearest = min(known, key=lambda each: abs(log(each[1] / limit)), default=None)
        allowed = limit if nearest is None else nearest[2] * limit / nearest[1]
        # Sums of proposals that were to hold the limit and did not are too low for placements of their kind; but one
        # that went wrong for another reason must not end the search.
        missed = [(real, summed) for t, real, summed in known if real > limit and t.proposal.predicted is not None]
        return min([allowed, *(summed * max(limit / real, WITHIN_FACTOR) for real, summed in missed)])

    def _by_metric(self, history: Sequence[Trial]) -> tuple[float, float]:
        """The largest summed noise that met all limits other than the SQNR of all samples (metric, single samples,
        top-1 classes), 0 if none did; and the smallest that missed one of them, inf if none did."""
        judged = []
        for trial in history:
            misses_limit = self.limit is not None and trial.accuracy is not None and trial.accuracy.noise > self.limit
            misses_another = trial.holds is False and trial.accuracy is not None and not misses_limit
            if trial.metric is not None or misses_another:
                judged.append((self.summed(trial.placement), trial.holds))
        if any(not holds for _, holds in judged):
            judged += [(self.summed(t.placement), True) for t in history if t.holds and t.metric is None]
        failed = min((noise for noise, holds in judged if not holds), default=inf)
        return max((noise for noise, holds in judged if holds and noise < failed), default=0.0), failed
