"""The table of a finished run by unit: how each one runs in the file that ships, its time, and why it is not in 8 bits.

A unit is a set of nodes that are quantized together, since the engine runs them as one kernel. For a unit in float, the
question is how the latency would change with it in 8 bits and nothing else changed; for a unit in 8 bits, the facts 2
and 3 tell how it would change in float. Units of equal operators and shapes are judged together, since the difference
of a single small one is lost in noise. The first of these facts that is available gives the answer:

1. structure and engine: no kernel reads 8 bits there, or the user has excluded it;
2. a candidate that was timed against the file that ships and differs in these units alone: its latency, "measured";
3. costs derived from the layer times of all builds (`search.costs.prices`): the difference is "estimated". If
   that depends on costs that no build shows, no figure is given;
4. the limits on accuracy, where 8 bits would be faster, or the times are unknown;
5. a candidate that was faster than the file that ships, but missed a limit or was not proven: estimates of single units
   do not tell what many save together;
6. the outcome of the candidate that had it in 8 bits with the fewest other changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import isclose, log, log10
from statistics import median
from typing import Any, Literal

from qdqtune.engines.facts import ENGINES, OF_EP
from qdqtune.errors import Failure
from qdqtune.explanation.formatting import counted, origin_in_words
from qdqtune.explanation.unfused import is_float, is_low
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import ASKS_SHAPE, CLAMPS, COMPUTE, CONTROL_FLOW
from qdqtune.numerics.accuracy import decibels
from qdqtune.placement.possible import IN_BODIES, refusal
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import NodeTime
from qdqtune.search.costs.decisions import margin, other
from qdqtune.search.costs.output_noise import DOUBT
from qdqtune.search.costs.prices import Costs
from qdqtune.search.costs.units import Decision, Unit, formats_in, partition, split, state, usual_groups
from qdqtune.search.cut import CutSearch
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import is_wide, judge, speed, with_ratios
from qdqtune.tuning.finished import FinishedRun
from qdqtune.types import Edge, Layer, Placement, Trial, WeightFormat, sqnr_of

Reason = Literal[
    "",
    "no kernel for this operator",
    "excluded by your options",
    "not between pairs",
    "slower in 8 bits",
    "conversions cost more than it saves",
    "no gain beyond noise",
    "slower together",
    "not proven",
    "accuracy limit",
    "accuracy limit, together",
    "its build failed",
    "not tried",
]
"""Why a unit does not run in 8 bits; empty if it does."""

WITHOUT_KERNEL = ASKS_SHAPE | {"ConstantOfShape", "EyeLike", "IsInf", "IsNaN", "NonZero", "Range"}
"""Operators that no engine runs in 8 bits: they compute shapes, indices or truth values, or read no data."""

IN_ADVANCE = "computed in advance"
"""The state of a unit that the engine computes when it is built, not in an inference."""

IN_Q = "its Q"
"""The state of a Relu or Clip that the engine removes, since the Q behind it clamps to the same range."""

NOISE = 0.02
"""Relative changes of the latency up to this count as noise: builds of the same file differ as much."""

CLEAR = 0.05
"""An estimated change counts above this share of the latency or the uncertainty of the run's comparisons, whichever is
larger. Chosen, not measured."""

APART = 0.15
"""If times of like nodes differ by more than this share of the latency, something disturbed the run: undisturbed runs
had at most 0.1, disturbed ones 0.4 and more."""


@dataclass(frozen=True)
class Explanation:
    """A row of the table: a unit, or a part of it that the engine runs in another precision than the rest, and why it
    runs so. Times are in ms, and include conversions at its borders.

    `state` is "8 bits", "16 bits", "float", "elsewhere" (another execution provider runs it), "computed in advance",
    "its Q" (the Q behind it does what this clamp did), or names the bits of its weights if only these are quantized.
    `precision` is what the engine reports, or "". `ms` is the time in the file that ships (`conversion_ms` of it in
    conversions), `float_ms` that in the float model; summed over all units, they are the measured latencies. If the
    float model runs it in one kernel with others, its share of that is a guess: `float_with` names one of them.
    `more_ms` is how much the latency would grow if this unit and `alike` others of equal operators and shapes switched
    precision (8 bits or float); `source` says where that comes from. A time is None if unknown, and `more_ms` if it is
    within noise.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    state: str
    precision: str
    ms: float | None
    float_ms: float | None
    more_ms: float | None = None
    alike: int = 0
    source: Literal["", "measured", "estimated"] = ""
    reason: Reason = ""
    detail: str = ""
    conversion_ms: float = 0.0
    float_with: str = ""

    @property
    def why(self) -> str:
        """The reason, with the evidence, as text."""
        facts = [self.detail] if self.detail else []
        if self.more_ms is not None:
            change = f"{float(f'{abs(self.more_ms):.2g}'):g} ms {'more' if self.more_ms >= 0 else 'less'}"
            where = "8 bits" if self.reason else "float"
            facts.append(f"with {and_others(self.alike)} in {where} the model would take {change} ({self.source})")
        return ": ".join(filter(None, (self.reason, "; ".join(facts))))


