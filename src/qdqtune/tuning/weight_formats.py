"""Which weights may be stored in fewer bits, and what that gains: asked of the engine once, in one small model.

Formats that an engine declares are tried on products of the sizes that the model has: whether a kernel draws the
DequantizeLinear in, and how long it takes beside the float product. What takes longer there is not searched for: a
decode step of a language model has much to gain, a convolutional network with one small product nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from onnx import helper

from qdqtune.calibration.rounding import LazyMapping, Moments, moments, no_moments
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.formats import storages_like, weight_formats
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, writing
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.operators import elements
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import Weight, met_by_weights, storable_edges, unstorable, weight_at
from qdqtune.search.costs.attribution import Priced, attribute
from qdqtune.search.costs.units import Ways
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.records import WeightFormatsRecord
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import Subject
from qdqtune.types import Array, Edge, Failure, Layer, Placement, WeightFormat, Workload

LEAST_BYTES = 2**20
"""Weights of fewer bytes in all stay in a cache: reading less of them gains nothing."""

LEAST_SHARE = 0.1
"""Of the float model's time: products that take less are not worth builds of their own."""

PAYS = 1.05
"""Share of the time of the float product that a weight format may take to be searched for: a product alone finds its
weights in a cache, which flatters floats."""

MOST_KINDS = 6
"""Sizes of products that are tried, those that take most time."""

MOST_WEIGHTS = 2**21
"""Of one product that is tried: a larger one is tried with fewer outputs."""

COPIES, TOGETHER = (3, 8), 2**22
"""Of each product that is tried, the least and the most, and the weights that they are to have together: a model reads
its weights from memory, and so do they then; and the median of several says more than one."""

RUNS = (4, 24)
"""Inferences of a product in float and in each weight format: the least and the most."""

OPERATIONS = 2e10
"""That these may take in all, multiplications with their additions: about a second."""

MOST_MOMENTS = 2**31
"""Bytes of what products meet that are held for rounding by it."""

UNTIMED = 0.5
"""What a weight format is presumed to take where the engine tells no times."""


@dataclass(frozen=True)
class Size:
    """A product: rows of the activation in each workload, inputs and outputs of the weight, and its type
    (onnx.TensorProto.*)."""

    rows: tuple[int, ...]
    inputs: int
    outputs: int
    dtype: int

    @property
    def key(self) -> str:
        """It in records."""
        return f"{self.name} {self.dtype}"

    @property
    def name(self) -> str:
        """Its sizes."""
        return f"{'+'.join(map(str, self.rows))}x{self.inputs}x{self.outputs}"


def ways(
    subject: Subject, settings: Settings, runner: Runner, store: Store, float_layers: Callable[[], Sequence[Layer]]
) -> Ways:
    """The weight formats that each weight may have and the share of its float time that it takes alone; none where the
    user wants none, the engine has none, or the model has nothing to gain."""
    wanted = wanted_storages(settings)
    weights = {e: w for e in storable_edges(subject.shaped) if (w := weight_at(subject.shaped, e)) is not None}
    chosen = {e.node for e in (subject.possible if settings.node_filter else weights)}
    weights = {e: w for e, w in weights.items() if w.node.op != "Gather" and e.node in chosen}
    if not wanted or sum(w.constant.nbytes for w in weights.values()) < LEAST_BYTES:
        return {}
    spent = _spent(subject.shaped, float_layers(), weights)
    if sum(spent.values()) < LEAST_SHARE:
        return {}
    by_workload = _by_workload(subject)
    sizes = {edge: _size(by_workload, weight) for edge, weight in weights.items()}
    totals: dict[Size, float] = {}
    for edge, size in sizes.items():
        totals[size] = totals.get(size, 0.0) + spent[edge]
    kinds = sorted(totals, key=lambda size: (-totals[size], size.key))[:MOST_KINDS]
    record = store.get(WeightFormatsRecord)
    if record is None:
        tried = {size.key: dict(_tried(size, wanted, subject, runner)) for size in kinds}
        record = store.put(WeightFormatsRecord(shares=tried))
        runner.feed(subject.mix)
    shares, found = record.shares, {}
    for edge, size in sizes.items():
        near = shares.get(size.key) or shares.get(_nearest(size, kinds).key, {})
        able = [s for s in wanted if near.get(s.name, PAYS) < PAYS and unstorable(weights[edge], s) is None]
        if able:
            found[edge] = {s: near[s.name] for s in able}
    return found


