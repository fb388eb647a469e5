"""Layers of a TensorRT engine, read from what its inspector and its profiler write.

The layer information is JSON of `trtexec --exportLayerInfo` or of the engine inspector, of TensorRT 8, 10 or 11. The
profile is JSON of `trtexec --exportProfile`, or names and times as `IProfiler` reports them. Nothing of TensorRT is
imported. A layer covers the ONNX nodes in its name, and those between them in the graph.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from qdqtune.engines.coverage import Claim, cover
from qdqtune.errors import BadOption, EngineFailure, InputError, one_line, parsed_json, reading
from qdqtune.graph.loading import name_nodes
from qdqtune.graph.model import Model
from qdqtune.graph.operators import QDQ
from qdqtune.types import LOW_PRECISIONS, Layer, LayerKind

Times = Sequence[tuple[str, float]]

PRECISION_NAMES = {
    "int8": "INT8", "uint8": "UINT8", "int4": "INT4", "fp8": "FP8", "fp4": "FP4", "half": "FP16", "fp16": "FP16",
    "float": "FP32", "fp32": "FP32", "bf16": "BF16", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64",
    "bool": "BOOL",
}  # fmt: skip
DATATYPE = re.compile(rf"\b({'|'.join(PRECISION_NAMES)})\b", re.IGNORECASE)

OPERANDS = re.compile(r"_({0})({0})_({0})({0})(?:_|$)".format("i8|u8|i4|e4m3|e5m2|e2m1|f16|bf16|tf32|f32|i32"))
"""Types in the tactic name of a GEMM or a convolution: first operand, result, second operand, accumulator."""

OPERAND = {"i8": "INT8", "u8": "UINT8", "i4": "INT4", "e4m3": "FP8", "e5m2": "FP8", "e2m1": "FP4", "f16": "FP16",
           "bf16": "BF16", "tf32": "FP32", "f32": "FP32"}  # fmt: skip

SCALAR = re.compile(r"_(alpha|beta)(_myl\d+)?$|^__mye\d+_?\w?const")
"""Names of inputs that are scalar factors or constants of a kernel, which are no operands of its product."""

INDICES = frozenset({"BOOL", "INT32", "INT64"})
"""Types of masks, indices and shapes, which are no operands of a product."""

ATTENTION = re.compile(r"mha|attention", re.IGNORECASE)

ATTENDED = 3
"""How many of its inputs an attention kernel multiplies: queries, keys and values."""

PAIR_NAME = re.compile(r"(?i:quantize_?linear|quantlinearnode)|[_/.]D?Q(_\d+)?$")

COPY_TYPES = frozenset(
    {"Concatenation", "NoOp", "Padding", "Shuffle", "Slice", "Wait", "Signal", "wait", "signal", "shape_call"}
)
"""Layer types that only move values; a NoOp does nothing."""

MYELIN = re.compile(r"__myl_([A-Za-z]+)_myl\d+_\d+")
MOVE_STEPS = re.compile(r"(Move|Tran|Resh|Cast|Conc|Slic)+")
ROUNDING_STEPS = re.compile(r"(Mul|Div|Min|Max|Roun|Cast|Move|Tran|Resh)+")
"""Parts of the name of a kernel that quantizes or dequantizes, provided that it reads or writes a low precision."""

LAYER_FIELD = re.compile(r"(?:^|, )(LayerType|Inputs|Constants|Outputs|TacticName|StreamId|Metadata): ")
LISTED_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[.*?, Datatype: (\w+)")
"""Matches name and type of a tensor in the builder's list of layers."""


@dataclass(frozen=True)
class _ReportedLayer:
    """One layer of the layer information. `inputs`, `constants` and `outputs` are precisions: of possible operands, of
    weights (also those listed as inputs), and of results. If only names were exported, other fields are empty."""

    name: str
    type: str = ""
    parameter_type: str = ""
    origin: str = ""
    tactic: str = ""
    inputs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()


