"""Calibration caches of TensorRT: their ranges by tensor name, and which tensors of a model these are.

Files are text as TensorRT's calibrators write it, of every algorithm and version; Polygraphy, trtexec and ModelOpt
write it too. Most entries have the names of tensors in the ONNX file. TensorRT names the tensor in front of a reshape
after the node (see `RESHAPED`). A tensor without an entry stays in float.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import BadData, first_of, reading
from qdqtune.graph.model import Model
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE, INTEGER_KERNELS, is_float

LEAST_SCALE = 1e-20
"""Smaller numbers are no scales: a truncated line has at most seven hex digits, which read as less than 3e-29."""

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
    """The ranges that a cache gives a model; `source` is the first line of the file.

    `tensors` have an entry under their own name. `lacking` are tensors that operators with integer kernels read, but
    that have no range, and so stay in float. `unused` are entries that match no tensor, or have no usable scale.
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
    """The first line of a file, and its ranges by tensor name; None where a scale cannot be used: not finite, negative,
    or too small. A scale s stands for the range [-127 s, 127 s]."""
    with reading(f"calibration cache {path}", BadData):
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    header, *lines = [line.strip() for line in text.split("\n")]
    if not TENSORRT_HEADER.fullmatch(header) or "\0" in text or "\ufffd" in text:
        raise BadData(f"{path} is no calibration cache of TensorRT, whose first line is TRT-VERSION-ALGORITHM")
    ranges: dict[str, Range | None] = {}
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        name, _, digits = line.rpartition(":")  # the name may have colons, and zeros before the digits may be missing
        if not name or not DIGITS.fullmatch(digits.strip()):
            raise BadData(f"{path} is damaged: line {number} is {line[:60]!r}, not a name with a scale")
        (scale,) = struct.unpack(">f", bytes.fromhex(digits.strip().removeprefix("0x").zfill(8)))
        is_usable = math.isfinite(scale) and scale >= LEAST_SCALE
        ranges[name] = Range(-CACHE_STEPS * scale, CACHE_STEPS * scale) if is_usable else None
    if not ranges:
        raise BadData(f"{path} is no calibration cache, or cut short: it names no tensor")
    return header, ranges


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
            f"{path}: {len(used)} of its {len(of_model)} names are tensors of the model: it is of another model, or of "
            "another export, where numbers name other tensors; calibrate this file anew"
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