def wanted_storages(settings: Settings) -> tuple[WeightFormat, ...]:
    """What the engine declares of what the user wants."""
    engine = settings.engine.name
    if settings.engine.options.get("provider", "CPUExecutionProvider") != "CPUExecutionProvider":
        return ()
    if settings.formats is None:
        return weight_formats(engine)
    return tuple(dict.fromkeys(s for name in settings.formats for s in storages_like(engine, name)))


def products_of(settings: Settings, subject: Subject) -> Moments:
    """What products meet whose weights may be stored, where rounding is to account for it: found on the calibration
    data once the first weight is written.

    Raises:
        BadOption: that would take too much memory.
    """
    if settings.weight_rounding == "nearest":
        return no_moments
    sizes = met_by_weights(subject.shaped, storable_edges(subject.shaped))
    needed = sum(12 * inputs**2 for inputs in sizes.values())  # the moment, and what its inverse says in float32
    if needed > MOST_MOMENTS:
        raise BadOption(
            f"--weight-rounding gptq would hold {needed / 1e9:.1f} GB of what products of this model meet: round to "
            "the nearest instead"
        )
    tensors, samples = sorted(sizes), subject.prepared.calibration

    def met(model: Model) -> LazyMapping[str, Array]:
        return LazyMapping(tensors, lambda: moments(model, tensors, samples))

    return met


def _spent(model: Model, layers: Sequence[Layer], weights: Mapping[Edge, Weight]) -> dict[Edge, float]:
    """The share of the float model's time that each product takes; of its weights' bytes where no times are told."""
    total = sum(layer.time_ms or 0.0 for layer in layers)
    if not total:
        every = sum(w.constant.nbytes for w in weights.values())
        return {edge: w.constant.nbytes / every for edge, w in weights.items()}
    nodes = attribute(model, Priced(Placement(), tuple(layers)), total).nodes
    return {edge: nodes.get(edge.node, 0.0) / total for edge in weights}


def _by_workload(subject: Subject) -> list[Model]:
    """The model in the sizes of each of several workloads."""
    shapes = [{name: a.shape for name, a in w.inputs.items() if name in subject.shaped.inputs} for w in subject.mix]
    return [with_input_shapes(subject.shaped, s) for s in shapes] if len(shapes) > 1 else [subject.shaped]


