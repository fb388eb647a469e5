"""The table of a finished run by unit: how each runs in what ships, what it takes, and why it does not run in 8 bits.

A unit are nodes that are quantized together, since the engine runs them as one kernel. What it would take the other way
stands there only if a build ran it so, with all units around it as in what ships: "measured" if nothing else differed
in that build, else "estimated" from the times of that build's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from qdqtune.explanation.facts import Facts
from qdqtune.explanation.unfused import is_float, is_low
from qdqtune.graph.model import GRAPH, Node
from qdqtune.graph.operators import ASKS_SHAPE
from qdqtune.numerics.accuracy import decibels
from qdqtune.placement.possible import refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import BuildTimes, TimedBuild, attribute
from qdqtune.search.costs.decisions import nearest
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
from qdqtune.timing.ratios import judge, speed
from qdqtune.types import Edge, Layer, Placement, Trial, WeightFormat, sqnr_of

Reason = Literal[
    "",
    "no kernel for this operator",
    "conversions cost more than it saves",
    "no gain beyond noise",
    "accuracy limit",
    "not tried",
]
"""Why a unit does not run in 8 bits; empty if it does."""

NO_KERNEL: Reason = "no kernel for this operator"

DECIDED: Mapping[str, Reason] = {
    "faster": "not tried",
    "inaccurate": "accuracy limit",
    "slower": "no gain beyond noise",
    "undecided": "no gain beyond noise",
    "failed": "not tried",
}
"""The reason that follows if a candidate with a unit in 8 bits came out so; what stands first decides. One that was
faster, or that failed, says nothing of this unit among its others."""

WITHOUT_KERNEL = ASKS_SHAPE | {"ConstantOfShape", "EyeLike", "NonZero", "Range"}
"""Operators that no engine runs in 8 bits: they compute shapes and indices, or read no data."""

NOISE = 0.1
"""Times of one unit in two builds are alike if they differ by no more than this share. Chosen, not measured."""


@dataclass(frozen=True)
class Explanation:
    """A row of the table: a unit, and why it runs as it does. Times are in ms, conversions at its borders included.

    `state` is "8 bits", "16 bits", "float", "elsewhere" (another execution provider runs it), or names the bits of its
    weights where these alone are quantized. `precision` is what the engine reports, "" if it does not. `ms` is the time
    in what ships, `float_ms` that in the float model: their sums over all units are the measured latencies.
    `more_ms` is what the model would take more with this unit in the state `otherwise`, below 0 if less, and `source`
    says where that comes from. A time is None where it is unknown.
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

    @property
    def why(self) -> str:
        """The reason, what shows it, and the times, in one text."""
        return ": ".join(filter(None, (self.reason, "; ".join(filter(None, (self.detail, *self._times()))))))

    def _times(self) -> Iterator[str]:
        if self.ms is not None and self.float_ms is not None:
            yield f"it takes {self.ms:.3g} ms, in the float model {self.float_ms:.3g} ms"
        if self.more_ms is not None:
            change = f"{abs(self.more_ms):.3g} ms {'more' if self.more_ms >= 0 else 'less'}"
            yield f"in {self.otherwise} it would take {change} ({self.source})"


@dataclass(frozen=True)
class Tally:
    """The units with one state and reason: how many nodes they have, what they take together, and the largest."""

    state: str
    reason: Reason
    nodes: int
    ms: float | None
    float_ms: float | None
    example: str


def tally(rows: Iterable[Explanation]) -> tuple[Tally, ...]:
    """The sums of rows with equal state and reason, the longest time first."""
    groups: dict[tuple[str, Reason], list[Explanation]] = {}
    for row in rows:
        groups.setdefault((row.state, row.reason), []).append(row)
    tallies = []
    for (state, reason), members in groups.items():
        largest = max(members, key=lambda row: row.ms or 0.0)
        nodes = sum(len(row.nodes) for row in members)
        ms, float_ms = total(row.ms for row in members), total(row.float_ms for row in members)
        tallies.append(Tally(state, reason, nodes, ms, float_ms, largest.nodes[0]))
    return tuple(sorted(tallies, key=lambda t: (-(t.ms or 0.0), -t.nodes, t.reason)))


def total(times: Iterable[float | None]) -> float | None:
    """The sum of the known times; None if none is known."""
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


def headline(facts: Facts) -> str:
    """What shipped and where it comes from, in one sentence."""
    if facts.placement:
        ratio = None if facts.is_by_rule else ratios_to_float(facts.history, facts.plan).get(facts.placement)
        share = "" if ratio is None else f", {speed(ratio)} as fast as float in the search"
        return f"what ships is {facts.origin}{share}"
    if facts.shipped == "tuned":
        return "the float model ships with its rewrites, which are faster alone than with any pair that was tried"
    if not facts.history:
        return "the float model ships: nothing was tried"
    return f"the float model ships: of {len(facts.history)} candidates none was proven faster within the limits"


