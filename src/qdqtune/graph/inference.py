"""Infers types and shapes of tensors, and computes nodes whose results are determined by constants and shapes.

onnx infers whole graphs. It stops where a node would have to be computed (the pads of a Pad, the sizes of a Reshape):
`decided` computes such nodes and goes on node by node.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from math import inf

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper
from onnx.helper import make_tensor_value_info

from qdqtune.errors import BadModel, BadOption, one_line
from qdqtune.graph.constants import SIZED, replace
from qdqtune.graph.model import LARGE_BYTES, Constant, Model, Node, TensorInfo, bodies, rebuild
from qdqtune.graph.operators import ARITHMETIC, ASKS_SHAPE, COMPUTE, COPIES, RANDOM, SIZED_BY_VALUES, is_float
from qdqtune.graph.simplifying import FAILURES, alone, computed, drop_unused, evaluated
from qdqtune.types import Array

COMBINES, MOVES = {"Add", "Concat", "Mul", "Sub"}, {"Cast", "Div", "Gather", "Slice", "Squeeze", "Unsqueeze"}
"""Operators whose results differ where sizes do: those of any input, and those of the first."""

GUESSES = 10**8, 10**9
"""The interval of numbers that stand for open sizes: above all sizes, and within 32 bits."""

INFERENCE_ERRORS = (onnx.shape_inference.InferenceError, RuntimeError, ValueError)
"""What onnx's C++ code raises: its error classes share no base."""

WEIGHT_OPS = COPIES | ARITHMETIC | {"Concat", "Pow", "ReduceL2", "ReduceSum", "Slice", "Sqrt"}
"""Operators that exporters put between weights and products: changes of order, shape and type, and norms of weights."""

MOST_GROWTH = 4
"""A computed weight may have up to this many times the bytes of its constants (8 bits to float32); if it has more,
because values repeat, it is not computed, as the file would grow."""

MOST_COMPUTED_BYTES = 2**20
"""Nodes are computed if inputs, and results at 8 bytes a value, have up to this many bytes. Chosen, not measured."""


def weights_computed(model: Model) -> Model:
    """`model` with constants in place of the nodes of WEIGHT_OPS between its constants and other nodes, so that pairs
    find the weights behind them; the same object if there are none. No large result is computed before it is read."""
    known = dict(model.constants)
    source_bytes = {t: c.nbytes for t, c in known.items()}
    kept, added = [], dict[str, Constant]()
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        result = _when_read(model, node, known, model.tensors)
        source = 0 if result is None else sum(source_bytes[t] for t in set(node.inputs) if t)
        if result is None or LARGE_BYTES <= result.nbytes > MOST_GROWTH * source:
            kept.append(proto)
            continue
        name = node.outputs[0]
        known[name], source_bytes[name] = result, source
        if name in model.outputs:
            kept.append(proto)
        else:
            added[name] = result
    return _with_constants(model, kept, added) if added else model


def _with_constants(model: Model, nodes: list[onnx.NodeProto], added: Mapping[str, Constant]) -> Model:
    rebuilt = rebuild(model, nodes, added)
    large = dict(rebuilt.large)
    drop_unused(rebuilt.proto.graph, large)
    return Model(infer(rebuilt.proto, large), large)


def known_sizes_computed(model: Model) -> Model:
    """`model` with constants in place of small values that follow from known sizes, where inputs have open sizes as
    well: the height of pictures is known, say, and the batch is open.

    Engines compute in advance what follows from a Shape only if all its sizes are known. Returns the same object if no
    input has open sizes, or if engines could compute no more nodes in advance than before.
    """
    if all(is_sized(model.tensors.get(t)) for t in model.inputs):
        return model
    bare = deepcopy(model.proto)
    del bare.graph.value_info[:]  # exporters list sizes of the run that they traced
    for value in bare.graph.output:
        value.ClearField("type")
    _, constants = decided(Model(infer(bare, model.large), model.large), LARGE_BYTES)
    kept, added = [], dict[str, Constant]()
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if constants.keys() >= set(node.outputs) and not set(node.outputs) & set(model.outputs):
            added |= {t: constants[t] for t in node.outputs}
        else:
            kept.append(proto)
    result = _with_constants(model, kept, added)
    before, after = (constant_nodes(each, each.constants).keys() for each in (model, result))
    return model if after <= before else result


