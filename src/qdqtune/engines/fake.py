"""A deterministic engine without a vendor library, for tests, examples and a first look at the tool.

Outputs come from ONNX's reference evaluator. Latencies come from a cost model, `latency`, that behaves like real
engines where it matters for placing Q/DQ pairs:

- Work is counted in multiply-adds for Conv, ConvTranspose, Gemm and MatMul, in output elements for everything else,
  plus a fixed cost for each node that runs. Inputs bring their sizes; sizes that stay unknown count as 1.
- A Relu or Clip behind a compute operator that it alone consumes is fused into it.
- An operator with an integer kernel uses it if all its inputs (biases aside) come out of DequantizeLinear and only
  QuantizeLinear reads its output. It then takes a fraction of the time, and absorbs that QuantizeLinear.
- A DequantizeLinear is absorbed if all its readers run in integers, or if it reads a constant; a QuantizeLinear, if its
  producer runs in integers. All other Q and DQ nodes run, and cost like any node of their size.

So pairs around one small or unsupported operator cost more than they gain, and a chain of pairs around large operators
gains: the best placement is neither empty nor full.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import exp, prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_19

from qdqtune.engines import formats
from qdqtune.engines.coverage import Claim, cover, read_model
from qdqtune.engines.facts import ASYMMETRIC
from qdqtune.errors import EngineFailure, one_line
from qdqtune.graph.model import GRAPH, Model, Node
from qdqtune.graph.operators import CLAMPS, COMPUTE, QDQ
from qdqtune.system.writing import append
from qdqtune.types import Array, Layer, LayerKind, NumericFormat, QType, QuantType, Tensors

MULTIPLY_ADDS_PER_SECOND = 2e10
ELEMENTS_PER_SECOND = 4e9
SECONDS_PER_NODE = 2e-6
COMPUTE_FRACTION = 0.3
MEMORY_FRACTION = 0.4
WIDE_FACTOR = 2.0
"""Speed in float32; the share of float time that an int8 kernel takes; and the factor by which 16-bit integers are
slower. Chosen, not measured: of the order of a CPU core."""

SHAPE_BYTES = 1024
"""Larger constants are weights. Shape inference does not need their values, and is slow with large ones."""

DEQUANTIZES = 19
"""The first opset for which the reference evaluator implements DequantizeLinear."""

MOVE_DATA = frozenset({"Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
RUN_ON_INTEGERS = COMPUTE | MOVE_DATA | {"Add", "AveragePool", "Concat", "GlobalAveragePool", "Mul"}


@dataclass(frozen=True)
class FakeOptions:
    seed: int = 0  # of the noise: the n-th call of `time` draws the same, whatever the clock says
    noise: float = 0.0  # standard deviation of independent noise on each sample, relative
    asymmetric: bool = False  # numbers like those of ONNX Runtime on a CPU; by default like those of TensorRT
    wide: bool = False  # `asymmetric` numbers have 16 bits as well, in which operators take twice as long
    build_seconds: float = 0.0  # how long each build takes, in real time
    faults: Mapping[Literal["refuse", "crash", "hang", "nan"], str] | None = None
    """Tests inject a failure: a regular expression for each kind. A model with a Q/DQ pair on an input of a node whose
    name matches fails so when it is built or (nan) run."""
    hide_times: bool = False  # layer reports have no times, like those of engines that cannot time layers
    threads: int = 1  # multiply-adds are divided among so many; all else takes as long as on one


def create(options: FakeOptions) -> Fake:
    return Fake(options)


class Fake:
    def __init__(self, options: FakeOptions) -> None:
        self._options, self._random = options, np.random.default_rng(options.seed)

    def describe(self) -> dict[str, str]:
        numbers, threads = "asymmetric" if self._options.asymmetric else "symmetric", str(self._options.threads)
        numbers += ", 16 bits" if self._options.wide else ""
        return {"engine": "fake", "version": "1", "device": "cost model", "threads": threads, "numbers": numbers}

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        if quant_type == "int8" and self._options.asymmetric:
            wide = QType.UINT16 if self._options.wide else None
            return replace(ASYMMETRIC, shared_scale_ops=MOVE_DATA, wide=wide)
        return formats.numeric_format("fake", quant_type)

    def build(self, model: Path, log: Path) -> FakeModel:
        time.sleep(self._options.build_seconds)
        log.write_bytes(b"")
        append(log, f"building {model}\n")
        try:
            onnx.checker.check_model(str(model))
            proto = read_model(model).proto
            for tensor in proto.graph.initializer:
                if len(tensor.raw_data) > SHAPE_BYTES:
                    tensor.ClearField("raw_data")
            faults = self._options.faults or {}
            pairs = {n.output[0] for n in proto.graph.node if n.op_type == "DequantizeLinear"}
            named = [n.name for n in proto.graph.node if n.op_type != "QuantizeLinear" and pairs & set(n.input)]
            struck = (kind for kind, pattern in faults.items() if any(fnmatchcase(name, pattern) for name in named))
            fault = next(struck, None)
            costs = CostModels(proto, self._options.threads)
            seconds = costs.of({}).seconds  # fails if the cost model cannot read the model
        except Exception as error:  # what protobuf, the checker and shape inference raise has no common class
            append(log, f"{error}\n")
            raise EngineFailure(f"fake engine: {one_line(error)}") from error
        append(log, f"modelled latency {1e6 * seconds:.3f} us\n" + (f"fault: {fault}\n" if fault else ""))
        if fault == "refuse":
            raise EngineFailure("fake engine: no implementation for a quantized node")
        if fault == "crash":
            os._exit(70)
        while fault == "hang":
            time.sleep(3600)
        return FakeModel(model, costs, self._options, self._random, fault == "nan")


@dataclass
class FakeModel:
    path: Path
    costs: CostModels
    options: FakeOptions
    random: np.random.Generator
    spoiled: bool
    _evaluator: ReferenceEvaluator | None = None

    def run(self, inputs: Tensors) -> dict[str, Array]:
        try:
            if self._evaluator is None:  # weights are read here: models that are only timed never need them
                model = onnx.load(self.path)
                opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), DEQUANTIZES)
                operators = [DequantizeLinear] if opset < DEQUANTIZES else None
                self._evaluator = ReferenceEvaluator(model, new_ops=operators)  # type: ignore[arg-type]
            outputs = dict(zip(self._evaluator.output_names, self._evaluator.run(None, dict(inputs)), strict=True))
        except Exception as error:  # whatever its Python code raises
            raise EngineFailure(f"fake engine: {one_line(error)}") from error
        if not self.spoiled:
            return outputs
        return {k: np.full_like(v, np.nan) if v.dtype.kind == "f" else v for k, v in outputs.items()}

    def time(self, inputs: Tensors, runs: int) -> float:
        """The modelled seconds with noise. Does not wait."""
        return self.costs.of(inputs).seconds * exp(self.options.noise * self.random.standard_normal())

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """One layer for each node that costs time, with what it absorbed. Exact: the times add up to the latency."""
        layers = self.costs.of(inputs).layers()
        return tuple(replace(layer, time_ms=None) for layer in layers) if self.options.hide_times else layers

    def save(self, path: Path) -> None:
        raise EngineFailure("fake engine: it has no format of its own to save")

    def close(self) -> None:
        self._evaluator = None


class DequantizeLinear(DequantizeLinear_19):
    """DequantizeLinear of opset 13, which the reference evaluator lacks. It is found by the name of the class."""

    op_domain = ""
    op_schema = onnx.defs.get_schema("DequantizeLinear", 13)


def latency(model: onnx.ModelProto, threads: int = 1, inputs: Tensors = MappingProxyType({})) -> float:
    return CostModels(model, threads).of(inputs).seconds


class CostModels:
    """The cost models of one file: one for each set of sizes of its dynamic inputs."""

    def __init__(self, model: onnx.ModelProto, threads: int) -> None:
        self._model, self._threads = model, threads
        tensors = {value.name: value.type.tensor_type for value in model.graph.input}
        self._open = [
            name
            for name, tensor in tensors.items()
            if not tensor.HasField("shape") or any(dim.dim_value < 1 for dim in tensor.shape.dim)
        ]
        self._known: dict[tuple[tuple[int, ...], ...], CostModel] = {}

    def of(self, inputs: Tensors) -> CostModel:
        sizes = {name: np.shape(inputs[name]) for name in self._open if name in inputs}
        key = tuple(sizes.values())
        if key not in self._known:
            model = deepcopy(self._model)
            for value in model.graph.input:
                for dim, size in zip(value.type.tensor_type.shape.dim, sizes.get(value.name, ()), strict=False):
                    dim.dim_value = dim.dim_value or size
            if sizes:  # the shapes of other tensors depended on them
                for value in (*model.graph.value_info, *model.graph.output):
                    value.type.tensor_type.ClearField("shape")
            self._known[key] = CostModel(model, self._threads)
        return self._known[key]


class CostModel:
    def __init__(self, model: onnx.ModelProto, threads: int) -> None:
        self.pace = MULTIPLY_ADDS_PER_SECOND * threads
        self.model = Model(onnx.shape_inference.infer_shapes(model))
        graph, self.nodes, self.maker = self.model.proto.graph, self.model.nodes, self.model.maker
        self.shapes = defaultdict[str, tuple[int, ...]](tuple, {t.name: tuple(t.dims) for t in graph.initializer})
        self.constants = set(self.shapes)
        for node in self.nodes:
            if node.op == "Constant" or (node.op == "QuantizeLinear" and node.inputs[0] in self.constants):
                self.constants.add(node.outputs[0])
        for value in (*graph.input, *graph.value_info, *graph.output):
            dims = value.type.tensor_type.shape.dim
            self.shapes[value.name] = tuple(max(d.dim_value, 1) for d in dims)
        self.wide = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.UINT16}
        self.integer = {node.outputs[0] for node in self.nodes if self._runs_in_integers(node)}

    @cached_property
    def seconds(self) -> float:
        return sum(self._node_seconds(node) for node in self.nodes) or SECONDS_PER_NODE

    def layers(self) -> tuple[Layer, ...]:
        """The nodes that run, each with those fused into it; see `Built.layers`."""
        running = [node for node in self.nodes if self._node_seconds(node) > 0]
        covered, folded = cover(self.model, [Claim((node.name,)) for node in running])
        layers = []
        for node, names in zip(running, covered, strict=True):
            kind: LayerKind = "quantize" if node.op in QDQ else "compute"
            precision = "INT8" if node.outputs[0] in self.integer else "FP32"
            layers.append(Layer(node.name, names, precision, 1e3 * self._node_seconds(node), kind))
        return (*layers, *folded)

    def _readers(self, tensor: str) -> list[Node | None]:
        """The nodes that read a tensor; None stands for the graph, of which it is an output."""
        uses = [use for use in self.model.uses(tensor) if use.slot >= 0]  # not in the bodies of a node
        return [None if use.node == GRAPH else self.nodes[use.node] for use in uses]

    def _final_tensor(self, node: Node) -> str:
        """The tensor that other nodes read from a node: its output, or that of the Relu or Clip fused into it."""
        readers = self._readers(node.outputs[0])
        if node.op in COMPUTE and len(readers) == 1 and readers[0] is not None:
            return readers[0].outputs[0] if readers[0].op in CLAMPS else node.outputs[0]
        return node.outputs[0]

    def _is_epilogue(self, node: Node) -> bool:
        before = self.maker(node.inputs[0]) if node.op in CLAMPS else None
        return before is not None and self._final_tensor(before) == node.outputs[0]

    def _runs_in_integers(self, node: Node) -> bool:
        if node.op not in RUN_ON_INTEGERS:
            return False
        count = 2 if node.op in COMPUTE else None
        makers = [self.maker(name) for name in node.inputs[: 1 if node.op in MOVE_DATA else count]]
        readers = self._readers(self._final_tensor(node))
        return (
            all(m is not None and m.op == "DequantizeLinear" for m in makers)
            and bool(readers)
            and all(r is not None and r.op == "QuantizeLinear" for r in readers)
        )

    def _node_seconds(self, node: Node) -> float:
        if node.op == "Constant" or self._is_epilogue(node) or self._is_absorbed(node):
            return 0.0
        integer = node.outputs[0] in self.integer
        width = WIDE_FACTOR if self._reads_wide(node) else 1.0
        if node.op in COMPUTE:
            work = self._multiply_adds(node) / self.pace * (width * COMPUTE_FRACTION if integer else 1.0)
        else:
            share = width * MEMORY_FRACTION if integer else 1.0
            work = prod(self.shapes[node.outputs[0]]) / ELEMENTS_PER_SECOND * share
        return SECONDS_PER_NODE + work

    def _reads_wide(self, node: Node) -> bool:
        """Whether a node reads activations of 16 bits, which the type of their zero point shows."""
        maker = self.maker(node.inputs[0]) if node.inputs else None
        return maker is not None and maker.op == "DequantizeLinear" and not self.wide.isdisjoint(maker.inputs[2:])

    def _is_absorbed(self, node: Node) -> bool:
        if node.op not in QDQ:
            return False
        if node.inputs[0] in self.constants:
            return True
        if node.op == "DequantizeLinear":
            return all(r is not None and r.outputs[0] in self.integer for r in self._readers(node.outputs[0]))
        maker = self.maker(node.inputs[0])
        before = self.maker(maker.inputs[0]) if maker is not None and self._is_epilogue(maker) else maker
        return before is not None and before.outputs[0] in self.integer

    def _multiply_adds(self, node: Node) -> int:
        left, right, out = (self.shapes[name] for name in (*node.inputs[:2], node.outputs[0]))
        if node.op == "Conv":
            return prod(out) * prod(right[1:])
        if node.op == "ConvTranspose":
            return prod(left) * prod(right[1:])
        return prod(out) * (left[0 if node.attributes.get("transA") else -1] if left else 1)