def and_others(alike: int) -> str:
    return f"it and {alike} like it" if alike else "it"


def _estimated(where: str, alike: int, change: float, most: float, is_guess: bool) -> str:
    """A text about a relative `change` of the latency with a unit in `where`, up to `most` of it noise; without a
    figure if it `is_guess`, as guesses may be many times too high."""
    units = and_others(alike)
    if abs(change) <= NOISE:
        effect = "save less than {:.0%} of the latency" if is_guess else "change the latency by less than {:.0%}"
        return f"in {where} {units} {'are' if alike else 'is'} estimated to {effect.format(NOISE)}"
    direction = "slower" if change > 0 else "faster"
    if is_guess:
        return f"estimated {direction} with {units} in {where}; not measured"
    noise = f"below this run's noise of {most:.0%}"
    return f"not known with {units} in {where}: estimate {abs(change):.0%} {direction}, {noise}"


def tally(rows: Iterable[Explanation]) -> tuple[Explanation, ...]:
    """One row for each state and reason, with the nodes and times of all its units; the longest time first."""
    groups = defaultdict[tuple[str, Reason], list[Explanation]](list)
    for row in sorted(rows, key=lambda row: -(row.ms or 0.0)):
        groups[row.state, row.reason].append(row)
    sums = []
    for members in groups.values():
        nodes = tuple(name for row in members for name in row.nodes)
        times = total(row.ms for row in members), total(row.float_ms for row in members)
        sums.append(replace(members[0], nodes=nodes, ms=times[0], float_ms=times[1], float_with=""))
    return tuple(sorted(sums, key=lambda row: (-(row.ms or 0.0), -len(row.nodes), row.reason)))


def total(times: Iterable[float | None]) -> float | None:
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


def explanations(run: FinishedRun) -> tuple[Explanation, ...]:
    table = _Table(run)
    return tuple(row for unit in table.parts.units for row in table.rows(unit))