def constant_nodes(
    model: Model,
    constants: Collection[str],
    free: Collection[str] = (),
    may: Callable[[Node], bool] = lambda node: not node.domain,
) -> dict[str, Node]:
    """The nodes, by name, that engines can compute in advance: those that read only `constants` or results of such
    nodes, and those of operators named in `free`; without random ones, and those for which `may` is false."""
    known, nodes = set(constants), dict[str, Node]()
    for node in model.nodes:
        if (node.op in free or known.issuperset(node.reads)) and node.op not in RANDOM and may(node):
            nodes[node.name] = node
            known.update(node.outputs)
    return nodes


FIXING = "with the open sizes fixed (python -m onnxruntime.tools.make_dynamic_shape_fixed) they would be constants"
"""What users can do about nodes that are `waiting_for_sizes`."""


def waiting_for_sizes(model: Model) -> list[Node]:
    """The nodes that compute floats of two or more dimensions from constants and open sizes alone, so that every
    inference computes them again. Nodes that only copy are left out."""
    if all(is_sized(model.tensors.get(t)) for t in model.inputs):
        return []
    fixed, sized = (constant_nodes(model, model.constants, free) for free in ((), ASKS_SHAPE))
    floats = {t for t, info in model.tensors.items() if is_float(model, t) and len(info.shape or ()) > 1}
    waiting = [node for name, node in sized.items() if name not in fixed and not floats.isdisjoint(node.outputs)]
    return [node for node in waiting if node.op not in COPIES | {"Expand"}]


def sized_by_values(model: Model) -> list[str]:
    """The operators whose results have sizes, or whose bodies run as often, as values that follow from inputs say."""
    sized = constant_nodes(model, model.constants, ASKS_SHAPE)
    steady = {"", *model.constants}.union(*(node.outputs for node in sized.values()))
    ops = {n.op for n in model.nodes if n.op in SIZED_BY_VALUES and not steady.issuperset(n.inputs)}
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        if node.op == "Loop":
            body = next(bodies(proto))
            makers, goes_on = {t: n for n in body.node for t in n.output}, body.output[0].name
            while goes_on in makers and makers[goes_on].op_type in COPIES:
                goes_on = makers[goes_on].input[0]
            is_computed = goes_on in makers and makers[goes_on].op_type != "Constant"
            ops |= {"Loop"} if is_computed or not steady.issuperset(node.inputs[:2]) else set()
    return sorted(ops)


def decided(model: Model, most: int = MOST_COMPUTED_BYTES) -> tuple[dict[str, TensorInfo], dict[str, Constant]]:
    """The types and shapes of tensors, as far as they are known, and all constants.

    Besides the model's own constants these are results that constants and known sizes determine. Their nodes are
    computed if the results have up to `most` bytes, so that shapes behind them become known, too.
    """
    known, infos, random = dict(model.constants), dict(model.tensors), np.random.default_rng(0)
    guesses = dict[str, Constant](), dict[str, Constant]()  # values that depend on open sizes, for two guesses of these
    news = set[str]()  # tensors of which more is known than before
    for node in model.nodes:
        if node.domain or node.captures:
            continue
        results = _results(model, node, known, most)
        if results is None:
            pair = _guessed(model, node, known, guesses, infos, random)
            if pair and pair[0].key == pair[1].key:
                results = {node.outputs[0]: pair[0]}
            elif pair:
                guesses[0][node.outputs[0]], guesses[1][node.outputs[0]] = pair
        if results is not None:
            known |= results
            news.update(results)
            infos |= {t: TensorInfo(c.dtype, c.shape) for t, c in results.items()}
        elif not news.isdisjoint(node.inputs) and not all(is_sized(infos.get(t)) for t in node.outputs if t):
            inferred = _inferred(model, node, known, infos)
            infos |= inferred
            news.update(inferred)
    return infos, known


def _open_sizes(info: TensorInfo | None) -> float:
    return inf if info is None or info.shape is None else info.shape.count(None)


def is_sized(info: TensorInfo | None) -> bool:
    return info is not None and info.sizes is not None


