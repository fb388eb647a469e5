"""Why each node of a tuned model runs as it does: what a finished run knows, weighed.

Everything is said of the placement that shipped, wherever it came from. Prices are learned from all builds of the run,
the shipped one's counting most; in every mode, as long as the engine tells layer times. Decisions are about units, the
nodes that are quantized as a whole: the nodes of a unit share its times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log10
from typing import Literal

from onnx import TensorProto

from qdqtune.commands.explanation import NOT_TAKEN, ORIGINS, RULED, Explanation, Tally, Why, tally
from qdqtune.commands.reasons import is_float, is_low
from qdqtune.graph.model import Model, Node
from qdqtune.measurement.limits import Limits, outcome
from qdqtune.measurement.timing import Plan, judge, speed
from qdqtune.placement.possible import refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.optimum import decision_of, margin, nearest, other, usual_ways
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.priors import NOTHING, Prior
from qdqtune.search.costs.units import Decision, Partition, Unit, partition, usual_groups, ways_in
from qdqtune.search.cut import CLOSE, CutSearch
from qdqtune.tuning.bench import FORETOLD
from qdqtune.types import Edge, Failure, Layer, Placement, Storage, Trial


@dataclass(frozen=True)
class Alone:
    """What subgraph mode found of a group by itself: its verdict, and its ms in float and at best in 8 bits."""

    why: str
    float_ms: float
    quantized_ms: float | None


@dataclass(frozen=True)
class Evidence:
    """All that is known of a finished run.

    `model` is the float model as it was measured, `able` where a pair can stand, `possible` where the user allows one
    as well. `placement` is what shipped ("tuned", "baseline", or "given": the user's own Q/DQ model). `noise` knows
    what rounding each value does where the run had to know, `alone` what subgraph mode found by node, `in_float` why
    the engine runs nodes of the shipped model in float although they have pairs.
    """

    model: Model
    able: frozenset[Edge]
    possible: frozenset[Edge]
    placement: Placement
    shipped: Literal["tuned", "baseline", "given"]
    quant_type: str
    float_layers: tuple[Layer, ...]
    history: tuple[Trial, ...]
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
        told = self.trial.layers if self.trial else self.float_layers if not self.placement else ()
        return {name: layer for layer in told or () for name in layer.nodes}

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


def headline(evidence: Evidence) -> str:
    """What shipped, and where it comes from: one sentence."""
    if not evidence.placement:
        if evidence.shipped == "tuned":
            return "the float model ships with its rewrites, which are faster alone than with any pair that was tried"
        if not evidence.history:
            return "the float model ships: nothing was tried"
        return f"the float model ships: of {len(evidence.history)} candidates none was proven faster within the limits"
    trial, ratios = evidence.trial, ratios_to_float(evidence.history, evidence.plan)
    share = f", {speed(ratios[evidence.placement])} as fast as float in the search" if trial else ""
    text = f"what ships is {evidence.origin}{share}"
    if trial and trial.proposal.origin not in FORETOLD:
        cuts = [t for t in evidence.history if t.proposal.origin == "cut" and t.placement in ratios]
        if cuts:
            best = min(cuts, key=lambda t: ratios[t.placement])
            came = NOT_TAKEN[outcome(best, evidence.plan)]
            text += f"; the best cut of the prices was {speed(ratios[best.placement])} as fast, {came}"
    return text


def explain(evidence: Evidence) -> tuple[Explanation, ...]:
    """A row for every node, in graph order."""
    return tallied(evidence)[0]


def tallied(evidence: Evidence) -> tuple[tuple[Explanation, ...], tuple[Tally, ...]]:
    """A row for every node, in graph order, and these by reason."""
    reasons = _Reasons(evidence)
    of_unit = {unit.number: reasons.of_unit(unit) for unit in reasons.parts.units}
    owner = reasons.parts.owner
    rows = tuple(reasons.of_node(node, of_unit[owner[node.name]]) for node in evidence.model.nodes)
    return rows, tally(rows, reasons.together)


@dataclass(frozen=True)
class _Verdict:
    """What is said of a unit as a whole."""

    unit: tuple[str, ...]
    quantized: bool
    why: Why
    reason: str
    ms: float | None = None
    other_ms: float | None = None
    measured: bool = False
    unknown: str = ""
    storage: str = ""
    otherwise: str = "8 bits"


class _Reasons:
    """The evidence, with what is asked of it for every unit computed once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._costs = evidence.costs
        self.parts: Partition = (
            self._costs.partition
            if self._costs
            else partition(evidence.model, evidence.possible, usual_groups(evidence.model, evidence.possible))
        )
        self._decision = self._decided(evidence.placement)
        self._others = tuple(self._flips())

    def _decided(self, placement: Placement) -> Decision:
        return decision_of(self._costs, placement) if self._costs else nearest(self.parts, placement)

    def _layers(self, unit: Unit) -> list[Layer]:
        """What computes the nodes of a unit in the shipped build."""
        names = (self.parts.model.nodes[n].name for n in unit.nodes)
        known = (self._evidence.layers.get(name) for name in names)
        return [layer for layer in known if layer is not None and layer.kind == "compute"]

    def _flips(self) -> Iterator[tuple[Trial, frozenset[int], frozenset[int]]]:
        """The candidates, with the units that each runs in 8 bits and those that its opponent does."""
        known = {p: self._decided(p).quantized for t in self._evidence.history for p in (t.placement, t.against)}
        for trial in self._evidence.history:
            yield trial, known[trial.placement], known[trial.against]

    def together(self, rows: Sequence[Explanation]) -> float | None:
        """What units take more, in ms, if all of them are decided otherwise: conversions between two of them go."""
        costs, decision = self._costs, self._decision
        if costs is None:
            return None
        numbers = {row.unit: self.parts.owner[row.unit[0]] for row in rows}
        stored = {numbers[row.unit] for row in rows if decision.way.get(numbers[row.unit]) and not row.quantized}
        in_part = {row.unit for row in rows if row.quantized and numbers[row.unit] not in decision.quantized}
        turned = [n for unit, n in numbers.items() if n not in stored and unit not in in_part]
        plain = replace(decision, ways=frozenset(pair for pair in decision.ways if pair[0] not in stored))
        flipped = other(self.parts, plain, turned, usual_ways(costs, turned))
        alone = sum(row.margin_ms or 0.0 for row in rows if row.unit in in_part)
        return costs.total(flipped) - costs.total(decision) + alone

    # ---- nodes

    def of_node(self, node: Node, verdict: _Verdict) -> Explanation:
        """The verdict on its unit, but for what the engine made of this very node."""
        row = Explanation(
            node.name,
            node.op,
            verdict.unit,
            verdict.quantized,
            self._precision(node, verdict),
            verdict.why,
            verdict.reason,
            verdict.ms,
            verdict.other_ms,
            verdict.measured,
            verdict.unknown,
            verdict.storage if any(e.node == node.name for e in self._evidence.placement.storages) else "",
            verdict.otherwise,
        )
        if verdict.quantized and (why := self._evidence.in_float.get(node.name)):
            told = why
            if row.ms is not None and row.other_ms is not None:
                told += f"; it takes {_ms(row.ms)} with the pairs and their conversions, {_ms(row.other_ms)} without"
            return replace(row, why="no kernel", reason=told)
        layer = self._evidence.layers.get(node.name)
        if layer is not None and layer.kind == "folded":
            return replace(row, why="no time", reason="the engine computes it in advance")
        return row

    def _precision(self, node: Node, verdict: _Verdict) -> str:
        layer = self._evidence.layers.get(node.name)
        if layer is not None and layer.kind == "compute" and layer.precision:
            return layer.precision.lower()
        if verdict.quantized:
            return self._evidence.quant_type
        infos = (self._evidence.model.tensors.get(t) for t in (*node.outputs, *node.inputs) if t)
        dtype = next((info.dtype for info in infos if info is not None), TensorProto.FLOAT)
        name: str = TensorProto.DataType.Name(dtype).lower()
        return {"float": "fp32", "float16": "fp16"}.get(name, name)

    # ---- units

    def of_unit(self, unit: Unit) -> _Verdict:
        """Why a unit runs as it does: what makes the other decision impossible, then what decided."""
        names = tuple(self.parts.model.nodes[n].name for n in unit.nodes)
        quantized = unit.number in self._decision.quantized
        costs = self._costs
        ms = None if costs is None else self._spent(unit, costs)
        if (way := self._decision.way.get(unit.number)) is not None and not quantized:
            return self._stored(unit, way, _Verdict(names, False, "placement", "", ms))
        if not unit.inputs:
            return self._barred(unit, _Verdict(names, False, "unsupported", "", ms))
        if costs is None:
            return self._by_trials(unit, _Verdict(names, quantized, "untried", "", unknown=_UNTIMED))
        price = costs.prices[unit.number]
        assert ms is not None
        verdict = _Verdict(names, quantized, "close", "", ms, ms + margin(costs, self._decision, unit), price.seen)
        if quantized:
            usual = costs.way(unit.number)[1]
            otherwise = "float" if usual is None else f"float with weights stored as {usual.name}"
            verdict = replace(verdict, measured=True, otherwise=otherwise)
            return self._in_8_bits(unit, verdict)
        if any(is_low(layer.precision) for layer in self._layers(unit)):
            return self._in_part(verdict, price.as_float)
        return self._in_float(unit, verdict)

    def _stored(self, unit: Unit, way: Storage, verdict: _Verdict) -> _Verdict:
        """Of a unit that runs in float, and has its weights in fewer bits."""
        told = f"its weights alone are stored in {way.bits} bits ({way.name})"
        verdict = replace(verdict, storage=way.name, otherwise="float weights")
        if self._costs is None or verdict.ms is None:
            return replace(verdict, reason=f"{told}, as part of {self._evidence.origin}", unknown=_UNTIMED)
        as_float = verdict.ms - self._costs.prices[unit.number].stored[way] + self._costs.prices[unit.number].as_float
        told += f": it takes {_ms(verdict.ms)}, with float weights {_ms(as_float)}"
        return self._weighed(replace(verdict, other_ms=as_float, measured=True), told)

    def _spent(self, unit: Unit, costs: Costs) -> float:
        around = {e.tensor for e in unit.inputs} | {t for t in unit.outputs if t in self.parts.edges}
        return costs.of_unit(unit, self._decision) + sum(costs.of_tensor(t, self._decision) for t in around)

    def _barred(self, unit: Unit, verdict: _Verdict) -> _Verdict:
        """Why there is nothing to decide about a unit: no activation that it reads can carry a pair."""
        evidence, nodes = self._evidence, [self.parts.model.nodes[n] for n in unit.nodes]
        names = {n.name for n in nodes}
        if any(e.node in names and e not in evidence.possible for e in evidence.able):
            told = "your list of nodes (--node-filter-list) leaves it in float"
            return replace(verdict, why="excluded", reason=told, unknown=told)
        if any(e in evidence.placement for e in unit.weights):
            told = f"only its constant carries a pair, as part of {evidence.origin}"
            return replace(verdict, quantized=True, why="placement", reason=told, unknown=told)
        told = self._refused(nodes, unit)
        return replace(verdict, reason=told, unknown=f"no pair can stand there, {told}")

    def _refused(self, nodes: Sequence[Node], unit: Unit) -> str:
        evidence = self._evidence
        made = {t for n in nodes for t in n.outputs}
        entering = [(n, slot, t) for n in nodes for slot, t in enumerate(n.inputs) if t and t not in made]
        data = [each for each in entering if each[2] not in evidence.model.constants]
        for node, slot, tensor in data:
            if why := refusal(evidence.model, tensor, node.index, slot):
                besides = "; a pair on its constant alone brings nothing" if unit.weights else ""
                return f"on its input {tensor}: {why}{besides}"
        if data:
            return f"on its input {data[0][2]}: the range of its values is unknown"
        return "for it reads no tensor but constants"

    def _in_8_bits(self, unit: Unit, verdict: _Verdict) -> _Verdict:
        assert verdict.ms is not None
        assert verdict.other_ms is not None
        took = f"8 bits take {_ms(verdict.ms)} with the conversions around it"
        told = f"{took}, {verdict.otherwise} would take {_ms(verdict.other_ms)}"
        if self._is_free(unit, verdict):
            return replace(verdict, why="no time", reason="it takes no time either way, and follows its neighbours")
        return self._weighed(verdict, told)

    def _in_part(self, verdict: _Verdict, as_float: float) -> _Verdict:
        """Of a unit that the prices count as float: pairs on some inputs, with which a node of it runs in 8 bits."""
        assert verdict.ms is not None
        told = f"it carries pairs in part and takes {_ms(verdict.ms)}, without any it would take {_ms(as_float)}"
        return self._weighed(
            replace(verdict, quantized=True, other_ms=as_float, measured=True, otherwise="float"), told
        )

    def _weighed(self, verdict: _Verdict, told: str) -> _Verdict:
        """Whether prices or the placement as a whole speak for 8 bits."""
        assert verdict.ms is not None
        assert verdict.other_ms is not None
        if verdict.other_ms > verdict.ms:
            return replace(verdict, why="faster", reason=told)
        whole = f"{told}; it is part of {self._evidence.origin}, which was measured as a whole"
        if self._is_close(verdict):
            return replace(verdict, why="close", reason=f"{whole}, and the two hardly differ")
        return replace(verdict, why="placement", reason=whole)

    def _in_float(self, unit: Unit, verdict: _Verdict) -> _Verdict:
        assert verdict.ms is not None
        assert verdict.other_ms is not None
        guessed = "" if verdict.measured else " (a guess: no build ran it so)"
        told = f"float takes {_ms(verdict.ms)}, 8 bits would take {_ms(verdict.other_ms)} with its conversions{guessed}"
        if alone := self._evidence.alone.get(verdict.unit[0]):
            told += f"; alone: {alone.why}"
        if self._is_free(unit, verdict):
            return replace(verdict, why="no time", reason="it takes no time either way, and follows its neighbours")
        if kernel := self._without_kernel(unit):
            return replace(verdict, why="no kernel", reason=f"{kernel}; {told}")
        if verdict.other_ms > verdict.ms:
            return replace(verdict, why="slower", reason=told)
        if noise := self._damage(unit):
            return replace(verdict, why="inaccurate", reason=f"{noise}; {told}")
        tried = self._by_trials(unit, verdict)
        if tried.why in ("failed", "inaccurate"):
            return replace(tried, reason=f"{tried.reason}; {told}")
        if self._is_close(verdict):
            return replace(verdict, why="close", reason=f"{told}: too little to tell them apart")
        if not self._evidence.placement:
            return replace(verdict, why="unproven" if self._evidence.history else "untried", reason=told)
        trial = self._evidence.trial
        if tried.why == "slower" or trial is None or trial.proposal.origin in FORETOLD:
            return replace(tried, reason=f"{told}; {tried.reason}")
        whole = f"this placement is {self._evidence.origin}, which measured faster than what the prices led to"
        return replace(verdict, why="placement", reason=f"{whole}; {told}")

    def _is_free(self, unit: Unit, verdict: _Verdict) -> bool:
        assert self._costs is not None
        return self._costs.prices[unit.number].as_float == 0 and not verdict.ms and not verdict.other_ms

    def _is_close(self, verdict: _Verdict) -> bool:
        """Whether the two ways differ by less than the search takes for a difference."""
        assert self._costs is not None
        assert verdict.ms is not None
        assert verdict.other_ms is not None
        return abs(verdict.other_ms - verdict.ms) <= CLOSE * self._costs.float_ms / 2

    def _without_kernel(self, unit: Unit) -> str:
        """That builds had pairs around the unit, and in each of them the engine ran it in float all the same."""
        names = {self.parts.model.nodes[n].name for n in unit.nodes}
        ran = [
            (trial.proposal.origin, layer)
            for trial, quantized, _ in self._others
            if unit.number in quantized
            for layer in trial.layers or ()
            if layer.kind == "compute" and not names.isdisjoint(layer.nodes)
        ]
        if not ran or not all(is_float(layer.precision) for _, layer in ran):
            return ""
        return f"with pairs around it (as in the candidate {ran[0][0]!r}) the engine still ran it in float"

    def _damage(self, unit: Unit) -> str:
        """That its rounding is foretold to take the outputs below the limit."""
        noise, parts = self._evidence.noise, self.parts
        if noise is None or self._evidence.limits.max_noise is None:
            return ""
        now, flipped = parts.placement(self._decision), parts.placement(other(parts, self._decision, [unit.number]))
        before, fresh = ({noise.value(e.tensor) for e in p.edges} for p in (now, flipped))
        alone = sum(noise.alone.get(value, 0.0) for value in fresh - before)
        if not alone or self._foretold + alone <= self._allowed:
            return ""
        most = self._evidence.limits.min_sqnr
        scale = self._evidence.limits.max_noise / self._allowed
        return (
            f"its rounding alone brings the outputs to {_db(alone * scale)}, with the rest of the placement to "
            f"{_db((self._foretold + alone) * scale)}, and the limit is {most:g} dB"
        )

    @cached_property
    def _foretold(self) -> float:
        noise = self._evidence.noise
        return 0.0 if noise is None else noise.predicted(self.parts.placement(self._decision))

    @cached_property
    def _allowed(self) -> float:
        noise = self._evidence.noise
        assert noise is not None
        return noise.allowed(self._evidence.history)

    def _by_trials(self, unit: Unit, verdict: _Verdict) -> _Verdict:
        """What candidates say that ran the unit otherwise than their opponent, the one with fewest changes first."""
        evidence = self._evidence
        if verdict.quantized and evidence.trial is not None:
            share = ratios_to_float(evidence.history, evidence.plan).get(evidence.placement)
            told = "" if share is None else f", which was {speed(share)} as fast as float"
            return replace(verdict, why="faster", reason=f"part of {evidence.origin}{told}")
        if verdict.quantized:
            return replace(verdict, why="placement", reason=f"part of {evidence.origin}")
        flips = [
            (len(mine ^ theirs), trial.number, trial, unit.number in mine)
            for trial, mine, theirs in self._others
            if (unit.number in mine) != (unit.number in theirs)
        ]
        telling = [flip for flip in flips if flip[3] != (outcome(flip[2], evidence.plan) == "faster")]
        if not flips:
            return replace(verdict, why="untried", reason="no candidate ran it in 8 bits within the builds of this run")
        changed, _, trial, into_8_bits = min(telling or flips)
        others = "" if changed == 1 else f" with {changed - 1} more unit{'s' if changed > 2 else ''}"
        way = "in 8 bits" if into_8_bits else "in float again"
        name = f"a candidate that ran it {way}{others} ({trial.proposal.origin!r})"
        if isinstance(trial.result, Failure):
            return replace(verdict, why="failed", reason=f"{name} failed: {trial.result.reason}")
        said, ratio = outcome(trial, evidence.plan), judge(trial, evidence.plan)
        if said == "inaccurate":
            return replace(verdict, why="inaccurate", reason=f"{name} missed the limits on accuracy: {trial.accuracy}")
        took = "" if ratio is None else f" was {speed(ratio.median)} as fast as its opponent"
        if into_8_bits and said == "faster":
            return replace(verdict, why="unproven", reason=f"{name}{took} and won, but did not ship")
        words = "" if said != "undecided" else ": not clearly faster"
        return replace(verdict, why="slower", reason=f"{name}{took}{words}")


_UNTIMED = "the builds of this run have no layer times, so that single nodes have no price"


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms"


def _db(noise: float) -> str:
    return f"{-10 * log10(noise):.1f} dB"
