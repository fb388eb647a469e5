"""Matches the entries of a calibration cache with the tensors of a model.

Most entries have the names of tensors in the ONNX file. Others have names that TensorRT gives to tensors with the same
values (`_renamed`). A tensor without an entry takes the range of a neighbour that has the same values (`_passed_on`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from qdqtune.calibration.caches import Cache, read_cache
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadData
from qdqtune.graph.loading import identities
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import (
    AVERAGE_POOLS,
    CLAMPS,
    COMPUTE,
    INTEGER_KERNELS,
    MOVERS,
    REARRANGES,
    is_float,
    takes_data,
)

UNNAMED_TENSOR = re.compile(r"\(Unnamed Layer\* \d+\) \[(.+)\]_output(?:_\d+)?")
"""The output of an unnamed TensorRT layer, with the kind of the layer."""

TENSORRT_NAME = re.compile(rf"{UNNAMED_TENSOR.pattern}|ONNXTRT_\w+|.+_output")
"""Names of tensors that TensorRT's parser adds to those of the model."""

TENSORRT_LAYERS: Mapping[str, frozenset[str]] = {
    "Convolution": frozenset({"Conv"}),
    "Deconvolution": frozenset({"ConvTranspose"}),
    "Fully Connected": frozenset({"Gemm", "MatMul"}),
    "Pooling": AVERAGE_POOLS | {"MaxPool", "GlobalMaxPool"},
    "Scale": frozenset({"BatchNormalization"}),
    "Softmax": frozenset({"Softmax"}),
}
"""Layers of TensorRT, by kind, and their operators, where the layer has no name because a reshaping layer behind it has
the name of the operator's output: Softmax, one-dimensional convolutions, fully connected layers in TensorRT 7. Matrix
products of later versions are left out, since the bias is added behind them."""

BACKWARD = REARRANGES | {"DepthToSpace", "MaxPool", "SpaceToDepth"}
"""Operators whose input may take the range of the output: they hold the same values, or TensorRT gives both one
scale."""

FORWARD = MOVERS | CLAMPS | {"Dropout", "GatherElements", "Tile"}
"""Operators whose output is within the range of their input."""

CONSTANT = "a constant: weights get scales of their own"
TENSORRTS_OWN = "a tensor of TensorRT's own, which the model does not have"
"""Reasons for unused entries that every cache has."""

LISTED_NAMES = 5
"""Names in a note before it is shortened."""


@dataclass(frozen=True)
class Matched:
    """The ranges that a cache gives a model.

    `exact` are the tensors with an entry. `derived` has the source of the range for other tensors with a range.
    `lacking` are tensors without one that operators with integer kernels read, which so stay in float. `unused` has the
    reason for each entry without a tensor.
    """

    source: str
    ranges: Ranges
    exact: tuple[str, ...]
    derived: Mapping[str, str]
    lacking: tuple[str, ...]
    unused: Mapping[str, str]

    def notes(self) -> tuple[str, ...]:
        """Notes on the entries that are used, the tensors that stay in float, and the entries that are not used."""
        counts = f"{self.source}: {len(self.exact)} tensors have an entry"
        if self.derived:
            counts += f", {len(self.derived)} more take that of a neighbour: {_listed(self.derived, self.derived)}"
        notes = [counts]
        if self.lacking:
            notes.append(f"tensors without a scale, which stay in float, {len(self.lacking)}: {_listed(self.lacking)}")
        own = [name for name, why in self.unused.items() if why in (CONSTANT, TENSORRTS_OWN)]
        if own:
            notes.append(f"entries for constants, and for tensors that only TensorRT has, are ignored: {len(own)}")
        if strange := [name for name in self.unused if name not in own]:
            notes.append(f"other entries that are not used, {len(strange)}: {_listed(strange, self.unused)}")
        return tuple(notes)

    def as_json(self) -> dict[str, object]:
        """All fields except the ranges."""
        named = {"source": self.source, "exact": list(self.exact), "derived": dict(self.derived)}
        return {**named, "lacking": list(self.lacking), "unused": dict(self.unused)}


