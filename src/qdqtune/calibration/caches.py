"""Calibration caches of other tools: their ranges by tensor name, and which tensors of a model these are.

Files are the text of TensorRT's calibrators (of every algorithm and version; Polygraphy, trtexec and ModelOpt write it
too), and ONNX Runtime's calibration.json. Formats as in the readers and writers of TensorRT and ONNX Runtime.

Most entries have the names of tensors in the ONNX file. TensorRT names the tensor in front of a reshape after the node
(see `RESHAPED`). A tensor without an entry stays in float.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadData, first_of, parsed_json, reading
from qdqtune.graph.model import Model
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE, INTEGER_KERNELS, is_float

LEAST_SCALE = 1e-20
"""A smaller number is no scale: a line that is cut short has at most seven digits left, which is below 3e-29."""

CACHE_STEPS = 127
"""The largest absolute value in steps of TensorRT's scale."""

TENSORRT_HEADER = re.compile(r"TRT-[^-]*-\S+")
DIGITS = re.compile(r"(?:0x)?[0-9a-fA-F]{1,8}")

TENSORRT_NAME = re.compile(r"\(Unnamed Layer\* \d+\) \[.+\]_output(?:_\d+)?|ONNXTRT_\w+|.+_output")
"""Names of tensors that TensorRT's parser adds to those of the model."""

RESHAPED = COMPUTE | AVERAGE_POOLS | {"BatchNormalization", "GlobalMaxPool", "MaxPool", "Softmax"}
"""Operators whose result TensorRT may name after the node, as a reshaping layer behind it has the operator's name."""


@dataclass(frozen=True)
class CacheRanges:
    """The ranges that a cache gives a model; `source` names the kind of file.

    `tensors` have an entry of their name. `lacking` are tensors without a range that operators with integer kernels
    read, which so stay in float. `unused` are the entries that no tensor takes, or that have no usable scale.
    """

    source: str
    ranges: Ranges
    tensors: tuple[str, ...]
    lacking: tuple[str, ...]
    unused: tuple[str, ...]

    def notes(self) -> tuple[str, ...]:
        notes = [f"{self.source}: {len(self.tensors)} tensors have an entry"]
        if self.lacking:
            notes.append(
                f"tensors without a scale, which stay in float, {len(self.lacking)}: {first_of(self.lacking, '; ')}"
            )
        if self.unused:
            notes.append(f"entries that are not used, {len(self.unused)}: {first_of(self.unused, '; ')}")
        return tuple(notes)

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "ranges"}


def read_cache(path: Path) -> tuple[str, dict[str, Range | None]]:
    """The kind of a file, and its ranges by tensor name, in its order; None where an entry is no usable range: not
    finite, negative, or too small for a scale. A scale s is the range [-127 s, 127 s], which has that scale."""
    with reading(f"calibration cache {path}", BadData):
        data = path.read_bytes()
    try:
        source, entries = _parsed(data)
        if not entries:
            raise ValueError("it names no tensor")
    except ValueError as error:
        raise BadData(f"{path} is no calibration cache, or damaged: {error}") from error
    ranges: dict[str, Range | None] = {}
    for name, (low, high) in entries.items():
        is_usable = math.isfinite(low + high) and low <= high and max(abs(low), abs(high)) / CACHE_STEPS >= LEAST_SCALE
        ranges[name] = Range(low, high) if is_usable else None
    return source, ranges


def _parsed(data: bytes) -> tuple[str, dict[str, tuple[float, float]]]:
    """The kind of file and its entries, the last of each name. Raises ValueError if it is damaged."""
    text = data.decode("utf-8-sig", errors="replace")
    if "\0" in text or "\ufffd" in text:
        raise ValueError("it is no text (of ONNX Runtime's tables calibration.json is read)")
    if text.lstrip()[:1] in ("{", "["):
        return "ONNX Runtime's table", _of_json(text)
    header, *lines = [line.strip() for line in text.split("\n")]
    if not TENSORRT_HEADER.fullmatch(header):
        raise ValueError("it begins with neither TensorRT's header TRT-VERSION-ALGORITHM nor a JSON object")
    entries: dict[str, tuple[float, float]] = {}
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


def _of_json(text: str) -> dict[str, tuple[float, float]]:
    content = parsed_json(text, parse_constant=float)
    if not isinstance(content, dict):
        raise ValueError("it is JSON of something else")
    if content.get("CLS") == "TensorsData" and isinstance(content.get("data"), dict):
        content = content["data"]
    entries: dict[str, tuple[float, float]] = {}
    for name, value in content.items():
        try:
            ends = value["lowest"], value["highest"]
            low, high = (float(np.asarray(end["data"] if isinstance(end, dict) else end).item()) for end in ends)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"it has no lowest and highest value of {name!r:.60}") from error
        entries[name] = low, high
    return entries


def ranges_of(path: Path, model: Model) -> CacheRanges:
    """The ranges that a cache file gives the tensors of a model.

    Raises:
        BadData: the file is no cache, or one of another model or export.
    """
    source, entries = read_cache(path)
    tensors = dict.fromkeys(candidate_tensors(model))  # large models have thousands, and each name is looked up
    ranges = {name: found for name, found in entries.items() if found is not None and name in tensors}
    used, named = set(ranges), tuple(t for t in tensors if t in ranges)
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
        found = entries.get(name)
        if found is not None and node.op in RESHAPED and is_new and not adds_bias:
            ranges[tensor] = found
            used.add(name)
    of_model = [n for n, found in entries.items() if n in used or (found and not TENSORRT_NAME.fullmatch(n))]
    if not ranges or (2 * len(used) < len(of_model) and 2 * len(named) < len(tensors)):
        raise BadData(
            f"{path}: {len(used)} of its {len(of_model)} names are tensors of the model, of whose {len(tensors)} the "
            f"first is {next(iter(tensors), 'none')!r}: it is of another model, or of another export, where numbers "
            "name other tensors; calibrate this file anew"
        )
    wanted = set[str]()
    for node in (node for node in model.nodes if not node.domain):
        if node.op in COMPUTE:
            wanted.update(node.inputs[:2])
        if node.op in INTEGER_KERNELS:
            wanted.update(node.inputs)
    lacking = tuple(t for t in tensors if t in wanted and t not in ranges)
    unused = tuple(name for name in entries if name not in used)
    return CacheRanges(source, Ranges(ranges, is_given=True), named, lacking, unused)
