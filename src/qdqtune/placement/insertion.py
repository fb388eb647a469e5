"""Insertion: a float model and a placement become a Q/DQ model.

`insert` is the only function that makes baselines, candidates and final models; the empty placement gives the baseline.
It decides first (which tensor gets which scale, which bias follows, which clamps the pairs make superfluous) and then
writes nodes in one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.equalization import scaled
from qdqtune.calibration.rounding import Moments, no_moments
from qdqtune.calibration.scales import Quantization, Range, Ranges
from qdqtune.errors import BadModel
from qdqtune.graph.loading import with_opset
from qdqtune.graph.model import GRAPH, NODE, Constant, Made, Model, Node, rebuild
from qdqtune.graph.operators import CLAMPS, COMPUTE
from qdqtune.graph.protobuf import field_of
from qdqtune.graph.simplifying import names_in
from qdqtune.placement.bias_correction import layer_at
from qdqtune.placement.compression import BLOCKS, Compressor
from qdqtune.placement.graph_builder import Draft, Fragment, Parameters, converter, with_names
from qdqtune.placement.possible import clamp_bounds, refusal, unscaled, weight_role
from qdqtune.placement.shared_scales import Member, common_ranges, joined_for_convolutions
from qdqtune.types import Array, Edge, NumericFormat, Placement, QType

ONNX_TYPE: Mapping[QType, int] = {
    QType.UINT8: TensorProto.UINT8,
    QType.INT8: TensorProto.INT8,
    QType.FP8: TensorProto.FLOAT8E4M3FN,
}

HAS_BIAS = COMPUTE - {"MatMul"}  # which takes two inputs

RAW_OUTPUT = "_QuantizeLinear_Input"
"""Suffix of the float tensor behind a graph output that carries a pair (quantize_static's convention)."""


def insert(model: Model, placement: Placement, ranges: Ranges, fmt: NumericFormat) -> Model:
    """A new model that computes as `model` does, with a Q/DQ pair on every edge of `placement`.

    One Q and one DQ serve all edges of a tensor. Constants become quantized initializers behind a DQ. Int32 biases,
    shared scales and superfluous clamps follow `fmt`. To make many candidates of one model, keep an `Inserter`.

    Raises:
        ValueError: an edge does not exist in the model, cannot carry a pair, or its tensor has no range.
    """
    return Inserter(model, ranges, fmt).insert(placement)


@dataclass(frozen=True, eq=False)
class _Bias:
    """A bias in int32, and its scale: one number or one a channel."""

    values: Array
    scale: Array


@dataclass(frozen=True, eq=False)
class _Shifted:
    """A bias in float, and which input of the node that adds it it is."""

    slot: int
    values: Array


@dataclass(frozen=True)
class _Decision:
    """What insertion will do: the quantization of each activation, and of each constant in each role."""

    activations: Mapping[str, Quantization]
    constants: Mapping[Edge, Quantization]
    biases: Mapping[int, _Bias]
    shifted: Mapping[int, _Shifted]
    dropped: frozenset[int]


class Inserter:
    """Makes candidates of one model; remembers scales and quantized weights, which most placements share.

    `moments` are what products meet, for weights that alone are quantized (see `calibration.moments`).
    """

    def __init__(self, model: Model, ranges: Ranges, fmt: NumericFormat, moments: Moments = no_moments) -> None:
        self._given, self._model = model, scaled(model, ranges.factors)
        self._ranges, self._format, self._moments = ranges, fmt, moments
        self._constants: dict[str, Range] = {}
        self._weights: dict[tuple[str, int | None], Quantization] = {}
        self._activations: dict[tuple[Range, int, bool], Quantization] = {}
        self._forms: dict[tuple[object, ...], Constant] = {}
        self._fine = frozenset[Edge]()
        self._fragments: dict[object, Fragment] = {}
        self._into = [node.into for node in self._model.nodes]
        self._latest: dict[int, Made] = {}
        self._clamps: dict[str, tuple[Node, tuple[float, float], frozenset[Edge]] | None] = {}
        self._names = names_in(model.proto.graph) | set(model.index_of)
        self._met = moments(self._model)
        self._compressor = Compressor(self._model, self._met)

    def insert(self, placement: Placement) -> Model:
        """See `insert`."""
        if self._ranges.factors and not placement.edges:
            return self._unequalized.insert(placement)
        if self._model.opset < self._compressor.opset(placement):
            return self._raised.insert(placement)
        self._check(placement)
        return self._write(self._decide(placement), placement)

    @cached_property
    def _raised(self) -> Inserter:
        """The same for a model of the opset that blocks need."""
        raised, ranges = with_opset(self._model, BLOCKS), replace(self._ranges, factors=())
        return Inserter(raised, ranges, self._format, lambda _: self._met)

    @cached_property
    def _unequalized(self) -> Inserter:
        """What writes the user's own model: without pairs, its channels stay as they are."""
        return Inserter(self._given, replace(self._ranges, factors=()), self._format, self._moments)

    def _check(self, placement: Placement) -> None:
        """Make sure that each edge exists and can carry a pair, or be stored as it shall."""
        if new := placement.edges - self._fine:
            for edge in sorted(new):
                if edge_problem := self._problem(edge):
                    raise ValueError(f"no pair can stand on {edge}: {edge_problem}")
            self._fine |= new
        for edge, weight_format in placement.compressed:
            if (problem := self._compressor.problem(edge, weight_format)) is not None:
                raise ValueError(f"{weight_format.name} cannot be the weight format of {edge}: {problem}")
        is_half = any(self._dtype(t) != TensorProto.FLOAT for t in {e.tensor for e in placement.edges})
        opset, needed = self._model.opset, max(self._format.opset, 19 if is_half else 13)
        if placement.edges and opset < needed:
            raise ValueError(f"the model has opset {opset}, its pairs need {needed}")

    def _problem(self, edge: Edge) -> str | None:
        """Why an edge can carry no pair; None if it can."""
        model, node = self._model, GRAPH if edge.is_graph_output else self._model.index_of.get(edge.node)
        slots = () if node is None else model.outputs if node == GRAPH else model.nodes[node].inputs
        if node is None or not 0 <= edge.index < len(slots) or slots[edge.index] != edge.tensor:
            return "the model has no such edge"
        return refusal(model, edge.tensor, node, edge.index) or unscaled(model, edge.tensor, self._ranges)

    def _dtype(self, tensor: str) -> int:
        return self._model.tensors[tensor].dtype

    # ---- decide

    def with_ranges(self, ranges: Ranges) -> Inserter:
        """One for the same model with other ranges of activations, which goes on to use what this one remembers."""
        other = copy(self)
        other._ranges = ranges
        return other

    def scales(self, placement: Placement) -> tuple[dict[str, Quantization], dict[Edge, Quantization]]:
        """How `insert` quantizes each activation, and each constant in its role unless a bias raises its scale."""
        constants = self._model.constants
        fixed = [e for e in placement if e.tensor in constants]
        weights = {e: self._weight_scale(e) for e in fixed if weight_role(self._model, e) is not None}
        read = dict.fromkeys(e.tensor for e in placement)
        members: dict[Member, Range] = {t: self._ranges.activations[t] for t in read if t not in constants}
        members.update({e: self._constant_range(e.tensor) for e in fixed if e not in weights})
        scale_of = self._scales(members, placement)
        weights.update({m: q for m, q in scale_of.items() if isinstance(m, Edge)})
        return {m: q for m, q in scale_of.items() if isinstance(m, str)}, weights

    def _decide(self, placement: Placement) -> _Decision:
        activations, weights = self.scales(placement)
        dropped = frozenset(self._superfluous(placement, activations)) if self._format.drop_clamps else frozenset()
        shifted = self._shifted(placement)
        biases = dict(self._biases(placement, activations, weights, shifted)) if self._format.bias == "int32" else {}
        return _Decision(activations, weights, biases, shifted, dropped)

    def _shifted(self, placement: Placement) -> dict[int, _Shifted]:
        """Biases that calibration has corrected, of layers whose input and weight both carry pairs, by the node that
        adds them."""
        model, found = self._model, dict[int, _Shifted]()
        for node in (n for n in model.nodes if n.name in self._ranges.shifts):
            layer = layer_at(model, placement, node)
            if layer is not None:
                own = node.inputs[layer.slot] if layer.slot < len(node.inputs) else ""
                shift = np.asarray(self._ranges.shifts[node.name], np.float64)
                values = (model.constants[own].array() if own else 0.0) + shift
                found[node.index] = _Shifted(layer.slot, values.astype(_numpy(self._dtype(node.outputs[0]))))
        return found

    def _scales(self, members: Mapping[Member, Range], placement: Placement) -> dict[Member, Quantization]:
        """One quantization per member; those that a value-passing operator ties together get a common range."""
        shared = frozenset[str]() if self._ranges.is_given else self._format.shared_scale_ops
        common = common_ranges(self._model, members, placement, shared)
        tensors = {m: m.tensor if isinstance(m, Edge) else m for m in members}
        joined = joined_for_convolutions(self._model, placement) if self._format.unsigned else frozenset[str]()
        return {m: self._activation_scale(r, self._dtype(tensors[m]), m in joined) for m, r in common.items()}

    def _activation_scale(self, values: Range, dtype: int, is_joined: bool) -> Quantization:
        key = (values, dtype, is_joined)
        if key not in self._activations:
            found = scales.of_range(values, self._format, _numpy(dtype))
            self._activations[key] = scales.without_sign(found) if is_joined else found
        return self._activations[key]

    def _constant_range(self, tensor: str) -> Range:
        """The range of a constant that is treated like an activation: the one that came with it, or its own."""
        if tensor not in self._constants:
            values = self._model.constants[tensor].array()
            own = Range(float(values.min(initial=0.0)), float(values.max(initial=0.0)))
            self._constants[tensor] = self._ranges.activations.get(tensor, own)
        return self._constants[tensor]

    def _weight_scale(self, edge: Edge, floor: Array | None = None) -> Quantization:
        constant, role = self._model.constants[edge.tensor], weight_role(self._model, edge)
        axis = None if role is None else role.axis
        key = (edge.tensor, axis)
        if key not in self._weights:
            given = self._ranges.weights.get(edge.tensor)
            self._weights[key] = scales.of_weight(constant.array(), axis, self._format, given)
        known = self._weights[key]
        if floor is None:
            return known
        return scales.of_weight(constant.array(), axis, self._format, known.scale.reshape(-1), floor)

    def _superfluous(self, placement: Placement, activations: Mapping[str, Quantization]) -> Iterator[int]:
        """Relu and Clip nodes whose work the saturation of the pair behind them already does.

        Every use of the clamp's output must carry the pair, and nothing else may read the clamp's input, so that the
        producer can write the clamped tensor's name itself.
        """
        for tensor, known in activations.items():
            if tensor not in self._clamps:
                self._clamps[tensor] = self._clamp(tensor)
            if (clamp := self._clamps[tensor]) is not None:
                node, bounds, uses = clamp
                if node.inputs[0] not in activations and uses <= placement.edges and known.covers(*bounds):
                    yield node.index

    def _clamp(self, tensor: str) -> tuple[Node, tuple[float, float], frozenset[Edge]] | None:
        """What makes a tensor if it may be superfluous, its bounds, and the uses of the tensor."""
        model, node = self._model, self._model.maker(tensor)
        if node is None or node.op not in CLAMPS or node.domain or tensor in model.outputs:
            return None
        bounds, is_alone = clamp_bounds(model, node), len(model.uses(node.inputs[0])) == 1
        is_inside = is_alone and node.inputs[0] in model.producers
        return (node, bounds, frozenset(model.edges(tensor))) if bounds is not None and is_inside else None

    def _biases(
        self, placement: Placement, activations: Mapping[str, Quantization], weights: dict[Edge, Quantization],
        shifted: Mapping[int, _Shifted],
    ) -> Iterator[tuple[int, _Bias]]:  # fmt: skip
        """Int32 biases with scale sx * sw, for nodes whose input and weight both carry pairs.

        Where that scale is too small to hold the bias in 31 bits, the weight's scale is raised (in `weights`).
        """
        model = self._model
        for node in model.nodes:
            if node.op not in HAS_BIAS or node.domain or (len(node.inputs) < 3 and node.index not in shifted):
                continue
            x, w = node.into[:2]
            own = None if node.index in shifted else model.constants.get(node.inputs[2])
            values = own.array() if own is not None else shifted[node.index].values if node.index in shifted else None
            if x.tensor not in activations or x not in placement or w not in weights or values is None:
                continue
            is_plain = all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
            # In float16 the product of two scales is mostly subnormal, or zero.
            if not is_plain or values.dtype != np.float32 or values.ndim != 1:
                continue
            sx = activations[x.tensor].scale
            scale = np.asarray(sx * weights[w].scale)
            needed = np.abs(values.astype(np.float64)) / (2.0**30)
            if (needed > scale).any():
                raised = needed / sx if weights[w].axis is not None else np.max(needed) / sx
                weights[w] = self._weight_scale(w, np.asarray(raised))
                scale = np.asarray(sx * weights[w].scale)
            quantized = scales.quantize_bias(values, scale)
            if quantized is not None and scale.size in (1, values.size):
                yield node.index, _Bias(quantized, scale)

    # ---- write

    def _write(self, decision: _Decision, placement: Placement) -> Model:
        model = self._model
        draft = Draft(names=set(self._names))
        renamed = {model.nodes[i].inputs[0]: model.nodes[i].outputs[0] for i in decision.dropped}
        shown = sorted(Edge(tensor, "", slot) for slot, tensor in enumerate(model.outputs))
        paired = {e.tensor: e for e in shown if e in placement}
        raw = {tensor: draft.unique(tensor + RAW_OUTPUT) for tensor in paired}
        weight_formats, superfluous = placement.weight_formats, self._compressor.superfluous(placement)
        changed = self._changed(placement, decision, raw.keys() | renamed.keys() | set(renamed.values()))
        for node in model.nodes:
            if node.index in decision.dropped or node.index in superfluous:
                continue
            if node.index not in changed:
                draft.nodes.append(model.made[node.index])
                continue
            inputs = self._inputs(draft, decision, node, placement.edges, raw)
            outputs = [raw.get(tensor, renamed.get(tensor, tensor)) for tensor in node.outputs]
            if stored := [e for e in self._into[node.index] if e in weight_formats] if weight_formats else []:
                written = with_names(model.proto.graph.node[node.index], inputs, outputs)
                behind = [n for e in stored for n in self._compressor.write(draft, written, e, weight_formats[e])]
                draft.nodes += [written, *behind]
            else:
                draft.nodes.append(self._renamed(node, inputs, outputs))
        for edge in paired.values():
            self._dequantized(draft, decision, edge, raw)
        result = rebuild(model, draft.nodes, draft.constants)
        if placement:
            oldest = 10 if model.opset >= 21 and placement.compressed else 9 if model.opset >= 19 else 7
            result.proto.ir_version = max(result.proto.ir_version, oldest)
        return result

    def _inputs(
        self, draft: Draft, decision: _Decision, node: Node, paired: Set[Edge], raw: Mapping[str, str]
    ) -> list[str]:
        """What a node reads in the new graph."""
        inputs = [
            draft.made.get(e[0]) or self._dequantized(draft, decision, e, raw) if e in paired else raw.get(e[0], e[0])
            for e in self._into[node.index]
        ]
        if node.index in decision.biases or node.index in decision.shifted:
            slot = 2 if node.op in HAS_BIAS else decision.shifted[node.index].slot
            inputs = [*inputs[:2], *[""] * (slot + 1 - len(inputs[:2]))]
            inputs[slot] = self._bias(draft, node, slot, decision)
        return inputs

    def _renamed(self, node: Node, inputs: Iterable[str], outputs: Iterable[str]) -> Made:
        """A node with other names of what it reads and makes; the latest is kept."""
        read, outputs = (*inputs, *node.captures), tuple(outputs)
        known = self._latest.get(node.index)
        if known is None or known.read != read or known.outputs != outputs:
            proto = with_names(self._model.proto.graph.node[node.index], inputs, outputs)
            known = self._latest[node.index] = Made(field_of(NODE, proto), read, outputs)
        return known

    def _changed(self, placement: Placement, decision: _Decision, touched: Set[str]) -> set[int]:
        """The nodes that are not as in the float model, `touched` being tensors that have other names."""
        model = self._model
        names = {e.node for e in (*placement.edges, *placement.weight_formats)} - {""}
        changed = {*map(model.index_of.__getitem__, names), *decision.biases, *decision.shifted}
        for tensor in touched:
            changed.update(use.node for use in model.uses(tensor))
            changed.add(model.producers.get(tensor, GRAPH))
        return changed

    def _dequantized(self, draft: Draft, decision: _Decision, edge: Edge, raw: Mapping[str, str]) -> str:
        """Name of the DQ output that stands for `edge`; its nodes are written on first use.

        Behind a graph output the DQ takes the output's name, and the float tensor its name in `raw`.
        """
        tensor = edge.tensor
        constant = self._model.constants.get(tensor)
        if constant is not None:
            return self._constant(draft, tensor, self._ranked(edge, constant), decision.constants[edge])
        if tensor not in draft.made:
            quantization = decision.activations[tensor]
            write = partial(self._pair, draft, tensor, quantization, raw)
            draft.made[tensor] = draft.once(self._fragments, tensor, (quantization, raw.get(tensor)), write)
        return draft.made[tensor]

    def _pair(self, draft: Draft, tensor: str, quantization: Quantization, raw: Mapping[str, str]) -> str:
        parameters = self._parameters(draft, tensor, quantization)
        quantized = draft.unique(f"{tensor}_QuantizeLinear_Output")
        output = tensor if tensor in raw else draft.unique(f"{tensor}_DequantizeLinear_Output")
        converter("QuantizeLinear", draft, tensor, raw.get(tensor, tensor), parameters, quantized)
        converter("DequantizeLinear", draft, tensor, quantized, parameters, output)
        return output

    def _ranked(self, edge: Edge, constant: Constant) -> Constant:
        """The constant, and a single number as a vector of one where that is the same to the node.

        TensorRT would give a number the rank of the other operand, and cannot where it is quantized.
        """
        user = self._model.user(edge)
        known = (self._model.tensors[t].shape for t in (user.inputs if user else ()) if t in self._model.tensors)
        if constant.shape or not any(known):
            return constant
        return Constant(f"{constant.key}:vector", constant.dtype, (1,), lambda: constant.array().reshape(1))

    def _constant(self, draft: Draft, tensor: str, constant: Constant, quantization: Quantization) -> str:
        key = (constant.key, quantization.qtype, quantization.axis, quantization.scale.tobytes(), tensor)
        if key not in draft.made:
            write = partial(self._fixed_pair, draft, tensor, constant, quantization, key)
            draft.made[key] = draft.once(self._fragments, (tensor, quantization.axis), key, write)
        return draft.made[key]

    def _fixed_pair(
        self, draft: Draft, tensor: str, constant: Constant, quantization: Quantization, key: tuple[object, ...]
    ) -> str:
        """A DQ behind a quantized constant, or a Q and a DQ behind a float one."""
        name = draft.unique(f"{tensor}_quantized")
        if not self._format.float_weights:
            if key not in self._forms:
                self._forms[key] = quantized(constant, quantization)
            draft.constants[name] = self._forms[key]
        parameters = self._parameters(draft, tensor, quantization)
        if self._format.float_weights:
            source = draft.unique(f"{tensor}_float")
            draft.constants[source] = constant
            converter("QuantizeLinear", draft, tensor, source, parameters, name, quantization.axis)
        output = draft.unique(f"{tensor}_DequantizeLinear_Output")
        converter("DequantizeLinear", draft, tensor, name, parameters, output, quantization.axis)
        return output

    def _bias(self, draft: Draft, node: Node, slot: int, decision: _Decision) -> str:
        """Name of the tensor that stands for a node's bias: a DQ of integers, or a corrected one in float."""
        tensor = (node.inputs[slot] if len(node.inputs) > slot else "") or f"{node.outputs[0]}_bias"
        bias = decision.biases.get(node.index)
        if bias is None:
            return draft.constant(f"{tensor}_corrected", decision.shifted[node.index].values)
        name = draft.constant(f"{tensor}_quantized", bias.values)
        dtype = _numpy(self._dtype(node.inputs[1]))
        parameters = Parameters(
            draft.constant(f"{name}_scale", bias.scale.astype(dtype)),
            draft.constant(f"{name}_zero_point", np.zeros(bias.scale.shape, np.int32)),
        )
        output = draft.unique(f"{tensor}_DequantizeLinear_Output")
        converter("DequantizeLinear", draft, tensor, name, parameters, output, 0 if bias.scale.ndim else None)
        return output

    def _parameters(self, draft: Draft, tensor: str, quantization: Quantization) -> Parameters:
        """Scale and zero point as initializers; the scale has the tensor's own float type."""
        dtype = _numpy(self._dtype(tensor))
        if self._format.float_weights and dtype == np.float16:
            raise BadModel(
                f"{tensor} is float16, and an engine that takes no integer weights reads float32 scales only: give the "
                "float32 model, the engine makes its float layers float16 by itself"
            )
        values = quantization.scale.astype(dtype)
        zeros = np.full(quantization.scale.shape, quantization.zero_point, scales.NUMPY_TYPE[quantization.qtype])
        return Parameters(draft.constant(f"{tensor}_scale", values), draft.constant(f"{tensor}_zero_point", zeros))


def _numpy(dtype: int) -> np.dtype[np.generic]:
    return helper.tensor_dtype_to_np_dtype(dtype)


def quantized(constant: Constant, quantization: Quantization) -> Constant:
    """The quantized form of a constant, computed when somebody writes or reads it."""
    scale = hashlib.sha256(quantization.scale.tobytes()).hexdigest()[:16]
    key = f"{constant.key}:{quantization.qtype.value}:{quantization.axis}:{quantization.zero_point}:{scale}"
    return Constant(
        key, ONNX_TYPE[quantization.qtype], constant.shape, lambda: scales.quantize(constant.array(), quantization)
    )