def _listed(names: Collection[str], words: Mapping[str, str] | None = None) -> str:
    shown = [f"{name} ({words[name]})" if words else name for name in islice(names, LISTED_NAMES)]
    return "; ".join(shown) + (f"; and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else "")


def from_file(cache: Path, model: Model, file: Path) -> Matched:
    """The ranges that a cache file gives a model that was read from `file`.

    Raises:
        BadData: the cache cannot be read, or is another model's.
        BadModel: the model file cannot be read.
    """
    found = read_cache(cache)
    try:
        return match(found, model, identities(file))
    except BadData as error:
        raise BadData(f"{cache}: {error}") from error


def match(cache: Cache, model: Model, aliases: Mapping[str, str]) -> Matched:
    """The ranges that a cache gives the tensors of a model. `aliases` maps names of tensors in the file to those in the
    model (see `loading.identities`).

    Raises:
        BadData: most of the names in the cache are no tensors of the model.
    """
    tensors = candidate_tensors(model)
    named = {n: n for n in cache.ranges} | {n: t for n, t in aliases.items() if n in cache.ranges}
    entries = {n: t for n, t in named.items() if t in tensors}
    known = {t: cache.ranges[n] for n, t in entries.items()} | {
        t: cache.ranges[t] for t in tensors if t in cache.ranges
    }
    exact = tuple(t for t in tensors if t in known)
    for tensor, other in _casts(model, tensors):
        if other in known:
            known.setdefault(tensor, known[other])
    derived: dict[str, str] = {}
    for name, tensor in _renamed(cache.ranges, model, known, tensors):
        known[tensor] = cache.ranges[name]
        derived[tensor], entries[name] = f"{name}, as TensorRT calls it", tensor
    of_model = [n for n in cache.ranges if n in entries or not TENSORRT_NAME.fullmatch(n)]
    if not known or (2 * len(entries) < len(of_model) and 2 * len(exact) < len(tensors)):
        raise BadData(
            f"{len(entries)} of its {len(of_model)} names are tensors of the model, of whose {len(tensors)} the first "
            f"is {next(iter(tensors), 'none')!r}: it is of another model, or of another export, where numbers name "
            "other tensors; calibrate this file anew"
        )
    derived |= _passed_on(model, known, tensors)
    unused = dict(cache.unusable) | {n: _why_unused(aliases.get(n, n), model) for n in cache.ranges if n not in entries}
    computed = {t for n in model.nodes if n.op in COMPUTE and not n.domain for t in n.inputs[:2] if t in tensors}
    wanted = computed.union(t for n in model.nodes if n.op in INTEGER_KERNELS and not n.domain for t in n.inputs)
    lacking = tuple(t for t in tensors if t in wanted and t not in known)
    return Matched(cache.source, Ranges(known, is_given=True), exact, derived, lacking, unused)


def _casts(model: Model, tensors: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors that differ in the float type only, as a conversion to float16 makes them."""
    for node in model.nodes:
        if node.op == "Cast" and not node.domain and is_float(model, node.inputs[0]):
            pair = node.inputs[0], node.outputs[0]
            yield from ((a, b) for a, b in (pair, pair[::-1]) if a in tensors)


# ---- TensorRT's names


def _renamed(
    ranges: Mapping[str, Range], model: Model, known: Mapping[str, Range], tensors: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Entries with names of TensorRT, and the tensors without entry that hold the same values.

    Later versions name the tensor in front of a reshape after the node. Earlier ones number it by kind of layer: if
    there are as many such entries as tensors without one, they are matched in order.
    """
    lacking = [n for n in model.nodes if n.outputs and n.outputs[0] in tensors and n.outputs[0] not in known]
    makers = frozenset[str]().union(*TENSORRT_LAYERS.values())
    by_name = {f"{n.name}_output": n.outputs[0] for n in lacking if n.op in makers and not _adds_bias(n)}
    found = {name: tensor for name, tensor in by_name.items() if name in ranges}
    yield from found.items()
    for kind, ops in TENSORRT_LAYERS.items():
        entries = [n for n in ranges if (m := UNNAMED_TENSOR.fullmatch(n)) and m[1] == kind]
        missing = [n.outputs[0] for n in lacking if n.op in ops and n.outputs[0] not in found.values()]
        if len(entries) == len(missing):
            yield from zip(entries, missing, strict=True)


def _adds_bias(node: Node) -> bool:
    return node.op == "Gemm" and len(node.inputs) > 2 and bool(node.inputs[2])


def _why_unused(name: str, model: Model) -> str:
    """Why an entry is not used."""
    unnamed = UNNAMED_TENSOR.fullmatch(name)
    plain = name.removesuffix("_output")
    if name in model.constants or plain in model.constants or (unnamed and unnamed[1] == "Constant"):
        return CONSTANT
    if name in model.tensors:
        return "nothing reads it" if is_float(model, name) else "it holds no floats"
    if unnamed or TENSORRT_NAME.fullmatch(name):
        return TENSORRTS_OWN
    return "the model has no such tensor"


# ---- neighbours


def _passed_on(model: Model, known: dict[str, Range], tensors: Collection[str]) -> dict[str, str]:
    """Add ranges of neighbours to `known`, near ones first. Returns the source of each."""
    wanted, derived = set(tensors), dict[str, str]()
    grows = True
    while grows:
        grows = False
        for node in (*model.nodes, *reversed(model.nodes)):
            for tensor, source in _takes(model, node, known):
                if tensor in wanted and tensor not in known:
                    known[tensor], grows = known[source], True
                    derived[tensor] = f"{source}, through {node.op} {node.name}"
    return derived


def _takes(model: Model, node: Node, known: Mapping[str, Range]) -> Iterator[tuple[str, str]]:
    """Pairs of an input and an output of a node where the first tensor may take the range of the second."""
    if node.domain:
        return
    data = [t for i, t in enumerate(node.inputs) if t and is_float(model, t) and takes_data(node, i)]
    if node.op == "Concat":
        if node.outputs[0] in known:
            yield from ((t, node.outputs[0]) for t in data)
        if data and all(t in known for t in data) and len({known[t] for t in data}) == 1:
            yield node.outputs[0], data[0]
        return
    is_cubic = node.attributes.get("mode") in ("cubic", b"cubic")
    if node.op in FORWARD and node.op not in AVERAGE_POOLS and data and data[0] in known and not is_cubic:
        yield from ((t, data[0]) for t in node.outputs if t)
    if node.op in BACKWARD and data and node.outputs[0] in known:
        yield data[0], node.outputs[0]
