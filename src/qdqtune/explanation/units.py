"""The table of a finished run by unit: how each runs in what ships, what it takes, and why it does not run in 8 bits.

A unit are nodes that are quantized together, since the engine runs them as one kernel. What it would take the other way
stands there only if a build ran it so, with all units around it as in what ships: "measured" if nothing else differed
in that build, else "estimated" from the times of that build's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from qdqtune.explanation.formatting import counted, origin_in_words
from qdqtune.explanation.unfused import is_float, is_low
from qdqtune.graph.operators import ASKS_SHAPE
from qdqtune.numerics.accuracy import decibels
from qdqtune.placement.possible import refusal
from qdqtune.search.costs.attribution import BuildTimes, attribute, timed_builds
from qdqtune.search.costs.output_noise import DOUBT
from qdqtune.search.costs.units import (
    Partition,
    Unit,
    formats_in,
    fusion_groups,
    inner_edges,
    partition,
    split,
    usual_groups,
)
from qdqtune.timing.limits import outcome
from qdqtune.tuning.finished import FinishedRun
from qdqtune.types import Layer, Placement, Trial, WeightFormat, sqnr_of

Reason = Literal[
    "",
    "no kernel for this operator",
    "conversions cost more than it saves",
    "no gain beyond noise",
    "accuracy limit",
    "not tried",
]
"""Why a unit does not run in 8 bits; empty if it does."""

REASONS: Mapping[str, Reason] = {
    "faster": "not tried",
    "inaccurate": "accuracy limit",
    "slower": "no gain beyond noise",
    "undecided": "no gain beyond noise",
    "failed": "not tried",
}
"""The reason for a unit that follows from the outcome of a candidate that ran it, and no other one, in 8 bits."""

WITHOUT_KERNEL = ASKS_SHAPE | {"ConstantOfShape", "EyeLike", "NonZero", "Range"}
"""Operators that no engine runs in 8 bits: they compute shapes and indices, or read no data."""

IN_ADVANCE = "computed in advance"
"""The state of a unit that the engine computes when it is built, not in an inference."""

NOISE = 0.1
"""Times of one unit in two builds are alike if they differ by no more than this share. Chosen, not measured."""


@dataclass(frozen=True)
class Explanation:
    """A row of the table: a unit, and why it runs as it does. Times are in ms, conversions at its borders included.

    `state` is "8 bits", "16 bits", "float", "elsewhere" (another execution provider runs it), "computed in advance", or
    names the bits of its weights where these alone are quantized. `precision` is what the engine reports, "" if it does
    not. `ms` is the time in what ships, `conversion_ms` of it in conversions, `float_ms` that in the float model: their
    sums over all units are the measured latencies. `more_ms` is what the model would take more with this unit in the
    state `otherwise`, below 0 if less, and `source` says where that comes from. A time is None where it is unknown.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    state: str
    precision: str
    ms: float | None
    float_ms: float | None
    otherwise: Literal["8 bits", "float"]
    more_ms: float | None = None
    source: Literal["", "measured", "estimated"] = ""
    reason: Reason = ""
    detail: str = ""
    conversion_ms: float = 0.0

    @property
    def why(self) -> str:
        """The reason, what shows it, and the times, in one text."""
        facts = [self.detail] if self.detail else []
        if self.ms is not None and self.float_ms is not None:
            facts.append(f"it takes {self.ms:.3g} ms, in the float model {self.float_ms:.3g} ms")
        if self.more_ms is not None:
            change = f"{abs(self.more_ms):.3g} ms {'more' if self.more_ms >= 0 else 'less'}"
            facts.append(f"in {self.otherwise} it would take {change} ({self.source})")
        return ": ".join(filter(None, (self.reason, "; ".join(facts))))


