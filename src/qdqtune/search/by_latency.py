"""Grouped search, for engines without layer times: each build shows how one change affects the latency of the model.

The placements by rules come first. Then all units of one kind (same operators and shapes) are flipped between quantized
and float in the best placement so far, kinds with the most work first; then stretches of the graph, since a conversion
at a border only pays if both sides agree; then halves of kinds and stretches, and so on. At the end, groups that were
tried on an earlier best placement are tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMPUTE, elements, work
from qdqtune.search import best_of, untried
from qdqtune.search.costs.decisions import cut_within, other
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Partition, Unit, partition, usual_groups
from qdqtune.types import Edge, Placement, Proposal, Trial

COPY_SHARE = 0.2
"""Assumed time of one multiplication, relative to copying one element. Chosen as roughly right for all engines."""

QUANTIZED_SHARE = 0.4
"""Assumed time of a compute operator in 8 bits, relative to float. Chosen as roughly right for all engines."""


@dataclass(frozen=True)
class LatencySearch:
    """Grouped search (see the module): begins with `seeds`, and proposes `width` placements at a time."""

    model: Model
    possible: frozenset[Edge]
    seeds: Mapping[str, Placement]
    width: int = 1

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`: first all seeds, then `width` groups of units at a time."""
        seeds = (Proposal(name, placement) for name, placement in self.seeds.items())
        if proposals := tuple(untried(seeds, history)):
            return proposals
        return tuple(islice(untried(self._flips(history), history), self.width))

    def _flips(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        """The best placement with one group flipped: first each new group, then those tried on an earlier best."""
        best = best_of(history)
        if best.wide:  # its units have 8 bits or floats
            return
        asked = {t.proposal.origin: t.against == best for t in history}
        for again in (False, True):
            for group in self._groups():
                origin = self._group_name(group)
                if again == (origin in asked) and not asked.get(origin):
                    yield Proposal(origin, self._flipped(best, group))

    @cached_property
    def units(self) -> Partition:
        """Units: each compute operator with what engines usually fuse into it, and every other node by itself."""
        return partition(self.model, self.possible, usual_groups(self.model, self.possible))

    def _groups(self) -> Iterator[Sequence[Unit]]:
        """Groups to flip: kinds of units by falling work and halves of the graph, then halves of these, and so on."""
        able = [unit for unit in self.units.units if unit.inputs]
        kinds: dict[str, list[Unit]] = {}
        for unit in able:
            kinds.setdefault(unit.kind, []).append(unit)
        level: list[Sequence[Unit]] = list(kinds.values())
        stretches = _halves([able])
        while level or stretches:
            for groups in (level, stretches):
                yield from sorted(groups, key=lambda units: (-self._work(units), units[0].number))
            level, stretches = _halves(level), _halves(stretches)

    def _flipped(self, best: Placement, group: Sequence[Unit]) -> Placement:
        """The best placement with a group flipped: to float if most of its work is quantized, else the reverse."""
        decision = self.units.decision(best)
        running = [u for u in group if u.number in decision.quantized]
        rest = [u for u in group if u.number not in decision.quantized]
        turned = running if self._work(running) >= self._work(rest) else rest
        return self.units.placement(other(self.units, decision, [u.number for u in turned]))

    def _work(self, units: Collection[Unit]) -> float:
        return sum(work(self.model, self.model.nodes[n]) for u in units for n in u.nodes)

    def _group_name(self, group: Sequence[Unit]) -> str:
        first, last = (self.model.nodes[group[k].nodes[0]].name for k in (0, -1))
        if len(group) == 1:
            return f"flip {first}"
        alike = len({unit.kind for unit in group}) == 1
        return f"flip {first} and {len(group) - 1} like it" if alike else f"flip {first} to {last}"


def _halves(groups: Sequence[Sequence[Unit]]) -> list[Sequence[Unit]]:
    return [half for g in groups if len(g) > 1 for half in (g[: len(g) // 2], g[len(g) // 2 :])]


def placement_within(model: Model, possible: frozenset[Edge], noise: Noise, allowed: float) -> Placement:
    """A placement with at most `allowed` noise that is estimated to be fast, without any measured time: the minimum cut
    of assumed costs.

    Compute operators are assumed to take less than half their time in 8 bits, other operators to save nothing, and each
    conversion to take one pass over its tensor: so stretches are quantized that are worth their conversions.
    """
    parts = partition(model, possible, usual_groups(model, possible))
    # The unit of prices is the time to copy an element.
    border = {tensor: elements(model, tensor) for tensor in parts.edges}
    costs = Costs(parts, tuple(_unit_price(model, unit) for unit in parts.units), quantize=border, dequantize=border)
    return parts.placement(cut_within(costs, noise, allowed))


def _unit_price(model: Model, unit: Unit) -> Price:
    nodes = [model.nodes[n] for n in unit.nodes]
    copied = sum(work(model, n) for n in nodes if n.op not in COMPUTE)
    computed = COPY_SHARE * sum(work(model, n) for n in nodes if n.op in COMPUTE)
    return Price(copied + computed, copied + QUANTIZED_SHARE * computed)
