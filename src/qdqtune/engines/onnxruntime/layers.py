"""The layer report of ONNX Runtime, read from the profile of a session and from the optimized graph that it wrote; and
which nodes an execution provider leaves to another, and why.

The optimizer keeps most names. A fused node has the name of one of its nodes with a suffix (`conv_nchwc`,
`fc/MatMulAddFusion`, `add_token_3`), or writes the tensor of the last of them. An inserted node reads or writes tensors
that the model does not have.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError

from qdqtune.engines import CPU_PROVIDER
from qdqtune.engines.coverage import Claim, cover, never_run, readers
from qdqtune.engines.providers import Provider
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model, Node, graphs
from qdqtune.graph.operators import ASKS_SHAPE, QDQ
from qdqtune.types import Layer, LayerKind

Event = Mapping[str, Any]

MEMORY_COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
CONVERSIONS = frozenset({"Cast", "ReorderInput", "ReorderOutput", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
INSERTED = MEMORY_COPIES | QDQ | CONVERSIONS
"""Operators of the nodes that the optimizer may insert. Nodes of other operators come from nodes of the model."""

PASSIVE = QDQ | CONVERSIONS | {"Flatten", "Gather", "Identity", "MaxPool", "Slice", "Split"}
"""Operators across which the optimizer moves Q and DQ nodes."""

TYPE_NAMES: Mapping[str, str] = {"float": "FP32", "float16": "FP16", "int8": "INT8", "uint8": "INT8"}
SUFFIX = "_kernel_time"

MOST_OVERHEAD = 0.9
"""Largest share of a layer's reported time that is taken for overhead of the profile. Chosen, not measured."""

OVERHEAD_STEPS = 40
"""Steps of the bisection for the overhead: 40 halvings find it to the last digit."""

TRIMMED_SHARE = 0.25
"""Share of the shortest and of the longest times that `trimmed_mean` leaves out. Unlike a median, it resolves fractions
of a microsecond, the unit of the profile."""


def report(
    model: Model,
    optimized: Path,
    profile: Path,
    warmup: int,
    plain: Sequence[float],
    table: Provider,
) -> tuple[Layer, ...]:
    """The layers of a session, in the order in which it ran them; see `Built.layers`.

    The first `warmup` inferences in the profile do not count. `plain` are seconds of inferences without the profiler,
    run between the profiled ones: the excess of the layers' times over `plain` is overhead of the profile. `table` is
    that of the execution provider.

    Raises:
        EngineFailure: the profile is not that of the optimized graph, or a file is cut short.
    """
    try:
        nodes = onnx.load(optimized, load_external_data=False).graph.node
        events = json.loads(profile.read_text(encoding="utf-8"), strict=False)
    except (DecodeError, ValueError) as error:  # ONNX Runtime does not say that a write has failed
        reason = f"its files in {profile.parent} are cut short, as with no space left on the disk"
        raise EngineFailure(f"ONNX Runtime: {reason}") from error
    runs = _inferences(events, nodes)[warmup:]
    covered, rest = cover(model, _claims(model, nodes))
    spent = np.array([trimmed_mean([run[i]["dur"] for run in runs]) for i in range(len(nodes))]) / 1e3
    times = without_overhead(spent, 1e3 * trimmed_mean(plain))
    layers = []
    for i, (node, names, time_ms) in enumerate(zip(nodes, covered, times.tolist(), strict=True)):
        name = node.name or " + ".join(names) or node.output[0]
        event, kind = runs[-1][i]["args"], _kind(node, names)
        ep = event.get("provider", "")
        is_away = table.source and ep not in ("", table.ep) and kind != "copy"
        where = elsewhere(name, node.op_type, ep, table, {}) if is_away else ""
        layers.append(Layer(name, names, _precision(node, event), time_ms, kind, elsewhere=where))
    return (*layers, *never_run(rest))


def trimmed_mean(times: Sequence[float]) -> float:
    """The mean without the `TRIMMED_SHARE` at either end. scipy.stats has it too, but takes a second to import."""
    cut = int(TRIMMED_SHARE * len(times))
    return float(np.mean(np.sort(times)[cut : len(times) - cut]))


