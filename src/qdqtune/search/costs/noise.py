"""How much noise a placement brings to the outputs, foretold from what each value brings alone.

Noise is relative: the power of the error at an output over the power of the output, 10^(-SQNR/10). Small errors of many
values hardly know of each other, so their powers add up. How far the sum is off, as engines fuse and round in their own
way, is learned from the builds: the one whose noise is nearest to the limit gives the factor. Where whole placements
are foretold by simulation, builds with pairs and builds with stored weights alone say each how far that is off for
their own kind: an engine that rounds more than the file says does so at pairs, and takes stored weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log

from qdqtune.graph.model import Model
from qdqtune.graph.operators import REARRANGES
from qdqtune.types import Edge, Placement, Trial, WeightFormat

RESERVE = 0.8
"""Share of what is allowed that a search uses up at first: what just fails is worth nothing."""

DOUBT = 1.25
"""How far beyond what is allowed a prediction may lie to be tried in the end, since predictions err."""

SHARES = (RESERVE, 1.0, DOUBT)

WITHIN_FACTOR = 0.1
"""Builds whose noise is within a factor of ten of the limit tell how exact the foretelling is there."""

LIMIT_SHARE = 0.98
"""Share of the limit that is aimed at: engines and simulation differ by a tenth of a dB."""

QUIETER_FACTOR = 4.0
"""How many times less noise is tried next while nothing has held a limit on the metric."""

BETWEEN = (0.5, 0.75, 0.875)
"""How far from what held a limit on the metric to what did not, in logarithms."""


@dataclass(frozen=True)
class Noise:
    """Noise by value, and what the user allows.

    `alone` is the relative noise that quantizing a value brings to the worst output; values are known by the first
    tensor that holds them, `aliases` knows the others. `limit` is the most noise that the output SQNR allows; None if
    only the user's metric counts, and then trials tell how much noise it takes. `simulate` gives the noise of a whole
    placement without a build, None where it cannot. `stored` is what weights alone bring, by tensor and name of the
    weight format. `harmless` finds out whether all that may be placed holds the limits, so that nobody needs to ask.
    """

    model: Model
    alone: Mapping[str, float]
    limit: float | None = None
    simulate: Callable[[Placement], float | None] | None = field(default=None, compare=False)
    stored: Mapping[tuple[str, str], float] = field(default_factory=dict)
    harmless: Callable[[], bool] = field(default=lambda: False, compare=False)
    pairs: float = 1.0
    weights: float = 1.0

    @cached_property
    def is_harmless(self) -> bool:
        """What `harmless` has found, asked once."""
        return self.harmless()

    def value(self, tensor: str) -> str:
        """The first tensor that holds the values of this one."""
        return self.aliases.get(tensor, tensor)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Tensor to the tensor that holds the same values first; others are absent."""
        first: dict[str, str] = {}
        for node in self.model.nodes:
            if node.op in REARRANGES and not node.domain and node.inputs[0] not in self.model.constants:
                first[node.outputs[0]] = first.get(node.inputs[0], node.inputs[0])
        return first

    def predicted(self, placement: Placement) -> float:
        """Noise of a placement as the sum of what its values bring alone."""
        values = {self.value(e.tensor) for e in placement.edges}
        return sum(map(self.of_value, values)) + sum(self.of_weight(edge, s) for edge, s in placement.compressed)

    def of_value(self, value: str) -> float:
        """What a value brings that carries a pair."""
        return self.pairs * self.alone.get(value, 0.0)

    def of_weight(self, edge: Edge, weight_format: WeightFormat) -> float:
        """What a weight brings that alone is quantized."""
        return self.weights * self.stored.get((edge.tensor, weight_format.name), 0.0)

    def expected(self, placement: Placement) -> float:
        """Noise of a placement as it is foretold, as much more as builds have shown; else as `predicted`."""
        noise = None if self.simulate is None else self.simulate(placement)
        return self.predicted(placement) if noise is None else noise * self._excess(placement)

    def _excess(self, placement: Placement) -> float:
        """How many times noisier a placement is than foretold: of both kinds as their parts of the sum are."""
        if self.pairs == self.weights or not placement.compressed:
            return self.pairs
        if not placement.edges:
            return self.weights
        of_pairs, of_both = self.predicted(Placement(placement.edges)), self.predicted(placement)
        plain = of_pairs / self.pairs + (of_both - of_pairs) / self.weights
        return of_both / plain if plain > 0 else max(self.pairs, self.weights)

    def bound(self, history: Sequence[Trial]) -> float | None:
        """The most that `expected` may be; None if nothing is foretold, or no limit is known."""
        if self.limit is None or self.simulate is None or any(t.metric is not None for t in history):
            return None
        return LIMIT_SHARE * self.limit

    def corrected(self, history: Sequence[Trial]) -> Noise:
        """It, as much more as builds near the limit were noisier than foretold."""
        limit, worst = self.limit, {True: 1.0, False: 1.0}
        if limit is None or self.simulate is None:
            return self
        for trial in history:
            measured = 0.0 if trial.accuracy is None else trial.accuracy.noise
            simulate = self.simulate(trial.placement) if measured > WITHIN_FACTOR * limit else None
            if simulate is not None and WITHIN_FACTOR * limit < simulate < limit / WITHIN_FACTOR:
                kind = bool(trial.placement.edges)
                worst[kind] = max(worst[kind], measured / simulate)
        return replace(self, pairs=worst[True], weights=worst[False])

    def fits(self, placement: Placement, history: Sequence[Trial]) -> bool:
        """Whether a placement may hold the limits."""
        bound = self.bound(history)
        if bound is None:
            allowed = self.allowed(history)
            return allowed == inf or self.predicted(placement) <= allowed
        return self.corrected(history).expected(placement) <= bound

    def allowed(self, history: Sequence[Trial]) -> float:
        """The most that `predicted` may be for a placement to hold the limits, as trials tell; inf: no bound yet."""
        return min(self._by_limit(history), RESERVE * self._by_metric(history)[1])

    def levels(self, history: Sequence[Trial]) -> tuple[float, ...]:
        """Sums of noise to aim at, the best guess first: near the bound that the SQNR sets, or between what has held
        the limit on the metric and what has not."""
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
        measured = ((t.accuracy.noise, self.predicted(t.placement)) for t in history if t.accuracy is not None)
        known = [(real, predicted) for real, predicted in measured if real > 0 and predicted > 0]
        if not known:
            return limit
        real, simulate = min(known, key=lambda pair: abs(log(pair[0] / limit)))
        return simulate * limit / real

    def _by_metric(self, history: Sequence[Trial]) -> tuple[float, float]:
        """The most noise that has held the limit on the metric, and the least that has not; 0 and inf if none has."""
        judged = [(self.predicted(t.placement), t.holds) for t in history if t.metric is not None]
        failed = min((noise for noise, holds in judged if not holds), default=inf)
        return max((noise for noise, holds in judged if holds and noise < failed), default=0.0), failed