def read_report(
    graph: Path | str, profile: Path | str | Times | None = None, model: onnx.ModelProto | None = None
) -> tuple[Layer, ...]:
    """One `Layer` for each layer of the engine, in order.

    `graph` is the layer information, a file or its text; `profile` the profile, the same or pairs of layer name and
    milliseconds. Times are None without it, and for layers that do nothing, which TensorRT does not time. With the
    `model` that the engine was built from, whose weights are not needed, each node is in one layer, by the name that
    `loading.load` gives it. Without it, the nodes of a layer are the words between the separators in its name, names of
    constants among them.

    `precision` is the type of the values that the layer multiplies or, if unknown, of those that it writes. Rows of the
    profile that fit no layer become layers of kind "unknown" without nodes.

    Raises:
        BadOption: a text has another form, or the texts and the model do not belong together.
    """
    names = None if model is None else NodeNames(model.graph)
    constants = frozenset[str]() if names is None else names.constants
    entries = _reported_layers(_text_of(graph, "layer information"), constants)
    mentions = [_mentions(entry.name, entry.metadata, names) for entry in entries]
    nodes, folded = mentions, tuple[Layer, ...]()
    if names is not None:
        nodes, folded = assign(names, entries, mentions)
    operators = {} if names is None else {node.name: node.op for node in names.model.nodes}
    layer_ms, unmatched = _match_times(entries, _profile_rows(profile))
    layers = []
    for entry, own, covered, ms in zip(entries, mentions, nodes, layer_ms, strict=True):
        kind = _kind(entry, own, operators)
        layers.append(Layer(entry.name, covered, _precision(entry, kind), ms, kind))
    layers += [Layer(name, (), "", ms, "unknown") for name, ms in unmatched.items()]
    return (*layers, *folded)


def layers_of(
    model: Path, graph: Path | str, profile: Path | Times | None = None, vendor: str = "TensorRT"
) -> tuple[Layer, ...]:
    """`read_report` for an engine that was just built from the file `model`.

    Raises:
        EngineFailure: the report cannot be read. Not BadOption, as the user did not give it.
    """
    try:
        return read_report(graph, profile, onnx.load(model, load_external_data=False))
    except InputError as error:
        raise EngineFailure(f"{vendor}: {one_line(error)}") from error


def layers_from_log(message: str) -> str:
    """The builder's message `Layers:`, one line for each layer, as the JSON that the engine inspector would write."""
    layers = []
    for line in message.split("\n\nI/O Tensors:")[0].split("\n")[1:]:
        if not line.startswith("Name: "):
            continue
        name, *rest = LAYER_FIELD.split(line.removeprefix("Name: "))
        fields: dict[str, Any] = {"Name": name, **dict(zip(rest[::2], rest[1::2], strict=True))}
        for part in ("Inputs", "Constants", "Outputs"):
            listed = LISTED_TENSOR.findall(fields.get(part, ""))
            fields[part] = [{"Name": tensor, "Datatype": datatype} for tensor, datatype in listed]
        layers.append(fields)
    return json.dumps({"Layers": layers})


def _text_of(source: Path | str, what: str) -> str:
    if isinstance(source, str):
        return source
    with reading(f"the {what} {source}"):
        return source.read_text(encoding="utf-8", errors="replace")


def _reported_layers(text: str, constants: frozenset[str]) -> list[_ReportedLayer]:
    try:
        content = parsed_json(text, strict=False)
    except ValueError as error:
        if text.lstrip().startswith("N/A"):
            raise BadOption(
                "the layer information says 'N/A due to dynamic shapes': export it from a run with shapes bound, "
                "trtexec --loadEngine=... --shapes=input:1x3x224x224 --exportLayerInfo=..."
            ) from error
        raise BadOption(f"the layer information is no JSON, or cut short ({error}): export it again") from error
    layers = content.get("Layers") if isinstance(content, dict) else None
    if not isinstance(layers, list) or not layers:
        raise BadOption("the layer information has no list 'Layers': give what trtexec --exportLayerInfo writes")
    return [_reported_layer(layer, constants) for layer in layers]


def _reported_layer(layer: Any, known: frozenset[str]) -> _ReportedLayer:
    if isinstance(layer, str):
        return _ReportedLayer(layer)
    if not isinstance(layer, dict) or not isinstance(layer.get("Name"), str):
        raise BadOption("the layer information has a layer without a name: give what trtexec --exportLayerInfo writes")
    constants = tuple(precision for _, precision in _tensors(layer.get("Constants")))
    weights = layer.get("Weights", layer.get("ConvWeights"))
    if isinstance(weights, Mapping) and weights.get("Count"):  # TensorRT 8 and 10; the count is 0 if there are none
        constants += (_precision_in(str(weights.get("Type"))),)
    inputs = []
    for name, precision in _tensors(layer.get("Inputs")):
        if name in known:
            constants += (precision,)
        elif not SCALAR.search(name) and precision not in INDICES:
            inputs.append(precision)
    return _ReportedLayer(
        layer["Name"],
        str(layer.get("LayerType", "")),
        str(layer.get("ParameterType", "")),
        str(layer.get("Origin", "")),
        str(layer.get("TacticName", "")),
        tuple(inputs),
        constants,
        tuple(precision for _, precision in _tensors(layer.get("Outputs"))),
        _onnx_layers(str(layer.get("Metadata", ""))),
    )


def _tensors(tensors: Any) -> list[tuple[str, str]]:
    """Name and precision of tensors. TensorRT 11 has a field `Datatype`, other versions `Format/Datatype`."""
    if not isinstance(tensors, list):
        return []
    given = [t for t in tensors if isinstance(t, Mapping)]
    return [
        (str(t.get("Name", "")), _precision_in(str(t.get("Datatype") or t.get("Format/Datatype") or ""))) for t in given
    ]