def without_overhead(times: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Layer times minus an equal overhead for each, so that they add up to `total`. At most the share `MOST_OVERHEAD`
    of a time is subtracted. If times add up to less than `total`, nothing is.
    """
    most = MOST_OVERHEAD * times
    excess = float(times.sum()) - total
    low, high = 0.0, float(most.max(initial=0.0))
    if excess <= 0.0 or high == 0.0:
        return times
    for _ in range(OVERHEAD_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle, most).sum() < excess else (low, middle)
    return times - np.minimum(high, most)


def _inferences(profile: Iterable[Event], nodes: Sequence[onnx.NodeProto]) -> list[list[Event]]:
    """The kernel events of each inference, one for each node: the graph is written in the order in which it runs.

    Kernels in the body of an If or Loop are left out, since its own event includes them.
    """
    if not nodes:  # all of the model was constant
        return []
    kernels = [e for e in profile if e["cat"] == "Node" and e["name"].endswith(SUFFIX)]
    ran: list[Event] = []
    end = -1
    for event in sorted(kernels, key=lambda e: (e["ts"], -e["dur"])):
        node = nodes[len(ran) % len(nodes)]
        is_next = event["args"]["op_name"] == node.op_type and event["name"].startswith(node.name)
        if event["ts"] >= end and is_next:
            ran.append(event)
            end = event["ts"] + event["dur"]
    if not ran or len(ran) % len(nodes):
        raise EngineFailure("ONNX Runtime: its profile does not show every node of the optimized graph")
    return [ran[i : i + len(nodes)] for i in range(0, len(ran), len(nodes))]


def _claims(model: Model, nodes: Sequence[onnx.NodeProto]) -> list[Claim]:
    """What each node of the optimized graph tells: the nodes that it is named after, or whose results it writes."""

    def tensor_named(name: str) -> str:
        """The tensor of the model with this name, or with the name without suffixes; "" if there is none."""
        return next((part for part in _prefixes(name) if part in model.producers or part in model.consumers), "")

    def maker(tensor: str) -> str:
        """The node that writes a tensor, or has its name; "" if there is none."""
        writer = model.maker(tensor)
        return (tensor if tensor in model.index_of else "") if writer is None else writer.name

    def origin(name: str) -> str:
        """The node with whose name, or with the name of whose tensor, an optimized node's name begins."""
        return next(filter(None, map(maker, _prefixes(name))), "")

    tensors = {name: tensor_named(name) for node in nodes for name in (*node.input, *node.output)}
    producer = {tensor: i for i, node in enumerate(nodes) for tensor in node.output if tensor}

    written = [list(filter(None, (maker(tensors[t] or t) for t in node.output))) for node in nodes]
    for i in reversed(range(len(nodes))):  # the results of an inserted node count for the node in front of it
        node = nodes[i]
        is_own = any(_stands_for(node, model.node(n)) for n in written[i])
        if node.op_type in INSERTED and not is_own and node.input[0] in producer and not tensors[node.input[0]]:
            written[producer[node.input[0]]] += written[i]

    exact = {node.name for node in nodes if node.name in model.index_of}
    claimed = list[list[str]]()
    for node, guesses in zip(nodes, written, strict=True):
        named_after = "" if node.name in exact else origin(node.name)
        if named_after:
            guesses = [named_after, *guesses]
        if node.op_type in INSERTED:  # it is a node of the model, or comes from none
            guesses = [g for g in guesses if _stands_for(node, model.node(g))]
        claimed.append([node.name] * (node.name in exact) + [g for g in guesses if g not in exact])

    free = set(model.index_of).difference(*claimed)
    for i, node in enumerate(nodes):  # a moved pair: the next one behind its input, if only data are moved in between
        if node.op_type not in QDQ or claimed[i]:
            continue
        source = node.input[0]
        while not (tensors[source] or maker(source)) and source in producer:
            before = nodes[producer[source]]
            if before.op_type not in INSERTED:
                break
            source = before.input[0]
        start, writer = [tensors[source]] if tensors[source] else [], origin(source)
        if not start and writer:
            start = list(model.node(writer).outputs)
        for behind in _behind(model, start):
            if behind.name in free and behind.op == node.op_type:
                claimed[i] = [behind.name]
                free.remove(behind.name)
                break
    borders = [[frozenset(tensors[t] for t in part) - {""} for part in (n.input, n.output)] for n in nodes]
    return [Claim(tuple(names), *around) for names, around in zip(claimed, borders, strict=True)]


def _behind(model: Model, tensors: Sequence[str]) -> Iterator[Node]:
    """The nodes that read one of the tensors, directly or through nodes that only move data, nearest first."""
    seen, queue = set(tensors), deque(tensors)
    while queue:
        for node in readers(model, queue.popleft()):
            yield node
            if node.op in PASSIVE:
                queue.extend(t for t in node.outputs if t not in seen)
                seen.update(node.outputs)


def _stands_for(optimized: onnx.NodeProto, node: Node) -> bool:
    return optimized.op_type == node.op or {optimized.op_type, node.op} <= CONVERSIONS


def _prefixes(name: str) -> Iterator[str]:
    """A name, then the name without its last suffix, and so on: `a_token_3`, `a_token`, `a`."""
    return (name[:end] for end in range(len(name), 0, -1) if end == len(name) or name[end] in "/_")


def _kind(node: onnx.NodeProto, names: Sequence[str]) -> LayerKind:
    if node.op_type in MEMORY_COPIES:
        return "copy"
    if node.op_type in QDQ:
        return "quantize"
    return "reformat" if node.op_type in CONVERSIONS and not names else "compute"


def _precision(node: onnx.NodeProto, event: Mapping[str, Any]) -> str:
    """INT8 if a kernel reads 8-bit values, W4 or W8 if only its weights have so many bits, else the type that it
    writes."""
    if node.op_type == "DynamicQuantizeMatMul":
        return "INT8"
    if node.op_type == "MatMulNBits":
        return f"W{next(a.i for a in node.attribute if a.name == 'bits')}"
    read, written = ([next(iter(t)) for t in event[key]] for key in ("input_type_shape", "output_type_shape"))
    if node.op_type != "DequantizeLinear" and read[:1] in (["int8"], ["uint8"]):
        return "INT8"
    return TYPE_NAMES.get(written[0], written[0].upper()) if written else ""


IN_PASSES = "/duplicated"
"""Suffix of the copies that ONNX Runtime makes of a node for each of its readers."""


def assigned_layers(
    model: Model,
    parts: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    table: Provider,
    log: str,
) -> tuple[Layer, ...]:
    """A layer for each part that the provider runs as one, and for each node that runs elsewhere; without times.

    `parts` have the name of their provider, and names and operators of their nodes, as ONNX Runtime assigns them. `log`
    is what it and the provider have said of that. Nodes in the body of an If or Loop count with that one.
    """
    bodies = list(graphs(model.proto.graph))[1:]
    inner = {node.name for node in chain.from_iterable(body.node for body in bodies)}
    parts = [(ep, nodes) for ep, nodes in parts if not all(name in inner for name, _ in nodes)]
    names = [tuple(name.removesuffix(IN_PASSES) for name, _ in nodes) for _, nodes in parts]
    covered, rest = cover(model, [Claim(each) for each in names])
    told, layers = own_words(table, log), list[Layer]()
    for (ep, nodes), own, nodes_here in zip(parts, names, covered, strict=True):
        name, op = own[0], nodes[0][1]
        kind: LayerKind = "quantize" if op in QDQ else "compute"
        if ep != table.ep:
            layers.append(Layer(name, nodes_here, "", None, kind, elsewhere=elsewhere(name, op, ep, table, told)))
            continue
        label = f"{table.ep} {1 + sum(not layer.elsewhere for layer in layers)}"
        precision = "INT8" if any(op in QDQ for _, op in nodes) else ""
        layers.append(Layer(label, nodes_here, precision, None, "compute"))
    return (*layers, *never_run(rest))


def elsewhere(node: str, op: str, ep: str, table: Provider, told: Mapping[str, str]) -> str:
    """Where a node runs that the provider of `table` leaves to another, and why: the provider's own words, or else the
    rule that holds for it."""
    where = "on the CPU" if ep == CPU_PROVIDER else f"on {ep}"
    if node in told:
        return f"{where}: {told[node]}"
    if op.startswith("QLinear"):
        return f"{where}: {op} is an operator on integers of ONNX Runtime's CPU; {table.ep} takes pairs in its place"
    if op in ASKS_SHAPE:
        return f"{where}: ONNX Runtime computes shapes there"
    return f"{where}: {table.ep} says no reason; {table.source} lists what it takes"


def own_words(table: Provider, log: str) -> dict[str, str]:
    """What the provider says in a log about each node that it leaves, by name."""
    told: dict[str, str] = {}
    for pattern in table.words:
        here: dict[str, str] = {}
        for found in re.finditer(pattern, log):
            here |= {name.removesuffix(IN_PASSES): found["reason"].strip(" .") for name in found["nodes"].split()}
        told = here | told
    return told
