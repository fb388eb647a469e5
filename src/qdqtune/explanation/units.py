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

from qdqtune.errors import Failure
from qdqtune.explanation.formatting import counted, origin_in_words
from qdqtune.explanation.unfused import is_float, is_low
from qdqtune.graph.model import GRAPH, Node
from qdqtune.graph.operators import ASKS_SHAPE
from qdqtune.numerics.accuracy import decibels
from qdqtune.placement.possible import refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import BuildTimes, attribute
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
from qdqtune.tuning.finished import FinishedRun
from qdqtune.types import CostsByRule, Edge, Layer, Placement, Trial, WeightFormat, sqnr_of

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


def headline(run: FinishedRun) -> str:
    """What shipped and where it comes from, in one sentence."""
    if run.placement:
        ratio = None if run.is_by_rule else ratios_to_float(run.history, run.plan).get(run.placement)
        share = "" if ratio is None else f", {speed(ratio)} as fast as float in the search"
        return f"what ships is {_origin(run)}{share}"
    if run.summary["shipped"] == "tuned":
        return "the float model ships with its rewrites, which are faster alone than with any pair that was tried"
    if not run.history:
        return "the float model ships: nothing was tried"
    return f"the float model ships: of {len(run.history)} candidates none was proven faster within the limits"


def _origin(run: FinishedRun) -> str:
    if run.summary["shipped"] == "given":
        return "your own Q/DQ model"
    return origin_in_words(run.trial.proposal.origin) if run.trial else "an earlier run"


def became(trial: Trial, run: FinishedRun) -> str:
    """What became of a candidate, in a sentence without its subject."""
    other = "the best before it" if trial.against else "the float model"
    is_by_rule = isinstance(trial.result, CostsByRule)
    if isinstance(trial.result, Failure):
        refused = "the engine refused it: " if trial.result.stage == "build" else ""
        return f"{refused}{trial.result.reason}"
    if trial.accepted and is_by_rule:
        return "cheaper by rule than all before it"
    if trial.accepted:
        return f"faster than {other} beyond noise, and exact enough: the new best"
    if trial.holds is False:
        return f"it does not hold the limits on accuracy: {run.limits.why_refused(trial)}"
    if is_by_rule:
        return f"not cheaper by rule than {other}"
    taken = "made for the front" if trial.proposal.origin == "front" else "but another one of its batch was taken"
    return {
        "faster": f"faster than {other}, {taken}",
        "slower": f"slower than {other}, beyond noise",
        "undecided": f"the interval holds 1: too close to {other} to tell",
    }[outcome(trial, run.plan)]


