"""Calibration caches of other tools: their ranges by tensor name, and which tensors of a model these are.

Files are the text of TensorRT's calibrators (of every algorithm and version; Polygraphy, trtexec and ModelOpt write it
too), and ONNX Runtime's calibration.json. Formats as in the readers and writers of TensorRT and ONNX Runtime.

Most entries have the names of tensors in the ONNX file. TensorRT names the tensor in front of a reshape after the node
(see `match`). A tensor without an entry stays in float.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadData, first_of, parsed_json, reading
from qdqtune.graph.loading import identities
from qdqtune.graph.model import Model
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE, INTEGER_KERNELS, is_float

LEAST_SCALE = 1e-20
"""A smaller number is no scale: a line that is cut short has at most seven digits left, which is below 3e-29."""

CACHE_STEPS = 127
"""The largest absolute value in steps of TensorRT's scale."""

TENSORRT_HEADER = re.compile(r"TRT-[^-]*-\S+")
DIGITS = re.compile(r"(?:0x)?[0-9a-fA-F]{1,8}")

Ends = tuple[float, float]
"""The lowest and the highest value of a tensor, as a file has them."""


@dataclass(frozen=True)
class Cache:
    """The ranges in a file by tensor name, in its order. A scale s is the range [-127 s, 127 s], which has that scale.

    `unusable` has the reason for each entry without a range. `source` names the kind of file.
    """

    source: str
    ranges: Mapping[str, Range]
    unusable: Mapping[str, str]


def read_cache(path: Path) -> Cache:
    """The ranges in a file of a known format."""
    with reading(f"calibration cache {path}", BadData):
        data = path.read_bytes()
    try:
        source, entries = _parsed(data)
    except ValueError as error:
        raise BadData(f"{path} is no calibration cache, or damaged: {error}") from error
    if not entries:
        raise BadData(f"{path} is no calibration cache, or damaged: it names no tensor")
    ranges: dict[str, Range] = {}
    unusable: dict[str, str] = {}
    for name, (low, high) in entries.items():
        scale = max(abs(low), abs(high)) / CACHE_STEPS
        if not math.isfinite(low + high):
            unusable[name] = "not finite: calibration saw no value of it, or an infinite one"
        elif low > high:
            unusable[name] = "negative: its highest value lies below the lowest"
        elif scale < LEAST_SCALE:
            cause = "calibration saw nothing but zeros, or a line is cut short"
            unusable[name] = f"{scale:.2g}: too small for a scale: {cause}"
        else:
            ranges[name] = Range(low, high)
    return Cache(source, ranges, unusable)


def _parsed(data: bytes) -> tuple[str, dict[str, Ends]]:
    """The kind of file and its entries, the last of each name. Raises ValueError if it is damaged."""
    text = data.decode("utf-8-sig", errors="replace")
    if "\0" in text or "\ufffd" in text:
        raise ValueError("it is no text (of ONNX Runtime's tables calibration.json is read)")
    if text.lstrip()[:1] in ("{", "["):
        return "ONNX Runtime's table", _of_json(text)
    header, *lines = [line.strip() for line in text.split("\n")]
    if not TENSORRT_HEADER.fullmatch(header):
        raise ValueError("it begins with neither TensorRT's header TRT-VERSION-ALGORITHM nor a JSON object")
    entries: dict[str, Ends] = {}
    for number, line in enumerate(lines, 2):
        name, _, digits = line.rpartition(":")  # the name may have colons, and zeros before the digits may be missing
        if line and not (name and DIGITS.fullmatch(digits.strip())):
            raise ValueError(
                f"line {number} is {line[:60]!r}, not a name with a scale of up to eight hexadecimal digits"
            )
        if line:
            (scale,) = struct.unpack(">f", bytes.fromhex(digits.strip().removeprefix("0x").zfill(8)))
            entries[name] = -CACHE_STEPS * scale, CACHE_STEPS * scale
    return header, entries


def _of_json(text: str) -> dict[str, Ends]:
    content = parsed_json(text, parse_constant=float)
    if not isinstance(content, dict):
        raise ValueError("it is JSON of something else")
    if content.get("CLS") == "TensorsData" and isinstance(content.get("data"), dict):
        content = content["data"]
    entries: dict[str, Ends] = {}
    for name, value in content.items():
        ends = [value["lowest"], value["highest"]] if isinstance(value, dict) and "highest" in value else value
        try:
            low, high = (float(np.asarray(end["data"] if isinstance(end, dict) else end).item()) for end in ends)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"it has no lowest and highest value of {name!r:.60}") from error
        entries[name] = low, high
    return entries


UNNAMED_TENSOR = re.compile(r"\(Unnamed Layer\* \d+\) \[(.+)\]_output(?:_\d+)?")
"""The output of an unnamed TensorRT layer, with the kind of the layer."""

