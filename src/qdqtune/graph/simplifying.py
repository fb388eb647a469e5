"""Simplifies a graph before it becomes a `Model`: removes Identity nodes and unused nodes, fixes inputs, resolves Ifs.

All functions expect nodes in topological order, and keep the names of graph inputs, graph outputs and nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import count

import numpy as np
import onnx
from onnx import numpy_helper

from qdqtune.errors import BadOption
from qdqtune.graph.constants import replace, settle
from qdqtune.graph.model import DEFAULT, LARGE_BYTES, Constant, TensorInfo, bodies, captured, defined
from qdqtune.graph.operators import RANDOM
from qdqtune.types import Array

FAILURES = (
    onnx.shape_inference.InferenceError,
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""What shape inference and the reference evaluator raise on a node that they cannot process; the evaluator has no error
class of its own."""


def drop_identities(graph: onnx.GraphProto) -> None:
    """Remove Identity nodes, except those that make a graph output."""
    outputs = {o.name for o in graph.output}
    aliases: dict[str, str] = {}
    kept = []
    for node in graph.node:
        rename(node, aliases)
        if node.op_type == "Identity" and node.domain in DEFAULT and node.output[0] not in outputs:
            aliases[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    replace(graph.node, kept)


def drop_unused(graph: onnx.GraphProto, large: MutableMapping[str, Constant]) -> None:
    """Remove nodes and constants that no graph output depends on."""
    used = {o.name for o in graph.output} | {v.name for v in graph.input}
    kept = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            kept.append(node)
            used.update(node.input, *(captured(body) for body in bodies(node)))
    replace(graph.node, kept[::-1])
    replace(graph.initializer, [t for t in graph.initializer if t.name in used])
    for name in large.keys() - used:
        del large[name]


def fix_inputs(
    proto: onnx.ModelProto, large: MutableMapping[str, Constant], values: Mapping[str, float | int | str]
) -> None:
    """Make graph inputs constant, compute small results of nodes that depend on them only, and replace each If whose
    condition is then known by the chosen body."""
    graph = proto.graph
    inputs = {v.name: v for v in graph.input}
    for name, value in values.items():
        if name not in inputs:
            raise BadOption(f"cannot fix input {name!r}: the model's inputs are {', '.join(inputs)}")
        replace(graph.initializer, [t for t in graph.initializer if t.name != name])
        graph.initializer.append(numpy_helper.from_array(_fixed(inputs[name], value), name))
        graph.input.remove(inputs[name])
    settle(graph, large)
    known = set(values)
    while _fold(proto, known):
        settle(graph, large)


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the tensors that a node and its bodies read and make, except names that a body defines itself."""
    for fields in (node.input, node.output):
        for i, name in enumerate(fields):
            if name in names:
                fields[i] = names[name]
    for body in bodies(node):
        own = defined(body)
        outer = {old: new for old, new in names.items() if old not in own}
        for inner in body.node:
            rename(inner, outer)


def names_in(graph: onnx.GraphProto) -> set[str]:
    names = defined(graph) | {o.name for o in graph.output}
    for node in graph.node:
        names.update(node.input, *(names_in(body) for body in bodies(node)))
    return names


class UniqueNames:
    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._suffixes: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(2))

    def fresh(self, base: str) -> str:
        """`base`, or the first of base_2, base_3 ... that is not in use."""
        name = base
        while name in self._taken:
            name = f"{base}_{next(self._suffixes[base])}"
        self._taken.add(name)
        return name


def _fixed(info: onnx.ValueInfoProto, value: float | int | str) -> Array:
    element, shape = info.type.tensor_type.elem_type, TensorInfo.of(info).sizes
    if shape is None or element not in onnx.TensorProto.DataType.values()[1:]:
        raise BadOption(f"cannot fix input {info.name!r}: it is no tensor of a static shape")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    if element == onnx.TensorProto.STRING:
        return np.full(shape, str(value), object)
    try:
        number = float({"false": 0, "true": 1}.get(str(value).lower(), value))
        if dtype.kind in "biu" and (dtype.type(number) != number or not abs(number) < 2**53):
            raise ValueError
    except (OverflowError, ValueError) as error:
        raise BadOption(f"cannot fix input {info.name!r} to {value!r}: its type is {dtype}") from error
    return np.full(shape, number, dtype)


def _fold(proto: onnx.ModelProto, known: set[str]) -> bool:
    """Compute the nodes that read a tensor named in `known`, which then holds their results too, up to the first If
    whose condition is constant, and put its body in its place. Returns whether there was such an If."""
    graph = proto.graph
    overridable = {v.name for v in graph.input}
    small = {t.name: t for t in graph.initializer if t.name not in overridable}
    nodes = list(graph.node)
    kept: list[onnx.NodeProto] = []
    for i, node in enumerate(nodes):
        if node.op_type == "If" and node.domain in DEFAULT and node.input[0] in small:
            replace(graph.node, kept + nodes[i + 1 :])
            body = _chosen(graph, node, bool(numpy_helper.to_array(small[node.input[0]]).any()))
            replace(graph.node, [*graph.node[: len(kept)], *body, *graph.node[len(kept) :]])
            return True
        inputs = [name for name in node.input if name]
        results = None
        if known.intersection(inputs) and small.keys() >= set(inputs):
            results = computed(proto, node, [small[name] for name in dict.fromkeys(inputs)])
        if results is None:
            kept.append(node)
            continue
        graph.initializer.extend(results)
        small |= {t.name: t for t in results}
        known.update(t.name for t in results)
    replace(graph.node, kept)
    return False


def computed(
    proto: onnx.ModelProto, node: onnx.NodeProto, inputs: list[onnx.TensorProto], most: int = LARGE_BYTES
) -> list[onnx.TensorProto] | None:
    """The results of a node with constant inputs; None if one may exceed `most` bytes or cannot be computed."""
    if node.op_type in RANDOM or any(True for _ in bodies(node)):
        return None
    model = alone(proto, node, inputs)
    try:
        # Check the size first: an Expand of two numbers may ask for more memory than there is.
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
        shapes = [TensorInfo.of(value).sizes for value in inferred]
        if any(shape is None or np.prod(shape) * 8 > most for shape in shapes):
            return None
        arrays = evaluated(model)
    except FAILURES:
        return None
    names = [output.name for output in model.graph.output]
    return [numpy_helper.from_array(np.asarray(a), name) for a, name in zip(arrays, names, strict=True)]


def alone(proto: onnx.ModelProto, node: onnx.NodeProto, inputs: Sequence[onnx.TensorProto]) -> onnx.ModelProto:
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "one", [], outputs, inputs)
    return onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def evaluated(model: onnx.ModelProto) -> list[Array]:
    """The outputs of a model without inputs; raises one of FAILURES."""
    from onnx.reference import ReferenceEvaluator  # slow to import

    return list(ReferenceEvaluator(model).run(None, {}))


def _chosen(graph: onnx.GraphProto, node: onnx.NodeProto, condition: bool) -> list[onnx.NodeProto]:
    """The nodes of the chosen body of an If; adds the body's constants to the graph."""
    body = deepcopy(next(a.g for a in node.attribute if a.name == ("then_branch" if condition else "else_branch")))
    own = defined(body)
    names: dict[str, str] = {}
    copies = []
    for result, name in zip((o.name for o in body.output), node.output, strict=False):
        if name and result not in names:
            names[result] = name
        elif name:  # the body returns one tensor twice
            copies.append(onnx.helper.make_node("Identity", [names[result]], [name]))
    taken = names_in(graph) | set(node.output)
    free = UniqueNames(taken | names_in(body))
    names |= {name: free.fresh(name) for name in sorted((own & taken) - names.keys())}
    for inner in body.node:
        rename(inner, names)
    for tensor in body.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for info in body.value_info:
        info.name = names.get(info.name, info.name)
    graph.initializer.extend(body.initializer)
    graph.value_info.extend(body.value_info)
    return [*body.node, *copies]