def tally(rows: Iterable[Explanation]) -> tuple[Explanation, ...]:
    """One row for each state and reason, with the nodes and times of all its units: the largest first, in both."""
    groups: dict[tuple[str, Reason], list[Explanation]] = {}
    for row in sorted(rows, key=lambda row: -(row.ms or 0.0)):
        groups.setdefault((row.state, row.reason), []).append(row)
    sums = []
    for members in groups.values():
        nodes = tuple(name for row in members for name in row.nodes)
        times = total(row.ms for row in members), total(row.float_ms for row in members)
        sums.append(replace(members[0], nodes=nodes, ms=times[0], float_ms=times[1]))
    return tuple(sorted(sums, key=lambda row: (-(row.ms or 0.0), -len(row.nodes), row.reason)))


def total(times: Iterable[float | None]) -> float | None:
    """The sum of the known times; None if none is known."""
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


def explanations(run: FinishedRun) -> tuple[Explanation, ...]:
    """A row for every unit, in graph order."""
    table = _Table(run)
    return tuple(map(table.row, table.parts.units))


@dataclass(frozen=True)
class _Build:
    """A candidate, or the float model (`trial` is None), with the state of each unit by number.

    `differing` are the units that run otherwise than in what ships, `fresh` those in 8 bits that were not in what it
    was compared with. `times` is None if unknown.
    """

    trial: Trial | None
    states: Sequence[str]
    differing: frozenset[int]
    fresh: frozenset[int]
    times: BuildTimes | None


