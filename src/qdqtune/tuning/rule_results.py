"""What summary.json says of a search by rule, where nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from qdqtune.numerics.scores import equal_share
from qdqtune.placement.widths import conversions, wide_tensors, wide_weights
from qdqtune.search.costs.rule_costs import RuleCosts, left_nodes
from qdqtune.timing.limits import failure
from qdqtune.types import Placement, Trial


class ByRuleCandidate(TypedDict):
    """A candidate: the nodes that run elsewhere, None if it failed; its tensors with a pair, those in 16 bits, the
    values that are converted between both, and weights in 16 bits."""

    number: int
    origin: str
    elsewhere: int | None
    tensors: int
    tensors_16: int
    conversions: int
    weights_16: int
    sqnr_db: float | None
    agreement: float | None
    holds_limits: bool
    shipped: bool
    failure: NotRequired[str]


class ByRule(TypedDict):
    """The result of a search by rule. `wide_share` is the share of the final model's tensors that have 16 bits."""

    wide_share: float
    candidates: list[ByRuleCandidate]


def summary_by_rule(costs: RuleCosts, history: Sequence[Trial], final: Placement) -> Mapping[str, Any]:
    """The candidates by nodes elsewhere, bits and accuracy, and the share of 16 bits in what ships."""
    rows = [_row(costs, trial, is_final=trial.placement == final) for trial in history]
    tensors, wide, _ = counts(costs, final)
    return {"wide_share": wide / tensors if tensors else 0.0, "candidates": rows}


def counts(costs: RuleCosts, placement: Placement) -> tuple[int, int, int]:
    """The activations with a pair, those stored in 16 bits, and the values that are converted to other bits."""
    model = costs.model
    stored = wide_tensors(model, placement)
    activations = {edge.tensor for edge in placement.edges} - model.constants.keys()
    return len(activations), len(stored), len({edge.tensor for edge in conversions(model, placement, stored)})


def _row(costs: RuleCosts, trial: Trial, *, is_final: bool) -> ByRuleCandidate:
    tensors, wide, converted = counts(costs, trial.placement)
    failed = failure(trial)
    row = ByRuleCandidate(
        number=trial.number,
        origin=trial.proposal.origin,
        elsewhere=None if failed else len(left_nodes(trial.layers or ())),
        tensors=tensors,
        tensors_16=wide,
        conversions=converted,
        weights_16=len(wide_weights(costs.model, trial.placement)),
        sqnr_db=trial.sqnr_db,
        agreement=equal_share(trial.accuracy),
        holds_limits=failed is None and trial.holds is not False,
        shipped=is_final,
    )
    return row if failed is None else row | {"failure": failed.reason}