def explanations(facts: Facts) -> tuple[Explanation, ...]:
    """A row for every unit, in graph order."""
    table = _Table(facts)
    return tuple(table.row(unit) for unit in table.parts.units)


@dataclass(frozen=True)
class _Build:
    """A candidate, or the float model (`trial` is None), with the state of each unit by number.

    `differing` are the units that run otherwise than in what ships, `fresh` those in 8 bits that were not in what it
    was compared with. `times` is None if unknown.
    """

    trial: Trial | None
    outcome: str
    states: Sequence[str]
    differing: frozenset[int]
    fresh: frozenset[int]
    times: BuildTimes | None


class _Table:
    """Makes the rows; values that all of them need are computed once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.parts = _units(facts)
        self._states = self._states_in(facts.placement, facts.shipped_layers)
        self._ratios = ratios_to_float(facts.history, facts.plan)
        self._shipped_times = None
        if facts.shipped_ms and facts.float_ms:
            ratio = facts.shipped_ms / facts.float_ms
            self._shipped_times = self._times(facts.placement, facts.shipped_layers, ratio)
        self._able: dict[str, list[Edge]] = {}
        for edge in facts.able:
            self._able.setdefault(edge.node, []).append(edge)

    def _states_in(self, placement: Placement, layers: Sequence[Layer]) -> list[str]:
        """The state of each unit: "8 bits" or "float" as the layers say, else by its pairs; or the name of its weight
        format."""
        decision, owner = nearest(self.parts, placement), self.parts.owner
        states = ["float"] * len(self.parts.units)
        for number in decision.quantized:
            states[number] = "8 bits"
        computing = [layer for layer in layers if layer.kind == "compute"]
        for reported, runs_so in (("float", is_float), ("8 bits", is_low)):
            for layer in computing:
                if runs_so(layer.precision):
                    for name in layer.nodes:
                        if name in owner:
                            states[owner[name]] = reported
        for number, weight_format in decision.weight_formats:
            states[number] = weight_format.name
        return states

    def _times(self, placement: Placement, layers: Sequence[Layer], ratio: float) -> BuildTimes | None:
        facts = self.facts
        if not facts.float_ms or not any(layer.time_ms for layer in layers):
            return None
        return attribute(facts.model, TimedBuild(placement, tuple(layers), ratio), facts.float_ms)

    @cached_property
    def _builds(self) -> list[_Build]:
        facts = self.facts
        states = {Placement(): self._states_in(Placement(), facts.float_layers)}
        builds = [self._build(None, states[Placement()], (), self._times(Placement(), facts.float_layers, 1.0))]
        for trial in facts.history:
            states[trial.placement] = self._states_in(trial.placement, trial.layers or ())
            ratio, times = self._ratios.get(trial.placement), None
            if ratio is not None:
                times = self._times(trial.placement, trial.layers or (), ratio)
            builds.append(self._build(trial, states[trial.placement], states.get(trial.against, ()), times))
        return builds

    def _build(
        self, trial: Trial | None, states: Sequence[str], before: Sequence[str], times: BuildTimes | None
    ) -> _Build:
        differing = frozenset(n for n, state in enumerate(states) if state != self._states[n])
        fresh = frozenset(n for n, state in enumerate(before) if states[n] == "8 bits" != state)
        return _Build(trial, "" if trial is None else outcome(trial, self.facts.plan), states, differing, fresh, times)

    def row(self, unit: Unit) -> Explanation:
        """How a unit runs, what it takes, and why it does not run in 8 bits."""
        facts, nodes = self.facts, self._nodes(unit)
        names = tuple(node.name for node in nodes)
        ran = [layer for name in names if (layer := facts.layers.get(name)) is not None]
        state = self._states[unit.number]
        row = Explanation(
            nodes=names,
            operators=tuple(node.op for node in nodes),
            state=state,
            precision=next((layer.precision.lower() for layer in ran if layer.kind == "compute"), ""),
            ms=sum(sum(facts.spent[name]) for name in names) if facts.spent else None,
            float_ms=sum(sum(facts.float_spent[name]) for name in names) if facts.float_spent else None,
            otherwise="8 bits" if state == "float" else "float",
        )
        least = facts.limits.min_sqnr
        limit = "the limits on accuracy" if least is None else f"{least:g} dB"
        part = f"part of {facts.origin}, which was measured as a whole"
        if facts.is_by_rule:
            part = f"8 bits cost the least, and the outputs hold {limit}"
        if elsewhere := next((layer.elsewhere for layer in ran if layer.elsewhere), ""):
            return replace(row, state="elsewhere", reason=NO_KERNEL, detail=f"it runs {elsewhere}")
        if not facts.placement.wide.isdisjoint(unit.inputs):
            detail = f"with 8 bits here too, the outputs would miss {limit}"
            return replace(row, state="16 bits", precision="uint16", reason="accuracy limit", detail=detail)
        if state == "8 bits":
            return self._with_other_time(unit, replace(row, detail=part))
        if state != "float":
            weight_format = WeightFormat.named(state)
            state = "8 bits, dynamic" if weight_format.dynamic else f"{weight_format.bits}-bit weights"
            return replace(row, state=state, detail=f"its weights alone are {weight_format.name}, {part}")
        if ran and all(layer.kind == "folded" for layer in ran):
            return replace(row, reason="no gain beyond noise", detail="the engine computes it in advance")
        if not self._edges(unit) <= facts.possible:
            return replace(row, reason="not tried", detail="the nodes that you have listed leave it in float")
        if without_kernel := self._without_kernel(unit):
            return replace(row, reason=NO_KERNEL, detail=without_kernel)
        if facts.is_by_rule:
            detail = f"nothing that was tried has it in 8 or 16 bits and holds {limit}"
            return replace(row, reason="accuracy limit", detail=detail)
        return self._in_float(unit, self._with_other_time(unit, row))

    # ---- the other way

    def _with_other_time(self, unit: Unit, row: Explanation) -> Explanation:
        """The row with what the unit takes more in the other state, if a build shows it."""
        build = self._shown(unit, row.otherwise)
        if build is None or build.times is None or self._shipped_times is None:
            return row
        more = self._time_in(build.times, unit) - self._time_in(self._shipped_times, unit)
        return replace(row, more_ms=more, source="measured" if len(build.differing) == 1 else "estimated")

    def _shown(self, unit: Unit, state: str) -> _Build | None:
        """The timed build that ran a unit in a state, and all units around it as in what ships, with the fewest other
        differences."""
        around = self._around(unit)
        timed = [build for build in self._builds if build.times is not None and build.states[unit.number] == state]
        shown = [build for build in timed if around.isdisjoint(build.differing)]
        return min(shown, key=lambda build: len(build.differing), default=None)

    def _nodes(self, unit: Unit) -> list[Node]:
        return [self.parts.model.nodes[n] for n in unit.nodes]

    def _tensors(self, unit: Unit) -> set[str]:
        """The tensors that a unit reads and writes, constants aside."""
        tensors = {tensor for node in self._nodes(unit) for tensor in (*node.inputs, *node.outputs) if tensor}
        return tensors - self.parts.model.constants.keys()

    def _around(self, unit: Unit) -> set[int]:
        """The other units that read or write a tensor of a unit."""
        model, owner = self.parts.model, self.parts.owner
        around = set()
        for tensor in self._tensors(unit):
            maker = model.maker(tensor)
            if maker is not None:
                around.add(owner[maker.name])
            around.update(owner[model.nodes[use.node].name] for use in model.uses(tensor) if use.node != GRAPH)
        return around - {unit.number}

    def _own_time(self, times: BuildTimes, unit: Unit) -> float:
        return sum(times.nodes.get(node.name, 0.0) for node in self._nodes(unit))

    def _time_in(self, times: BuildTimes, unit: Unit) -> float:
        """The ms of a unit in a build, with all conversions of its tensors."""
        conversions = (times.quantize.get(t, 0.0) + times.dequantize.get(t, 0.0) for t in self._tensors(unit))
        return self._own_time(times, unit) + sum(conversions)

    # ---- reasons

    def _edges(self, unit: Unit) -> set[Edge]:
        """The edges that enter a unit and can carry a pair, whether or not the user allows it there."""
        nodes = self._nodes(unit)
        inside = {tensor for node in nodes for tensor in node.outputs}
        edges = {edge for node in nodes for edge in self._able.get(node.name, ()) if edge.tensor not in inside}
        return edges - set(unit.inner)

    def _without_kernel(self, unit: Unit) -> str:
        """A text if a unit reads nothing that can carry a pair, no engine has an 8-bit kernel for it, or this one ran
        it in float in every build with pairs on all of its inputs; else empty."""
        facts, model, nodes = self.facts, self.parts.model, self._nodes(unit)
        if all(node.op in WITHOUT_KERNEL for node in nodes):
            return f"{nodes[0].op} computes no values in 8 bits"
        if not unit.inputs:
            inside = {tensor for node in nodes for tensor in node.outputs} | model.constants.keys()
            for node in nodes:
                for slot, tensor in enumerate(node.inputs):
                    if tensor and tensor not in inside:
                        why = refusal(model, tensor, node.index, slot) or "the range of its values is unknown"
                        return f"no pair can stand on its input {tensor}: {why}"
            return "it reads no tensor but constants"
        reported = [(each.trial.placement, each.states) for each in self._builds if each.trial and each.trial.layers]
        if facts.shipped_layers:
            reported.append((facts.placement, self._states))
        edges = self._edges(unit)
        states = [states[unit.number] for placement, states in reported if edges <= placement.edges]
        if not states or "8 bits" in states:
            return ""
        return "with pairs on all of its inputs the engine still ran it in float"

    def _in_float(self, unit: Unit, row: Explanation) -> Explanation:
        """The reason for a unit in float that may have pairs: what a build shows of it, else what is predicted of its
        rounding, else what became of the candidates that ran it in 8 bits."""
        build, shipped = self._shown(unit, "8 bits"), self._shipped_times
        if row.more_ms is not None and row.more_ms > NOISE * (row.ms or 0.0) and build and build.times and shipped:
            saves = self._own_time(build.times, unit) < self._own_time(shipped, unit)
            return replace(row, reason="conversions cost more than it saves" if saves else "no gain beyond noise")
        if lost := self._lost_accuracy(unit):
            return replace(row, reason="accuracy limit", detail=lost)
        if row.more_ms is not None or row.ms == 0:
            return replace(row, reason="no gain beyond noise")
        tried = [build for build in self._builds if unit.number in build.fresh]
        for came, reason in DECIDED.items():
            builds = [build for build in tried if build.outcome == came]
            if builds:
                return replace(row, reason=reason, detail=self._came(min(builds, key=lambda b: len(b.fresh))))
        return replace(row, reason="not tried", detail="no candidate ran it in 8 bits")

    def _came(self, build: _Build) -> str:
        """What became of a candidate."""
        trial, others = build.trial, len(build.fresh) - 1
        assert trial is not None
        more = f" with {others} more unit{'s' * (others > 1)}" if others else ""
        candidate = f"a candidate that ran it in 8 bits{more} ({trial.proposal.origin!r})"
        ratio = judge(trial, self.facts.plan)
        if ratio is None:
            return f"{candidate} failed"
        if build.outcome == "inaccurate":
            return f"{candidate} was refused: {self.facts.limits.why_refused(trial) or 'too inexact'}"
        return f"{candidate} was {speed(ratio.median)} as fast as its opponent"

    def _lost_accuracy(self, unit: Unit) -> str:
        """A text if rounding a unit is predicted to take the outputs below the limit; else empty."""
        noise, most = self.facts.noise, self.facts.limits.max_noise
        if noise is None or most is None:
            return ""
        allowed, now, rounded = self._noise_now
        tensors = {edge.tensor for edge in (*unit.inputs, *unit.weights)}
        tensors |= {tensor for tensor in unit.outputs if tensor in self.parts.edges}
        alone = sum(noise.value_noise.get(value, 0.0) for value in set(map(noise.value, tensors)) - rounded)
        if not alone or now + alone <= allowed:
            return ""
        scale = most / allowed
        own, together, limit = (decibels(sqnr_of(n)) for n in (alone * scale, (now + alone) * scale, most))
        return (
            f"its rounding alone brings the outputs to {own}, with the rest of the placement to {together}, and the "
            f"limit is {limit}"
        )

    @cached_property
    def _noise_now(self) -> tuple[float, float, set[str]]:
        """The most noise that holds the limits, the noise of what ships, and the values that it rounds."""
        noise, placement = self.facts.noise, self.facts.placement
        assert noise is not None
        rounded = {noise.value(edge.tensor) for edge in placement.edges}
        return noise.allowed(self.facts.history), noise.summed(placement), rounded


def _units(facts: Facts) -> Partition:
    """The kernels of the float build as units, each split where pairs of what ships stand inside it; as engines usually
    fuse nodes if the layers are unknown."""
    model, possible = facts.model, facts.possible
    groups: list[Sequence[str]] = []
    for group in fusion_groups(model, facts.float_layers):
        inside = {edge for edge in inner_edges(model, group, possible) if edge in facts.placement}
        groups += split(model, group, inside)
    if not facts.float_layers:
        groups += usual_groups(model, possible)
    formats = formats_in([facts.placement, *(trial.placement for trial in facts.history)])
    return partition(model, possible, groups, formats)