TENSORRT_NAME = re.compile(rf"{UNNAMED_TENSOR.pattern}|ONNXTRT_\w+|.+_output")
"""Names of tensors that TensorRT's parser adds to those of the model."""

RESHAPED = COMPUTE | AVERAGE_POOLS | {"BatchNormalization", "GlobalMaxPool", "MaxPool", "Softmax"}
"""Operators whose result TensorRT may name after the node, as a reshaping layer behind it has the operator's name."""

CONSTANT = "a constant: weights get scales of their own"
TENSORRTS_OWN = "a tensor of TensorRT's own, which the model does not have"
"""Reasons for unused entries that every cache has."""


@dataclass(frozen=True)
class Matched:
    """The ranges that a cache gives a model.

    `exact` are the tensors with an entry. `derived` has the entry for other tensors with a range.
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
        counts = f"{self.source}: {len(self.exact)} tensors have an entry"
        others = [f"{tensor} ({name}, as TensorRT calls it)" for tensor, name in self.derived.items()]
        if others:
            counts += f", {len(others)} more one by another name: {first_of(others, '; ')}"
        notes = [counts]
        if self.lacking:
            notes.append(
                f"tensors without a scale, which stay in float, {len(self.lacking)}: {first_of(self.lacking, '; ')}"
            )
        strange = [f"{name} ({why})" for name, why in self.unused.items() if why not in (CONSTANT, TENSORRTS_OWN)]
        if strange:
            notes.append(f"entries that are not used, {len(strange)}: {first_of(strange, '; ')}")
        return tuple(notes)

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "ranges"}


def from_file(cache: Path, model: Model, file: Path) -> Matched:
    """The ranges that a cache file gives a model that was read from `file`."""
    content = read_cache(cache)
    try:
        return match(content, model, identities(file))
    except BadData as error:
        raise BadData(f"{cache}: {error}") from error


def match(cache: Cache, model: Model, aliases: Mapping[str, str]) -> Matched:
    """The ranges that a cache gives the tensors of a model. `aliases` maps names of tensors in the file to those in the
    model (see `loading.identities`)."""
    tensors = dict.fromkeys(candidate_tensors(model))  # large models have thousands, and each name is looked up
    named = {name: name if name in tensors else aliases.get(name, name) for name in cache.ranges}
    entries = {name: tensor for name, tensor in named.items() if tensor in tensors}
    ranges = {tensor: cache.ranges[name] for name, tensor in entries.items()}
    exact = tuple(tensor for tensor in tensors if tensor in ranges)
    derived: dict[str, str] = {}
    for node in model.nodes:
        if node.op == "Cast" and not node.domain and is_float(model, node.inputs[0]):
            before, after = node.inputs[0], node.outputs[0]
            for tensor, other in ((before, after), (after, before)):
                if tensor in tensors and other in ranges:
                    ranges.setdefault(tensor, ranges[other])
    for node in model.nodes:
        name, tensor = f"{node.name}_output", node.outputs[0]
        adds_bias = node.op == "Gemm" and len(node.inputs) > 2 and node.inputs[2]
        is_new = tensor in tensors and tensor not in ranges
        if node.op in RESHAPED and name in cache.ranges and is_new and not adds_bias:
            ranges[tensor] = cache.ranges[name]
            derived[tensor], entries[name] = name, tensor
    of_model = [n for n in cache.ranges if n in entries or not TENSORRT_NAME.fullmatch(n)]
    if not ranges or (2 * len(entries) < len(of_model) and 2 * len(exact) < len(tensors)):
        raise BadData(
            f"{len(entries)} of its {len(of_model)} names are tensors of the model, of whose {len(tensors)} the first "
            f"is {next(iter(tensors), 'none')!r}: it is of another model, or of another export, where numbers name "
            "other tensors; calibrate this file anew"
        )
    unused = dict(cache.unusable) | {n: _why_unused(aliases.get(n, n), model) for n in cache.ranges if n not in entries}
    wanted = set[str]()
    for node in (node for node in model.nodes if not node.domain):
        if node.op in COMPUTE:
            wanted.update(node.inputs[:2])
        if node.op in INTEGER_KERNELS:
            wanted.update(node.inputs)
    lacking = tuple(t for t in tensors if t in wanted and t not in ranges)
    return Matched(cache.source, Ranges(ranges, is_given=True), exact, derived, lacking, unused)


def _why_unused(name: str, model: Model) -> str:
    unnamed = UNNAMED_TENSOR.fullmatch(name)
    plain = name.removesuffix("_output")
    if name in model.constants or plain in model.constants or (unnamed and unnamed[1] == "Constant"):
        return CONSTANT
    if name in model.tensors:
        return "nothing reads it" if is_float(model, name) else "it holds no floats"
    if unnamed or TENSORRT_NAME.fullmatch(name):
        return TENSORRTS_OWN
    return "the model has no such tensor"
