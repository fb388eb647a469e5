"""Computes how a placement is quantized: tensor scales, int32 biases, and the Relu and Clip nodes that pairs replace.

Operators that pass integers on unchanged need the same scale for input and output, and a Concat only copies integers if
all its inputs have the same scale. `common_ranges` finds the tensors that share a range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from qdqtune.calibration import scales
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.graph.model import Model
from qdqtune.graph.operators import CLAMPS, COMPUTE
from qdqtune.placement.possible import biased_layer_at, clamp_bounds, conversions, weight_role, wide_tensors
from qdqtune.types import Array, Edge, NumericFormat, Placement, QType

TAKES_BIAS = COMPUTE - {"MatMul"}  # MatMul has no bias input

Member = str | Edge
"""A tensor that may share a scale: an activation by name; a constant by edge, as another edge may use it as a
weight."""

NEAR_RANGE = 1.15
"""Factor by which the range of a Concat's output may be wider than that of an input that adopts it. See "Rewrites and
number formats" in the findings."""


@dataclass(frozen=True, eq=False)
class Bias:
    """A new bias [channels] for input number `slot` of a node: in int32, with one scale or one for each channel; or a
    float one after bias correction, without a scale."""

    slot: int
    values: Array
    scale: Array | None = None


@dataclass(frozen=True)
class Decision:
    """How one placement is quantized: activations by name and constants by edge; new biases by node index; and indices
    of the Relu and Clip nodes to leave out (`dropped`). The edges `conversions` read their activation in another number
    of bits than it is stored in, as `converted` says."""

    activations: Mapping[str, Quantization]
    constants: Mapping[Edge, Quantization]
    biases: Mapping[int, Bias]
    dropped: frozenset[int]
    converted: Mapping[str, Quantization]
    conversions: frozenset[Edge]


