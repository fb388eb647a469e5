"""Reasons concluded from measurements: why each node of a tuned model runs in float or in 8 bits.

Explanations are about the shipped placement of a finished run. Times of nodes come from the run's `facts`. What the
opposite decision would cost is predicted from prices: they are learned from all builds of a run in any mode, if the
engine gives layer times. Decisions are about units: nodes that are quantized together, and share the unit's times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import log10
from typing import Any, Literal

from onnx import TensorProto

from qdqtune.errors import Failure
from qdqtune.explanation.facts import Facts
from qdqtune.explanation.reasons_by_graph import is_float, is_low
from qdqtune.graph.model import Node
from qdqtune.placement.possible import refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import NodeTime
from qdqtune.search.costs.decisions import cheapest_formats, decision_of, is_shown_by, margin, nearest, other
from qdqtune.search.costs.units import Decision, Partition, Unit, partition, usual_groups
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import judge, speed
from qdqtune.types import Layer, Placement, Trial, WeightFormat

Why = Literal[
    "faster", "slower", "placement", "inaccurate", "no kernel", "elsewhere", "unproven", "unsupported", "no time"
]  # fmt: skip
"""What decided, in this order: prices or measurements; the placement as a whole, measured or the cheapest by rule; the
accuracy of the outputs, which takes float or 16 bits; that the engine has no such kernel, or leaves the node to another
execution provider; that no candidate was proven faster; that no pair can stand there, or the user wants none; or that
the node takes no time."""

IN_WORDS: Mapping[Why, str] = {
    "faster": "faster so",
    "slower": "8 bits alone there take longer",
    "placement": "part of the placement that ships",
    "inaccurate": "8 bits would do too much to the outputs",
    "no kernel": "the engine does not run it in 8 bits, with pairs as well",
    "elsewhere": "the engine leaves it to another execution provider",
    "unproven": "no candidate proved faster",
    "unsupported": "no pair can stand there, or you have excluded it",
    "no time": "takes no time of its own",
}


@dataclass(frozen=True)
class Explanation:
    """Why one node runs in float or in 8 bits. Times are in ms, and of its whole unit.

    `ms` is the time of the unit in the shipped model, conversions included (each counts with one unit), and `float_ms`
    its time in the float model. Summed over all units they give the measured latencies. `margin_ms` is the extra time
    of the whole model if this unit alone had the opposite decision (`otherwise`); below 0 if it would save time.
    `measured` is False where that time is partly a guess. A time is None where it is unknown.

    `precision` is that of the engine's report on the shipped build, or else follows from the pairs. `weight_format` is
    the weight format of its weights where these alone are quantized, "" if there are none.
    """

    node: str
    op: str
    unit: tuple[str, ...]
    quantized: bool
    precision: str
    why: Why
    reason: str
    ms: float | None
    float_ms: float | None
    margin_ms: float | None
    measured: bool
    weight_format: str = ""
    otherwise: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        return asdict(self) | {"unit": list(self.unit)}


@dataclass(frozen=True)
class Tally:
    """The nodes with one decision and reason: how many, and the times of their units in the shipped and in the float
    model. `margin_ms` is the extra time of the model if all had the opposite decision; `measured` is False where that
    is partly a guess. `family` is that of their weight format, "" where there is none."""

    quantized: bool
    why: Why
    nodes: int
    ms: float | None
    float_ms: float | None
    margin_ms: float | None
    measured: bool
    example: str
    family: str = ""

    @property
    def runs_in(self) -> str:
        if self.family:
            return "8 bits, dynamic" if self.family.startswith("d") else f"{self.family[1:]}-bit weights"
        if self.why == "elsewhere":
            return "elsewhere"
        if self.quantized and self.why == "inaccurate":
            return "16 bits"
        return "8 bits" if self.quantized and self.why != "no kernel" else "float"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tally(rows: Sequence[Explanation], together: Callable[[Sequence[Explanation]], float | None]) -> tuple[Tally, ...]:
    """The sums of rows with equal decision and reason, the longest time first. Each unit counts once.

    `together` gives the extra time of the model in ms if all units of some rows had the opposite decision, or None.
    """
    groups: dict[tuple[bool, str, Why], list[Explanation]] = {}
    for row in rows:
        family = WeightFormat.named(row.weight_format).family if row.weight_format else ""
        groups.setdefault((row.quantized, family, row.why), []).append(row)
    tallies = []
    for (quantized, family, why), members in groups.items():
        units = tuple({row.unit: row for row in members}.values())
        ms, float_ms = total(row.ms for row in units), total(row.float_ms for row in units)
        more = together(units) if all(row.margin_ms is not None for row in units) else None
        largest, shown = max(members, key=lambda row: row.ms or 0.0).node, all(row.measured for row in units)
        tallies.append(Tally(quantized, why, len(members), ms, float_ms, more, shown, largest, family))
    return tuple(sorted(tallies, key=lambda t: (-(t.ms or 0.0), -t.nodes, t.why)))


def total(times: Iterable[float | None]) -> float | None:
    """The sum of the known times; None if none is known."""
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


PREDICTED = frozenset({"cut", "front", "polish"})
"""Origins of candidates that prices have proposed, with a predicted ratio."""


def headline(facts: Facts) -> str:
    """What shipped and where it comes from, in one sentence."""
    if not facts.placement:
        if facts.shipped == "tuned":
            return "the float model ships with its rewrites, which are faster alone than with any pair that was tried"
        if not facts.history:
            return "the float model ships: nothing was tried"
        return f"the float model ships: of {len(facts.history)} candidates none was proven faster within the limits"
    ratio = None if facts.is_by_rule else ratios_to_float(facts.history, facts.plan).get(facts.placement)
    share = "" if ratio is None else f", {speed(ratio)} as fast as float in the search"
    return f"what ships is {facts.origin}{share}"


def tallied(facts: Facts) -> tuple[tuple[Explanation, ...], tuple[Tally, ...]]:
    """An explanation for every node, in graph order, and their sums by reason."""
    reasons = _Explainer(facts)
    of_unit = {unit.number: reasons.of_unit(unit) for unit in reasons.parts.units}
    owner = reasons.parts.owner
    rows = tuple(reasons.of_node(node, of_unit[owner[node.name]]) for node in facts.model.nodes)
    return rows, tally(rows, reasons.together)


class _Explainer:
    """Explains nodes and units; values that all of them need are computed once."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._costs = facts.costs
        self.parts: Partition = (
            self._costs.partition
            if self._costs
            else partition(facts.model, facts.possible, usual_groups(facts.model, facts.possible))
        )
        self._decision = self._decided(facts.placement)
        self._tried = tuple(self._quantized_units())

    def _decided(self, placement: Placement) -> Decision:
        return decision_of(self._costs, placement) if self._costs else nearest(self.parts, placement)

    def _layers(self, unit: Unit) -> list[Layer]:
        """The layers of the shipped build that compute nodes of a unit."""
        names = (self.parts.model.nodes[n].name for n in unit.nodes)
        known = (self._facts.layers.get(name) for name in names)
        return [layer for layer in known if layer is not None and layer.kind == "compute"]

    def _quantized_units(self) -> Iterator[tuple[Trial, frozenset[int], frozenset[int]]]:
        """Each candidate, the units that it runs in 8 bits, and those that the placement compared with it does."""
        known = {p: self._decided(p).quantized for t in self._facts.history for p in (t.placement, t.against)}
        for trial in self._facts.history:
            yield trial, known[trial.placement], known[trial.against]

    def together(self, rows: Sequence[Explanation]) -> float | None:
        """The extra time of the model, in ms, if all units of these rows had the opposite decision; None if unknown.

        Conversions between two of these units no longer count.
        """
        costs, decision = self._costs, self._decision
        if costs is None:
            return None
        numbers = {row.unit: self.parts.owner[row.unit[0]] for row in rows}
        formatted = {
            numbers[row.unit] for row in rows if decision.format_of.get(numbers[row.unit]) and not row.quantized
        }
        in_part = {row.unit for row in rows if row.quantized and numbers[row.unit] not in decision.quantized}
        turned = [n for unit, n in numbers.items() if n not in formatted and unit not in in_part]
        plain = replace(
            decision, weight_formats=frozenset(pair for pair in decision.weight_formats if pair[0] not in formatted)
        )
        flipped = other(self.parts, plain, turned, cheapest_formats(costs, turned))
        alone = sum(row.margin_ms or 0.0 for row in rows if row.unit in in_part)
        return costs.total(flipped) - costs.total(decision) + alone

    # ---- nodes

    def of_node(self, node: Node, verdict: Explanation) -> Explanation:
        """A node's explanation: `verdict`, that of its unit, unless the engine ran the node otherwise."""
        has_format = any(e.node == node.name for e in self._facts.placement.weight_formats)
        row = replace(
            verdict,
            node=node.name,
            op=node.op,
            precision=self._precision(node, verdict),
            weight_format=verdict.weight_format if has_format else "",
        )
        if verdict.quantized and verdict.why == "inaccurate":
            row = replace(row, precision="uint16")
        layer = self._facts.layers.get(node.name)
        if layer is not None and layer.elsewhere:
            return replace(row, why="elsewhere", reason=f"runs {layer.elsewhere}")
        if verdict.quantized and (why := self._facts.in_float.get(node.name)):
            return replace(row, why="no kernel", reason="; ".join([why, *_times_text(verdict, "with the pairs it")]))
        if layer is not None and layer.kind == "folded":
            return replace(row, why="no time", reason="the engine computes it in advance")
        return row

    def _precision(self, node: Node, verdict: Explanation) -> str:
        layer = self._facts.layers.get(node.name)
        if layer is not None and layer.kind == "compute" and layer.precision:
            return layer.precision.lower()
        if verdict.quantized:
            return self._facts.quant_type
        infos = (self._facts.model.tensors.get(t) for t in (*node.outputs, *node.inputs) if t)
        dtype = next((info.dtype for info in infos if info is not None), TensorProto.FLOAT)
        name: str = TensorProto.DataType.Name(dtype).lower()
        return {"float": "fp32", "float16": "fp16"}.get(name, name)

    # ---- units

    def of_unit(self, unit: Unit) -> Explanation:
        """Explain a unit: why the opposite decision is impossible, or else what decided. `node` and `op` are empty."""
        names = tuple(self.parts.model.nodes[n].name for n in unit.nodes)
        quantized = unit.number in self._decision.quantized
        costs = self._costs
        verdict = Explanation(
            node="",
            op="",
            unit=names,
            quantized=quantized,
            precision="",
            why="unproven",
            reason="",
            ms=_time_of(names, self._facts.spent),
            float_ms=_time_of(names, self._facts.float_spent),
            margin_ms=None,
            measured=False,
            otherwise="8 bits",
        )
        if (weight_format := self._decision.format_of.get(unit.number)) is not None and not quantized:
            return self._weight_only(unit, weight_format, verdict)
        if not unit.inputs:
            return self._without_pairs(unit, verdict)
        if not self._facts.placement.wide.isdisjoint(unit.inputs):
            return self._in_16_bits(unit, verdict)
        if self._facts.is_by_rule:
            return self._by_rule(verdict)
        if costs is None:
            return self._by_trials(unit, verdict)
        more, is_shown = margin(costs, self._decision, unit), is_shown_by(costs, self._decision, unit)
        verdict = replace(verdict, margin_ms=more, measured=is_shown)
        if quantized:
            usual = costs.cheapest_float(unit.number)[1]
            otherwise = "float" if usual is None else f"float with weights stored as {usual.name}"
            verdict = replace(verdict, otherwise=otherwise)
            if self._is_free(unit, verdict):
                return replace(verdict, why="no time", reason="it takes no time either way, and follows its neighbours")
            return self._with_reason(verdict, "; ".join(_times_text(verdict, "in 8 bits it")))
        if any(is_low(layer.precision) for layer in self._layers(unit)):
            return self._in_part(verdict)
        return self._in_float(unit, verdict)

    @property
    def _limit(self) -> str:
        least = self._facts.limits.min_sqnr
        return "the limits on accuracy" if least is None else f"{least:g} dB"

    def _by_rule(self, verdict: Explanation) -> Explanation:
        """Explain a unit of a run that timed nothing: what it computes in was the cheapest by rule."""
        if not verdict.quantized:
            told = f"nothing that was tried has it in 8 or 16 bits and holds {self._limit}"
            return replace(verdict, why="inaccurate", reason=told)
        return replace(verdict, why="placement", reason=f"8 bits cost the least, and the outputs hold {self._limit}")

    def _in_16_bits(self, unit: Unit, verdict: Explanation) -> Explanation:
        best, noise = "cheapest" if self._facts.is_by_rule else "fastest", self._facts.noise
        alone = 0.0 if noise is None else sum(noise.of_value(noise.value(tensor)) for tensor in unit.outputs)
        told = f": rounding its results alone to 8 bits leaves {_db(alone)}" if alone else ""
        told = f"with 8 bits here too, the {best} found would miss {self._limit}{told}"
        return replace(verdict, why="inaccurate", quantized=True, reason=told)

    def _weight_only(self, unit: Unit, weight_format: WeightFormat, verdict: Explanation) -> Explanation:
        """Explain a unit in float whose weights have a weight format."""
        told = f"its weights alone are stored in {weight_format.bits} bits ({weight_format.name})"
        if weight_format.dynamic:
            told = f"its product runs in 8 bits, with scales found at run time ({weight_format.name})"
        verdict = replace(
            verdict, why="placement", quantized=False, weight_format=weight_format.name, otherwise="float weights"
        )
        if verdict.ms is None or verdict.float_ms is None:
            return replace(verdict, reason=f"{told}, as part of {self._facts.origin}")
        verdict = replace(verdict, margin_ms=verdict.float_ms - verdict.ms, measured=True)
        return self._with_reason(verdict, "; ".join([told, *_times_text(verdict, "it")]))

    def _without_pairs(self, unit: Unit, verdict: Explanation) -> Explanation:
        """Explain a unit of which no input can have a pair, apart from constants."""
        facts, nodes = self._facts, [self.parts.model.nodes[n] for n in unit.nodes]
        names = {n.name for n in nodes}
        if any(e.node in names and e not in facts.possible for e in facts.able):
            told = "the nodes that you have listed leave it in float"
            return replace(verdict, quantized=False, why="unsupported", reason=told)
        if any(e in facts.placement for e in unit.weights):
            told = f"only its constant carries a pair, as part of {facts.origin}"
            return replace(verdict, quantized=True, why="placement", reason=told)
        told = self._refused(nodes, unit)
        return replace(verdict, why="unsupported", reason=told)

    def _refused(self, nodes: Sequence[Node], unit: Unit) -> str:
        """Why no pair can stand on the inputs of a unit, apart from constants."""
        facts = self._facts
        made = {t for n in nodes for t in n.outputs}
        entering = [(n, slot, t) for n in nodes for slot, t in enumerate(n.inputs) if t and t not in made]
        data = [each for each in entering if each[2] not in facts.model.constants]
        for node, slot, tensor in data:
            if why := refusal(facts.model, tensor, node.index, slot):
                besides = "; a pair on its constant alone brings nothing" if unit.weights else ""
                return f"on its input {tensor}: {why}{besides}"
        if data:
            return f"on its input {data[0][2]}: the range of its values is unknown"
        return "for it reads no tensor but constants"

    def _in_part(self, verdict: Explanation) -> Explanation:
        """Explain a unit that prices count as float although some inputs have pairs and a node runs in 8 bits."""
        assert verdict.ms is not None
        assert verdict.float_ms is not None
        more = verdict.float_ms - verdict.ms
        verdict = replace(verdict, quantized=True, margin_ms=more, measured=True, otherwise="float")
        return self._with_reason(verdict, "; ".join(["it carries pairs in part", *_times_text(verdict, "it")]))

    def _with_reason(self, verdict: Explanation, told: str) -> Explanation:
        """Add the reason: the unit is faster so by its prices, or its placement was measured as a whole."""
        assert verdict.margin_ms is not None
        if verdict.margin_ms > 0:
            return replace(verdict, why="faster", reason=told)
        whole = f"{told}; it is part of {self._facts.origin}, which was measured as a whole"
        return replace(verdict, why="placement", reason=whole)

    def _in_float(self, unit: Unit, verdict: Explanation) -> Explanation:
        assert verdict.margin_ms is not None
        told = "; ".join(_times_text(verdict, "in float it"))
        if self._is_free(unit, verdict):
            return replace(verdict, why="no time", reason="it takes no time either way, and follows its neighbours")
        if kernel := self._without_kernel(unit):
            told = "; ".join([kernel, *_times_text(replace(verdict, margin_ms=None), "it")])
            return replace(verdict, margin_ms=None, why="no kernel", reason=told)
        if verdict.margin_ms > 0:
            return replace(verdict, why="slower", reason=told)
        if noise := self._lost_accuracy(unit):
            return replace(verdict, why="inaccurate", reason=f"{noise}; {told}")
        tried = self._by_trials(unit, verdict)
        if tried.why in ("no kernel", "inaccurate"):
            return replace(tried, reason=f"{tried.reason}; {told}")
        if not self._facts.placement:
            return replace(verdict, reason=told)
        trial, is_own = self._facts.trial, self._facts.shipped == "given"
        is_known = is_own or (trial is not None and trial.proposal.origin not in PREDICTED)
        if tried.why == "slower" or not is_known:
            return replace(tried, reason=f"{told}; {tried.reason}")
        why = "nothing proved faster than" if is_own else "measured faster than what the prices led to"
        whole = f"this placement is {self._facts.origin}, which {why}"
        return replace(verdict, why="placement", reason=f"{whole}; {told}")

    def _is_free(self, unit: Unit, verdict: Explanation) -> bool:
        assert self._costs is not None
        return self._costs.prices[unit.number].as_float == 0 and not verdict.ms and not verdict.margin_ms

    def _without_kernel(self, unit: Unit) -> str:
        """A text if the engine ran the unit in float in every build that had pairs around it; else empty."""
        names = {self.parts.model.nodes[n].name for n in unit.nodes}
        ran = [
            (trial.proposal.origin, layer)
            for trial, quantized, _ in self._tried
            if unit.number in quantized
            for layer in trial.layers or ()
            if layer.kind == "compute" and not names.isdisjoint(layer.nodes)
        ]
        if not ran or not all(is_float(layer.precision) for _, layer in ran):
            return ""
        return f"with pairs around it (as in the candidate {ran[0][0]!r}) the engine still ran it in float"

    def _lost_accuracy(self, unit: Unit) -> str:
        """A text if rounding the unit is predicted to take the outputs below the limit; else empty."""
        noise, parts = self._facts.noise, self.parts
        if noise is None or self._facts.limits.max_noise is None:
            return ""
        now, flipped = parts.placement(self._decision), parts.placement(other(parts, self._decision, [unit.number]))
        before, fresh = ({noise.value(e.tensor) for e in p.edges} for p in (now, flipped))
        alone = sum(noise.value_noise.get(value, 0.0) for value in fresh - before)
        if not alone or self._predicted_noise + alone <= self._allowed_noise:
            return ""
        most = self._facts.limits.min_sqnr
        scale = self._facts.limits.max_noise / self._allowed_noise
        return (
            f"its rounding alone brings the outputs to {_db(alone * scale)}, with the rest of the placement to "
            f"{_db((self._predicted_noise + alone) * scale)}, and the limit is {most:g} dB"
        )

    @cached_property
    def _predicted_noise(self) -> float:
        noise = self._facts.noise
        return 0.0 if noise is None else noise.summed(self.parts.placement(self._decision))

    @cached_property
    def _allowed_noise(self) -> float:
        noise = self._facts.noise
        assert noise is not None
        return noise.allowed(self._facts.history)

    def _by_trials(self, unit: Unit, verdict: Explanation) -> Explanation:
        """Explain a unit by the candidate with the fewest changes that ran it otherwise than its `against`."""
        facts = self._facts
        if verdict.quantized and facts.trial is not None:
            share = ratios_to_float(facts.history, facts.plan).get(facts.placement)
            told = "" if share is None else f", which was {speed(share)} as fast as float"
            return replace(verdict, why="faster", reason=f"part of {facts.origin}{told}")
        if verdict.quantized:
            return replace(verdict, why="placement", reason=f"part of {facts.origin}")
        flips = [
            (len(mine ^ theirs), trial.number, trial, unit.number in mine)
            for trial, mine, theirs in self._tried
            if (unit.number in mine) != (unit.number in theirs)
        ]
        telling = [flip for flip in flips if flip[3] != (outcome(flip[2], facts.plan) == "faster")]
        if not flips:
            return replace(verdict, reason="no candidate ran it in 8 bits within the builds of this run")
        changed, _, trial, into_8_bits = min(telling or flips)
        others = "" if changed == 1 else f" with {changed - 1} more unit{'s' if changed > 2 else ''}"
        way = "in 8 bits" if into_8_bits else "in float again"
        name = f"a candidate that ran it {way}{others} ({trial.proposal.origin!r})"
        if isinstance(trial.result, Failure):
            return replace(verdict, why="no kernel", reason=f"{name} failed: {trial.result.reason}")
        said, ratio = outcome(trial, facts.plan), judge(trial, facts.plan)
        if said == "inaccurate":
            missed = facts.limits.why_refused(trial) or "it misses the limits on accuracy"
            return replace(verdict, why="inaccurate", reason=f"{name} was refused: {missed}")
        took = "" if ratio is None else f" was {speed(ratio.median)} as fast as its opponent"
        if into_8_bits and said == "faster":
            return replace(verdict, reason=f"{name}{took} and won, but did not ship")
        words = "" if said != "undecided" else ": not clearly faster"
        return replace(verdict, why="slower", reason=f"{name}{took}{words}")


def _time_of(names: Sequence[str], spent: Mapping[str, NodeTime]) -> float | None:
    """The time of some nodes in ms, conversions included; None if unknown."""
    return sum(sum(spent[name]) for name in names) if spent else None


def _times_text(verdict: Explanation, subject: str) -> Iterator[str]:
    """The times of a unit in the shipped and in the float model, and what the opposite decision would add."""
    if verdict.ms is not None and verdict.float_ms is not None:
        yield f"{subject} takes {_ms(verdict.ms)}, in the float model {_ms(verdict.float_ms)}"
    if (margin_ms := verdict.margin_ms) is not None:
        verb, more = ("cost", " more") if margin_ms >= 0 else ("save", "")
        guess = "" if verdict.measured else " (a guess: no build ran it so)"
        yield f"{verdict.otherwise} would {verb} {_ms(abs(margin_ms))}{more} with the conversions around it{guess}"


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms"


def _db(noise: float) -> str:
    return f"{-10 * log10(noise):.1f} dB"
