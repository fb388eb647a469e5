"""Search strategies: pure functions from the trials so far to the placements to measure next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from qdqtune.graph.model import GRAPH, Model
from qdqtune.graph.operators import CLAMPS, COMPUTE
from qdqtune.timing.ratios import Plan, judge, with_ratios
from qdqtune.types import LOW_PRECISIONS, CostsByRule, Placement, Proposal, Trial

MOST_PRODUCTS = 0.5
"""If an engine runs this share of the model's matrix products and convolutions in float although they have pairs, it
has no 8-bit kernels for any. Chosen, not measured."""


class Strategy(Protocol):
    """A search, as a pure function of the trials so far."""

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """The next placements to measure against the best so far; empty when nothing is left to try.

        No proposal is the empty placement, or one that `history` has.
        """


def best_of(history: Sequence[Trial]) -> Placement:
    """The placement accepted last; the empty one (float) if none was."""
    return next((t.placement for t in reversed(history) if t.accepted), Placement())


def untried(proposals: Iterable[Proposal], history: Sequence[Trial]) -> Iterator[Proposal]:
    """The proposals that were not measured yet, each placement once, under its first name."""
    tried = {t.placement for t in history} | {Placement()}
    for proposal in proposals:
        if proposal.placement not in tried:
            tried.add(proposal.placement)
            yield proposal


def ratios_to_float(history: Sequence[Trial], plan: Plan) -> dict[Placement, float]:
    """Latency of each placement relative to the float model: medians of the comparisons that lead from it to float,
    multiplied. Failed trials are left out."""
    ratios = {Placement(): 1.0}
    for trial, measured in with_ratios(history, plan):
        if trial.against in ratios:
            ratios[trial.placement] = ratios[trial.against] * measured.median
    return ratios


def products_left_in_float(trial: Trial, model: Model, plan: Plan) -> int:
    """The number of convolutions and matrix products with pairs in front and behind, if the engine ran all of them in
    float and they are most of the model's; else 0. Such an engine has no 8-bit kernels, so pairs are never fast."""
    if not trial.layers or not trial.placement.edges or isinstance(trial.result, CostsByRule):
        return 0
    measured = judge(trial, plan)
    if measured is None or measured.verdict != "slower":
        return 0
    products = [node for node in model.nodes if node.op in COMPUTE]
    stored = {edge.tensor for edge in trial.placement.edges}
    between = set()
    for product in products:
        readers = (model.nodes[use.node] for use in model.uses(product.outputs[0]) if use.node != GRAPH)
        results = [product.outputs[0], *(reader.outputs[0] for reader in readers if reader.op in CLAMPS)]
        if product.inputs[0] in stored and not stored.isdisjoint(results):
            between.add(product.name)
    fused = {name for layer in trial.layers if layer.precision in LOW_PRECISIONS for name in layer.nodes}
    return len(between) if len(between) > MOST_PRODUCTS * len(products) and between.isdisjoint(fused) else 0


@dataclass(frozen=True)
class TwoStage:
    """Runs strategy `first`, which uses layer reports, until it ends or has spent `builds`; then `second`."""

    first: Strategy
    second: Strategy
    builds: int

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        is_first = all(t.proposal.wants_layers for t in history) and len(history) < self.builds
        return (is_first and self.first.propose(history)) or self.second.propose(history)
