"""Which nodes an execution provider runs itself, which it leaves to another, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx

from qdqtune.engines import CPU_PROVIDER
from qdqtune.engines.coverage import Claim, cover, never_run
from qdqtune.engines.providers import Provider
from qdqtune.graph.model import graphs
from qdqtune.graph.operators import ASKS_SHAPE, QDQ
from qdqtune.types import Layer, LayerKind

IN_PASSES = "/duplicated"
"""Suffix of the copies that ONNX Runtime makes of a node for each of its readers."""


def layers(
    graph: onnx.GraphProto,
    parts: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    table: Provider,
    log: str,
) -> tuple[Layer, ...]:
    """A layer for each part that the provider runs as one, and for each node that runs elsewhere; without times.

    `parts` have the name of their provider, and names and operators of their nodes, as ONNX Runtime assigns them. `log`
    is what it and the provider have said of that. Nodes in the body of an If or Loop count with that one.
    """
    inner = {node.name for body in list(graphs(graph))[1:] for node in body.node}
    parts = [(ep, nodes) for ep, nodes in parts if not all(name in inner for name, _ in nodes)]
    names = [tuple(name.removesuffix(IN_PASSES) for name, _ in nodes) for _, nodes in parts]
    covered, rest = cover(graph, [Claim(each) for each in names])
    told, found = own_words(table, log), list[Layer]()
    for (ep, nodes), own, nodes_here in zip(parts, names, covered, strict=True):
        if ep == table.ep:
            label = f"{table.ep} {1 + sum(not layer.elsewhere for layer in found)}"
            precision = "INT8" if any(op in QDQ for _, op in nodes) else ""
            found.append(Layer(label, nodes_here, precision, None, "compute"))
            continue
        (name, op) = own[0], nodes[0][1]
        kind: LayerKind = "quantize" if op in QDQ else "compute"
        found.append(Layer(name, nodes_here, "", None, kind, elsewhere=elsewhere(name, op, ep, table, told)))
    return (*found, *never_run(rest))


def elsewhere(node: str, op: str, ep: str, table: Provider, told: Mapping[str, str]) -> str:
    """Where a node runs that the provider of `table` leaves to another, and why: the provider's own words, or else the
    rule that holds for it."""
    where = "on the CPU" if ep == CPU_PROVIDER else f"on {ep}"
    if node in told:
        return f"{where}: {told[node]}"
    if op.startswith("QLinear") and table.like != "onnxruntime":
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