class _Table:
    def __init__(self, run: FinishedRun) -> None:
        self.run = run
        self.parts = _units(run)
        self._layer_of = {name: layer for layer in run.shipped_layers for name in layer.nodes}
        self._states = self._states_in(run.placement, run.shipped_layers)
        least = run.limits.min_sqnr
        self._limit = "the limits on accuracy" if least is None else f"{least:g} dB"

    def _states_in(self, placement: Placement, layers: Sequence[Layer]) -> list[str]:
        """The state of each unit: "8 bits" or "float" as the layers say, else by its pairs; or the name of its weight
        format."""
        decision, owner = self.parts.decision(placement), self.parts.owner
        states = ["8 bits" if unit.number in decision.quantized else "float" for unit in self.parts.units]
        computing = [layer for layer in layers if layer.kind == "compute"]
        for reported, runs_so in (("float", is_float), ("8 bits", is_low)):
            for layer in computing:
                if runs_so(layer.precision):
                    for name in owner.keys() & layer.nodes:
                        states[owner[name]] = reported
        for number, weight_format in decision.weight_formats:
            states[number] = weight_format.name
        return states

    @cached_property
    def _times(self) -> Mapping[Placement, BuildTimes]:
        """The times of the builds that have layer times, that of what ships among them."""
        run = self.run
        if not run.float_spent or not run.spent or not run.float_ms or not run.shipped_ms:
            return {}
        times = {
            each.placement: each
            for each in timed_builds(run.model, run.history, run.plan, run.float_layers, run.float_ms)
        }
        return times | {run.placement: attribute(run.model, run.placement, run.shipped_layers, run.shipped_ms)}

    @cached_property
    def _builds(self) -> list[_Build]:
        states = dict[Placement, Sequence[str]]()
        builds = list[_Build]()
        for trial in (None, *self.run.history):
            placement = Placement() if trial is None else trial.placement
            layers = self.run.float_layers if trial is None else trial.layers or ()
            states[placement] = ran = self._states_in(placement, layers)
            before = () if trial is None else states.get(trial.against, ())
            differing = frozenset(n for n, state in enumerate(ran) if state != self._states[n])
            fresh = frozenset(n for n, state in enumerate(before) if ran[n] == "8 bits" != state)
            builds.append(_Build(trial, ran, differing, fresh, self._times.get(placement)))
        return builds

    def row(self, unit: Unit) -> Explanation:
        """How a unit runs, what it takes, and why it does not run in 8 bits."""
        run, state = self.run, self._states[unit.number]
        nodes = [self.parts.model.nodes[n] for n in unit.nodes]
        names = tuple(node.name for node in nodes)
        ran = [self._layer_of[name] for name in names if name in self._layer_of]
        row = Explanation(
            nodes=names,
            operators=tuple(node.op for node in nodes),
            state=state,
            precision=next((layer.precision.lower() for layer in ran if layer.kind == "compute"), ""),
            ms=sum(sum(run.spent[name]) for name in names) if run.spent else None,
            float_ms=sum(sum(run.float_spent[name]) for name in names) if run.float_spent else None,
            otherwise="8 bits" if state == "float" else "float",
            conversion_ms=sum(run.spent[name].conversions for name in names) if run.spent else 0.0,
        )
        part = f"part of {shipped_origin(run)}, which was measured as a whole"
        if not run.summary["timed"]:
            part = f"8 bits cost the least, and the outputs hold {self._limit}"
        elsewhere = [layer.elsewhere for layer in ran if layer.elsewhere]
        if elsewhere:
            detail = f"it runs {elsewhere[0]}"
            return replace(row, state="elsewhere", reason="no kernel for this operator", detail=detail)
        if not run.placement.wide.isdisjoint(unit.inputs):
            detail = f"with 8 bits here too, the outputs would miss {self._limit}"
            return replace(row, state="16 bits", precision="uint16", reason="accuracy limit", detail=detail)
        if state not in ("8 bits", "float"):
            weight_format = WeightFormat.named(state)
            state = "8 bits, dynamic" if weight_format.dynamic else f"{weight_format.bits}-bit weights"
            return replace(row, state=state, detail=f"its weights alone are {weight_format.name}, {part}")
        if state == "float":
            if ran and all(layer.kind == "folded" for layer in ran):
                return replace(row, state=IN_ADVANCE, detail="the engine computes it once, when it is built")
            if not run.possible.issuperset(unit.inputs + unit.weights):
                return replace(row, reason="not tried", detail="the nodes that you have listed leave it in float")
            without_kernel = self._without_kernel(unit)
            if without_kernel:
                return replace(row, reason="no kernel for this operator", detail=without_kernel)
        build, ships = self._shown(unit, row.otherwise), self._times.get(run.placement)
        saves = False
        if build is not None and build.times is not None and ships is not None:
            conversions = self._conversions(unit, build.times) - self._conversions(unit, ships)
            own = sum(build.times.nodes.get(name, 0.0) - ships.nodes.get(name, 0.0) for name in names)
            source: Literal["measured", "estimated"] = "measured" if len(build.differing) == 1 else "estimated"
            row, saves = replace(row, more_ms=own + conversions, source=source), own < 0
        if state == "8 bits":
            return replace(row, detail=part)
        reason, detail = self._in_float(unit, row, saves)
        return replace(row, reason=reason, detail=detail)

    def _shown(self, unit: Unit, state: str) -> _Build | None:
        """The timed build that ran a unit in a state, and all units around it as in what ships, with the fewest other
        differences."""
        around = self.parts.near(unit) - {unit.number}
        timed = [build for build in self._builds if build.times is not None and build.states[unit.number] == state]
        shown = [build for build in timed if around.isdisjoint(build.differing)]
        return min(shown, key=lambda build: len(build.differing), default=None)

    def _conversions(self, unit: Unit, times: BuildTimes) -> float:
        tensors = {*unit.outputs, *(edge.tensor for edge in unit.inputs)}
        return sum(times.quantize.get(t, 0.0) + times.dequantize.get(t, 0.0) for t in tensors)

    # ---- reasons

    def _without_kernel(self, unit: Unit) -> str:
        """A text if a unit reads nothing that can carry a pair, no engine has an 8-bit kernel for it, or this one ran
        it in float in every build with pairs on all of its inputs; else empty."""
        run, model = self.run, self.parts.model
        nodes = [model.nodes[n] for n in unit.nodes]
        if all(node.op in WITHOUT_KERNEL for node in nodes):
            return f"{nodes[0].op} computes no values in 8 bits"
        if not unit.inputs:
            inside = set(model.constants).union([""], *(node.outputs for node in nodes))
            for node in nodes:
                for slot, tensor in enumerate(node.inputs):
                    if tensor not in inside:
                        why = refusal(model, tensor, node.index, slot) or "the range of its values is unknown"
                        return f"no pair can stand on its input {tensor}: {why}"
            return "it reads no tensor but constants"
        reported = [(each.trial.placement, each.states) for each in self._builds if each.trial and each.trial.layers]
        if run.shipped_layers:
            reported.append((run.placement, self._states))
        edges = unit.inputs + unit.weights
        states = [states[unit.number] for placement, states in reported if placement.edges.issuperset(edges)]
        if not states or "8 bits" in states:
            return ""
        return "with pairs on all of its inputs the engine still ran it in float"

    def _in_float(self, unit: Unit, row: Explanation, saves: bool) -> tuple[Reason, str]:
        """The reason for a unit in float that may have pairs: what a build shows of it, else what is predicted of its
        rounding, else what became of the candidate with the fewest units that ran it in 8 bits. `saves`: it takes
        less in 8 bits, without conversions."""
        if not self.run.summary["timed"]:
            return "accuracy limit", f"nothing that was tried has it in 8 or 16 bits and holds {self._limit}"
        if row.more_ms is not None and row.more_ms > NOISE * (row.ms or 0.0):
            return "conversions cost more than it saves" if saves else "no gain beyond noise", ""
        lost = self._lost_accuracy(unit)
        if lost:
            return "accuracy limit", lost
        if row.more_ms is not None or row.ms == 0:
            return "no gain beyond noise", ""
        tried = [build for build in self._builds if unit.number in build.fresh]
        if not tried:
            return "not tried", "no candidate ran it in 8 bits"
        build = min(tried, key=lambda each: len(each.fresh))
        assert build.trial is not None
        came, others = outcome(build.trial, self.run.plan), len(build.fresh) - 1
        origin = origin_in_words(build.trial.proposal.origin)
        if others:
            return (
                "not tried",
                f"not by itself: {origin} had it in 8 bits with {counted(others, 'more unit')}, and was {came}",
            )
        return REASONS[came], f"{origin} ran it in 8 bits: {came}"

    def _lost_accuracy(self, unit: Unit) -> str:
        """A text if rounding a unit is predicted to take the outputs below the limit; else empty."""
        noise, most = self.run.noise, self.run.limits.max_noise
        if noise is None or most is None:
            return ""
        allowed, now, rounded = self._noise_now
        stored = [edge for tensor in unit.outputs for edge in self.parts.edges.get(tensor, ())]
        edges = {e for e in (*unit.inputs, *unit.weights, *stored) if noise.value(e.tensor) not in rounded}
        alone = noise.summed(Placement.of(edges))
        if not alone or now + alone <= DOUBT * allowed:
            return ""
        expected, limit = (decibels(sqnr_of(each)) for each in ((now + alone) * most / allowed, most))
        too = ", too," if rounded else ""
        return f"with it in 8 bits{too} the outputs are estimated at {expected}, and the limit is {limit}"

    @cached_property
    def _noise_now(self) -> tuple[float, float, set[str]]:
        """The most noise that holds the limits, the noise of what ships, and the values that it rounds."""
        noise, placement = self.run.noise, self.run.placement
        assert noise is not None
        rounded = {noise.value(edge.tensor) for edge in placement.edges}
        return noise.allowed(self.run.history), noise.summed(placement), rounded


def shipped_origin(run: FinishedRun) -> str:
    """Where the placement of what ships comes from."""
    if run.summary["shipped"] == "given":
        return "your own Q/DQ model"
    return origin_in_words(run.trial.proposal.origin) if run.trial else "an earlier run"


def _units(run: FinishedRun) -> Partition:
    """The kernels of the float build as units, each split where pairs of what ships stand inside it; as engines usually
    fuse nodes if the layers are unknown."""
    model, able = run.model, run.able
    groups: list[Sequence[str]] = []
    for group in fusion_groups(model, run.float_layers):
        groups += split(model, group, run.placement.edges.intersection(inner_edges(model, group, able)))
    if not run.float_layers:
        groups += usual_groups(model, able)
    formats = formats_in([run.placement, *(trial.placement for trial in run.history)])
    return partition(model, able, groups, formats)