class Quantizer:
    """Decides how placements of one model are quantized, given calibrated ranges; caches scales that they share."""

    def __init__(self, model: Model, ranges: Ranges, fmt: NumericFormat) -> None:
        self._model, self._ranges, self._format = model, ranges, fmt
        self._constants: dict[str, Range] = {}
        self._weights: dict[tuple[str, int | None, bool], Quantization] = {}
        self._fixed = {fixed.op: fixed for fixed in fmt.wide_scales}

    def scales(self, placement: Placement) -> tuple[dict[str, Quantization], dict[Edge, Quantization]]:
        """The quantization of activations by name, and of constants by edge; biases may still raise weights' scales."""
        constants = self._model.constants
        fixed = [e for e in placement if e.tensor in constants]
        weights = {e: self._weight_scale(e, placement) for e in fixed if weight_role(self._model, e) is not None}
        read = dict.fromkeys(e.tensor for e in placement)
        members: dict[Member, Range] = {t: self._ranges.activations[t] for t in read if t not in constants}
        for edge in fixed:
            if edge not in weights:
                if edge.tensor not in self._constants:
                    values = constants[edge.tensor].array()
                    own = Range(float(values.min(initial=0.0)), float(values.max(initial=0.0)))
                    self._constants[edge.tensor] = self._ranges.activations.get(edge.tensor, own)
                members[edge] = self._constants[edge.tensor]
        shared = frozenset[str]() if self._ranges.is_given else self._format.shared_scale_ops
        joined = set[str]()  # outputs of Concats that a convolution reads
        for edge in placement if self._format.unsigned else ():
            maker, user = self._model.maker(edge.tensor), self._model.user(edge)
            if maker and user and (maker.op, maker.domain, user.op, user.domain) == ("Concat", "", "Conv", ""):
                joined.add(edge.tensor)
        wide: Set[Member] = {*placement.wide, *wide_tensors(self._model, placement)}
        activations: dict[str, Quantization] = {}
        for member, common in common_ranges(self._model, members, placement, shared).items():
            if isinstance(member, Edge):
                weights[member] = self._own_scale(member.tensor, common, wide=member in wide)
            else:
                activations[member] = self._own_scale(member, common, member in joined, wide=member in wide)
        return activations, weights

    def decide(self, placement: Placement) -> Decision:
        activations, weights = self.scales(placement)
        stored = wide_tensors(self._model, placement)
        other = conversions(self._model, placement, stored)
        twice = sorted({e.tensor for e in other})
        converted = {t: self._own_scale(t, self._ranges.activations[t], wide=t not in stored) for t in twice}
        dropped = frozenset(self._superfluous(placement, activations)) if self._format.drop_clamps else frozenset()
        biases = self._shifted(placement)
        read = {e: converted.get(e.tensor) if e in other else activations.get(e.tensor) for e in placement}
        if self._format.bias == "int32":
            biases = biases | dict(self._biases(placement, read, weights, biases))
        return Decision(activations, weights, biases, dropped, converted, other)

    def _shifted(self, placement: Placement) -> dict[int, Bias]:
        """Corrected float biases of quantized layers, by index of the node that adds them."""
        model, found = self._model, dict[int, Bias]()
        for node in (n for n in model.nodes if n.name in self._ranges.shifts):
            layer = biased_layer_at(model, placement, node)
            if layer is not None:
                own = node.inputs[layer.slot] if layer.slot < len(node.inputs) else ""
                shift = np.asarray(self._ranges.shifts[node.name], np.float64)
                values = (model.constants[own].array() if own else 0.0) + shift
                found[node.index] = Bias(layer.slot, values.astype(float_type(model, node.outputs[0])))
        return found

    def _own_scale(self, tensor: str, values: Range, is_joined: bool = False, *, wide: bool) -> Quantization:
        maker, least = self._model.maker(tensor), 0.0
        if wide and maker is not None and maker.op in self._fixed and self._format.wide is not None:
            fixed = self._fixed[maker.op]
            if fixed.zero_point is not None:
                return Quantization(self._format.wide, np.asarray(fixed.scale, np.float32), fixed.zero_point)
            least = fixed.scale * (self._format.wide.high - self._format.wide.low)
        values = self._ranges.wide.get(tensor, values) if wide else values
        values = Range(values.low, max(values.high, min(values.low, 0.0) + least))
        found = scales.of_range(values, self._format, float_type(self._model, tensor), wide=wide)
        if is_joined and found.qtype is QType.INT8:  # the same values with unsigned integers
            return replace(found, qtype=QType.UINT8, zero_point=128)
        return found

    def _weight_scale(self, edge: Edge, placement: Placement, floor: Array | None = None) -> Quantization:
        constant, role = self._model.constants[edge.tensor], weight_role(self._model, edge)
        axis, wide = None if role is None else role.axis, edge in placement.wide
        key = (edge.tensor, axis, wide)
        if key not in self._weights:
            given = self._ranges.weights.get(edge.tensor)
            self._weights[key] = scales.of_weight(constant.array(), axis, self._format, given, wide=wide)
        known = self._weights[key]
        if floor is None:
            return known
        return scales.of_weight(constant.array(), axis, self._format, known.scale.reshape(-1), floor, wide=wide)

    def _superfluous(self, placement: Placement, activations: Mapping[str, Quantization]) -> Iterator[int]:
        """Indices of Relu and Clip nodes that the saturation of the pair behind them replaces: all uses of the output
        carry the pair, and nothing else reads the input."""
        model = self._model
        for tensor, known in activations.items():
            node = model.maker(tensor)
            if node is None or node.op not in CLAMPS or node.domain or tensor in model.outputs:
                continue
            source, bounds = node.inputs[0], clamp_bounds(model, node)
            if bounds is None or source in activations or source not in model.producers or len(model.uses(source)) > 1:
                continue
            if placement.edges.issuperset(model.edges(tensor)) and known.covers(*bounds):
                yield node.index

    def _biases(
        self, placement: Placement, read: Mapping[Edge, Quantization | None], weights: dict[Edge, Quantization],
        shifted: Mapping[int, Bias],
    ) -> Iterator[tuple[int, Bias]]:  # fmt: skip
        """Int32 biases by node index, of nodes whose input and weight both carry pairs; scale = input scale * weight
        scale. `read` has the quantization of each edge. If a bias would overflow, the scale in `weights` is raised."""
        model = self._model
        for node in model.nodes:
            if node.op not in TAKES_BIAS or node.domain or (len(node.inputs) < 3 and node.index not in shifted):
                continue
            x, w = node.into[:2]
            constant = None if node.index in shifted else model.constants.get(node.inputs[2])
            activation = read.get(x)
            if activation is None or w not in weights or (constant is None and node.index not in shifted):
                continue
            values = shifted[node.index].values if constant is None else constant.array()
            is_plain = all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
            # In float16 the product of two scales is mostly subnormal, or zero.
            if not is_plain or values.dtype != np.float32 or values.ndim != 1:
                continue
            sx = activation.scale
            scale = np.asarray(sx * weights[w].scale)
            needed = np.abs(values.astype(np.float64)) / (2.0**30)
            if (needed > scale).any():
                raised = needed / sx if weights[w].axis is not None else np.max(needed) / sx
                weights[w] = self._weight_scale(w, placement, np.asarray(raised))
                scale = np.asarray(sx * weights[w].scale)
            if scale.size in (1, values.size):
                rounded = np.rint(values.astype(np.float64) / scale.astype(np.float64)).astype(np.int32)
                yield node.index, Bias(2, rounded, scale)


