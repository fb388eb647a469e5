"""What summary.json says of a search by rule, where nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from qdqtune.graph.model import Model
from qdqtune.numerics.scores import equal_share
from qdqtune.placement.possible import conversions, wide_tensors, wide_weights
from qdqtune.search.costs.rule_costs import RuleCosts, left_nodes
from qdqtune.timing.limits import failure
from qdqtune.types import Placement, Trial


class Bits(TypedDict):
    """The activations of a placement with a pair, those of them that are stored in 16 bits, and the weights that are.
    Files of earlier versions do not count weights."""

    tensors: int
    tensors_16: int
    weights_16: NotRequired[int]


class ByRuleCandidate(Bits):
    """A candidate: the nodes that run elsewhere, None if it failed; the values that are converted between 8 and 16
    bits; and on how many samples it ran: on the first ones if they showed that it misses a limit."""

    number: int
    origin: str
    elsewhere: int | None
    conversions: int
    sqnr_db: float | None
    agreement: float | None
    holds_limits: bool | None
    shipped: bool
    samples: NotRequired[int]
    failure: NotRequired[str]


class ByRule(TypedDict):
    """The result of a search by rule."""

    candidates: list[ByRuleCandidate]


def summary_by_rule(costs: RuleCosts, history: Sequence[Trial], final: Placement, *, is_judged: bool) -> ByRule:
    """The candidates by nodes elsewhere, bits and accuracy; without what random inputs say of that."""
    rows = [_row(costs, trial, is_final=trial.placement == final) for trial in history]
    if not is_judged:
        rows = [{**row, "sqnr_db": None, "agreement": None} for row in rows]
    return {"candidates": rows}


def bits_of(model: Model, placement: Placement) -> Bits:
    """How many bits the tensors of a placement have."""
    activations = {edge.tensor for edge in placement.edges} - model.constants.keys()
    wide, weights = wide_tensors(model, placement), wide_weights(model, placement)
    return Bits(tensors=len(activations), tensors_16=len(wide), weights_16=len(weights))


def _row(costs: RuleCosts, trial: Trial, *, is_final: bool) -> ByRuleCandidate:
    bits, failed, placement = bits_of(costs.model, trial.placement), failure(trial), trial.placement
    converted = conversions(costs.model, placement, wide_tensors(costs.model, placement))
    row = ByRuleCandidate(
        number=trial.number,
        origin=trial.proposal.origin,
        elsewhere=None if failed else len(left_nodes(trial.layers or ())),
        tensors=bits["tensors"],
        tensors_16=bits["tensors_16"],
        weights_16=bits["weights_16"],
        conversions=len({edge.tensor for edge in converted}),
        sqnr_db=trial.sqnr_db,
        agreement=equal_share(trial.accuracy),
        holds_limits=trial.holds if failed is None else False,
        shipped=is_final,
        samples=0 if trial.accuracy is None else trial.accuracy.samples,
    )
    return row if failed is None else row | {"failure": failed.reason}
