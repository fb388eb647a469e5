"""Estimated costs of placements, for engines that do not report times of single nodes: simulators, whose times mean
nothing, and NPUs, which run a whole network as one.

The graph is divided into parts: nodes between which no pair can stand. A part computes with weights and activations in
8 bits (W8A8), with activations in 16 bits and weights in 8 or 16 (W8A16, W16A16), or in floats, and writes its outputs
as its activations. Costs are in bytes, so that these count in this order:

1. the nodes that the engine leaves to another processor, by its layer reports;
2. the bytes written in 16 bits, twice as much in floats, and those read and written by conversions between parts;
3. the bytes of weights.

Each tensor in 16 bits, weights too, and each conversion also costs a fixed number of bytes, since small operators are
not free. With a price on noise, `labels` is the cheapest assignment: of W8A16 and W16A16, which look alike to other
parts, each part has the cheaper one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from qdqtune.graph.model import Model
from qdqtune.graph.operators import elements, is_dilated, is_float
from qdqtune.placement.possible import weight_role
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.table import Table, solve
from qdqtune.search.costs.units import joined
from qdqtune.types import Edge, Layer, Placement

W8A8, W8A16, W16A16, FLOAT = range(4)
"""What a part computes in: bits of weights (W) and activations (A)."""

SIXTEEN = (W8A16, W16A16)

ALIKE = ((W8A8,), SIXTEEN, (FLOAT,))
"""The labels that write the same type of values: 8 bits, 16 bits, floats."""

WRITES = {label: kind for kind, labels in enumerate(ALIKE) for label in labels}
"""The type of values that a part with this label reads and writes, as an index into `ALIKE`."""

EACH = 4096.0
"""Bytes added for each tensor in 16 bits and each conversion. Chosen, not measured."""

WIDE_BYTES, CONVERTED_BYTES = 2.0, 3.0
"""Bytes per element in 16 bits; and per converted element, which is read in one width and written in the other."""

FLOAT_FACTOR = 2.0
"""Cost of floats relative to 16 bits: processors that have (16-bit) floats are slower in them. Chosen, not measured."""


@dataclass(frozen=True)
class Part:
    """Nodes that must compute in the same bits, by index; their edges that may have a pair, of activations, of weights
    and of other constants (quantized like activations); and the tensors that they write for others."""

    nodes: tuple[int, ...]
    reads: tuple[Edge, ...]
    weights: tuple[Edge, ...]
    constants: tuple[Edge, ...]
    writes: tuple[str, ...]


Labels = tuple[int, ...]
"""For each part, what it computes in (`W8A8` ...)."""

Off = Mapping[tuple[int, int], int]
"""By part number and label, how many of its nodes the engine leaves to another processor; 0 if no build has shown it,
so that it is tried."""


@dataclass(frozen=True)
class RuleCosts:
    """Estimates costs of one model's placements; `fullest` has all pairs that are ever placed. `has_wide`: the engine
    has 16-bit activations."""

    model: Model
    fullest: Placement
    has_wide: bool = True
    refused: frozenset[tuple[str, int]] = frozenset()
    """Operators with a label in which the engine refused them."""
    off: Off = field(default_factory=dict)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts in graph order: nodes connected by tensors that cannot have a pair."""
        model, bare = self.model, list[tuple[int, int]]()
        for node in model.nodes:
            for edge in node.into:
                maker = model.maker(edge.tensor)
                if maker is not None and edge not in self.fullest and is_float(model, edge.tensor):
                    bare.append((node.index, maker.index))
        return tuple(self._part(nodes) for nodes in joined(range(len(model.nodes)), bare))

    @cached_property
    def maker(self) -> Mapping[str, int]:
        """The number of the part that writes each tensor; inputs of the graph and constants are absent."""
        return {t: number for number, part in enumerate(self.parts) for t in part.writes}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the parts that read each activation through an edge that may have a pair."""
        readers = defaultdict[str, list[int]](list)
        for number, part in enumerate(self.parts):
            for tensor in dict.fromkeys(edge.tensor for edge in part.reads):
                readers[tensor].append(number)
        return readers

    # ------------------------------------------------ labels and placements

    def allows(self, part: Part, label: int) -> bool:
        """Whether a part can have a label; floats are only for parts without a possible pair in front. QNN computes
        dilated convolutions with 16-bit weights too coarsely (35 dB to the CPU instead of 84), so they get none."""
        if label == FLOAT or not part.reads:
            return label == FLOAT and not part.reads
        if label == W8A8:
            return True
        nodes = [self.model.nodes[node] for node in part.nodes]
        if not self.has_wide or any((node.op, label) in self.refused for node in nodes):
            return False
        return label == W8A16 or (part.weights != () and not any(map(is_dilated, nodes)))

    def everywhere(self, label: int) -> Labels:
        """All parts with one label; a part that cannot have it gets the next fewer bits it can have, else floats."""
        order = (*range(label, -1, -1), FLOAT)
        return tuple(next(found for found in order if self.allows(part, found)) for part in self.parts)

    def placement(self, labels: Labels) -> Placement:
        read: dict[Edge, int] = {}
        for part, label in zip(self.parts, labels, strict=True):
            for edge in part.reads:
                number = self.maker.get(edge.tensor)
                read[edge] = label if label != FLOAT or number is None else labels[number]
            read |= dict.fromkeys(part.constants, label)
            read |= dict.fromkeys(part.weights, W8A8 if label == W8A16 else label)
        for edge in self.fullest.edges:
            if edge.is_graph_output:
                number = self.maker.get(edge.tensor)
                read[edge] = W8A8 if number is None else labels[number]
        edges = (edge for edge, label in read.items() if label != FLOAT)
        return Placement.of(edges, (), (edge for edge, label in read.items() if label in SIXTEEN))

    def labels(self, placement: Placement) -> Labels:
        """The labels of parts under a placement: floats unless all that a part reads and writes has pairs. An operator
        without weights between parts in 8 bits counts as 8 bits, as its file is the same either way."""
        bare = {edge.tensor for edge in self.fullest.edges} - {edge.tensor for edge in placement.edges}
        labels = []
        for part in self.parts:
            own = (*part.reads, *part.weights, *part.constants)
            if not part.reads or not placement.edges.issuperset(own) or not bare.isdisjoint(part.writes):
                labels.append(FLOAT)
            elif placement.wide.isdisjoint(part.reads):
                labels.append(W8A8)
            else:
                labels.append(W8A16 if placement.wide.isdisjoint(part.weights) else W16A16)
        return tuple(labels)

    def in_16_bits(self, operators: Collection[str], placement: Placement) -> set[tuple[str, int]]:
        """Those of `operators` that a placement runs in 16 bits, each with the label of its part."""
        wide = set[tuple[str, int]]()
        for part, label in zip(self.parts, self.labels(placement), strict=True):
            if label in SIXTEEN:
                wide.update((self.model.nodes[node].op, label) for node in part.nodes)
        return {(op, label) for op, label in wide if op in operators}

    # ------------------------------------------------ costs

    def learned(self, reports: Iterable[tuple[Placement, Sequence[Layer]]]) -> RuleCosts:
        """The costs with what layer reports show about nodes on another processor; later reports take precedence."""
        off = dict(self.off)
        for placement, layers in reports:
            left = left_nodes(layers)
            for number, label in enumerate(self.labels(placement)):
                nodes = self.parts[number].nodes
                off[number, label] = sum(self.model.nodes[node].name in left for node in nodes)
        return replace(self, off=off)

    def cost(self, placement: Placement, layers: Sequence[Layer] = ()) -> float:
        """The cost of a placement; `layers` shows which nodes run on another processor."""
        known = replace(self, off={}).learned([(placement, layers)] if layers else [])
        return known.total(self.labels(placement))

    def total(self, labels: Labels) -> float:
        """The cost of labels in bytes, plus 1, so that ratios of costs exist."""
        own = sum(self._of_part(number, label) for number, label in enumerate(labels))
        return 1.0 + own + self._conversions.total([*(WRITES[label] for label in labels), WRITES[FLOAT]])

    @cached_property
    def _conversions(self) -> Table:
        """The table with the costs of conversions alone; each part costs 0."""
        return self._table([(0.0,) * len(ALIKE)] * len(self.parts), Noise(self.model, {}), 0.0)

    def _table(self, own: Sequence[tuple[float, ...]], noise: Noise, price: float) -> Table:
        """The table with the costs of conversions and with `own`: for each part its cost by type of values, as in
        `ALIKE`. A last part is added for the graph's inputs, which are floats."""
        table = Table([*own])
        outside = table.part(inf, inf, 0.0)  # inputs of the graph come as floats
        for tensor, readers in self.readers.items():
            base = _conversion_bytes(self.model, tensor)
            narrowed = base + price * noise.of_value(noise.value(tensor))
            widened = base + price * noise.of_wide(noise.value(tensor))
            table.convert(self.maker.get(tensor, outside), readers, narrowed, widened, base)
        return table

    def cheapest(self, noise: Noise, price: float, *, float_too: bool) -> Labels:
        """The labels with the least cost, where noise as large as the signal costs `price` bytes. `float_too`: parts
        that can compute in 8 bits may also compute in floats."""
        own = []
        for number, part in enumerate(self.parts):
            costs = [inf] * len(WRITES)
            for label in WRITES:
                if self.allows(part, label) or (label == FLOAT and float_too):
                    costs[label] = self._of_part(number, label) + price * self._noise_of(part, label, noise)
            own.append(costs)
        by_kind = [tuple(min(costs[label] for label in alike) for alike in ALIKE) for costs in own]
        kinds = solve(self._table(by_kind, noise, price))[:-1]
        return tuple(min(ALIKE[kind], key=costs.__getitem__) for kind, costs in zip(kinds, own, strict=True))

    @cached_property
    def _weights(self) -> float:
        """An upper bound for the bytes of all weights."""
        constants = {edge.tensor for edge in self.fullest.edges if edge.tensor in self.model.constants}
        return 1.0 + WIDE_BYTES * sum(elements(self.model, tensor) for tensor in constants)

    @cached_property
    def _elsewhere(self) -> float:
        """The cost of one node on another processor: more than everything else together."""
        written = sum(EACH + _written(self.model, part) for part in self.parts)
        converted = sum(_conversion_bytes(self.model, tensor) for tensor in self.readers)
        return 1.0 + FLOAT_FACTOR * written + 3 * converted

    def _of_part(self, number: int, label: int) -> float:
        part = self.parts[number]
        constants = (*part.weights, *part.constants)
        weights = sum(elements(self.model, edge.tensor) for edge in constants) / self._weights
        left = self._elsewhere * self.off.get((number, label), 0)
        if label == W8A8:
            return left + weights
        written = _written(self.model, part)
        if label == FLOAT:
            return left + FLOAT_FACTOR * written + WIDE_BYTES * weights
        more = 0.0 if label == W8A16 else EACH
        return left + written + more + (WIDE_BYTES if more else 1.0) * weights

    def _noise_of(self, part: Part, label: int, noise: Noise) -> float:
        """The noise of the outputs and constants of a part with this label."""
        if label == FLOAT:
            return 0.0
        of_values = noise.of_value if label == W8A8 else noise.of_wide
        of_weights = noise.of_wide if label == W16A16 else noise.of_value
        values = sum(of_values(noise.value(t)) for t in (*part.writes, *(e.tensor for e in part.constants)))
        return values + sum(of_weights(e.tensor) for e in part.weights)

    def _part(self, nodes: tuple[int, ...]) -> Part:
        model, inside = self.model, set(nodes)
        edges = [e for node in nodes for e in model.nodes[node].into if e in self.fullest]
        made = [t for node in nodes for t in model.nodes[node].outputs if t and is_float(model, t)]
        writes = (t for t in made if any(use.node not in inside for use in model.uses(t)))
        constants = [e for e in edges if e.tensor in model.constants]
        return Part(
            nodes,
            tuple(e for e in edges if e.tensor not in model.constants),
            tuple(e for e in constants if weight_role(model, e) is not None),
            tuple(e for e in constants if weight_role(model, e) is None),
            tuple(writes),
        )


def left_nodes(layers: Sequence[Layer]) -> frozenset[str]:
    """The nodes left to another processor in a layer report; without Q and DQ, as some always run there."""
    left = (layer for layer in layers if layer.elsewhere and layer.kind != "quantize")
    return frozenset(name for layer in left for name in layer.nodes)


def _conversion_bytes(model: Model, tensor: str) -> float:
    return CONVERTED_BYTES * elements(model, tensor) + EACH


def _written(model: Model, part: Part) -> float:
    return sum(WIDE_BYTES * elements(model, tensor) + EACH for tensor in part.writes)