def _guessed(
    model: Model,
    node: Node,
    known: dict[str, Constant],
    guesses: Sequence[dict[str, Constant]],
    infos: Mapping[str, TensorInfo],
    random: np.random.Generator,
) -> list[Constant]:
    """The result of a node that depends on open sizes, for both `guesses` of these; a Shape draws new ones. Empty for
    other nodes, and where results may be equal although sizes differ: of a Slice up to an open size, say."""
    info = infos.get(node.inputs[0]) if node.op == "Shape" else None
    if info is not None and info.shape is not None:
        shape = info.shape[node.attributes.get("start", 0) : node.attributes.get("end")]
        drawn = ([random.integers(*GUESSES) if size is None else size for size in shape] for _ in guesses)
        return [Constant.of(np.array(sizes, np.int64)) for sizes in drawn]
    slots = [slot for slot, tensor in enumerate(node.inputs) if tensor in guesses[0]]
    is_narrow = node.op == "Cast" and onnx.helper.tensor_dtype_to_np_dtype(node.attributes["to"]).itemsize < 4
    if not slots or is_narrow or not (node.op in COMBINES or (slots == [0] and node.op in MOVES)):
        return []
    first, second = (_results(model, node, ChainMap(own, known), MOST_COMPUTED_BYTES) for own in guesses)
    return [] if first is None or second is None else [*first.values(), *second.values()]


def _results(model: Model, node: Node, known: Mapping[str, Constant], most: int) -> dict[str, Constant] | None:
    if not all(t in known for t in node.inputs if t):
        return None
    if sum(known[t].nbytes for t in node.inputs if t) > most:
        return None
    inputs = [known[t].to_proto(t) for t in dict.fromkeys(node.inputs) if t]
    found = computed(model.proto, model.proto.graph.node[node.index], inputs, most)
    return None if found is None else {t.name: Constant.of(numpy_helper.to_array(t)) for t in found}


