"""Reads calibration caches of other tools: ranges by tensor name, which `matching` applies to a model.

These are the text of TensorRT's calibrators (of every algorithm and version; Polygraphy and trtexec write it too), the
tables of ONNX Runtime (JSON and text), and the JSON of TAO. Formats as in the readers and writers of
TensorRT and ONNX Runtime.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qdqtune.calibration.scales import Range
from qdqtune.errors import BadData, parsed_json, reading

MOST_CACHE_BYTES = 64 << 20
"""Enough for a million tensors of long names; a larger file is a model or its data, named by mistake."""

LEAST_SCALE = 1e-20
"""A smaller number is no scale: a line that is cut short has at most seven digits left, which is below 3e-29."""

CACHE_STEPS = 127
"""The largest absolute value in steps of TensorRT's scale."""

TENSORRT_HEADER = re.compile(r"TRT-([^-]*)-(\S+)")
NAMED_NUMBER = re.compile(r"(\S.*) ([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|-?inf)")
DIGITS = re.compile(r"(?:0x)?[0-9a-fA-F]{1,8}")


@dataclass(frozen=True)
class Cache:
    """The ranges in a file by tensor name, in its order. A scale s is the range [-127 s, 127 s], which has that scale.

    `unusable` has the reason for each entry without a range. `source` names the kind of file, `digest` its content.
    """

    source: str
    ranges: Mapping[str, Range]
    unusable: Mapping[str, str]
    digest: str


Value = Range | str
"""A range, or the reason why there is none."""


def read_cache(path: Path) -> Cache:
    """The ranges in a file of any known format.

    Raises:
        BadData: the file is missing, too large, damaged, empty, or of no known format.
    """
    with reading(f"calibration cache {path}", BadData):
        size = path.stat().st_size
        if size > MOST_CACHE_BYTES:
            raise BadData(f"{path} holds {size / 2**20:.0f} MB: no calibration cache is as large")
        data = path.read_bytes()
    try:
        source, entries = _parsed(data)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadData(f"{path} is no calibration cache, or damaged: {why}") from error
    ranges, unusable = _without_contradictions(entries)
    if not ranges and not unusable:
        raise BadData(f"{path} is no calibration cache, or damaged: it names no tensor")
    return Cache(source, ranges, unusable, hashlib.sha256(data).hexdigest()[:16])


def _without_contradictions(entries: Iterable[tuple[str, Value]]) -> tuple[dict[str, Range], dict[str, str]]:
    """Ranges and reasons by name. A name with two different values has no range."""
    values: dict[str, Value] = {}
    for name, value in entries:
        if values.get(name, value) != value:
            value = "the file has it twice, with different values"
        values[name] = value
    ranges = {name: value for name, value in values.items() if isinstance(value, Range)}
    return ranges, {name: value for name, value in values.items() if isinstance(value, str)}