class _Table:
    def __init__(self, run: FinishedRun) -> None:
        self.run = run
        shares = formats_in([run.placement, *(trial.placement for trial in run.history)])
        self._search = CutSearch(run.model, run.able, run.float_layers, plan=run.plan, format_shares=shares)
        # Units are the kernels of the float build, each split as its kind ran fastest in 8 bits, and where pairs of
        # what ships stand inside it; or nodes that engines usually fuse, if the layers are unknown.
        self._costs = self._search.costs(run.history, cuts=run.placement.edges) if run.float_spent else None
        if self._costs is not None:
            self.parts = self._costs.partition
        else:
            groups = self._search.groups if run.float_layers else usual_groups(run.model, run.able)
            cut = chain.from_iterable(split(run.model, group, run.placement.edges) for group in groups)
            self.parts = partition(run.model, run.able, cut, shares)
        engine = run.summary["engine"]
        facts = OF_EP.get(engine["provider"]) if "provider" in engine else ENGINES.get(engine.get("engine", ""))
        self._lacking = frozenset[str]() if facts is None else facts.lacks
        self._decision = self.parts.decision(run.placement)
        self._layer_of = {name: layer for layer in run.shipped_layers for name in layer.nodes}
        quantized, reported = self._decision.quantized, self._reported(run.shipped_layers, run.placement)
        states = dict.fromkeys((unit.number for unit in self.parts.units), "float")
        # A pair in front of an operator without a kernel, such as a Shape, changes nothing.
        states |= {n: "8 bits" for n in quantized if not self._without_kernel(self.parts.units[n])}
        formats = {number: weight_format.name for number, weight_format in self._decision.weight_formats}
        self._states = states | reported | formats
        self._twins = defaultdict[str, frozenset[int]](frozenset)
        """Numbers of the units in float that could be in 8 bits, by kind (equal operators and shapes)."""
        for unit in self.parts.units:
            if unit.inputs and self._states[unit.number] == "float" and unit.number not in quantized:
                self._twins[unit.kind] |= {unit.number}
        self._judged = dict[tuple[str, int], dict[str, Any]]()
        self._if_floats = dict[tuple[str, str], tuple[str, Mapping[str, Any]]]()
        ratios = [each for _, each in with_ratios(run.history, run.plan)]
        widths = [log(each.high / each.low) / 2 for each in ratios if each.low is not None and each.high is not None]
        self._clear = max(CLEAR, median(widths or [0.0]))
        least = run.limits.min_sqnr
        self._limit = "the limits on accuracy" if least is None else f"{least:g} dB"

    def _reported(self, layers: Iterable[Layer], placement: Placement) -> dict[int, str]:
        """State by unit number, where kernels of a build report a precision: "8 bits" if one of them has 8 bits or
        less; where pairs are not all around it, only if none is in float, as a Gelu is behind an Add in 8 bits."""
        low, floats, owner = set[int](), set[int](), self.parts.owner
        for layer in layers:
            if layer.kind == "compute" and (is_low(layer.precision) or is_float(layer.precision)):
                numbers = low if is_low(layer.precision) else floats
                numbers.update(owner[name] for name in owner.keys() & layer.nodes)
        low -= {n for n in low & floats if state(self.parts.units[n], self.parts, placement) in ("float", "mixed")}
        return dict.fromkeys(floats, "float") | dict.fromkeys(low, "8 bits")

    def rows(self, unit: Unit) -> Iterator[Explanation]:
        """The row of a unit; one more for each part that the engine runs in another precision or nowhere."""
        run, parts = self.run, defaultdict[str, list[Node]](list)
        for node in (self.parts.model.nodes[n] for n in unit.nodes):
            parts[self._state_of(node, unit)].append(node)
        for how, nodes in parts.items():
            names = tuple(node.name for node in nodes)
            ran = [self._layer_of[name] for name in names if name in self._layer_of]
            precisions = [layer.precision.lower() for layer in ran if layer.kind == "compute"]
            row = Explanation(
                nodes=names,
                operators=tuple(node.op for node in nodes),
                state=how,
                precision=min(precisions, key=lambda each: is_float(each) != (how == "float"), default=""),
                ms=sum(sum(run.spent[name]) for name in names) if run.spent else None,
                float_ms=sum(sum(run.float_spent[name]) for name in names) if run.float_spent else None,
                conversion_ms=sum(run.spent[name].conversions for name in names) if run.spent else 0.0,
            )
            row = replace(row, float_with=self._float_with(row))
            beside = next((n for layer in ran for n in layer.nodes if n in self.parts.owner and n not in names), "")
            if how == IN_Q:
                yield replace(row, detail="the Q behind it clamps to the same range")
            elif how == "8 bits" and beside and unit.number not in self._decision.quantized:
                yield replace(row, detail=f"the kernel of {beside} computes it")  # a product's bias
            elif how == "float" and self._states[unit.number] == "8 bits":
                detail = f"it is quantized as one with {parts['8 bits'][0].name}, so no pair stands between them"
                yield replace(row, reason="not between pairs", detail=detail)
            else:
                yield self._row(unit, row, ran)

    def _state_of(self, node: Node, unit: Unit) -> str:
        """The state of a node: that of its unit, unless the engine reports another one."""
        how, layer = self._states[unit.number], self._layer_of.get(node.name)
        if layer is None and self._layer_of and node.op in CLAMPS and (how == "float" or len(unit.nodes) == 1):
            paired = {edge.tensor for edge in self.run.placement.edges}
            return IN_Q if paired.issuperset(node.outputs) else how
        if layer is None or layer.elsewhere or layer.kind != "compute" or how not in ("float", "8 bits"):
            return how
        return "8 bits" if is_low(layer.precision) else "float" if is_float(layer.precision) else how

    def _row(self, unit: Unit, row: Explanation, ran: Sequence[Layer]) -> Explanation:
        """The row of the nodes of a unit that run in its state, or in 8 bits, in these layers."""
        run, state = self.run, row.state
        where = next((layer.elsewhere for layer in ran if layer.elsewhere), "")
        if where:
            return replace(row, state="elsewhere", reason="no kernel for this operator", detail=f"it runs {where}")
        if ran and all(layer.kind == "folded" for layer in ran):
            return replace(row, state=IN_ADVANCE, detail="the engine computes it once, when it is built")
        if not run.placement.wide.isdisjoint(unit.inputs):
            detail = f"with 8 bits here too, the outputs would miss {self._limit}"
            return replace(row, state="16 bits", precision="uint16", reason="accuracy limit", detail=detail)
        if state == "float":
            return replace(row, **self._in_float(unit))
        chosen = "part of the placement that proved fastest"
        figure: Mapping[str, Any] = {}
        if run.keeps_own_pairs:
            chosen = "part of your own Q/DQ file, which ships as it is"
        elif not run.summary["timed"]:
            chosen = f"8 bits cost the least by rule, and the outputs hold {self._limit}"
        else:
            told, figure = self._if_float(unit.kind, state)
            chosen += told and f"; {told}"
        if state != "8 bits":
            weight_format = WeightFormat.named(state)
            state = "8 bits, dynamic" if weight_format.dynamic else f"{weight_format.bits}-bit weights"
            how = f"only its weights are in {weight_format.bits} bits ({weight_format.name})"
            if weight_format.dynamic:
                how = f"an {weight_format.bits}-bit product that finds the scale of its input in every inference"
            chosen = f"{how}: {chosen}"
        return replace(row, state=state, detail=chosen, **figure)

    def _if_float(self, kind: str, how: str) -> tuple[str, Mapping[str, Any]]:
        """How the latency would change if all units of a kind (equal operators and shapes) that run as `how` ran in
        float: a text if there is no figure, and the figure as fields of `Explanation`; both empty if unknown."""
        if (kind, how) in self._if_floats:
            return self._if_floats[kind, how]
        run, ships = self.run, self._decision
        kin = {u.number for u in self.parts.units if u.kind == kind and self._states[u.number] == how}
        alike, changed, ms = len(kin) - 1, kin & ships.quantized, run.shipped_ms
        kept = ((number, each) for number, each in ships.weight_formats if number not in kin)
        floats = replace(other(self.parts, ships, changed), weight_formats=frozenset(kept))
        text, figure, is_guess = "", dict[str, Any](), False
        share, source = self._measured_with(floats, kin), "measured"
        if share is None and self._costs is not None and run.float_ms and ms and floats != ships:
            share, is_guess = self._estimate(lambda costs: costs.total(floats) - costs.total(ships))
            share, source = share * run.float_ms / ms, "estimated"
        if share is not None and ms is not None:
            most = NOISE if source == "measured" else self._clear
            if abs(share) > most and not is_guess:
                figure = {"more_ms": share * ms, "alike": alike, "source": source}
            elif abs(share) <= NOISE and not is_guess:
                gain = f"{and_others(alike)} gain{'' if alike else 's'} less than {NOISE:.0%} of the latency"
                text = f"{gain} ({source}){self._cost_in_accuracy(floats)}"
            elif share > NOISE:
                text = _estimated("float", alike, share, most, is_guess)
        self._if_floats[kind, how] = text, figure
        return text, figure

    def _cost_in_accuracy(self, floats: Decision) -> str:
        """What all that ships and a decision leaves in float costs in accuracy, as text; empty if unknown."""
        if self.run.noise is None:
            return ""
        now, rest = (self.run.noise.summed(self.parts.placement(each)) for each in (self._decision, floats))
        return f", at a cost of {10 * log10(now / rest):.1f} dB (estimated)" if now > 1.01 * rest > 0 else ""

    def _measured_with(self, decision: Decision, units: Collection[int]) -> float | None:
        """The relative change of latency with `decision` in place of what ships, which differs in `units` alone, if
        builds of both were timed against each other; None if not, or if the interval is too wide."""
        run, beside, ships, plan = self.run, self._beside(units), self.run.trial, self.run.plan
        is_float = not decision.quantized and not decision.weight_formats
        is_float &= beside.issuperset(e.tensor for e in (*run.placement.edges, *run.placement.weight_formats))
        if is_float and run.float_ms and run.shipped_ms and run.summary["shipped"] == "tuned":  # as in the proof
            return run.float_ms / run.shipped_ms - 1
        for trial, quantized, changed in self._candidates:
            formats = self.parts.decision(trial.placement).weight_formats
            if quantized != decision.quantized or formats != decision.weight_formats or not changed <= beside:
                continue
            pairs = [(trial, run.placement, 1)] + ([] if ships is None else [(ships, trial.placement, -1)])
            for timed, against, sign in pairs:
                measured = judge(timed, plan) if timed.against == against else None
                if measured is not None and (measured.verdict != "undecided" or not is_wide(measured)):
                    return measured.median**sign - 1
        return None

    def _beside(self, units: Iterable[int]) -> set[str]:
        """The tensors that units read and write."""
        beside = set[str]()
        for unit in (self.parts.units[number] for number in units):
            beside.update(unit.outputs, (e.tensor for e in (*unit.inputs, *unit.weights, *unit.weight_only)))
        return beside

    def _in_float(self, unit: Unit) -> dict[str, Any]:
        """Why a unit is in float, with the evidence, as fields of `Explanation`."""
        without = self._without_kernel(unit)
        if without:
            return {"reason": "no kernel for this operator", "detail": without}
        if not self.run.possible.issuperset(unit.inputs + unit.weights):
            return {"reason": "excluded by your options", "detail": "it is none of the nodes that you have listed"}
        if not self.run.summary["timed"]:
            detail = f"nothing that was tried has it in 8 or 16 bits and holds {self._limit}"
            return {"reason": "accuracy limit", "detail": detail}
        if unit.number not in self._twins[unit.kind]:
            return {"reason": "not between pairs", "detail": f"the engine ran it in float{self._bare_side(unit)}"}
        missed = self._missed_chance(unit)
        key = unit.kind, 0 if missed is None else missed.number
        if key not in self._judged:
            self._judged[key] = self._judgement(unit, missed)
        return self._judged[key]

    def _bare_side(self, unit: Unit) -> str:
        """Where a unit has no pair in what ships, as text."""
        edges = self.run.placement.edges
        reads = (f"its input {e.tensor}" for e in (*unit.inputs, *unit.weights) if e not in edges)
        stored = {edge.tensor for edge in edges}
        writes = (f"its output {tensor}" for tensor in unit.outputs if tensor not in stored)
        bare = next(chain(reads, writes), "")
        return f": {bare} carries no pair" if bare else ": no pair stands between its nodes" * (len(unit.nodes) > 1)

    def _judgement(self, unit: Unit, missed: Trial | None) -> dict[str, Any]:
        """As `_in_float`, by the facts 2 to 6 of the module's docstring; `missed` is a candidate for fact 5."""
        run, latency, twins = self.run, self.run.shipped_ms, self._twins[unit.kind]
        alike = len(twins) - 1
        trial, others = self._nearest(twins)
        measured = None if trial is None or others or trial.against != run.placement else judge(trial, run.plan)
        change, is_guess, is_shown, source, figure, detail = None, False, True, "measured", dict[str, Any](), ""
        if measured is not None and (measured.verdict != "undecided" or not is_wide(measured)):
            change, most = measured.median - 1 if measured.verdict != "undecided" else 0.0, NOISE
            detail = f"with {and_others(alike)} in 8 bits the model was {measured.speedup} as fast (measured)"
        elif self._costs is not None and latency is not None and run.float_ms is not None:
            share, is_guess = self._estimate(lambda costs: sum(self._more_ms(costs, number) for number in twins))
            change, most, source = share * run.float_ms / latency, self._clear, "estimated"
            is_shown = not is_guess and abs(change) > most
            detail = _estimated("8 bits", alike, max(change, 0.0), most, is_guess)
        if change is not None and is_shown and latency is not None:
            figure = {"more_ms": change * latency, "alike": alike, "source": source}
        if change is None or change < -NOISE:
            lost = self._lost_accuracy(twins)
            if lost:
                return {"reason": "accuracy limit", "detail": lost, **figure}
        if missed is not None and (source == "estimated" or change is None or change < -NOISE):
            reason, detail = self._why_missed(missed, twins, others)
            is_gain = reason.startswith("accuracy limit") and change is not None and change < -NOISE
            return {"reason": reason, "detail": detail, **(figure if is_gain else {})}
        if change is not None and -NOISE <= change <= most:
            together = self._together(unit) if source == "estimated" else None
            if together or change <= NOISE or not is_guess:
                reason, detail = together or ("no gain beyond noise", detail)
                return {"reason": reason, "detail": detail}
        if change is not None and change > 0:
            price = None if self._costs is None else self._costs.prices[unit.number]
            has_fast_kernel = price is not None and price.as_quantized < price.as_float
            reason = "conversions cost more than it saves" if has_fast_kernel else "slower in 8 bits"
            guess = f"estimated with {and_others(alike)} in 8 bits, not measured"
            return {"reason": reason, "detail": "" if figure else guess, **figure}
        reason, detail = self._outcome(trial, others)
        return {"reason": reason, "detail": detail, **figure}

    # ---- facts

    def _without_kernel(self, unit: Unit) -> str:
        """A text if a unit has no 8-bit kernel: nothing that it reads can carry a pair, no engine has one, or this
        engine is known to lack it, or ran all such units in float wherever pairs stood on all their inputs and outputs;
        else empty."""
        model = self.parts.model
        nodes = [model.nodes[n] for n in unit.nodes]
        for node in nodes:
            if node.op in CONTROL_FLOW:
                return IN_BODIES
            if node.op in WITHOUT_KERNEL:
                return f"{node.op} computes no values in 8 bits"
        if not unit.inputs:
            inside = set(model.constants).union([""], *(node.outputs for node in nodes))
            for node in nodes:
                for slot, tensor in enumerate(node.inputs):
                    if tensor not in inside:
                        why = refusal(model, tensor, node.index, slot) or "the range of its values is unknown"
                        return f"no pair can stand on its input {tensor!r}: {why}"
            return "it reads no tensor but constants"
        low, refused = self._ran
        if unit.kind in refused - low:
            return "with pairs on all that it reads and writes the engine still ran it in float"
        # The kernel of a unit is that of its product, or one that must compute all of its operators.
        deciding = [node.op for node in nodes if node.op in COMPUTE] or [node.op for node in nodes]
        lacking = [op for op in deciding if op in self._lacking and unit.kind not in low]
        return f"this engine computes {lacking[0]} in float, with or without pairs" if lacking else ""

    @cached_property
    def _ran(self) -> tuple[set[str], set[str]]:
        """The kinds of units that ran in 8 bits in any build, and those that ran in float with pairs on all tensors."""
        low, refused = set[str](), set[str]()
        builds = [(trial.placement, trial.layers) for trial in self.run.history if trial.layers]
        for placement, layers in (*builds, (self.run.placement, self.run.shipped_layers)):
            in_low = {name for layer in layers if is_low(layer.precision) for name in layer.nodes}
            for number, reported in self._reported(layers, placement).items():
                unit = self.parts.units[number]
                nodes = [self.parts.model.nodes[n] for n in unit.nodes]
                if reported == "8 bits" or any(node.op in COMPUTE and node.name in in_low for node in nodes):
                    low.add(unit.kind)
                elif state(unit, self.parts, placement) == "quantized":
                    refused.add(unit.kind)
        return low, refused

    @cached_property
    def _candidates(self) -> list[tuple[Trial, frozenset[int], set[str]]]:
        """Each candidate, its units in 8 bits, and the tensors whose pair or weight format differs from what ships."""
        ships, candidates = self.run.placement, []
        for trial in self.run.history:
            formats = {edge for edge, _ in trial.placement.weight_only ^ ships.weight_only}
            changed = {edge.tensor for edge in formats | trial.placement.edges ^ ships.edges}
            candidates.append((trial, self.parts.decision(trial.placement).quantized, changed))
        return candidates

    def _nearest(self, twins: frozenset[int]) -> tuple[Trial | None, int]:
        """The candidate with some of the units `twins` in 8 bits (all of them, if possible) that differs least from
        what ships in the rest of the model; and on how many other tensors it differs."""
        beside, ranked = self._beside(twins), list[tuple[bool, int, Trial]]()
        for trial, quantized, changed in self._candidates:
            if not twins.isdisjoint(quantized):
                ranked.append((not twins <= quantized, len(changed - beside) + len(twins - quantized), trial))
        _, others, nearest = min(ranked, key=lambda each: each[:2], default=(False, 0, None))
        return nearest, others

    def _float_with(self, row: Explanation) -> str:
        """The first of the other nodes that take a good part of the kernel that runs a row in the float model."""
        here = {name for own in row.nodes if own in self._layer_of for name in self._layer_of[own].nodes}
        for layer in self.run.float_layers if row.ms else ():
            apart = [name for name in layer.nodes if name in self.run.float_spent and name not in here]
            rest = sum(self.run.float_spent[name].own for name in apart)
            if rest > CLEAR * (row.float_ms or 0.0) and not set(layer.nodes).isdisjoint(row.nodes):
                return apart[0]
        return ""

    @cached_property
    def _ratios(self) -> dict[Placement, float]:
        return ratios_to_float(self.run.history, self.run.plan)

    @cached_property
    def _faster(self) -> list[tuple[Trial, Decision]]:
        """The candidates that were faster in the search than what ships: first those within the limits, which were not
        proven, then by accuracy. If the run found no model within the limits, undecided ones count as well."""
        enough = ("faster", "undecided") if self.run.summary["constraint_met"] is False else ("faster",)
        most = (1 - NOISE) * self._ratios.get(self.run.placement, 0.0)
        faster = []
        for trial, measured in with_ratios(self.run.history, self.run.plan):
            if measured.verdict in enough and self._ratios.get(trial.placement, most) < most:
                faster.append((trial, self.parts.decision(trial.placement)))
        return sorted(faster, key=lambda each: (each[0].holds is False, -each[0].exactness))

    def _missed_chance(self, unit: Unit) -> Trial | None:
        """The first of `_faster` with a unit in 8 bits; if pairs ship, only if its estimate does not favour float."""
        for trial, decision in self._faster:
            loses = self.run.placement and self._costs is not None and margin(self._costs, decision, unit) < 0
            if unit.number in decision.quantized and not loses:
                return trial
        return None

    def _why_missed(self, trial: Trial, twins: frozenset[int], others: int) -> tuple[Reason, str]:
        """Why `trial` does not ship, a candidate with some of the units `twins`; `others` as `_nearest` tells it."""
        low = self.parts.decision(trial.placement).quantized - self._decision.quantized - twins
        beside = sum(len(self.parts.units[number].nodes) for number in low) if others else 0
        with_it = f"it and {counted(beside, 'other node')}" if beside else "it"
        was = f"a candidate with {with_it} in 8 bits was {self._in_search(trial)}, but"
        refused = self.run.limits.why_refused(trial)
        if refused is None:
            return "not proven", f"{was} fresh builds did not prove it: a quieter machine, or more time, may decide"
        if beside:
            return "accuracy limit, together", f"only tried together with others: {was} {refused}"
        return "accuracy limit", f"{was} {refused}"

    def _in_search(self, trial: Trial) -> str:
        """The speed of a candidate and of what ships, as text: both from the search, as the proof's may differ."""
        ships = f", where what ships had {speed(self._ratios[self.run.placement])}" if self.run.placement else ""
        return f"{speed(self._ratios[trial.placement])} as fast as float in the search{ships}"

    def _together(self, unit: Unit) -> tuple[Reason, str] | None:
        """The reason and its text if float ships and all candidates with a unit in 8 bits were slower, one beyond
        noise; else None. If the fastest of them is undecided, the limit on accuracy that it misses is the reason; None
        if it misses none."""
        tried = {trial.number: low for trial, low, _ in self._candidates if unit.number in low}
        judged = [each for each in with_ratios(self.run.history, self.run.plan) if each[0].number in tried]
        if self.run.placement or "slower" not in [measured.verdict for _, measured in judged]:
            return None
        trial, measured = min(judged, key=lambda each: (self._ratios[each[0].placement], each[0].number))
        ratio, refused = self._ratios[trial.placement], self.run.limits.why_refused(trial)
        if ratio <= 1 + self._clear or (measured.verdict == "undecided" and refused is None):
            return None
        if measured.verdict == "undecided":
            return "accuracy limit", f"the candidate with it was refused: {refused}; its speed was undecided"
        others = sum(len(self.parts.units[each].nodes) for each in tried[trial.number]) - len(unit.nodes)
        was = f"with {counted(others, 'other node')} in 8 bits the model was {speed(ratio)} as fast as float when tried"
        return "slower together", was

    @cached_property
    def _raised(self) -> Costs:
        """The costs, with guesses for those that no build shows raised."""
        return self._search.costs(self.run.history, raised=True, cuts=self.run.placement.edges)

    def _estimate(self, more_ms: Callable[[Costs], float]) -> tuple[float, bool]:
        """A change of the latency by the costs, relative to the float model's; whether it depends on guessed costs."""
        assert self._costs is not None
        usual, raised = more_ms(self._costs), more_ms(self._raised)
        return usual / self._search.float_ms, not isclose(usual, raised, rel_tol=1e-6, abs_tol=1e-9)

    def _more_ms(self, costs: Costs, number: int) -> float:
        unit, ships = self.parts.units[number], self._decision
        more_ms = margin(costs, ships, unit)
        if state(unit, self.parts, self.run.placement) == "handing":
            # Decisions have it in float, but prices tell what it takes as a unit that reads 8 bits and writes floats.
            handing = replace(ships, quantized=ships.quantized | {number})
            more_ms += costs.total(ships) - costs.total(handing)
        return more_ms

    def _lost_accuracy(self, twins: frozenset[int]) -> str:
        """A text if the noise that was measured for the values of these units, one by one, exceeds the limit together
        with that of what ships; else empty."""
        noise, most, trial = self.run.noise, self.run.limits.max_noise, self.run.trial
        if noise is None or most is None:
            return ""
        rounded = {noise.value(edge.tensor) for edge in self.run.placement.edges}
        edges = set[Edge]()
        for unit in (self.parts.units[number] for number in twins):
            edges.update(unit.inputs, unit.weights, *(self.parts.edges.get(tensor, ()) for tensor in unit.outputs))
        added = noise.summed(Placement.of(edge for edge in edges if noise.value(edge.tensor) not in rounded))
        now = 0.0 if trial is None or trial.accuracy is None else trial.accuracy.noise
        if not added or now + added <= DOUBT * most:
            return ""
        expected, limit = decibels(sqnr_of(now + added)), decibels(sqnr_of(most))
        what = f"{and_others(len(twins) - 1)} in 8 bits{', too,' if rounded else ''}"
        return f"with {what} the outputs are estimated at {expected}, and the limit is {limit}"

    def _outcome(self, trial: Trial | None, others: int) -> tuple[Reason, str]:
        """The outcome of `trial`, the candidate nearest to a unit in 8 bits, which differs on `others` more tensors."""
        if trial is None:
            return "not tried", "no candidate has it in 8 bits"
        run = self.run
        missed = run.limits.why_refused(trial)
        reason: Reason = "no gain beyond noise"
        became = f"was {outcome(trial, run.plan)}"
        if isinstance(trial.result, Failure):
            reason, became = "its build failed", f"failed: {trial.result.reason}"
        elif missed is not None:
            reason, became = "accuracy limit", f"was not accurate enough: {missed}"
        elif trial.placement in self._ratios and run.placement in self._ratios:
            became = f"was {self._in_search(trial)}"
        if others:
            with_others = f"a candidate with it and {counted(others, 'more tensor')} in 8 bits"
            return "not tried", f"never tried in 8 bits by itself; {with_others} {became}"
        return reason, f"{origin_in_words(trial.proposal.origin)} has it in 8 bits, and {became}"


