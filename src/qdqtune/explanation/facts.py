"""The facts of a finished run about its nodes: the source of both `qdqtune explain` and the report.

Nothing is run. The float model is read from baseline.onnx, the shipped placement from placement.yaml (from the shipped
file where that is the user's own Q/DQ model); builds, ranges and noise from the state file. Times of nodes come from
the engine's layers, scaled so that they add up to the measured latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from qdqtune.errors import BadState
from qdqtune.explanation.formatting import origin_in_words
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.placement.files import every_edge, read_placement_file
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import placement_in
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import NodeTime, node_times
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.regions import discovery, patterns
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.fingerprint import Fingerprint
from qdqtune.tuning.finished import FinishedRun
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT
from qdqtune.tuning.records import RangesRecord
from qdqtune.tuning.subject import edges_within, filtered
from qdqtune.types import CostsByRule, Edge, Layer, Placement, Trial


@dataclass(frozen=True)
class Facts:
    """What is known of a finished run.

    `model` is the float model as it was measured. A pair can stand on the edges of `able`; the user allows it on those
    of `possible`. `placement` is the shipped one; `shipped` says whether that is the tuned model, the baseline, or the
    user's own Q/DQ model ("given"). The times of `float_layers` add up to the latency of the float model, those of
    `final_layers` to `final_ms`, which is None where only the search has measured the shipped model. `noise` is set
    where the run measured the noise of single tensors.
    """

    model: Model
    able: frozenset[Edge]
    possible: frozenset[Edge]
    placement: Placement
    shipped: Literal["tuned", "baseline", "given"]
    float_layers: tuple[Layer, ...]
    history: tuple[Trial, ...]
    final_layers: tuple[Layer, ...] = ()
    final_ms: float | None = None
    limits: Limits = field(default_factory=Limits)
    plan: Plan = field(default_factory=Plan)
    noise: Noise | None = None

    @cached_property
    def trial(self) -> Trial | None:
        """The trial of the shipped placement, the last one if there are several; None where the user's own file ships,
        which no candidate stands for."""
        if self.shipped == "given":
            return None
        return next((t for t in reversed(self.history) if t.placement == self.placement), None)

    @property
    def is_by_rule(self) -> bool:
        """Whether nothing was timed, and costs by rule decided."""
        return any(isinstance(trial.result, CostsByRule) for trial in self.history)

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        """The layers of the shipped build by node; empty if unknown."""
        return {name: layer for layer in self.shipped_layers for name in layer.nodes}

    @cached_property
    def shipped_layers(self) -> tuple[Layer, ...]:
        """The layers of the shipped build, in order; empty if unknown."""
        if not self.placement:
            return self.float_layers
        return self.final_layers or (self.trial and self.trial.layers) or ()

    @property
    def float_ms(self) -> float:
        """The time of the float model: the sum of its layers."""
        return sum(layer.time_ms or 0.0 for layer in self.float_layers)

    @cached_property
    def float_spent(self) -> Mapping[str, NodeTime]:
        """The time of each node in the float model; empty if the engine gives no times."""
        return node_times(self.model, Placement(), self.float_layers, self.float_ms)

    @cached_property
    def spent(self) -> Mapping[str, NodeTime]:
        """The time of each node in the shipped model; empty if unknown."""
        if not self.placement:
            return self.float_spent
        ms = self.shipped_ms
        return {} if ms is None else node_times(self.model, self.placement, self.shipped_layers, ms)

    @cached_property
    def shipped_ms(self) -> float | None:
        """The time of what ships; None if unknown."""
        if not self.placement:
            return self.float_ms
        if self.final_ms is not None:
            return self.final_ms
        ratio = ratios_to_float(self.history, self.plan).get(self.placement)
        return None if ratio is None else ratio * self.float_ms

    @cached_property
    def origin(self) -> str:
        """Where the shipped placement comes from, in words."""
        if self.shipped == "given":
            return "your own Q/DQ model"
        origin = self.trial.proposal.origin if self.trial else ""
        return origin_in_words(origin) if origin else "an earlier run"


def facts_of(run: FinishedRun) -> Facts:
    """Read the facts of a finished run from its folder.

    Raises:
        BadState: its state file ends too early, or records pairs of another model.
    """
    folder, summary, fingerprint, limits = run.folder, run.summary, run.fingerprint, run.limits
    recorded, shipped = read_placement_file(folder / PLACEMENT), summary["shipped"]
    shaped = with_input_shapes(load(folder / BASELINE), fingerprint.input_shapes)
    placement = placement_in(shaped, load(folder / FINAL)) if run.keeps_own_pairs else recorded.placement
    seen = placement.edges.union(*(t.placement.edges for t in run.history))
    if strange := seen - every_edge(shaped):
        raise BadState(f"{folder} records a pair at {min(map(str, strange))}, which its {BASELINE} does not have")
    if (calibrated := run.records.get("ranges", RangesRecord)) is None:
        raise BadState(f"the state file of {folder} ends before the calibration: run qdqtune tune to its end")
    able = possible_edges(shaped, calibrated.ranges) | seen
    return Facts(
        model=shaped,
        able=able,
        possible=able & _edges_of_listed_nodes(shaped, fingerprint) | seen,
        placement=placement,
        shipped=shipped,
        float_layers=run.float_layers,
        history=run.history,
        final_layers=run.layers_of(placement) if placement else (),
        final_ms=run.here["final_ms"],
        limits=limits,
        plan=run.plan,
        noise=Noise(shaped, run.alone, limits.max_noise) if run.alone else None,
    )


def _edges_of_listed_nodes(model: Model, fingerprint: Fingerprint) -> frozenset[Edge]:
    """The edges within the nodes that the user has listed; all edges if there is no list."""
    if not fingerprint.node_filter:
        return every_edge(model)
    regions = discovery.find(model, fingerprint.regions)
    return edges_within(filtered(model, patterns.group(model, regions), fingerprint.node_filter))
