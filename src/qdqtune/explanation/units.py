"""The table of a finished run by unit: how each runs in what ships, what it takes, and why it does not run in 8 bits.

A unit are nodes that are quantized together, since the engine runs them as one kernel. What it would take the other way
stands there only if a build ran it so, with all units around it as in what ships: "measured" if nothing else differed
in that build, else "estimated" from the times of that build's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log10
from typing import Literal

from qdqtune.explanation.facts import Facts
from qdqtune.explanation.unfused import is_float, is_low
from qdqtune.graph.model import GRAPH
from qdqtune.graph.operators import ASKS_SHAPE
from qdqtune.placement.possible import refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import BuildTimes, TimedBuild, attribute, timed_builds
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
from qdqtune.types import Edge, Layer, Placement, Trial, WeightFormat

Reason = Literal[
    "",
    "no kernel for this operator",
    "conversions cost more than it saves",
    "no gain beyond noise",
    "accuracy limit",
    "not tried",
]
"""Why a unit does not run in 8 bits; empty if it does."""

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
    """A timed build: the state of each unit by number, and the units that run otherwise than in what ships."""

    times: BuildTimes
    states: Sequence[str]
    differing: frozenset[int]


@dataclass(frozen=True)
class _Candidate:
    """A candidate with the states of units by its pairs, as its layers ran, and by the pairs of its opponent."""

    trial: Trial
    paired: Sequence[str]
    ran: Sequence[str]
    before: Sequence[str]


class _Table:
    """Makes the rows; values that all of them need are computed once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.parts = _units(facts)
        self._states = self._ran(self._paired(facts.placement), facts.shipped_layers)

    def _paired(self, placement: Placement) -> list[str]:
        """The state of each unit by its pairs: "8 bits", the name of its weight format, or "float"."""
        decision = nearest(self.parts, placement)
        states = ["float"] * len(self.parts.units)
        for number, weight_format in decision.weight_formats:
            states[number] = weight_format.name
        for number in decision.quantized:
            states[number] = "8 bits"
        return states

    def _ran(self, paired: Sequence[str], layers: Sequence[Layer]) -> list[str]:
        """The states of units, where those that the engine ran in float, or in 8 bits, in spite of their pairs have
        that state."""
        owner = self.parts.owner
        low, wide = set[int](), set[int]()
        for layer in layers:
            if layer.kind == "compute":
                units = {owner[name] for name in layer.nodes if name in owner}
                low |= units if is_low(layer.precision) else set()
                wide |= units if is_float(layer.precision) else set()
        states = list(paired)
        for number in low | wide:
            if states[number] in ("8 bits", "float"):
                states[number] = "8 bits" if number in low else "float"
        return states

    @cached_property
    def _candidates(self) -> list[_Candidate]:
        found = []
        for trial in self.facts.history:
            paired = self._paired(trial.placement)
            ran = self._ran(paired, trial.layers or ())
            found.append(_Candidate(trial, paired, ran, self._paired(trial.against)))
        return found

    @cached_property
    def _shipped_times(self) -> BuildTimes | None:
        facts = self.facts
        if not facts.spent or not facts.float_ms or facts.shipped_ms is None:
            return None
        build = TimedBuild(facts.placement, facts.shipped_layers, facts.shipped_ms / facts.float_ms)
        return attribute(facts.model, build, facts.float_ms)

    @cached_property
    def _builds(self) -> list[_Build]:
        facts = self.facts
        builds = []
        for build in timed_builds(facts.history, facts.plan, facts.float_layers):
            states = self._ran(self._paired(build.placement), build.layers)
            differing = frozenset(n for n, state in enumerate(states) if state != self._states[n])
            builds.append(_Build(attribute(facts.model, build, facts.float_ms), states, differing))
        return builds

    def row(self, unit: Unit) -> Explanation:
        """How a unit runs, what it takes, and why it does not run in 8 bits."""
        facts, model = self.facts, self.parts.model
        nodes = [model.nodes[n] for n in unit.nodes]
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
        if elsewhere := next((layer.elsewhere for layer in ran if layer.elsewhere), ""):
            return replace(row, state="elsewhere", reason="no kernel for this operator", detail=f"it runs {elsewhere}")
        if not facts.placement.wide.isdisjoint(unit.inputs):
            detail = f"with 8 bits here too, the outputs would miss {self._limit}"
            return replace(row, state="16 bits", precision="uint16", reason="accuracy limit", detail=detail)
        if state not in ("8 bits", "float"):
            return self._with_weight_format(unit, row, WeightFormat.named(state))
        if state == "8 bits":
            return self._with_other_time(unit, replace(row, detail=self._part))
        if ran and all(layer.kind == "folded" for layer in ran):
            return replace(row, reason="no gain beyond noise", detail="the engine computes it in advance")
        if not self._edges(unit) <= facts.possible:
            return replace(row, reason="not tried", detail="the nodes that you have listed leave it in float")
        if not unit.inputs:
            return self._without_pairs(unit, row)
        if facts.is_by_rule:
            detail = f"nothing that was tried has it in 8 or 16 bits and holds {self._limit}"
            return replace(row, reason="accuracy limit", detail=detail)
        if without_kernel := self._without_kernel(unit):
            return replace(row, reason="no kernel for this operator", detail=without_kernel)
        return self._in_float(unit, self._with_other_time(unit, row))

    @property
    def _part(self) -> str:
        facts = self.facts
        if facts.is_by_rule:
            return f"8 bits cost the least, and the outputs hold {self._limit}"
        return f"part of {facts.origin}, which was measured as a whole"

    @property
    def _limit(self) -> str:
        least = self.facts.limits.min_sqnr
        return "the limits on accuracy" if least is None else f"{least:g} dB"

    def _with_weight_format(self, unit: Unit, row: Explanation, weight_format: WeightFormat) -> Explanation:
        detail = f"its weights alone are stored in {weight_format.bits} bits ({weight_format.name})"
        state = f"{weight_format.bits}-bit weights"
        if weight_format.dynamic:
            detail = f"its product runs in 8 bits, with scales found at run time ({weight_format.name})"
            state = "8 bits, dynamic"
        return self._with_other_time(unit, replace(row, state=state, detail=f"{detail}, {self._part}"))

    # ---- the other way

    def _with_other_time(self, unit: Unit, row: Explanation) -> Explanation:
        """The row with the time of the unit in the other state, if a build shows it."""
        shipped, builds = self._shipped_times, self._shown(unit, row.otherwise)
        if shipped is None or row.ms is None or not builds:
            return row
        more = self._time_in(builds[0].times, unit) - self._time_in(shipped, unit)
        source: Literal["measured", "estimated"] = "measured" if len(builds[0].differing) == 1 else "estimated"
        return replace(row, more_ms=more, source=source)

    def _shown(self, unit: Unit, state: str) -> list[_Build]:
        """The builds that ran a unit in a state, and all units around it as in what ships, with the fewest other
        differences first."""
        around = self._around(unit)
        builds = [each for each in self._builds if each.states[unit.number] == state]
        return sorted((each for each in builds if around.isdisjoint(each.differing)), key=lambda b: len(b.differing))

    def _tensors(self, unit: Unit) -> set[str]:
        """The tensors that a unit reads and writes, constants aside."""
        nodes = [self.parts.model.nodes[n] for n in unit.nodes]
        return {t for node in nodes for t in (*node.inputs, *node.outputs) if t and t not in self.parts.model.constants}

    def _around(self, unit: Unit) -> set[int]:
        """The other units that read or write a tensor of a unit."""
        model, owner = self.parts.model, self.parts.owner
        found = set()
        for tensor in self._tensors(unit):
            maker = model.maker(tensor)
            if maker is not None:
                found.add(owner[maker.name])
            found.update(owner[model.nodes[use.node].name] for use in model.uses(tensor) if use.node != GRAPH)
        return found - {unit.number}

    def _time_in(self, times: BuildTimes, unit: Unit) -> float:
        """The ms of a unit in a build, with all conversions of its tensors."""
        own = sum(times.nodes.get(self.parts.model.nodes[n].name, 0.0) for n in unit.nodes)
        touched = self._tensors(unit)
        return own + sum(times.quantize.get(t, 0.0) + times.dequantize.get(t, 0.0) for t in touched)

    # ---- reasons

    @cached_property
    def _able_of(self) -> Mapping[str, Sequence[Edge]]:
        able: dict[str, list[Edge]] = {}
        for edge in self.facts.able:
            able.setdefault(edge.node, []).append(edge)
        return able

    def _edges(self, unit: Unit) -> set[Edge]:
        """The edges that enter a unit and can carry a pair, whether or not the user allows it there."""
        nodes = [self.parts.model.nodes[n] for n in unit.nodes]
        inside = {tensor for node in nodes for tensor in node.outputs}
        edges = {edge for node in nodes for edge in self._able_of.get(node.name, ()) if edge.tensor not in inside}
        return edges - set(unit.inner)

    def _without_pairs(self, unit: Unit, row: Explanation) -> Explanation:
        """The reason for a unit of which no tensor that it reads can carry a pair, constants aside."""
        model = self.parts.model
        nodes = [model.nodes[n] for n in unit.nodes]
        row = replace(row, reason="no kernel for this operator", detail="it reads no tensor but constants")
        inside = {tensor for node in nodes for tensor in node.outputs}
        for node in nodes:
            for slot, tensor in enumerate(node.inputs):
                if not tensor or tensor in inside or tensor in model.constants:
                    continue
                why = refusal(model, tensor, node.index, slot) or "the range of its values is unknown"
                return replace(row, detail=f"no pair can stand on its input {tensor}: {why}")
        return row

    def _without_kernel(self, unit: Unit) -> str:
        """A text if no engine has an 8-bit kernel for a unit, or this one ran it in float in every build with pairs
        around it; else empty."""
        nodes = [self.parts.model.nodes[n] for n in unit.nodes]
        if all(node.op in WITHOUT_KERNEL for node in nodes):
            return f"{nodes[0].op} computes no values in 8 bits"
        facts = self.facts
        builds = [(each.trial.placement, each.ran[unit.number]) for each in self._candidates if each.trial.layers]
        if facts.shipped_layers:
            builds.append((facts.placement, self._states[unit.number]))
        edges = self._edges(unit)
        in_builds = [state for placement, state in builds if edges <= placement.edges]
        if not in_builds or "8 bits" in in_builds:
            return ""
        return "with pairs on all of its inputs the engine still ran it in float"

    def _in_float(self, unit: Unit, row: Explanation) -> Explanation:
        """The reason for a unit in float that may have pairs: what a build shows of it, else what is predicted of its
        rounding, else what became of the candidates that ran it in 8 bits."""
        if row.more_ms is not None and row.ms is not None and row.more_ms > NOISE * row.ms:
            return replace(row, reason=self._slower(unit))
        if lost := self._lost_accuracy(unit):
            return replace(row, reason="accuracy limit", detail=lost)
        if row.more_ms is not None or row.ms == 0:
            return replace(row, reason="no gain beyond noise")
        reason, detail = self._by_candidates(unit)
        return replace(row, reason=reason, detail=detail)

    def _slower(self, unit: Unit) -> Reason:
        """Whether the kernel in 8 bits is no faster, or saves less than the conversions around it cost."""
        names = [self.parts.model.nodes[n].name for n in unit.nodes]
        own = [sum(build.times.nodes.get(name, 0.0) for name in names) for build in self._shown(unit, "8 bits")[:1]]
        before = sum(self.facts.spent[name].own for name in names)
        return "conversions cost more than it saves" if own and own[0] < before else "no gain beyond noise"

    def _lost_accuracy(self, unit: Unit) -> str:
        """A text if rounding a unit is predicted to take the outputs below the limit; else empty."""
        facts, noise = self.facts, self.facts.noise
        if noise is None or facts.limits.max_noise is None:
            return ""
        rounded = {noise.value(edge.tensor) for edge in facts.placement.edges}
        fresh = {noise.value(edge.tensor) for edge in (*unit.inputs, *unit.weights)} - rounded
        fresh |= {noise.value(tensor) for tensor in unit.outputs if tensor in self.parts.edges} - rounded
        alone = sum(noise.value_noise.get(value, 0.0) for value in fresh)
        allowed, now = self._allowed_noise, self._noise_now
        if not alone or now + alone <= allowed:
            return ""
        scale = facts.limits.max_noise / allowed
        return (
            f"its rounding alone brings the outputs to {_db(alone * scale)}, with the rest of the placement to "
            f"{_db((now + alone) * scale)}, and the limit is {self._limit}"
        )

    @cached_property
    def _allowed_noise(self) -> float:
        return self.facts.noise.allowed(self.facts.history) if self.facts.noise else 0.0

    @cached_property
    def _noise_now(self) -> float:
        return self.facts.noise.summed(self.facts.placement) if self.facts.noise else 0.0

    def _by_candidates(self, unit: Unit) -> tuple[Reason, str]:
        """What became of the candidates that ran a unit in 8 bits, which those that they were compared with did not."""
        facts, number = self.facts, unit.number
        came: dict[str, list[tuple[int, int, Trial]]] = {}
        for each in self._candidates:
            if each.paired[number] == "8 bits" != each.before[number]:
                changed = sum(a != b for a, b in zip(each.paired, each.before, strict=True))
                came.setdefault(outcome(each.trial, facts.plan), []).append((changed, each.trial.number, each.trial))
        if not came:
            return "not tried", "no candidate ran it in 8 bits"
        reason, outcomes = _decided(came)
        changed, _, trial = min(each for name in outcomes for each in came.get(name, ()))
        others = "" if changed == 1 else f" with {changed - 1} more unit{'s' * (changed > 2)}"
        candidate = f"a candidate that ran it in 8 bits{others} ({trial.proposal.origin!r})"
        ratio = judge(trial, facts.plan)
        if ratio is None:
            return reason, f"{candidate} failed"
        if reason == "accuracy limit":
            missed = facts.limits.why_refused(trial) or "it misses the limits on accuracy"
            return reason, f"{candidate} was refused: {missed}"
        return reason, f"{candidate} was {speed(ratio.median)} as fast as its opponent"


def _decided(came: Mapping[str, object]) -> tuple[Reason, Sequence[str]]:
    """The reason that follows from the outcomes of candidates, and the outcomes that show it."""
    if "faster" in came:
        return "not tried", ("faster",)
    if "inaccurate" in came:
        return "accuracy limit", ("inaccurate",)
    if "slower" in came or "undecided" in came:
        return "no gain beyond noise", ("slower", "undecided")
    return "no kernel for this operator", ("failed",)


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


def _db(noise: float) -> str:
    return f"{-10 * log10(noise):.1f} dB"