def _size(by_workload: Sequence[Model], weight: Weight) -> Size:
    inputs, outputs = weight.shape
    written = (elements(model, weight.node.outputs[0]) for model in by_workload)
    return Size(tuple(max(1, int(count) // outputs) for count in written), inputs, outputs, weight.constant.dtype)


def _nearest(size: Size, kinds: Sequence[Size]) -> Size:
    """That of the sizes that is the most alike: in rows first."""

    def distance(other: Size) -> tuple[float, float]:
        work = size.inputs * size.outputs / (other.inputs * other.outputs)
        return float(np.abs(np.log(np.divide(size.rows, other.rows))).sum()), abs(float(np.log(work)))

    return min(kinds, key=distance)


def _tried(size: Size, wanted: Sequence[WeightFormat], subject: Subject, runner: Runner) -> Iterator[tuple[str, float]]:
    """The share of a float product's time that each weight format takes; those that the engine refuses, or does not
    draw into the product, are absent."""
    able = [s for s in wanted if s.block is None or size.inputs % s.block == 0]
    layers = _layers(size, able, subject, runner)
    if isinstance(layers, Failure):  # one that the engine refuses spoils all
        alone = {s: _layers(size, [s], subject, runner) for s in able} if len(able) > 1 else {}
        able = [s for s, told in alone.items() if not isinstance(told, Failure)]
        layers = _layers(size, able, subject, runner)
        if isinstance(layers, Failure):
            return
    floats = _time(layers, "float")
    for weight_format in able:
        weights = (layer for layer in layers if _parts_of(layer, weight_format.name, "weight"))
        stands_alone = any(w.kind != "folded" and not _parts_of(w, weight_format.name, "product") for w in weights)
        spent = _time(layers, weight_format.name)
        if not stands_alone:
            yield weight_format.name, UNTIMED if not floats or spent is None else spent / floats


def _parts_of(layer: Layer, name: str, what: str) -> list[str]:
    """The nodes of a layer that are a product of that name, or its weight's; what numbers them stands behind."""
    return [node for node in layer.nodes if node.startswith(f"{name}_{what}")]


def _time(layers: Sequence[Layer], name: str) -> float | None:
    """The ms of one product: an engine may run it in several layers, or several in one."""
    spent: dict[str, float] = {}
    for layer in layers:
        if layer.time_ms is not None:
            products = _parts_of(layer, name, "product")
            for product in products:
                spent[product] = spent.get(product, 0.0) + layer.time_ms / len(products)
    return median(spent.values()) if spent else None


def _layers(
    size: Size, wanted: Sequence[WeightFormat], subject: Subject, runner: Runner
) -> tuple[Layer, ...] | Failure:
    """What the engine runs of one product in float and in each weight format, side by side."""
    copies = min(max(COPIES[0], TOGETHER // (size.inputs * _columns(size))), COPIES[1])
    model = _side_by_side(size, wanted, copies)
    stored = [(Edge(f"{s.name}_weight{n}", f"{s.name}_product{n}", 1), s) for s in wanted for n in range(copies)]
    dtype = helper.tensor_dtype_to_np_dtype(size.dtype)
    random = np.random.default_rng(0)
    mix = tuple(
        Workload({"x": random.standard_normal((rows, size.inputs)).astype(dtype)}, workload.share)
        for rows, workload in zip(size.rows, subject.mix, strict=True)
    )
    once = sum(size.rows) * size.inputs * _columns(size) * (1 + len(wanted)) * copies
    runs = int(min(max(OPERATIONS / once, RUNS[0]), RUNS[1]))
    with temporary_folder() as folder, writing(folder):
        path = folder / "storages.onnx"
        save(Inserter(model, Ranges({}), subject.numbers).insert(Placement.of((), stored)), path)
        return runner.report(path, mix, runs, f"storages_{size.name}")


def _columns(size: Size) -> int:
    """Outputs of the product that stands for all of such a size."""
    return max(1, min(size.outputs, MOST_WEIGHTS // size.inputs))


def _side_by_side(size: Size, wanted: Sequence[WeightFormat], copies: int) -> Model:
    columns = _columns(size)
    dtype = helper.tensor_dtype_to_np_dtype(size.dtype)
    rows = size.rows[0] if len(size.rows) == 1 else None
    random, large, nodes, outputs = np.random.default_rng(1), dict[str, Constant](), [], []
    for copy in range(copies):
        weight = Constant.of(random.standard_normal((size.inputs, columns), np.float32).astype(dtype))
        for name in ("float", *(s.name for s in wanted)):
            result = f"{name}_y{copy}"
            large[f"{name}_weight{copy}"] = weight
            nodes.append(helper.make_node("MatMul", ["x", f"{name}_weight{copy}"], [result], f"{name}_product{copy}"))
            outputs.append(helper.make_tensor_value_info(result, size.dtype, [rows, columns]))
    given = [helper.make_tensor_value_info("x", size.dtype, [rows, size.inputs])]
    graph = helper.make_graph(nodes, "storages", given, outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return Model(proto, large)
