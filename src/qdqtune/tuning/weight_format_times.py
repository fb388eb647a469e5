"""Which weight formats are worth searching, and how much time they save: measured on the engine, in a small model.

Each weight format of the engine is tried on a matrix product of the size that takes most of the model's time: does the
engine fuse the DequantizeLinear into it, and how long does it take compared with float? Slower formats are not
searched. Decoding in a language model gains much, a convolutional network with one small product nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
from onnx import TensorProto, helper

from qdqtune.calibration.scales import Ranges
from qdqtune.engines.formats import weight_formats, weight_formats_like
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineRefused, writing
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.operators import elements
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import can_have, weight_at, weight_only_edges
from qdqtune.search.costs.attribution import DYNAMIC_CONVERSION, attribute
from qdqtune.search.costs.units import FormatShares
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.contexts import at_each
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Caveat, Store
from qdqtune.tuning.subject import Subject
from qdqtune.types import Edge, Layer, Placement, WeightFormat, Workload

LEAST_BYTES = 2**20
"""Weights of fewer bytes in all fit in a cache, so that smaller ones save no time. Estimated, not measured."""

LEAST_SHARE = 0.1
"""If products take less than this share of float's time, no weight format is tried. Chosen, not measured."""

PAYS = 1.05
"""The most time of a product in a weight format, relative to float, for the format to be searched. It may exceed 1:
alone, a float product finds its weights in a cache and is faster than in the model. Chosen, not measured."""

MOST_WEIGHTS = 2**21
"""Elements of a weight that is tried; of a larger product only some outputs are tried."""

PRODUCT_COPIES, TOGETHER = (3, 8), 2**22
"""Copies of each product that is tried (least, most), and the weights that all copies should have in elements: enough
not to fit in a cache, and for a median over copies."""

PRODUCT_RUNS = (4, 24)
"""Inferences of a product in float and in each weight format (least, most)."""

OPERATIONS = 2e10
"""Multiply-adds of all inferences for one size of product: about a second."""

UNTIMED = 0.5
"""Assumed time of a weight format relative to float, if the engine reports no times."""


