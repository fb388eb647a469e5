"""CPU time of large graphs: finding regions and grouping them to patterns, one exact cut, and one candidate.

Each graph is of one kind, without weights: what matters is how its nodes are joined. 'index s' is the time in which a
model makes its index of nodes and tensors, which every later stage shares; 'find s' and 'group s' follow on it. Each
run starts with a new model; the figures are medians, 'slowest s' is the longest run of find and group together. Goal
for 10,000 nodes: less than 1 s of find and group together. 'edges s' is the time, once, of all points of all patterns
with their edges in all instances, which are made when a search asks for them.

'prices s' is dividing the graph into units and learning prices from two builds, whose layer times are drawn here, 'cut
s' one minimum cut of them, and 'candidate ms' inserting its placement and writing it beside its constants. Goals for
20,000 nodes: 2 s of find and group, 3 s of prices and cut, 150 ms. Drawn times make few pairs pay: 'all pairs ms' is
the same for the candidate that has pairs nearly everywhere, the largest that a search builds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import onnx
import zoo
from onnx import helper

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines import formats
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.cheapest_decision import cut
from qdqtune.search.costs.prices import learn
from qdqtune.search.costs.units import partition, usual_groups
from qdqtune.search.regions import discovery, patterns
from qdqtune.types import Placement

FLOAT, SHAPE = onnx.TensorProto.FLOAT, (1, 8, 4, 4)
CONSTANTS: Mapping[str, tuple[int, ...]] = {"weight": (8, 8, 1, 1), "matrix": (4, 4)}


class Network:
    """Nodes in the making. `add` returns the name of what the new node makes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def add(self, op: str, *inputs: str) -> str:
        name = f"node{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name))
        return name

    def conv(self, x: str) -> str:
        return self.add("Conv", x, "weight")

    def proto(self) -> onnx.ModelProto:
        """The network; its last node makes the output."""
        made = [helper.make_tensor_value_info(n.name, FLOAT, SHAPE) for n in self.nodes]
        constants = [helper.make_tensor(n, FLOAT, s, [0.0] * (s[0] * s[1])) for n, s in CONSTANTS.items()]
        given = [helper.make_tensor_value_info("input", FLOAT, SHAPE)]
        graph = helper.make_graph(self.nodes, "network", given, made[-1:], constants, value_info=made[:-1])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def residual(net: Network, x: str) -> str:
    """Two convolutions and what went around them."""
    return net.add("Relu", net.add("Add", net.conv(net.add("Relu", net.conv(x))), x))


def gated(net: Network, x: str) -> str:
    """x times Sigmoid(x)."""
    return net.add("Mul", x, net.add("Sigmoid", x))


def plain(net: Network, x: str) -> str:
    """A chain without branches."""
    return net.add("Relu", net.conv(x))


def towers(net: Network, x: str) -> str:
    """Four equal towers that meet in a Concat."""
    return net.conv(net.add("Concat", *(net.add("Relu", net.conv(x)) for _ in range(4))))


def attention(net: Network, x: str) -> str:
    """One head, with the residual Add."""
    query, key, value = (net.add("MatMul", x, "matrix") for _ in range(3))
    weights = net.add("Softmax", net.add("MatMul", query, net.add("Transpose", key)))
    return net.add("Add", net.add("MatMul", net.add("MatMul", weights, value), "matrix"), x)


def chained(block: Callable[[Network, str], str]) -> Callable[[Network, int], None]:
    """One block after the other, up to a number of nodes."""

    def build(net: Network, size: int) -> None:
        x = "input"
        while len(net.nodes) < size:
            x = block(net, x)

    return build


def nested(net: Network, size: int) -> None:
    """A chain of convolutions, and then an Add for each, the last one first."""
    kept = ["input"]
    while len(net.nodes) < size // 2:
        kept.append(net.conv(kept[-1]))
    x = kept.pop()
    while kept:
        x = net.add("Add", x, kept.pop())


def dense(net: Network, size: int) -> None:
    """The sum of the last eight results, over and over."""
    kept = ["input"]
    for _ in range(size):
        kept.append(net.add("Sum", *kept[-8:]))


