"""OpenVINO on the CPU.

Layers are read from its runtime model, which lists the operations that each was fused from. The list has names, which
are ambiguous: OpenVINO may give its own operations names of the model, its ONNX front end makes several operations of
one node, and names may contain the commas of the list. So each operation is renamed to a number before the model is
compiled for a report.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import openvino as ov

from qdqtune.engines import formats, machine, output_to, translated
from qdqtune.engines.coverage import Claim, cover, read_model
from qdqtune.engines.library_settings import OpenVinoOptions, openvino_configuration
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.operators import QDQ
from qdqtune.types import Array, Layer, LayerKind, NumericFormat, QuantType, Tensors

DEVICE = "CPU"

refusals_in_words = partial(
    translated,
    "OpenVINO",
    {re.compile(r"Exception from \S+:\d+:\s*|Check '.*?' failed at \S+:\d+:\s*|FrontEnd API failed with \w+:\s*"): ""},
)
"""`translated`, with a pattern that removes places in OpenVINO's sources from messages."""


def create(options: OpenVinoOptions) -> OpenVino:
    return OpenVino(ov.Core(), options)


class OpenVino:
    """Compiles models for one inference at a time."""

    def __init__(self, core: ov.Core, options: OpenVinoOptions) -> None:
        self.core, self._options = core, options

    def describe(self) -> dict[str, str]:
        return {
            "engine": "openvino",
            "version": ov.get_version(),
            "threads": str(self._options.threads),
            "precision": self._options.precision,
            "device": machine.processor_name(),
            "isa": " ".join(machine.instruction_sets()),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return formats.numeric_format("openvino", quant_type)

    def build(self, model: Path, log: Path) -> OpenVinoModel:
        with output_to(log), refusals_in_words():
            compiled = self.core.compile_model(str(model), DEVICE, self.configuration())
            outputs = read_model(model).outputs
        return OpenVinoModel(self, model, compiled, outputs)

    def configuration(self, **more: Any) -> dict[str, Any]:
        """The properties for compiling a model; `more` are added, or replace some."""
        return openvino_configuration(self._options.threads, self._options.precision) | more


class OpenVinoModel:
    def __init__(self, engine: OpenVino, path: Path, compiled: ov.CompiledModel, outputs: tuple[str, ...]) -> None:
        self._engine = engine
        self._path = path
        self._request = compiled.create_infer_request()
        self._outputs = outputs

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with refusals_in_words():
            _feed(self._request, inputs)
            self._request.infer(share_outputs=True)
            return {name: np.array(self._request.get_output_tensor(i).data) for i, name in enumerate(self._outputs)}

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`: neither setting inputs nor copying outputs counts."""
        with refusals_in_words():
            _feed(self._request, inputs)
            start = time.perf_counter()
            for _ in range(runs):
                self._request.infer(share_outputs=True)
            return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`, from a second, profiled build of the file."""
        source = read_model(self._path)
        with refusals_in_words():
            model = self._engine.core.read_model(str(self._path))
            tags = tag(model, source)
            compiled = self._engine.core.compile_model(model, DEVICE, self._engine.configuration(PERF_COUNT=True))
            request = compiled.create_infer_request()
            _feed(request, inputs)
            profiles = []
            for _ in range(1 + runs):
                request.infer(share_outputs=True)
                profiles.append(request.get_profiling_info())
            executed = compiled.get_runtime_model().get_ordered_ops()
        return report(source, tags, executed, profiles[1:])  # the first one allocates

    def save(self, path: Path) -> None:
        """Write an OpenVINO IR, and compile it: NAME.xml holds the graph, NAME.bin beside it the constants."""
        with refusals_in_words():
            ov.save_model(self._engine.core.read_model(str(self._path)), str(path), compress_to_fp16=False)
            self._engine.core.compile_model(str(path), DEVICE, self._engine.configuration())

    def close(self) -> None:
        del self._request


def _feed(request: ov.InferRequest, inputs: Tensors) -> None:
    """Set every input of the model. Further arrays are ignored."""
    for port in request.model_inputs:
        name = next((name for name in port.get_names() if name in inputs), None)
        if name is None:
            raise EngineFailure(f"OpenVINO: no array for input {port.get_any_name()!r}")
        request.set_tensor(port, ov.Tensor(np.asarray(inputs[name], order="C")))


TAG = re.compile(r"@(\d+)@")
ELEMENT_TYPES: Mapping[str, str] = {
    "f32": "FP32", "f16": "FP16", "i8": "INT8", "u8": "INT8", "i32": "INT32", "i64": "INT64",
}  # fmt: skip
BORDERS = frozenset({"Input", "Output"})
"""Types of the layers that are inputs and outputs of the model."""


@dataclass(frozen=True)
class Tag:
    """What is known of an operation before it is renamed: its name, the model's nodes that it is part of, and the
    tensors of a constant. `is_logical`: it reads or writes booleans, which OpenVINO reports as 8-bit values."""

    name: str
    nodes: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()
    is_logical: bool = False


def tag(model: Any, source: Model) -> tuple[Tag, ...]:
    """Rename the operations of `model`, the `ov.Model` of `source`, to `@0@`, `@1@` ..., and return what each of them
    was.

    An operation that writes no tensor of `source` belongs to the nodes of its reader.
    """
    tags: list[Tag] = []
    owners: dict[str, tuple[str, ...]] = {}
    for operation in reversed(model.get_ordered_ops()):
        name = operation.get_friendly_name()
        if operation.get_type_name() in ("Parameter", "Result"):
            continue
        tensors = frozenset(name for output in operation.outputs() for name in output.get_names())
        makers = sorted({source.producers[t] for t in tensors if t in source.producers})
        nodes = [source.nodes[index].name for index in makers]
        if not tensors:
            users = (port.get_node() for output in operation.outputs() for port in output.get_target_inputs())
            owned = (owners.get(user.get_friendly_name(), ()) for user in users)
            nodes = list(next(filter(None, owned), ()))
        operation.set_friendly_name(f"@{len(tags)}@")
        owners[operation.get_friendly_name()] = tuple(nodes)
        if operation.get_type_name() == "Constant":
            tags.append(Tag(name, tensors=tensors))
        else:
            ports = (*operation.inputs(), *operation.outputs())
            is_logical = any(port.get_element_type().get_type_name() == "boolean" for port in ports)
            tags.append(Tag(name, tuple(nodes), is_logical=is_logical))
    return tuple(tags)


def report(
    model: Model, tags: Sequence[Tag], executed: Iterable[Any], profiles: Sequence[Iterable[Any]]
) -> tuple[Layer, ...]:
    """The layers of a compiled model, in the order in which they run; see `Built.layers`.

    `executed` are the operations of the runtime model, `profiles` the profiling information of each inference.
    """
    times = _times(profiles)
    infos, before = dict[str, dict[str, str]](), dict[str, list[str]]()
    fixed = set[str]()  # constants, and layers of constants only: they ran when the model was compiled
    for op in executed:
        name = op.get_friendly_name()
        infos[name] = {key: value.astype(str) for key, value in op.get_rt_info().items()}
        before[name] = [port.get_source_output().get_node().get_friendly_name() for port in op.inputs()]
        if infos[name]["layerType"] == "Const" or (before[name] and fixed.issuperset(before[name])):
            fixed.add(name)
    running = sorted(
        (name for name, info in infos.items() if name not in fixed and info["layerType"] not in BORDERS),
        key=lambda name: int(infos[name]["execOrder"]),
    )
    sources = {node.outputs[0]: node.inputs[0] for node in model.nodes if node.op == "DequantizeLinear"}
    weights = {node.name: {sources[t] for t in node.inputs if t in sources} for node in model.nodes}
    claims, precisions = [], []
    for name in running:
        fused = [tags[int(tagged[1])] for tagged in TAG.finditer(infos[name]["originalLayersNames"])]
        nodes = tuple(dict.fromkeys(chain.from_iterable(part.nodes for part in fused)))
        constants = _constants_read(before[name], before, fixed, tags)
        precisions.append(_precision(infos[name], any(part.is_logical for part in fused)))
        if precisions[-1] == "INT8":  # then its weights have 8 bits as well
            constants = constants.union(*(weights.get(node, ()) for node in nodes))
        claims.append(Claim(nodes, frozenset(constants)))
    covered, folded = cover(model, claims)
    layers = []
    for name, nodes, precision in zip(running, covered, precisions, strict=True):
        known = TAG.sub(lambda match: tags[int(match[1])].name, name)
        kind = _kind(infos[name], known, [model.node(n).op for n in nodes])
        if kind == "quantize":
            precision = _type(infos[name]["outputPrecisions"])
        layers.append(Layer(known, nodes, precision, times.get(name, 0.0), kind))
    return (*layers, *folded)


def _times(profiles: Sequence[Iterable[Any]]) -> dict[str, float]:
    """Mean milliseconds of each layer over its shortest tenth, as other processes slow some inferences down."""
    samples: dict[str, list[float]] = {}
    for profile in profiles:
        for entry in profile:
            samples.setdefault(entry.node_name, []).append(1e3 * entry.real_time.total_seconds())
    return {name: fmean(sorted(values)[: max(1, len(values) // 10)]) for name, values in samples.items()}


def _constants_read(
    names: Sequence[str], before: Mapping[str, Sequence[str]], fixed: set[str], tags: Sequence[Tag]
) -> set[str]:
    """The model's constants that a layer reads, directly or through operations computed in advance (`fixed`)."""
    constants: set[str] = set()
    stack = [name for name in names if name in fixed]
    while stack:
        name = stack.pop()
        stack.extend(before[name])
        for match in TAG.finditer(name):
            constants |= tags[int(match[1])].tensors
    return constants


def _kind(info: Mapping[str, str], name: str, operators: Sequence[str]) -> LayerKind:
    if operators:
        return "quantize" if QDQ.issuperset(operators) else "compute"
    if info["layerType"] in ("Convert", "Reorder"):
        return "reformat"
    return "quantize" if "FakeQuantize" in (info["layerType"], name.split("_")[0]) else "compute"  # from a moved pair


def _precision(info: Mapping[str, str], is_logical: bool) -> str:
    if not is_logical:
        return _type(info["runtimePrecision"])
    made = _type(info["outputPrecisions"])
    return "BOOL" if made == "INT8" else made


def _type(names: str) -> str:
    first = names.split(",")[0]
    return ELEMENT_TYPES.get(first, first.upper())
