"""Recovers the float model from a Q/DQ model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
import onnx
from onnx import helper

from qdqtune.graph.inference import infer
from qdqtune.graph.model import FLOATS, GRAPH, Constant, Model, rebuild
from qdqtune.graph.operators import KEEPS_SIGN, LOWER_BOUNDS
from qdqtune.graph.simplifying import drop_unused
from qdqtune.placement.reading import DynamicProduct, Pair, dynamic_products_of, pairs_of


def strip_pairs(model: Model) -> Model:
    """The float model behind a Q/DQ model. Where a range starts at zero and the tensor may be negative, the quantizer
    had removed a clamp: the pair becomes a Relu, or a Clip if the range ends at 6."""
    model = with_float_weights(model)
    pairs = {p.dq.outputs[0]: p for p in pairs_of(model)}
    bounds = _lower_bounds(model, pairs)
    added, source = dict[str, Constant](), dict[str, str]()
    clamps: dict[str, onnx.NodeProto] = {}
    casts: dict[str, onnx.NodeProto] = {}
    for name, pair in pairs.items():
        if pair.is_constant:
            added[name] = _dequantized(model, pair)
            continue
        before = source.get(pair.source, pair.source)
        is_second = before != pair.source  # a conversion to other bits, behind another pair
        if not is_second and pair.end("min") == 0 and bounds.get(pair.source, -1.0) < 0:
            if pair.source not in clamps:
                clamps[pair.source], bound = _lost_clamp(model, pair)
                added |= bound
            before = clamps[pair.source].output[0]
        info = model.tensors.get(pair.source)
        if info is None or info.dtype == pair.dtype:
            source[name] = before
        else:
            casts[name] = helper.make_node("Cast", [before], [name], pair.dq.name, to=pair.dtype)
    gone = {p.dq.index for p in pairs.values()}
    quantizing = [n for n in model.nodes if n.op == "QuantizeLinear"]
    gone |= {n.index for n in quantizing if all(use.node in gone for use in model.uses(n.outputs[0]))}
    final: dict[str, str] = {}  # float tensor to the name of the graph output that it can take over from its pair
    clamped = {clamp.output[0] for clamp in clamps.values()}
    for output in model.outputs:
        tensor = source.get(output)
        if tensor is None or any(use.slot < 0 for use in model.uses(output)) or _is_read_by_name(model, tensor):
            continue
        if tensor in model.producers or tensor in clamped:
            final.setdefault(tensor, output)
    nodes = [_renamed(clamps[t], source, final) for t in model.inputs if t in clamps]
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.index not in gone:
            nodes.append(_renamed(proto, source, final))
            nodes += [_renamed(clamps[o], source, final) for o in node.outputs if o in clamps]
            continue
        name = node.outputs[0]
        if name in casts:
            nodes.append(_renamed(casts[name], source, final))
        elif name in source and _is_read_by_name(model, name) and name not in final.values():
            nodes.append(_renamed(helper.make_node("Identity", [name], [name], node.name), source, final))
    stripped = rebuild(model, nodes, added)
    return Model(infer(stripped.proto, stripped.large), stripped.large)


def _is_read_by_name(model: Model, tensor: str) -> bool:
    return any(use.slot < 0 or use.node == GRAPH for use in model.uses(tensor))


def _renamed(node: onnx.NodeProto, source: Mapping[str, str], final: Mapping[str, str]) -> onnx.NodeProto:
    copy = deepcopy(node)
    for i, name in enumerate(node.input):
        copy.input[i] = final.get(source.get(name, name), source.get(name, name))
    for i, name in enumerate(node.output):
        copy.output[i] = final.get(name, name)
    return copy


def _dequantized(model: Model, pair: Pair) -> Constant:
    """The float constant behind a DQ of a constant: (q - zero point) * scale, or the float source of a Q."""
    constant = model.constants[pair.source]
    dtype = helper.tensor_dtype_to_np_dtype(pair.dtype)
    if pair.q is not None:
        if constant.dtype == pair.dtype:
            return constant
        key = f"{constant.key}:cast:{pair.dtype}"
        return Constant(key, pair.dtype, constant.shape, lambda: constant.array().astype(dtype))
    numbers = ":".join(model.constants[name].key for name in pair.dq.inputs[1:] if name)
    key = f"{constant.key}:dequantized:{numbers}:{pair.axis}:{pair.block}:{pair.dtype}"
    return Constant(key, pair.dtype, constant.shape, lambda: pair.dequantized(constant.array()).astype(dtype))


def _lost_clamp(model: Model, pair: Pair) -> tuple[onnx.NodeProto, dict[str, Constant]]:
    """A Relu or Clip in place of a pair whose range starts at zero, and its constants."""
    name, result = f"{pair.source}_clamp", f"{pair.source}_clamped"
    if abs(pair.end("max") - 6) > 0.01:
        return helper.make_node("Relu", [pair.source], [result], name), {}
    info = model.tensors.get(pair.source)
    dtype = helper.tensor_dtype_to_np_dtype(pair.dtype if info is None else info.dtype)
    bounds = {f"{name}_{end}": Constant.of(np.array(v, dtype)) for end, v in (("min", 0), ("max", 6))}
    return helper.make_node("Clip", [pair.source, *bounds], [result], name), bounds


def _lower_bounds(model: Model, pairs: Mapping[str, Pair]) -> Mapping[str, float]:
    """Lower bounds of tensors once the pairs are removed and the lost clamps are restored."""
    bounds: dict[str, float] = {}

    def bound(tensor: str) -> float | None:
        constant = model.constants.get(tensor)
        return bounds.get(tensor) if constant is None else _least(constant)

    for node in model.nodes:
        if node.op in LOWER_BOUNDS:
            low: float | None = LOWER_BOUNDS[node.op]
        elif node.op == "DequantizeLinear" and node.outputs[0] in pairs:
            pair = pairs[node.outputs[0]]
            if pair.is_constant:
                low = _least(_dequantized(model, pair))
            else:
                low = 0.0 if pair.end("min") == 0 else bound(pair.source)
        elif node.op == "Clip" and len(node.inputs) > 1 and node.inputs[1]:
            low = bound(node.inputs[1])
        elif node.op in KEEPS_SIGN and (first := bound(node.inputs[0])) is not None:
            low = min(first, 0.0)  # average pools may count the zeros of the padding
        elif node.op in ("Add", "Concat", "Mul"):
            known = [least for least in map(bound, node.inputs) if least is not None]
            low = sum(known) if node.op == "Add" else min(known, default=0.0)
            if len(known) < len(node.inputs) or (node.op == "Mul" and low < 0):
                low = None
        else:
            low = None
        if low is not None:
            bounds.update(dict.fromkeys(node.outputs, low))
    return bounds


def _least(constant: Constant) -> float | None:
    return float(constant.array().min()) if constant.nbytes and constant.dtype in FLOATS else None


def with_float_weights(model: Model) -> Model:
    """The model with a float product in place of each `DynamicProduct`."""
    replaced: dict[int, onnx.NodeProto] = {}
    added: dict[str, Constant] = {}
    for product in dynamic_products_of(model):
        weight = f"{product.node.inputs[1]}_float"
        added[weight] = _float_weight(model, product)
        inputs, result = [product.source, weight], product.last.outputs[0]
        replaced[product.last.index] = helper.make_node("MatMul", inputs, [result], product.node.name)
    if not replaced:
        return model
    nodes = [replaced.get(i, proto) for i, proto in enumerate(model.proto.graph.node)]
    rebuilt = rebuild(model, nodes, added)
    large = dict(rebuilt.large)
    drop_unused(rebuilt.proto.graph, large)
    return Model(rebuilt.proto, large)


def _float_weight(model: Model, product: DynamicProduct) -> Constant:
    integers, scale = model.constants[product.node.inputs[1]], model.constants[product.scale]
    key = f"{integers.key}:product:{scale.key}"
    return Constant(key, scale.dtype, integers.shape, lambda: integers.array().astype(np.float32) * scale.array())
