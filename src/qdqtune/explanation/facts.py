"""What a finished run knows of its nodes: the one source of `qdqtune explain` and of the report.

Nothing is run. The float model is baseline.onnx, what shipped placement.yaml (the file itself where the user's own Q/DQ
model did); builds, ranges and noise are in the state file. What nodes took comes from the layers of the float model and
of what ships, shared out so that they add up to the latencies that rounds have measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from qdqtune.engines.formats import FORMATS, numeric_format
from qdqtune.errors import BadState
from qdqtune.explanation.reasons import Reasons, is_float
from qdqtune.explanation.values import ORIGINS, RULED
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.placement.files import every_edge, read_placement_file
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import placement_in
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import Spent, spent_by
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.priors import NOTHING, Prior, unpacked
from qdqtune.search.costs.units import ways_in
from qdqtune.search.cut import CutSearch
from qdqtune.search.regions import discovery, patterns
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.fingerprint import Fingerprint
from qdqtune.tuning.finished import FinishedRun
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT
from qdqtune.tuning.modes.mode import GroupOutcome
from qdqtune.tuning.records import PricesRecord, RangesRecord
from qdqtune.tuning.subject import edges_within, filtered
from qdqtune.types import Edge, Layer, Placement, Trial


@dataclass(frozen=True)
class Alone:
    """What subgraph mode found of a group by itself: its verdict, and its ms in float and at best in 8 bits."""

    why: str
    float_ms: float
    quantized_ms: float | None


@dataclass(frozen=True)
class Facts:
    """All that is known of a finished run.

    `model` is the float model as it was measured, `able` where a pair can stand, `possible` where the user allows one
    as well. `placement` is what shipped ("tuned", "baseline", or "given": the user's own Q/DQ model). The times of
    `float_layers` add up to what the float model took; those of `final_layers`, of what shipped, are shares of
    `final_ms`, None where nothing but the search has measured that. `noise` knows what rounding each value does where
    the run had to know, `alone` what subgraph mode found by node, `in_float` why the engine runs nodes of the shipped
    model in float although they have pairs.
    """

    model: Model
    able: frozenset[Edge]
    possible: frozenset[Edge]
    placement: Placement
    shipped: Literal["tuned", "baseline", "given"]
    quant_type: str
    float_layers: tuple[Layer, ...]
    history: tuple[Trial, ...]
    final_layers: tuple[Layer, ...] = ()
    final_ms: float | None = None
    limits: Limits = field(default_factory=Limits)
    plan: Plan = field(default_factory=Plan)
    noise: Noise | None = None
    prior: Prior = NOTHING
    alone: Mapping[str, Alone] = field(default_factory=dict)
    in_float: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def trial(self) -> Trial | None:
        """The trial of what shipped, the last one if there are several."""
        return next((t for t in reversed(self.history) if t.placement == self.placement), None)

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        """What the shipped build ran, by node; empty if nobody knows."""
        return {name: layer for layer in self.shipped_layers for name in layer.nodes}

    @cached_property
    def shipped_layers(self) -> tuple[Layer, ...]:
        """What the shipped build ran, in order; empty if nobody knows."""
        if not self.placement:
            return self.float_layers
        return self.final_layers or (self.trial and self.trial.layers) or ()

    @property
    def float_ms(self) -> float:
        """What the float model took, as far as its layers tell."""
        return sum(layer.time_ms or 0.0 for layer in self.float_layers)

    @cached_property
    def float_spent(self) -> Mapping[str, Spent]:
        """What each node took in the float model; empty if the engine tells no times."""
        return spent_by(self.model, Placement(), self.float_layers, self.float_ms)

    @cached_property
    def spent(self) -> Mapping[str, Spent]:
        """What each node took in what shipped; empty if nobody knows."""
        if not self.placement:
            return self.float_spent
        ms = self.final_ms
        if ms is None:
            ratio = ratios_to_float(self.history, self.plan).get(self.placement)
            ms = None if ratio is None else ratio * self.float_ms
        return {} if ms is None else spent_by(self.model, self.placement, self.shipped_layers, ms)

    @cached_property
    def costs(self) -> Costs | None:
        """Prices of the units of what shipped; None if the engine tells no layer times."""
        if not any(layer.time_ms for layer in self.float_layers):
            return None
        ways = ways_in([self.placement, *(t.placement for t in self.history)])
        search = CutSearch(self.model, self.possible, self.float_layers, plan=self.plan, ways=ways, prior=self.prior)
        return search.costs(self.history, self.placement)

    @cached_property
    def origin(self) -> str:
        """Where the placement that shipped comes from, in words."""
        if self.shipped == "given":
            return "your own Q/DQ model"
        origin = self.trial.proposal.origin if self.trial else ""
        known = f"the rule {origin!r}" if origin in RULED else ORIGINS.get(origin, f"the candidate {origin!r}")
        return known if origin else "an earlier run"


def facts_of(run: FinishedRun) -> Facts:
    """What a finished run has left, without running anything.

    Raises:
        BadState: its state file ends too early.
    """
    folder, summary, fingerprint, limits = run.folder, run.summary, run.fingerprint, run.limits
    recorded, shipped = read_placement_file(folder / PLACEMENT), summary["shipped"]
    shaped = with_input_shapes(load(folder / BASELINE), fingerprint.input_shapes)
    needs_file = shipped == "given" and fingerprint.from_qdq
    placement = placement_in(shaped, load(folder / FINAL)) if needs_file else recorded.placement
    seen = placement.edges.union(*(t.placement.edges for t in run.history))
    if (calibrated := run.records.get(RangesRecord)) is None:
        raise BadState(f"the state file of {folder} ends before the calibration: run qdqtune tune to its end")
    able, known = possible_edges(shaped, calibrated.ranges) | seen, run.records.get(PricesRecord)
    facts = Facts(
        model=shaped,
        able=able,
        possible=able & _chosen(shaped, fingerprint) | seen,
        placement=placement,
        shipped=shipped,
        quant_type=recorded.quant_type,
        float_layers=run.float_layers,
        history=run.history,
        final_layers=run.final_layers if shipped == "tuned" else (),
        final_ms=run.here["final_ms"] if shipped == "tuned" else None,
        limits=limits,
        plan=run.plan,
        noise=Noise(shaped, run.alone, limits.max_noise) if run.alone else None,
        prior=NOTHING if known is None else unpacked(known.prices),
        alone=dict(_alone(summary.get("groups", ()))),
    )
    return _with_engine(facts, folder / FINAL, recorded.engine)


def _chosen(model: Model, fingerprint: Fingerprint) -> frozenset[Edge]:
    """The edges that the user's list of nodes leaves."""
    if not fingerprint.node_filter:
        return every_edge(model)
    regions = discovery.find(model, fingerprint.regions)
    return edges_within(filtered(model, patterns.group(model, regions), fingerprint.node_filter))


def _alone(groups: Iterable[GroupOutcome]) -> Iterator[tuple[str, Alone]]:
    """What subgraph mode found of each group that it has timed, by node."""
    for group in groups:
        if group.kind is not None:
            for node in group.nodes:
                yield node, Alone(group.why, group.float_ms, group.quantized_ms)


def _with_engine(facts: Facts, final: Path, engine: str) -> Facts:
    """With the reasons for nodes that have pairs and ran in float all the same, read from the shipped model."""
    running = {name: x for name, x in facts.layers.items() if x.kind == "compute" and is_float(x.precision)}
    paired = {e.node for e in facts.placement} & running.keys()
    if not paired or engine not in FORMATS:
        return facts
    model = load(final)
    numbers = numeric_format(engine, "fp8" if facts.quant_type == "fp8" else "int8")
    reasons = Reasons(model, facts.shipped_layers, numbers)
    told = {name: reasons.of_float(model.node(name)) for name in paired & model.index_of.keys()}
    return replace(facts, in_float=told)