GRAPHS: Mapping[str, Callable[[Network, int], None]] = {
    "residual": chained(residual), "gated": chained(gated), "plain": chained(plain), "nested": nested, "dense": dense,
    "towers": chained(towers), "attention": chained(attention),
}  # fmt: skip


COLUMNS = (
    "graph", "nodes", "index s", "find s", "group s", "find + group s", "slowest s", "edges s", "prices s", "cut s",
    "candidate ms", "all pairs ms",
)  # fmt: skip


class Run(NamedTuple):
    """Seconds of CPU of one run."""

    indexed: float
    find: float
    group: float
    edges: float
    prices: float
    cut: float
    candidate: float
    all_pairs: float


def run(proto: onnx.ModelProto) -> Run:
    model = Model(proto)
    gc.collect()
    ticks = [time.process_time()]
    _ = model.nodes, model.producers, model.consumers, model.constants, model.tensors
    ticks.append(time.process_time())
    found = discovery.find(model)
    ticks.append(time.process_time())
    grouped = patterns.group(model, found)
    ticks.append(time.process_time())
    for pattern in grouped:
        for region in pattern.instances:
            _ = pattern.edges[region]
    ticks.append(time.process_time())
    indexed, find, group, edges = (after - before for before, after in itertools.pairwise(ticks))
    return Run(indexed, find, group, edges, *searched(model))


def searched(model: Model) -> tuple[float, float, float, float]:
    """Seconds of CPU of learning prices, of a cut, of the candidate that it proposes, and of one with all pairs."""
    ranges = Ranges({tensor: Range(-1.0, 1.0) for tensor in model.tensors})
    possible = possible_edges(model, ranges)
    whole = start_placements.everything(model, possible)
    builds = [times(model, Placement(), 0), times(model, whole, 1)]
    inserter = Inserter(model, ranges, formats.onnxruntime("int8"))
    with TemporaryDirectory() as folder, ConstantFile(Path(folder) / "constants.bin") as constants:
        gc.collect()
        ticks = [time.process_time()]
        costs = learn(partition(model, possible, usual_groups(model, possible)), builds)
        ticks.append(time.process_time())
        placement = costs.partition.placement(cut(costs))
        ticks.append(time.process_time())
        for candidate in (placement, whole):
            constants.save(inserter.insert(candidate), Path(folder) / "candidate.onnx")
            ticks.append(time.process_time())
    prices, found, proposed, all_pairs = (after - before for before, after in itertools.pairwise(ticks))
    return prices, found, proposed, all_pairs


def times(model: Model, placement: Placement, seed: int) -> BuildTimes:
    """Layer times of a build, drawn."""
    drawn = np.random.default_rng(seed).exponential(size=(3, len(model.nodes)))
    nodes = {node.name: float(ms) for node, ms in zip(model.nodes, drawn[0], strict=True)}
    tensors = {edge.tensor for edge in placement if edge.tensor not in model.constants}
    quantize, dequantize = (dict(zip(sorted(tensors), map(float, ms), strict=False)) for ms in drawn[1:])
    return BuildTimes(placement, nodes, quantize, dequantize, dict.fromkeys(tensors, 1))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", default=list(GRAPHS), help="kinds of graphs (default: %(default)s)")
    arguments.add_argument("--nodes", type=int, default=10_000, help="nodes of each graph (%(default)s)")
    arguments.add_argument("--runs", type=int, default=5, help="runs to take the median of (%(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    rows = []
    small = Network()
    GRAPHS["plain"](small, 10)
    run(small.proto())  # imports what only a cut needs
    for name in given.names:
        net = Network()
        GRAPHS[name](net, given.nodes)
        proto = net.proto()
        taken = [run(proto) for _ in range(given.runs)]
        both = [r.find + r.group for r in taken]
        index, find, group, edges, *search = (median(column) for column in zip(*taken, strict=True))
        cells = (index, find, group, median(both), max(both), edges, *search[:2])
        candidates = (f"{1e3 * s:.0f}" for s in search[2:])
        rows.append([name, str(len(net.nodes)), *(f"{c:.2f}" for c in cells), *candidates])
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