def float_type(model: Model, tensor: str) -> np.dtype[np.generic]:
    return helper.tensor_dtype_to_np_dtype(model.tensors[tensor].dtype)


def common_ranges(
    model: Model, own: Mapping[Member, Range], placement: Placement, operators: Set[str]
) -> dict[Member, Range]:
    """The range of each member, from the calibrated ranges `own`. Members that `operators` connect share the union of
    their ranges; inputs that only a Concat reads are not counted, as the range of its output fits them best.

    If Concat is not among `operators`, an input that only the Concat reads still gets the range of its output, unless
    that is wider by more than NEAR_RANGE: with another scale, it is rounded again by a table instead of copied.
    """
    group, joined = {m: m for m in own}, set[Member]()

    def root(member: Member) -> Member:
        while group[member] != member:
            group[member] = member = group[group[member]]
        return member

    for node in model.nodes if operators else ():
        if node.op not in operators or not any(o in group for o in node.outputs):
            continue
        uses = [e for e in (node.into if node.op == "Concat" else node.into[:1]) if e in placement]
        ends: list[Member] = [e if e in group else e.tensor for e in uses]
        for other in (*ends[1:], *(o for o in node.outputs if o in group)) if ends else ():
            group[root(other)] = root(ends[0])
        if node.op == "Concat":
            joined.update(m for m in ends if isinstance(m, Edge) or len(model.uses(m)) == 1)
    common: dict[Member, Range] = {}
    for member in (m for m in own if m not in joined):
        of = root(member)
        common[of] = common[of] | own[member] if of in common else own[member]
    if operators and "Concat" not in operators:
        _join(model, placement, operators, common, {m: root(m) for m in own})
    return {m: common[root(m)] for m in own}


def _join(
    model: Model, placement: Placement, operators: Set[str], common: dict[Member, Range], root: Mapping[Member, Member]
) -> None:
    """Give inputs that only a Concat reads the range of its output, in `common` (ranges by root). Goes from the last
    Concat to the first, as an input may be the output of an earlier one."""
    joins = []
    for node in model.nodes:
        uses = model.edges(node.outputs[0]) if node.op == "Concat" and not node.domain else []
        if uses and all(e in placement for e in uses):
            joins.append(node)
    if not joins:
        return
    members = defaultdict[Member, list[Member]](list)
    for member, of in root.items():
        members[of].append(member)
    edges = defaultdict[str, list[Edge]](list)
    for edge in placement:
        edges[edge.tensor].append(edge)
    for join in reversed(joins):
        given = common[root[join.outputs[0]]]
        uses = [e for e in join.into if e in placement]
        for of in {root[e if e in root else e.tensor] for e in uses}:
            if _width(given) > NEAR_RANGE * _width(common[of]):
                continue
            read = (e for m in members[of] for e in ([m] if isinstance(m, Edge) else edges[m]))
            users = [model.user(e) for e in read]
            # each leads to the Concat, or to one of `operators` whose outputs are in the same group
            is_alone = all(
                n is not None and (n is join or (n.op in operators and all(root.get(o) == of for o in n.outputs if o)))
                for n in users
            )
            if is_alone and _still_clamps(model, members[of], common[of], given):
                common[of] = given


def _width(values: Range) -> float:
    return max(values.high, 0.0) - min(values.low, 0.0)


def _still_clamps(model: Model, members: Sequence[Member], own: Range, given: Range) -> bool:
    """Whether pairs on `members` still replace the Relu or Clip in front if the range changes from `own` to `given`."""
    for node in (model.maker(m) for m in members if isinstance(m, str)):
        bounds = clamp_bounds(model, node) if node and node.op in CLAMPS and not node.domain else None
        if bounds is not None and not (given.low >= bounds[0] and given.high <= max(bounds[1], own.high)):
            return False
    return True
