"""The layer report of ONNX Runtime: the profile of a session, and the optimized graph that the session wrote.

Its optimizer keeps most names. A node that it makes of others is called after one of them, with something appended
(`conv_nchwc`, `fc/MatMulAddFusion`, `add_token_3`), or gives the last one's tensor; what it merely inserts reads or
writes tensors that the model does not have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import onnx

from qdqtune.engines.coverage import Claim, cover, folded, read_graph
from qdqtune.errors import EngineFailure
from qdqtune.types import Layer

Event = Mapping[str, Any]
Kind = Literal["compute", "reformat", "copy", "quantize"]

COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
CONVERSIONS = frozenset({"DequantizeLinear", "QuantizeLinear"})
MOVES = frozenset({"Cast", "ReorderInput", "ReorderOutput", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
INSERTED = COPIES | CONVERSIONS | MOVES
"""What the optimizer puts between two nodes; anything else is a node of the model in another form."""

PRECISIONS: Mapping[str, str] = {"float": "FP32", "float16": "FP16", "int8": "INT8", "uint8": "INT8"}
SUFFIX = "_kernel_time"


def report(model: Path, optimized: Path, profile: Path, warmup: int) -> tuple[Layer, ...]:
    """The layers of a session, in the order in which it ran them; see `Built.layers`.

    The first `warmup` inferences in the profile do not count.

    Raises:
        EngineFailure: the profile is not that of the optimized graph.
    """
    graph = read_graph(model)
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    runs = _inferences(json.loads(profile.read_text()), nodes)[warmup:]
    covered, rest = cover(graph, _claims(graph, nodes))
    layers = []
    for i, (node, names) in enumerate(zip(nodes, covered, strict=True)):
        time_ms = median(run[i]["dur"] for run in runs) / 1e3
        name = node.name or " + ".join(names) or node.output[0]
        layers.append(Layer(name, names, _precision(node, runs[-1][i]["args"]), time_ms, _kind(node, names)))
    return (*layers, *folded(rest))


def _inferences(profile: Iterable[Event], nodes: Sequence[onnx.NodeProto]) -> list[list[Event]]:
    """The kernel events of each inference, one a node: the graph was written in the order in which it runs.

    Kernels in the body of an If or Loop are left out: they are part of its own event.
    """
    kernels = [e for e in profile if e["cat"] == "Node" and e["name"].endswith(SUFFIX)]
    found: list[Event] = []
    end = -1
    for event in sorted(kernels, key=lambda e: (e["ts"], -e["dur"])):
        node = nodes[len(found) % len(nodes)]
        is_next = event["args"]["op_name"] == node.op_type and event["name"].startswith(node.name)
        if event["ts"] >= end and is_next:
            found.append(event)
            end = event["ts"] + event["dur"]
    if not found or len(found) % len(nodes):
        raise EngineFailure("ONNX Runtime: its profile does not show every node of the optimized graph")
    return [found[i : i + len(nodes)] for i in range(0, len(found), len(nodes))]


def _claims(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> list[Claim]:
    """What each optimized node says of itself by its name and its tensors."""
    by_name = {node.name: node for node in graph.node}
    makers = {tensor: node for node in graph.node for tensor in node.output if tensor}
    tensors = {t for node in graph.node for t in (*node.input, *node.output)} - {""}
    exact = {node.name for node in nodes}
    writes = _written(nodes, makers, tensors)
    claims = []
    for i, node in enumerate(nodes):
        named = [by_name[node.name]] if node.name in by_name else []
        origin = _origin(node.name, by_name, makers)
        guesses = ([origin] if origin is not None else []) + [makers[t] for t in writes[i] if t in makers]
        if node.op_type in INSERTED:  # a node of the model in its own right, or none
            guesses = [g for g in guesses if g.op_type == node.op_type]
        named += [g for g in guesses if g.name not in exact]
        claims.append(Claim(tuple(n.name for n in named), tensors.intersection(node.input), frozenset(writes[i])))
    return claims


def _written(
    nodes: Sequence[onnx.NodeProto], makers: Mapping[str, onnx.NodeProto], tensors: Collection[str]
) -> list[list[str]]:
    """The tensors of the model that each node makes. Inserted nodes make theirs for the node in front of them."""
    written: list[list[str]] = [[t for t in node.output if t in tensors] for node in nodes]
    producer = {tensor: i for i, node in enumerate(nodes) for tensor in node.output if tensor}
    for i in reversed(range(len(nodes))):
        node = nodes[i]
        is_own = any(makers[t].op_type == node.op_type for t in written[i] if t in makers)
        if node.op_type in INSERTED and not is_own and node.input[0] in producer and node.input[0] not in tensors:
            written[producer[node.input[0]]] += written[i]
            written[i] = []
    return written


def _origin(
    name: str, nodes: Mapping[str, onnx.NodeProto], makers: Mapping[str, onnx.NodeProto]
) -> onnx.NodeProto | None:
    """The node whose name, or whose tensor, the name of an optimized node begins with."""
    for end in range(len(name) - 1, 0, -1):
        if name[end] in "/_" and (origin := nodes.get(name[:end]) or makers.get(name[:end])) is not None:
            return origin
    return None


def _kind(node: onnx.NodeProto, names: Sequence[str]) -> Kind:
    if node.op_type in COPIES:
        return "copy"
    if node.op_type in CONVERSIONS:
        return "quantize"
    return "reformat" if node.op_type in MOVES and not names else "compute"


def _precision(node: onnx.NodeProto, event: Mapping[str, Any]) -> str:
    """INT8 where the data that a kernel reads are 8-bit values, else the type that it writes."""
    read, written = ([next(iter(t)) for t in event[key]] for key in ("input_type_shape", "output_type_shape"))
    if node.op_type != "DequantizeLinear" and read[:1] in (["int8"], ["uint8"]):
        return "INT8"
    return PRECISIONS.get(written[0], written[0].upper()) if written else ""