def _parsed(data: bytes) -> tuple[str, list[tuple[str, Value]]]:
    """The kind of file and its entries. Raises ValueError or RecursionError if it is damaged."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError("it is no text (ONNX Runtime writes its table as calibration.json as well)")
    if text.lstrip()[:1] in ("{", "["):
        return _json(text)
    lines = [line.rstrip("\r") for line in text.split("\n")]
    head = TENSORRT_HEADER.fullmatch(lines[0].strip())
    if head is not None:
        return f"TensorRT {_version(head[1])}, {head[2]}", _lines(lines[1:], 2, _tensorrt_line)
    return "ONNX Runtime's table", _lines(lines, 1, _onnxruntime_line)


def _version(digits: str) -> str:
    """A version as TensorRT numbers itself: 8510 is 8.5.10, 101600 is 10.16.0."""
    if not digits.isdecimal() or not 4 <= len(digits) <= 6:
        return digits
    major, rest = divmod(int(digits), 1000 if len(digits) == 4 else 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


# ---- lines of text


def _lines(lines: list[str], first: int, parse: Callable[[str], tuple[str, Value]]) -> list[tuple[str, Value]]:
    entries = []
    for number, line in enumerate(lines, first):
        if line.strip():
            try:
                entries.append(parse(line))
            except ValueError as error:
                raise ValueError(f"line {number} is {_shown(line)}, {error}") from error
    return entries


def _tensorrt_line(line: str) -> tuple[str, Value]:
    """`name: digits`. The name may have colons and blanks; leading zeros of the digits may be missing."""
    name, _, digits = line.rpartition(":")
    if not name or not DIGITS.fullmatch(digits.strip()):
        raise ValueError("not a name with a scale of up to eight hexadecimal digits")
    (scale,) = struct.unpack(">f", bytes.fromhex(digits.strip().removeprefix("0x").zfill(8)))
    return name, _of_scale(scale)


def _onnxruntime_line(line: str) -> tuple[str, Value]:
    """`name value`, where value is the largest one of the tensor."""
    match = NAMED_NUMBER.fullmatch(line.strip())
    if match is None:
        raise ValueError("neither TensorRT's header TRT-VERSION-ALGORITHM nor a name with a number")
    return match[1], _symmetric(float(match[2]))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# ---- values


def _of_scale(scale: float) -> Value:
    if math.isnan(scale):
        return "nan: calibration saw no value of it"
    if not math.isfinite(scale):
        return "infinite"
    if scale == 0:
        return "zero: calibration saw nothing but zeros"
    if scale < 0:
        return "negative: no scale is"
    if scale < LEAST_SCALE:
        return f"{scale:.2g}: too small for a scale, perhaps a line that is cut short"
    return Range(-CACHE_STEPS * scale, CACHE_STEPS * scale)


def _symmetric(largest: float) -> Value:
    """The range of a largest absolute value, rounded to float32 as ONNX Runtime reads it."""
    with np.errstate(over="ignore"):
        largest = float(np.float32(largest))
    found = _of_scale(largest / CACHE_STEPS)
    return Range(-largest, largest) if isinstance(found, Range) else found


def _of_ends(low: float, high: float) -> Value:
    if math.isnan(low) or math.isnan(high):
        return "nan: calibration saw no value of it"
    if low > high:
        return f"the lowest value {low:g} lies above the highest {high:g}"
    found = _of_scale(max(abs(low), abs(high)) / CACHE_STEPS)
    return Range(low, high) if isinstance(found, Range) else found


# ---- JSON


def _json(text: str) -> tuple[str, list[tuple[str, Value]]]:
    content = parsed_json(text, object_pairs_hook=_unique, parse_constant=float)
    if not isinstance(content, dict):
        raise ValueError("it is JSON of something else")
    if isinstance(scales := content.get("tensor_scales"), dict):  # TAO writes largest values
        return "TAO", [(name, _symmetric(_number(value, name))) for name, value in scales.items()]
    if content.get("CLS") == "TensorsData" and isinstance(content.get("data"), dict):
        content = content["data"]
    return "ONNX Runtime's table", [(name, _of_ends(*_ends(value, name))) for name, value in content.items()]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{_shown(name)} is there twice")
    return content


def _ends(value: object, name: str) -> tuple[float, float]:
    """Lowest and highest value, from a list of both or from ONNX Runtime's `TensorData`."""
    if isinstance(value, dict) and "lowest" in value and "highest" in value:
        return _number(value["lowest"], name), _number(value["highest"], name)
    if isinstance(value, list) and len(value) == 2:
        return _number(value[0], name), _number(value[1], name)
    raise ValueError(f"it says of {_shown(name)} neither the lowest nor the highest value")


def _number(value: object, name: str) -> float:
    """A number, alone or as ONNX Runtime's array of one."""
    if isinstance(value, dict):
        value = value.get("data")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"it has no number for {_shown(name)}")
    try:
        return float(np.float64(value))
    except OverflowError:
        return math.inf