@dataclass(frozen=True)
class Size:
    """The size of a matrix product: rows of the activation in each workload, inputs and outputs of the weight, and the
    element type (onnx.TensorProto.*)."""

    rows: tuple[int, ...]
    inputs: int
    outputs: int
    dtype: int

    @property
    def name(self) -> str:
        """The size and type as text, for logs and the state file."""
        return f"{'+'.join(map(str, self.rows))}x{self.inputs}x{self.outputs}_{self.dtype}"

    @property
    def columns(self) -> int:
        return max(1, min(self.outputs, MOST_WEIGHTS // self.inputs))

    @property
    def copies(self) -> int:
        least, most = PRODUCT_COPIES
        return min(max(least, TOGETHER // (self.inputs * self.columns)), most)


def format_shares(
    subject: Subject,
    settings: Settings,
    runner: Runner,
    store: Store,
    float_layers: Callable[[], Sequence[Layer]],
) -> FormatShares:
    """For each weight, the weight formats that it may have, each with its product's time relative to the float product.

    Empty if the user wants none, the engine has none, or the model has nothing to gain. Measured on the product size
    that takes most of the time, and applied to the others.
    """
    wanted = wanted_formats(settings)
    weights = {e: w for e in weight_only_edges(subject.shaped) if (w := weight_at(subject.shaped, e)) is not None}
    chosen = {e.node for e in (subject.possible if settings.node_filter else weights)}
    weights = {e: w for e, w in weights.items() if e.node in chosen}
    if not wanted or sum(w.constant.nbytes for w in weights.values()) < LEAST_BYTES:
        return {}
    layers = float_layers()
    total = sum(layer.time_ms or 0.0 for layer in layers)
    if total:
        nodes = attribute(subject.shaped, Placement(), layers, total).nodes
        spent = {edge: nodes.get(edge.node, 0.0) / total for edge in weights}
    else:  # without layer times, by the share of the bytes
        every = sum(w.constant.nbytes for w in weights.values())
        spent = {edge: w.constant.nbytes / every for edge, w in weights.items()}
    if sum(spent.values()) < LEAST_SHARE:
        return {}
    shapes = [{name: a.shape for name, a in w.inputs.items() if name in subject.shaped.inputs} for w in subject.mix]
    by_workload = [with_input_shapes(subject.shaped, s) for s in shapes] if len(shapes) > 1 else [subject.shaped]
    totals: dict[Size, float] = {}
    for edge, weight in weights.items():
        inputs, outputs = weight.shape
        rows = (int(elements(model, weight.node.outputs[0])) // outputs for model in by_workload)
        size = Size(tuple(max(1, count) for count in rows), inputs, outputs, weight.constant.dtype)
        totals[size] = totals.get(size, 0.0) + spent[edge]
    largest = min(totals, key=lambda size: (-totals[size], size.name))
    before, caveat = runner.mix, Caveat()

    def layers_of(formats: Sequence[WeightFormat]) -> tuple[Layer, ...] | None:
        try:
            return _layers(largest, formats, subject, runner, settings.thread_counts)
        except EngineRefused as refused:
            caveat.is_lost |= refused.is_transient
            return None

    tried = partial(_tried, largest, wanted, layers_of)
    shares = store.memo(f"weight formats:{largest.name}", dict[str, float], tried, caveat)
    if runner.mix is not before:
        runner.feed(before)
    found = {}
    for edge, weight in weights.items():
        able = [s for s in wanted if shares.get(s.name, PAYS) < PAYS and can_have(weight, s)]
        if able:
            found[edge] = {s: shares[s.name] for s in able}
    return found


def wanted_formats(settings: Settings) -> tuple[WeightFormat, ...]:
    engine = settings.engine.name
    if settings.engine.facts.unwatched:
        return ()
    if settings.formats is None:
        return weight_formats(engine, narrow=settings.has_narrow_products)
    like = partial(weight_formats_like, engine, narrow=settings.has_narrow_products)
    return tuple(dict.fromkeys(s for name in settings.formats if name != settings.quant_type for s in like(name)))


def _tried(
    size: Size, wanted: Sequence[WeightFormat], layers_of: Callable[[Sequence[WeightFormat]], Sequence[Layer] | None]
) -> dict[str, float]:
    """The time of the product in each weight format relative to float, without formats that the engine refuses or does
    not fuse into the product."""
    able = [s for s in wanted if s.block is None or size.inputs % s.block == 0]
    able = [s for s in able if not s.dynamic or size.dtype == TensorProto.FLOAT]
    layers = layers_of(able)
    if layers is None:  # if the engine refuses one format, it refuses the model with all
        able = [s for s in able if layers_of([s]) is not None] if len(able) > 1 else []
        layers = layers_of(able)
    if layers is None:
        return {}
    shares = dict[str, float]()
    floats = _time(layers, "float")
    for weight_format in able:
        weights = (layer for layer in layers if any(n.startswith(f"{weight_format.name}_weight") for n in layer.nodes))
        stands_alone = any(w.kind != "folded" and not _products_of(w, weight_format.name) for w in weights)
        spent = _time(layers, weight_format.name)
        if weight_format.dynamic and spent is not None:  # each product of the model may be the only one that reads it
            spent += sum(layer.time_ms or 0.0 for layer in layers if any(map(DYNAMIC_CONVERSION.match, layer.nodes)))
        if not stands_alone:
            shares[weight_format.name] = UNTIMED if not floats or spent is None else spent / floats
    return shares


def _products_of(layer: Layer, name: str) -> set[str]:
    """The products in a format that a layer runs at least in part, by the names of their nodes."""
    found = (re.match(rf"{name}_product\d+", node) for node in layer.nodes)
    return {match[0] for match in found if match}


def _time(layers: Sequence[Layer], name: str) -> float | None:
    """The ms of one product in a format, the median over its copies. Layers may split or join products."""
    spent: dict[str, float] = {}
    for layer in layers:
        if layer.time_ms is not None:
            products = _products_of(layer, name)
            for product in products:
                spent[product] = spent.get(product, 0.0) + layer.time_ms / len(products)
    return median(spent.values()) if spent else None


def _layers(
    size: Size, wanted: Sequence[WeightFormat], subject: Subject, runner: Runner, counts: Sequence[int | None]
) -> tuple[Layer, ...]:
    """The layer report for a model with several copies of the product, in float and in each weight format."""
    dtype = helper.tensor_dtype_to_np_dtype(size.dtype)
    rows = size.rows[0] if len(size.rows) == 1 else None
    random, large, nodes, outputs = np.random.default_rng(1), dict[str, Constant](), [], []
    for copy in range(size.copies):
        weight = Constant.of(random.standard_normal((size.inputs, size.columns), np.float32).astype(dtype))
        for name in ("float", *(s.name for s in wanted)):
            result = f"{name}_y{copy}"
            large[f"{name}_weight{copy}"] = weight
            nodes.append(helper.make_node("MatMul", ["x", f"{name}_weight{copy}"], [result], f"{name}_product{copy}"))
            outputs.append(helper.make_tensor_value_info(result, size.dtype, [rows, size.columns]))
    given = [helper.make_tensor_value_info("x", size.dtype, [rows, size.inputs])]
    graph = helper.make_graph(nodes, "weight_formats", given, outputs)
    model = Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), large)
    formats = [(Edge(f"{s.name}_weight{n}", f"{s.name}_product{n}", 1), s) for s in wanted for n in range(size.copies)]
    random = np.random.default_rng(0)
    mix = tuple(
        Workload({"x": random.standard_normal((rows, size.inputs)).astype(dtype)}, workload.share)
        for rows, workload in zip(size.rows, subject.mix, strict=True)
    )
    once = sum(size.rows) * size.inputs * size.columns * (1 + len(wanted)) * size.copies
    runs = int(min(max(OPERATIONS / once, PRODUCT_RUNS[0]), PRODUCT_RUNS[1]))
    with temporary_folder() as folder, writing(folder):
        path = folder / "weight_formats.onnx"
        save(Inserter(model, Ranges({}), subject.numbers).insert(Placement.of((), formats)), path)
        return runner.report(path, at_each(mix, counts), runs, f"weight_formats_{size.name}")
