"""Graphs as scripts hold them (ONNX models, GraphSurgeon graphs) as the model that the core works on."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qdqtune.autotune.errors import AutotunerError
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMMUTATIVE


@runtime_checkable
class Surgeon(Protocol):
    """A graph of GraphSurgeon, which this package does not need and never imports by itself."""

    nodes: Sequence[Any]

    def toposort(self) -> Any:
        """Sort the nodes."""


GraphLike = Model | onnx.ModelProto | Surgeon
"""A model of the core, an ONNX model, or a GraphSurgeon graph."""


def as_proto(graph: onnx.ModelProto | Surgeon) -> onnx.ModelProto:
    """An ONNX model, of a GraphSurgeon graph made by the library that the graph itself comes from.

    Raises:
        AutotunerError: it is neither of them.
    """
    if isinstance(graph, onnx.ModelProto):
        return graph
    library = _library(graph)
    if not isinstance(graph, Surgeon) or library is None:
        raise AutotunerError(f"a graph is an onnx.ModelProto or a GraphSurgeon graph, not {type(graph).__name__}")
    return cast(onnx.ModelProto, library.export_onnx(graph))


def _library(graph: object) -> Any:
    """The module that can export a graph of its own; None if there is none."""
    found = sys.modules.get(type(graph).__module__.partition(".")[0])
    return found if hasattr(found, "export_onnx") else None


def as_model(graph: GraphLike) -> Model:
    """The model of a graph whose nodes are numbered alike in both.

    Raises:
        AutotunerError: it is no graph, or nodes went away when it was loaded (constants, Identity), so that indices
            would mean others.
        BadModel: it is invalid.
    """
    if isinstance(graph, Model):
        return graph
    if isinstance(graph, Surgeon) and not isinstance(graph, onnx.ModelProto) and _library(graph) is None:
        return _sketch(graph.nodes, *(getattr(graph, side, None) for side in ("inputs", "outputs")))
    proto = as_proto(graph)
    model = _loaded(proto.SerializeToString(deterministic=True))
    if [list(node.output) for node in proto.graph.node] != [list(node.outputs) for node in model.nodes]:
        raise AutotunerError(
            "the nodes of this graph are numbered otherwise than those of the loaded model, where constants and "
            "Identity are no nodes: give the autotuner's graph"
        )
    return model


def model_with(graph: GraphLike, node: object) -> tuple[Model, int]:
    """The model of a graph and the index of one of its nodes; of a node that is not in it, a model of that alone."""
    model, made = as_model(graph), getattr(node, "outputs", None) or getattr(node, "output", None) or [""]
    index = model.producers.get(getattr(made[0], "name", made[0]), model.index_of.get(str(node)))
    return (_sketch([node], getattr(node, "inputs", ()), ()), 0) if index is None else (model, index)


def _sketch(nodes: Sequence[Any], inputs: object, outputs: object) -> Model:
    """What nodes of GraphSurgeon's form say that no library exports: operators and tensors, without attributes. Tensors
    that no node makes are `inputs` or weights."""
    ends = [list(side) if isinstance(side, list | tuple) else [] for side in (inputs, outputs)]
    known = {t.name: t for node in nodes for t in (*node.inputs, *node.outputs)}
    infos = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape)
        for name, t in known.items()
        if t.dtype is not None
    }
    made = {t.name for node in nodes for t in node.outputs} | {t.name for t in ends[0]}
    weights = [numpy_helper.from_array(np.zeros(known[n].shape, known[n].dtype), n) for n in infos.keys() - made]
    drawn = [
        helper.make_node(n.op, [t.name for t in n.inputs], [t.name for t in n.outputs], n.name or f"{n.op}_{index}")
        for index, n in enumerate(nodes)
    ]
    first, last = ([infos[t.name] for t in end if t.name in infos] for end in ends)
    return Model(helper.make_model(helper.make_graph(drawn, "", first, last, weights, value_info=[*infos.values()])))


@lru_cache(maxsize=1)
def _loaded(content: bytes) -> Model:
    """Kept, because scripts ask about one region of a graph after the other."""
    return load_proto(onnx.ModelProto.FromString(content))


def get_tensor_consumer_node_indices(graph: GraphLike | onnx.GraphProto) -> dict[str, list[int]]:
    """By tensor, the indices of the nodes that read it, once for each input."""
    found: dict[str, list[int]] = {}
    for index, inputs in enumerate(_inputs(graph)):
        for name in inputs:
            found.setdefault(name, []).append(index)
    return found


def _inputs(graph: GraphLike | onnx.GraphProto) -> list[list[str]]:
    """The names of what each node reads."""
    if isinstance(graph, onnx.ModelProto):
        graph = graph.graph
    if isinstance(graph, onnx.GraphProto):
        return [[name for name in node.input if name] for node in graph.node]
    names = ([getattr(tensor, "name", tensor) for tensor in node.inputs] for node in graph.nodes)
    return [[name for name in inputs if name] for inputs in names]


def get_symmetric_ops() -> set[str]:
    """Operators whose inputs may change places."""
    return set(COMMUTATIVE)


def escaped(name: str) -> str:
    """The wildcard that means just one name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def nodes_of(model: Model, operators: Collection[str]) -> list[str]:
    """The nodes of some operators, as wildcards.

    Raises:
        BadOption: the model has none.
    """
    names = [escaped(node.name) for node in model.nodes if node.op in operators]
    if not names:
        raise BadOption(f"the model has no {', '.join(sorted(operators))}")
    return names