def disturbance(run: FinishedRun) -> str:
    """A warning if times of nodes contradict each other: those of like nodes in one build, or those of nodes without
    pairs in the file that ships and in float; else empty."""
    if not run.float_spent:
        return ""
    rough = "times of single nodes are rough, since other work or the profile disturbed them"
    paired = {edge.tensor for edge in (*run.placement.edges, *run.placement.weight_formats)}
    for spent, pairs in ((run.float_spent, frozenset[str]()), (run.spent, paired)):
        share = _apart(run.model, spent, pairs)
        if share > APART:
            return f"{rough}: of nodes with equal operators and shapes they differ by {share:.0%} of the latency"
    same = [n.name for n in run.model.nodes if paired.isdisjoint((*n.inputs, *n.outputs))]
    before = sum(run.float_spent[name].own for name in same)
    shown = run.shipped_times.nodes
    after = sum(shown.get(name, 0.0) for name in same)
    if not run.spent or abs(after - before) <= CLEAR * (run.float_ms or 0.0):
        return ""
    return f"{rough}: those beside no pair take {before:.3g} ms in float, and {after:.3g} ms in what ships"


def _apart(model: Model, spent: Mapping[str, NodeTime], paired: Collection[str]) -> float:
    """The share of all times by which nodes differ from the median of those with equal operators, shapes and pairs."""
    alike = defaultdict[str, list[float]](list)
    for node in model.nodes if spent else ():
        shapes = [info.shape for tensor in node.inputs if (info := model.tensors.get(tensor)) is not None]
        if all(shape is not None and None not in shape[1:] for shape in shapes):
            where = [tensor in paired for tensor in (*node.inputs, *node.outputs)]
            alike[str((node.op, shapes, where))].append(sum(spent[node.name]))
    apart = sum(abs(ms - median(times)) for times in alike.values() if len(times) > 2 for ms in times)
    return apart / (sum(map(sum, spent.values())) or 1.0)


def shipped_origin(run: FinishedRun) -> str:
    """How the placement that ships was found, as text."""
    if run.summary["shipped"] == "given":
        return "your own Q/DQ model"
    if not run.placement:
        return f"the {run.floats} model without pairs"
    return origin_in_words(run.trial.proposal.origin) if run.trial else "an earlier run"