def explanations(run: FinishedRun) -> tuple[Explanation, ...]:
    """A row for every unit, in graph order."""
    table = _Table(run)
    return tuple(table.row(unit) for unit in table.parts.units)


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
        self._states = self._states_in(run.placement, run.shipped_layers)
        self._shipped_times = None
        if run.shipped_ms and run.float_ms:
            self._shipped_times = self._times(run.placement, run.shipped_layers, run.shipped_ms / run.float_ms)
        self._able: dict[str, list[Edge]] = {}
        for edge in run.able:
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

    def _times(self, placement: Placement, layers: Sequence[Layer], ratio: float | None) -> BuildTimes | None:
        if not self.run.float_ms or ratio is None or not any(layer.time_ms for layer in layers):
            return None
        return attribute(self.run.model, placement, layers, ratio * self.run.float_ms)

    @cached_property
    def _builds(self) -> list[_Build]:
        run, ratios = self.run, ratios_to_float(self.run.history, self.run.plan)
        states, builds = dict[Placement, Sequence[str]](), list[_Build]()
        for trial in (None, *run.history):
            placement = Placement() if trial is None else trial.placement
            layers = run.float_layers if trial is None else trial.layers or ()
            states[placement] = ran = self._states_in(placement, layers)
            before = () if trial is None else states.get(trial.against, ())
            differing = frozenset(n for n, state in enumerate(ran) if state != self._states[n])
            fresh = frozenset(n for n, state in enumerate(before) if ran[n] == "8 bits" != state)
            times = self._times(placement, layers, ratios.get(placement))
            builds.append(_Build(trial, ran, differing, fresh, times))
        return builds

    def row(self, unit: Unit) -> Explanation:
        """How a unit runs, what it takes, and why it does not run in 8 bits."""
        run, nodes = self.run, self._nodes(unit)
        names = tuple(node.name for node in nodes)
        ran = [layer for name in names if (layer := self._layer_of.get(name)) is not None]
        state = self._states[unit.number]
        row = Explanation(
            nodes=names,
            operators=tuple(node.op for node in nodes),
            state=state,
            precision=next((layer.precision.lower() for layer in ran if layer.kind == "compute"), ""),
            ms=sum(sum(run.spent[name]) for name in names) if run.spent else None,
            float_ms=sum(sum(run.float_spent[name]) for name in names) if run.float_spent else None,
            otherwise="8 bits" if state == "float" else "float",
        )
        least = run.limits.min_sqnr
        limit = "the limits on accuracy" if least is None else f"{least:g} dB"
        part = f"part of {_origin(run)}, which was measured as a whole"
        if run.is_by_rule:
            part = f"8 bits cost the least, and the outputs hold {limit}"
        if elsewhere := next((layer.elsewhere for layer in ran if layer.elsewhere), ""):
            return replace(row, state="elsewhere", reason=NO_KERNEL, detail=f"it runs {elsewhere}")
        if not run.placement.wide.isdisjoint(unit.inputs):
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
        if not self._edges(unit) <= run.possible:
            return replace(row, reason="not tried", detail="the nodes that you have listed leave it in float")
        if without_kernel := self._without_kernel(unit):
            return replace(row, reason=NO_KERNEL, detail=without_kernel)
        if run.is_by_rule:
            detail = f"nothing that was tried has it in 8 or 16 bits and holds {limit}"
            return replace(row, reason="accuracy limit", detail=detail)
        return self._in_float(unit, self._with_other_time(unit, row))

    @cached_property
    def _layer_of(self) -> Mapping[str, Layer]:
        return {name: layer for layer in self.run.shipped_layers for name in layer.nodes}

    # ---- the other way

    def _with_other_time(self, unit: Unit, row: Explanation) -> Explanation:
        build = self._shown(unit, row.otherwise)
        if build is None or build.times is None or self._shipped_times is None:
            return row
        more = self._time_in(build.times, unit) - self._time_in(self._shipped_times, unit)
        return replace(row, more_ms=more, source="measured" if len(build.differing) == 1 else "estimated")

    def _shown(self, unit: Unit, state: str) -> _Build | None:
        """The timed build that ran a unit in a state, and all units around it as in what ships, with the fewest other
        differences."""
        model, owner, around = self.parts.model, self.parts.owner, set[int]()
        for tensor in self._tensors(unit):
            maker = model.maker(tensor)
            if maker is not None:
                around.add(owner[maker.name])
            around.update(owner[model.nodes[use.node].name] for use in model.uses(tensor) if use.node != GRAPH)
        around -= {unit.number}
        timed = [build for build in self._builds if build.times is not None and build.states[unit.number] == state]
        shown = [build for build in timed if around.isdisjoint(build.differing)]
        return min(shown, key=lambda build: len(build.differing), default=None)

    def _nodes(self, unit: Unit) -> list[Node]:
        return [self.parts.model.nodes[n] for n in unit.nodes]

    def _tensors(self, unit: Unit) -> set[str]:
        """The tensors that a unit reads and writes, constants aside."""
        tensors = {tensor for node in self._nodes(unit) for tensor in (*node.inputs, *node.outputs) if tensor}
        return tensors - self.parts.model.constants.keys()

    def _own_time(self, times: BuildTimes, unit: Unit) -> float:
        return sum(times.nodes.get(node.name, 0.0) for node in self._nodes(unit))

    def _time_in(self, times: BuildTimes, unit: Unit) -> float:
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
        run, model, nodes = self.run, self.parts.model, self._nodes(unit)
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
        if run.shipped_layers:
            reported.append((run.placement, self._states))
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
        tried = [(build, build.trial) for build in self._builds if unit.number in build.fresh]
        for came, reason in DECIDED.items():
            chosen = [(b, trial) for b, trial in tried if trial and outcome(trial, self.run.plan) == came]
            if chosen:
                build, trial = min(chosen, key=lambda pair: len(pair[0].fresh))
                others = len(build.fresh) - 1
                more = f" with {counted(others, 'more unit')}" if others else ""
                origin, measured = trial.proposal.origin, judge(trial, self.run.plan)
                told = origin if measured is None else f"{origin}, {speed(measured.median)}"
                detail = f"a candidate that ran it in 8 bits{more} ({told}): {became(trial, self.run)}"
                return replace(row, reason=reason, detail=detail)
        return replace(row, reason="not tried", detail="no candidate ran it in 8 bits")

    def _lost_accuracy(self, unit: Unit) -> str:
        """A text if rounding a unit is predicted to take the outputs below the limit; else empty."""
        noise, most = self.run.noise, self.run.limits.max_noise
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
        noise, placement = self.run.noise, self.run.placement
        assert noise is not None
        rounded = {noise.value(edge.tensor) for edge in placement.edges}
        return noise.allowed(self.run.history), noise.summed(placement), rounded


def _units(run: FinishedRun) -> Partition:
    """The kernels of the float build as units, each split where pairs of what ships stand inside it; as engines usually
    fuse nodes if the layers are unknown."""
    model, possible = run.model, run.possible
    groups: list[Sequence[str]] = []
    for group in fusion_groups(model, run.float_layers):
        inside = {edge for edge in inner_edges(model, group, possible) if edge in run.placement}
        groups += split(model, group, inside)
    if not run.float_layers:
        groups += usual_groups(model, possible)
    formats = formats_in([run.placement, *(trial.placement for trial in run.history)])
    return partition(model, possible, groups, formats)