def _inferred(
    model: Model, node: Node, known: Mapping[str, Constant], infos: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    names = set(node.inputs) - {""}
    if not infos.keys() >= names:
        return {}
    data = {t: known[t].to_proto(t) for t in names if t in known and known[t].nbytes < LARGE_BYTES}
    one, free = alone(model.proto, model.proto.graph.node[node.index], [*data.values()]), names - data.keys()
    one.graph.input.extend(make_tensor_value_info(t, infos[t].dtype, infos[t].shape) for t in free)
    try:
        outputs = onnx.shape_inference.infer_shapes(one, data_prop=True).graph.output
    except INFERENCE_ERRORS:
        return {}
    results = {value.name: TensorInfo.of(value) for value in outputs if value.type.HasField("tensor_type")}
    return {t: info for t, info in results.items() if _open_sizes(info) < _open_sizes(infos.get(t))}


def _when_read(
    model: Model, node: Node, known: Mapping[str, Constant], infos: Mapping[str, TensorInfo]
) -> Constant | None:
    """The output of a node of WEIGHT_OPS with constant inputs, computed when it is read; None for other nodes."""
    if node.op not in WEIGHT_OPS or node.domain or not all(t in known for t in node.inputs if t):
        return None
    output, inputs = node.outputs[0], {t: known[t] for t in node.inputs if t}
    info = infos.get(output)
    if info is None or (sizes := info.sizes) is None or info.dtype not in SIZED:
        return None
    proto = model.proto.graph.node[node.index]

    def read() -> Array:
        try:
            (values,) = evaluated(alone(model.proto, proto, [c.to_proto(name) for name, c in inputs.items()]))
            return np.ascontiguousarray(values, onnx.helper.tensor_dtype_to_np_dtype(info.dtype)).reshape(sizes)
        except FAILURES as error:
            raise BadModel(f"cannot compute the constant {output!r} ({node.op}): {one_line(error)}") from error

    attributes = (a.SerializeToString(deterministic=True) for a in proto.attribute)
    told = [node.op, str(sizes), *(inputs[t].key if t else "" for t in node.inputs)]
    key = hashlib.sha256(" ".join(told).encode() + b"".join(attributes)).hexdigest()[:32]
    return Constant(key, info.dtype, sizes, read)


def with_input_shapes(model: Model, shapes: Mapping[str, tuple[int | None, ...]]) -> Model:
    """`model` with these shapes of inputs by name, and the shapes that follow. A symbolic dimension gets one value
    everywhere; None leaves a dimension as it is."""
    if shapes:
        model = _with_sizes(model, shapes)
    inputs = (info for name, info in model.tensors.items() if name in model.inputs)
    made = list(model.producers)
    if not all(map(is_sized, inputs)) or all(is_sized(model.tensors.get(t)) for t in made):
        return model
    infos, proto = decided(model)[0], deepcopy(model.proto)
    listed = {v.name: v for v in (*proto.graph.value_info, *proto.graph.output)}
    for name in made:
        if name in infos and infos[name] != model.tensors.get(name):
            info = listed.get(name) or proto.graph.value_info.add(name=name)
            info.CopyFrom(make_tensor_value_info(name, infos[name].dtype, infos[name].shape))
    return Model(proto, model.large)


def _with_sizes(model: Model, shapes: Mapping[str, tuple[int | None, ...]]) -> Model:
    proto = deepcopy(model.proto)
    inputs = {v.name: v for v in proto.graph.input if v.type.HasField("tensor_type")}
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise BadOption(f"cannot shape input {name!r}: the model's inputs are {', '.join(inputs)}")
        tensor = inputs[name].type.tensor_type
        if not tensor.HasField("shape"):
            tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
        dims = tensor.shape.dim
        if len(dims) != len(shape):
            raise BadOption(f"input {name!r} has {len(dims)} dimensions, not {len(shape)}")
        for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if size is None:
                continue
            least = 1 if i == 0 else 0  # a key-value cache may be empty, a batch not
            known = dim.dim_value if dim.dim_value > 0 else symbols.get(dim.dim_param, max(size, least))
            if known != size:
                (own,) = (v for v in model.proto.graph.input if v.name == name)
                declared = "x".join(str(d.dim_param or d.dim_value or "?") for d in own.type.tensor_type.shape.dim)
                other = f", and another input has {dim.dim_param} {known}" if dim.dim_param in symbols else ""
                raise BadOption(f"input {name!r}: dimension {i} cannot be {size}: the model declares {declared}{other}")
            if dim.dim_param:
                symbols[dim.dim_param] = size
            dim.dim_value = size
    for dim in _dimensions(proto.graph):
        if dim.dim_param in symbols:
            dim.dim_value = symbols[dim.dim_param]
    return Model(infer(proto, model.large), model.large)


def with_float_type(model: Model, dtype: int) -> Model:
    """`model` with element type `dtype` for inputs of compute operators whose type is unknown.

    Types behind a custom operator are unknown, but a convolution or a matrix product reads floats.
    """
    result = deepcopy(model.proto)
    unknown = {t for n in model.nodes if n.op in COMPUTE for t in n.inputs[:2]}
    for tensor in sorted(unknown - set(model.tensors)):
        result.graph.value_info.append(make_tensor_value_info(tensor, dtype, None))
    return Model(result, model.large)


def infer(proto: ModelProto, large: Mapping[str, Constant]) -> ModelProto:
    """`proto` with inferred types and shapes; unchanged if inference fails. Open sizes get no names that the file does
    not have: with those that onnx invents ONNX Runtime fuses other operators than in the user's file."""
    try:
        inferred = onnx.shape_inference.infer_shapes(with_large_inputs(proto, large), data_prop=True)
    except INFERENCE_ERRORS:
        return proto
    own = {dim.dim_param for dim in _dimensions(proto.graph)}
    for dim in _dimensions(inferred.graph):
        if dim.dim_param and dim.dim_param not in own:
            dim.ClearField("dim_param")
    return without_large_inputs(inferred, large)


def _dimensions(graph: onnx.GraphProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for info in (*graph.input, *graph.value_info, *graph.output):
        yield from info.type.tensor_type.shape.dim


def with_large_inputs(proto: ModelProto, large: Mapping[str, Constant]) -> ModelProto:
    """A copy with the large constants as graph inputs, for ONNX functions that take the whole graph as one protobuf."""
    copy = deepcopy(proto)
    for name, constant in large.items():
        copy.graph.input.append(make_tensor_value_info(name, constant.dtype, constant.shape))
    return copy


def without_large_inputs(proto: ModelProto, large: Mapping[str, Constant]) -> ModelProto:
    """Undo `with_large_inputs` in place."""
    replace(proto.graph.input, [v for v in proto.graph.input if v.name not in large])
    return proto