def _precision_in(text: str) -> str:
    match = DATATYPE.search(text)
    return PRECISION_NAMES[match[1].lower()] if match else ""


def _onnx_layers(metadata: str) -> tuple[str, ...]:
    """Node names in `[ONNX Layer: a]\\x1e[ONNX Layer: b]`. As names may hold brackets, it splits at separators."""
    return tuple(re.findall(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|\[ONNX Layer: |$)", metadata, re.DOTALL))


def _profile_rows(profile: Path | str | Times | None) -> Times:
    if profile is None or not isinstance(profile, Path | str):
        return profile or ()
    try:
        content = parsed_json(_text_of(profile, "profile"), strict=False)
    except ValueError as error:
        raise BadOption(f"the profile is no JSON, or cut short ({error}): export it again") from error
    if not isinstance(content, list):
        raise BadOption("the profile is no list of layers: give what trtexec --exportProfile writes")
    times = []
    for row in content:
        if isinstance(row, Mapping) and "name" not in row:
            continue  # the number of inferences
        ms = row.get("medianMs", row.get("averageMs")) if isinstance(row, Mapping) else None
        if not isinstance(ms, int | float):
            raise BadOption("the profile has a layer without a time: give what trtexec --exportProfile writes")
        times.append((str(row["name"]), float(ms)))
    return times


def _match_times(entries: Sequence[_ReportedLayer], times: Times) -> tuple[list[float | None], dict[str, float]]:
    """The milliseconds of each layer, and the rest of the profile: ms by the name of rows that fit no layer. Layers of
    equal names are matched in order."""
    waiting: dict[str, deque[float]] = {}
    for name, ms in times:
        waiting.setdefault(name, deque()).append(ms)
    layer_ms = [waiting[e.name].popleft() if waiting.get(e.name) else None for e in entries]
    unmatched = {name: sum(rows) for name, rows in waiting.items() if rows}
    if unmatched and all(ms is None for ms in layer_ms):
        raise BadOption(
            f"the profile has layer {next(iter(unmatched))!r:.200}, the layer information has not, nor any other of "
            "the profile: they are of two engines"
        )
    return layer_ms, unmatched


def _mentions(layer: str, metadata: tuple[str, ...], names: NodeNames | None) -> tuple[str, ...]:
    """The nodes that a layer's name and metadata mention; none for a copy, whose name is that of the node it serves."""
    if layer.startswith(COPY_NODE):
        return ()
    if names is None:
        words = () if MADE_UP.match(layer) else BREAK.split(layer)
        return metadata or tuple(word for word in words if word and word not in WRAPPERS)
    known = (names.known[name] for name in metadata if name in names.known)
    return tuple(dict.fromkeys((*names.mentioned(layer), *known)))


def _kind(entry: _ReportedLayer, mentions: Sequence[str], operators: Mapping[str, str]) -> LayerKind:
    steps = MYELIN.match(entry.name)
    pairs_only = bool(mentions) and all(
        operators[n] in QDQ if n in operators else PAIR_NAME.search(n) is not None for n in mentions
    )
    if entry.origin == "QDQ" or entry.type in ("Quantize", "Dequantize"):
        return "quantize"
    if entry.type == "NoOp":
        return "copy"
    if entry.type == "Reformat" or entry.name.startswith(COPY_NODE):
        return "reformat"
    if pairs_only and (not entry.type or entry.type in ("Scale", "kgen") or "ointWise" in entry.type):
        return "quantize"
    if steps and not mentions:
        low = set(LOW_PRECISIONS) & {*entry.inputs, *entry.constants} != set(LOW_PRECISIONS) & set(entry.outputs)
        if low and ROUNDING_STEPS.fullmatch(steps[1]):
            return "quantize"
        if MOVE_STEPS.fullmatch(steps[1]):
            return "reformat"
    return "copy" if {entry.type, entry.parameter_type} & COPY_TYPES else "compute"


def _precision(entry: _ReportedLayer, kind: LayerKind) -> str:
    written = next((p for p in entry.outputs if p not in INDICES), next(iter(entry.outputs), ""))
    if kind != "compute":
        return written
    named = OPERANDS.search(entry.tactic)
    if named is not None and OPERAND.get(named[1]) == OPERAND.get(named[3]) is not None:
        return OPERAND[named[1]]
    low = next((p for p in entry.inputs if p in LOW_PRECISIONS), "")
    if low and _multiplies(entry, low):
        return low
    in_float = next((p for p in entry.inputs if p not in LOW_PRECISIONS), written)
    return in_float if written in LOW_PRECISIONS else written  # a DQ or a Q that was fused with float arithmetic


def _multiplies(entry: _ReportedLayer, low: str) -> bool:
    """Whether a kernel multiplies in the low precision of one of its inputs; if not, it converts that input first."""
    weights = {c for c in entry.constants if c in LOW_PRECISIONS}
    if weights:
        return weights == {low}  # another input may be an operand of a fused Add
    if ATTENTION.search(f"{entry.name} {entry.tactic}"):
        return entry.inputs.count(low) >= ATTENDED  # further inputs are masks
    if entry.type == "gemm":
        return entry.inputs[:2] == (low, low)  # the third is added
    return set(entry.inputs) == {low}


BREAK = re.compile(r" \+ | \|\| |, |\.\.\.|[()\[\]{}]|_myl\d+_\d+")
FOREIGN = re.compile(r"\{ForeignNode\[(.*)\.\.\.(.*)\]\}")
WRAPPERS = frozenset({"PWN", "ForeignNode"})
COPY_NODE = "Reformatting CopyNode for "
MADE_UP = re.compile(
    rf"{COPY_NODE}|__my[le]|.*\(Unnamed Layer\* |"
    r"(copied_)?(un)?squeeze_(node_)?after_|(re)?shape_after_|transpose_(before|after)_"
)
"""Matches names of layers that TensorRT adds itself."""


class NodeNames:
    """Finds the names of a model's nodes, as `loading.load` gives them, in the names of TensorRT's layers.

    TensorRT's parser calls an unnamed node `node_of_` and the name of its first output. These names work for every
    node, since the report may be of a file with unnamed nodes.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        constants = [onnx.TensorProto(name=tensor.name) for tensor in graph.initializer]  # without their values
        named = onnx.GraphProto(node=graph.node, initializer=constants)
        name_nodes(named)
        self.model = Model(onnx.ModelProto(graph=named))
        made = (node.outputs[0] for node in self.model.nodes if node.op == "Constant")
        self.constants = frozenset((*(tensor.name for tensor in constants), *made))
        parsed = {f"node_of_{node.outputs[0]}": node.name for node in self.model.nodes if node.outputs}
        self.known = parsed | {name: name for name in self.model.index_of}
        """The node's name by each name that TensorRT may use."""
        self._longest = max(map(len, self.known), default=0)

    def mentioned(self, layer: str) -> tuple[str, ...]:
        """The nodes in a layer's name. As node names may contain separators, the longest match is taken."""
        breaks = list(BREAK.finditer(layer))
        starts = [0, *(b.end() for b in breaks)]
        ends = [*(b.start() for b in breaks), len(layer)]
        names, position = [], 0
        for start in starts:
            if start < position:
                continue
            fitting = [e for e in ends if start < e <= start + self._longest and layer[start:e] in self.known]
            if fitting:
                position = max(fitting)
                names.append(self.known[layer[start:position]])
        return tuple(names)


def assign(
    names: NodeNames,
    layers: Sequence[_ReportedLayer],
    mentions: Sequence[Sequence[str]],
) -> tuple[list[tuple[str, ...]], tuple[Layer, ...]]:
    """The nodes of each layer, and the layer of those that were folded (see `cover`).

    A node belongs to the first layer that mentions it in its name, or else in its metadata; nodes that none mentions
    are assigned by `coverage.cover`.
    """
    home: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for name in names.mentioned(layer.name):
            if name in mentions[number]:
                home.setdefault(name, number)
    for number, own in enumerate(mentions):
        for name in own:
            home.setdefault(name, number)
    named = [own for layer, own in zip(layers, mentions, strict=True) if not MADE_UP.match(layer.name)]
    if not home or 2 * sum(not own for own in named) > len(named):
        raise BadOption(
            "the layer information hardly names a node of the model: it is of another model, or was exported "
            "without --profilingVerbosity=detailed"
        )
    for number, layer in enumerate(layers):
        foreign = FOREIGN.search(layer.name)
        for between in _between(names, *foreign.groups()) if foreign else ():
            home.setdefault(between, number)
    claims: list[list[str]] = [[] for _ in layers]
    for name, number in home.items():
        claims[number].append(name)
    return cover(names.model, [Claim(tuple(own)) for own in claims])


def _between(names: NodeNames, first: str, last: str) -> set[str]:
    """The nodes on all paths from the nodes mentioned in `first` to those mentioned in `last`."""
    after, made = set(names.mentioned(first)), set[str]()
    for node in names.model.nodes:
        if node.name in after or not made.isdisjoint(node.reads):
            after.add(node.name)
            made.update(node.outputs)
    before, needed = set(names.mentioned(last)), set[str]()
    for node in reversed(names.model.nodes):
        if node.name in before or not needed.isdisjoint(node.outputs):
            before.add(node.name)
            needed.update(node.reads)
    return after & before
