"""Files that are damaged or made up, as one number says, and what every command owes whoever gives it such files.

A seed names a case: which file of which kind is mutated, how, and what is run on it. Each case has a folder of its own.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from models import ATTENTION, build, conv_net, normal
from qdqtune.autotune import __main__ as autotune
from qdqtune.cli import main
from qdqtune.graph.saving import save
from qdqtune.system.checks import LIST
from qdqtune.tuning.store import line_of
from runs import contents, mixed, write
from workers import in_process

PROMISED = (0, 2, 3, 4, 5)
"""Exit codes: done, bad input, nothing faster, a limit unmet, no engine."""

FAKE = ["--engine", "fake", "--engine-option", "asymmetric=true", "-q"]
PLAIN = ["--calibration-method", "minmax", "--no-bias-correction"]
RUNS = {
    "cut": ["--builds", "5"],
    "region": ["--mode", "region", "--builds", "8"],
    "subgraph": ["--mode", "subgraph", "--builds", "4"],
    "front": ["--front", "--builds", "14"],
}
"""What runs have been told whose files are mutated."""

STATE = "autotuner_state.yaml"
OUT = "out"

MEMORY = 6 * 2**30
"""Bytes of memory that a case of a long run may take."""

LINKS = {"loop": "loop", "up": "..", "dangling": "nowhere", "whole": "samples.npz"}
"""Links in the folder of a case, and where they lead."""

TEXTS = ["", "x", "\x00", "a\x00b", *LINKS, "loop/x", "up/x",
         "\x1b[2J", "\x1b]0;t\x07", "a\nb", "\u202e", "../../etc/passwd", "/", "a" * 5000, "é\ud7ff",
         "0",          "%s{}", "[red]x[/red]", "-1", "None", " "]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan")]
VALUES: list[Any] = [*TEXTS, *NUMBERS, *FLOATS, None, True, [], {}, [[]], {"a": 1}, [1, "x"], 1e308]


@dataclass(frozen=True)
class Case:
    """What is run, in a folder of its own: the mutated file is `path`, outputs are `out` and what begins so."""

    arguments: list[str]
    path: Path
    how: str
    writes_elsewhere: bool = False
    """Whether outputs may have other names."""

    def __str__(self) -> str:
        return f"{self.path.name} {self.how}: {' '.join(self.arguments)}"


# ---------------------------------------------------------------- what is whole


def whole(folder: Path) -> Path:
    """The files that are mutated: models, samples, and what runs have left. Made once."""
    write(mixed(batch=2), folder, "mixed")
    write(conv_net(), folder, "conv")
    write(build(ATTENTION, _attention()), folder, "attention")
    write(mixed(batch=2), folder, "outside")
    onnx.save(onnx.load(folder / "outside.onnx"), folder / "outside.onnx", save_as_external_data=True,
              location="outside.bin", size_threshold=0)  # fmt: skip
    save(conv_net(), folder / "quantized.onnx")
    made, data = folder / "quantized.onnx", ["--calibration-data", str(folder / "mixed.npz"), *PLAIN]
    with in_process(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        _call("quantize", folder / "conv.onnx", "--calibration-data", folder / "conv.npz", *PLAIN, "-o", made)
        _call("quantize", folder / "mixed.onnx", *data, "-o", folder / "mixed_quantized.onnx")
        for name, more in RUNS.items():
            _call("tune", folder / "mixed.onnx", *FAKE, *data, *more, "-o", folder / name)
    return folder


def _attention() -> dict[str, Any]:
    names = ("wq", "wk", "wv", "wo")
    weights = {name: normal(16, 16, scale=0.3, seed=i) for i, name in enumerate(names)}
    return weights | {"gamma": normal(16), "beta": normal(16, seed=1)}


def _call(*arguments: object) -> int:
    """Run a command line in this process: its exit code."""
    words = [str(a) for a in arguments]
    program = autotune.main if words[:1] == ["autotune"] else main.main
    with pytest.raises(SystemExit) as end:
        program(words[1:] if program is autotune.main else words)
    assert isinstance(end.value.code, int)
    return end.value.code


# ---------------------------------------------------------------- how files change


def bits(rng: random.Random, content: bytes) -> bytes:
    """Some bits turned over."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spans(rng: random.Random, content: bytes) -> bytes:
    """A part cut off, taken out, doubled, zeroed, or made random."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + rng.choice([1, 16, 4096, len(content)]))
    part = content[a:b]
    new = rng.choice([b"", b"", part * 2, bytes(len(part)), rng.randbytes(len(part)), b"\xff" * len(part)])
    return content[:a] if rng.random() < 0.3 else content[:a] + new + content[b:]


def fields(rng: random.Random, content: bytes) -> bytes:
    """One to three fields of a protobuf changed, wherever in the tree."""
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    for _ in range(rng.choice([1, 1, 2, 3])):
        _change_field(rng, rng.choice(list(_messages(proto))))
    return proto.SerializeToString()


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _change_field(rng: random.Random, message: Message) -> None:
    there = [field for field, _ in message.ListFields()]
    field = rng.choice(there) if there and rng.random() < 0.8 else rng.choice(list(message.DESCRIPTOR.fields))
    if not field.is_repeated:
        if field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.2:
            message.ClearField(field.name)
            return
        setattr(message, field.name, _scalar(rng, field))
        return
    items = getattr(message, field.name)
    action = rng.choice(["drop", "double", "swap", "change", "clear"])
    if action == "clear" or not len(items):
        message.ClearField(field.name)
    elif action == "drop":
        del items[rng.randrange(len(items))]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        items.add().CopyFrom(rng.choice(list(items)))
    elif action == "double":
        items.append(rng.choice(list(items)))
    else:
        items[rng.randrange(len(items))] = _scalar(rng, field)


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    width = 2**31 if kind == FieldDescriptor.CPPTYPE_INT32 else 2**63
    low = 0 if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64) else -width
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice([n for n in (*NUMBERS, *range(-4, 40)) if low <= n < width])


TYPES = [n for n in onnx.TensorProto.DataType.values() if n]
SIZES = [0, 1, 2, -1, 7, 2**20, 2**31 - 1, 2**40, 2**62, 2**63 - 1]


def declared(rng: random.Random, content: bytes) -> bytes:
    """A model that lists other types or sizes of a tensor than it has."""
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    graph = proto.graph
    inside = [name for node in graph.node for name in node.output if name]
    listed = rng.choice([graph.input, graph.output, graph.value_info, graph.value_info])
    kind, sizes = rng.choice(TYPES), [rng.choice(SIZES) for _ in range(rng.randrange(5))]
    if listed is graph.value_info:
        listed.add().name = rng.choice(inside)
    value = rng.choice(list(listed))
    if rng.random() < 0.3:
        value.CopyFrom(rng.choice([onnx.helper.make_tensor_sequence_value_info, _optional])(value.name, kind, sizes))
    elif rng.random() < 0.5:
        tensor = value.type.tensor_type
        tensor.elem_type = rng.choice([tensor.elem_type, 1, kind])
        for dim in tensor.shape.dim:
            dim.dim_value = rng.choice([dim.dim_value, rng.choice(SIZES)])
    else:
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, rng.choice([1, kind]), sizes))
    return proto.SerializeToString()


def _optional(name: str, kind: int, sizes: list[int]) -> onnx.ValueInfoProto:
    inner = onnx.helper.make_tensor_type_proto(kind, sizes)
    return onnx.helper.make_value_info(name, onnx.helper.make_optional_type_proto(inner))


def foreign(rng: random.Random, content: bytes) -> bytes:
    """A model with constants of strings, or with sequences and optional values, which may be outputs."""
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    graph, words = proto.graph, ["a", "b" * rng.choice([0, 1, 2000]), "\x00", "\x1b[2J"][: rng.choice([1, 2, 4])]
    have = rng.choice([*(v.name for v in graph.input), *(n for node in graph.node for n in node.output if n)])
    held = onnx.helper.make_tensor("words", onnx.TensorProto.STRING, [len(words)], [w.encode() for w in words])
    node = onnx.helper.make_node
    made = rng.choice([
        [node("Constant", [], ["odd"], value_strings=words)],
        [node("Constant", [], ["odd"], value_string=words[0])],
        [node("Constant", [], ["odd"], value=held)],
        [node("Identity", ["words"], ["odd"])],
        [node("SequenceConstruct", [have, have], ["odd"])],
        [node("SplitToSequence", [have], ["odd"], axis=0)],
        [node("Optional", [have], ["odd"])],
    ])  # fmt: skip
    if made[0].input == ["words"]:
        graph.initializer.append(held)
    after = rng.choice(["Identity", "Shape", "Size", "SequenceLength", "SequenceAt", "ConcatFromSequence", "Cast",
                        "Equal", "Gather", "Concat", "Flatten", "Where", "OptionalGetElement", ""])  # fmt: skip
    if after:
        inputs = ["odd", *{"Equal": ["odd"], "Concat": ["odd"], "Gather": [have], "SequenceAt": [have]}.get(after, [])]
        how = {"Cast": {"to": 1}, "Concat": {"axis": 0}, "ConcatFromSequence": {"axis": 0}}.get(after, {})
        made.append(node(after, inputs, ["odder"], **how))
    where = rng.choice([0, len(graph.node)])
    nodes = [*graph.node[:where], *made, *graph.node[where:]]
    if have not in {v.name for v in graph.input}:
        nodes = [*graph.node, *made]
    del graph.node[:]
    graph.node.extend(nodes)
    if rng.random() < 0.7:
        graph.output.add().name = made[-1].output[0]
    if rng.random() < 0.2:
        del graph.output[:-1]
    return proto.SerializeToString()


def empty(rng: random.Random, content: bytes) -> bytes:
    """A model that computes nothing, or next to nothing."""
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    graph = proto.graph
    keep = rng.choice([0, 0, 1, 2])
    del graph.node[keep:]
    ends = [o for node in graph.node for o in node.output] or [rng.choice(list(graph.input)).name]
    values = list(graph.input)
    del graph.output[:]
    if graph.node:
        graph.output.add().name = ends[-1]
    elif rng.random() < 0.8:
        graph.output.append(values[0])
    if rng.random() < 0.5 and not graph.node:
        graph.node.append(onnx.helper.make_node("Identity", [values[0].name], ["copy"], "copy"))
        graph.output.add().name = "copy"
    return proto.SerializeToString()


def arrays(rng: random.Random, content: bytes) -> bytes:
    """Other arrays under other names in an archive, or none."""
    given = dict(np.load(io.BytesIO(content)))
    name = rng.choice(list(given))
    array = given[name]
    other = rng.choice(["dtype", "shape", "value", "name", "more", "empty", "object", "header"])
    if other == "dtype":
        given[name] = array.astype(rng.choice(["f8", "f2", "i4", "u1", "c8", "?", "U3", "M8[s]", ">f4"]))
    elif other == "shape":
        given[name] = rng.choice([array[..., :1], array[0], array[None], array.reshape(-1), array[:0], array.T])
    elif other == "value":
        given[name] = np.full_like(array, rng.choice(FLOATS))
    elif other == "name":
        given = {rng.choice(TEXTS).replace("\x00", "0"): array}
    elif other == "more":
        given["more"] = array
    elif other == "empty":
        given = {}
    elif other == "object":
        given[name] = np.array([{"a": 1}], dtype=object)
    held = io.BytesIO()
    np.savez(held, **given)
    if other != "header":
        return held.getvalue()
    return _archive({f"{n}.npy": _header(rng, a) for n, a in given.items()})


def _header(rng: random.Random, array: np.ndarray[Any, Any]) -> bytes:
    """An array whose header says something else."""
    held = io.BytesIO()
    np.save(held, array)
    content = held.getvalue()
    old = f"{array.shape}".encode()
    new = rng.choice([b"(9999999999, 8)", b"(-1,)", b"()", b"((),)", b"(1e3,)", b"None", b"", b"(" * 90])
    return content.replace(old, new)


def _archive(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def lines(rng: random.Random, content: bytes) -> bytes:
    """Lines taken out, doubled, swapped, or with a word changed."""
    rows = content.split(b"\n")
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    action = rng.choice(["drop", "double", "swap", "word", "deep"])
    if action == "drop":
        del rows[i]
    elif action == "double":
        rows.insert(j, rows[i])
    elif action == "swap":
        rows[i], rows[j] = rows[j], rows[i]
    elif action == "deep":
        rows[i] = rng.choice([b"[", b"{", b"a: &a [*a]", b"- "]) * rng.choice([1, 2000])
    else:
        words = rows[i].split(b" ")
        words[rng.randrange(len(words))] = str(rng.choice(VALUES)).encode(errors="replace")
        rows[i] = b" ".join(words)
    return b"\n".join(rows)


def _node(rng: random.Random, value: Any) -> Any:
    """A value in a tree of lists and maps replaced, taken out, or moved."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(changed)) if isinstance(changed, dict) else rng.randrange(len(changed))
    action = rng.random()
    if action < 0.15:
        del changed[key]
    elif action < 0.25 and isinstance(changed, dict):
        changed[rng.choice(TEXTS)] = changed.pop(key)
    elif action < 0.3 and isinstance(changed, list):
        changed.append(changed[key])
    else:
        changed[key] = _node(rng, changed[key])
    return changed


def documents(rng: random.Random, content: bytes) -> bytes:
    """A YAML or JSON file of which one value is another."""
    changed = _node(rng, yaml.safe_load(content))
    try:
        return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).encode()
    except yaml.YAMLError:
        return repr(changed).encode(errors="replace")


def jsons(rng: random.Random, content: bytes) -> bytes:
    """A JSON file of which one value is another."""
    return json.dumps(_node(rng, json.loads(content))).encode()


def records(rng: random.Random, content: bytes) -> bytes:
    """A state file with a record that is whole by its checksum, and made up."""
    rows = [json.loads(row) for row in content.splitlines()]
    for row in rows:
        row.pop("crc")
    i = rng.randrange(len(rows))
    changed = _node(rng, rows[i])
    rows[i] = changed if isinstance(changed, dict) else {"key": changed}
    return b"".join(_stated(row) for row in rows)


def _stated(row: dict[str, Any]) -> bytes:
    try:
        return line_of(row)
    except ValueError:  # NaN has no place in such a file
        return line_of({key: str(value) for key, value in row.items()})


def beyond(rng: random.Random, content: bytes) -> bytes:
    """A text with a number that is beyond all others, or none."""
    spots = list(re.finditer(rb"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", content))
    if not spots:
        return content
    spot = rng.choice(spots)
    number = rng.choice([b"1e999", b"-1e999", b"1e-999", b"9" * 400, b"9" * 5000, b"1e308", b"Infinity", b"-0", b"0x7"])
    return content[: spot.start()] + number + content[spot.end() :]


Mutate = Callable[[random.Random, bytes], bytes]
ANY: tuple[Mutate, ...] = (bits, spans)
TEXT: tuple[Mutate, ...] = (bits, spans, lines, lines, beyond)
ODD: tuple[Mutate, ...] = (declared, declared, foreign, foreign, empty)

# ---------------------------------------------------------------- what is run


def case(seed: int, base: Path, folder: Path) -> Case:
    """The case of a seed, its files written to `folder`; those of `base` stay as they are."""
    rng = random.Random(seed)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    return KINDS[rng.choice(list(KINDS))](rng, base, folder)


def _mutated(rng: random.Random, source: Path, target: Path, hows: tuple[Mutate, ...]) -> str:
    how = rng.choice(hows)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(how(rng, source.read_bytes()))
    return how.__name__


PLAIN_OF = {"quantized": "conv", "mixed_quantized": "mixed"}
QUANTIZED_OF = {"mixed": "mixed_quantized.onnx", "outside": "mixed_quantized.onnx"}
"""The float model of a quantized one, and the other way."""


def _of_model(rng: random.Random, base: Path, folder: Path) -> Case:
    name = rng.choice(["mixed", "mixed", "conv", "attention", "outside", "quantized", "mixed_quantized"])
    path = folder / f"{name}.onnx"
    how = _mutated(rng, base / path.name, path, (fields, fields, fields, fields, *ANY, *ODD))
    if name == "outside":
        if rng.random() < 0.3:
            how += " and " + _mutated(rng, base / "outside.bin", folder / "outside.bin", ANY)
        else:
            shutil.copyfile(base / "outside.bin", folder / "outside.bin")
    data = base / f"{PLAIN_OF.get(name, name)}.npz"
    with_data = ["--calibration-data", str(data), *PLAIN]
    out = ["-o", str(folder / OUT)]
    commands = [
        ["quantize", str(path), *with_data, "-o", str(folder / f"{OUT}.onnx")],
        ["quantize", str(path), *with_data, "-o", str(folder / f"{OUT}.onnx")],
        ["quantize", str(path), *PLAIN, "-o", str(folder / f"{OUT}.onnx")],
        ["quantize", str(path), "--calibration-data", str(data), "-o", str(folder / f"{OUT}.onnx")],
        ["tune", str(path), *FAKE, *with_data, "--builds", "3", *out],
        ["tune", str(path), *FAKE, *with_data, "--builds", "3", "--mode", "subgraph", *out],
        ["tune", str(path), *FAKE, *with_data, "--builds", "5", "--mode", "region", *out],
        ["tune", str(path), *FAKE, *with_data, "--builds", "3", "--from-qdq", *out],
        ["apply", str(path), *with_data, "--placement", str(base / "cut" / "placement.yaml"), "-o",
         str(folder / f"{OUT}.onnx")],
        ["inspect", str(path)],
        ["check", str(path), "--engine", "fake"],
        ["check", "--layers", str(path), "--engine", "fake"],
        ["inspect", str(path), "--json"],
        ["debug", str(path), "--engine", "fake"],
        ["debug", str(path)],
        ["debug", str(base / f"{PLAIN_OF.get(name, name)}.onnx"), str(path), "--calibration-data", str(data)],
        ["debug", str(path), str(base / QUANTIZED_OF.get(name, "quantized.onnx")), "--calibration-data", str(data)],
        ["quantize", str(path), *with_data, "--engine", "tensorrt", "--precision", "bf16", "-o",
         str(folder / f"{OUT}.onnx")],
        ["quantize", str(path), *with_data, "--engine", "openvino", "-o", str(folder / f"{OUT}.onnx")],
        ["compare", str(base / f"{name}.onnx"), str(path), "--engine", "fake", "--calibration-data", str(data)],
    ]  # fmt: skip
    return Case(rng.choice(commands), path, how)


def _of_data(rng: random.Random, base: Path, folder: Path) -> Case:
    path = folder / "samples.npz"
    how = _mutated(rng, base / "mixed.npz", path, (*ANY, arrays, arrays, arrays))
    if rng.random() < 0.3:  # a folder of it
        (folder / "d").mkdir()
        path = path.rename(folder / "d" / rng.choice(["a.npz", "a.npy"]))
        given = path.parent
    else:
        given = path
    commands = [
        ["quantize", str(base / "mixed.onnx"), *PLAIN, "-o", str(folder / f"{OUT}.onnx")],
        ["tune", str(base / "mixed.onnx"), *FAKE, *PLAIN, "--builds", "3", "-o", str(folder / OUT)],
    ]
    return Case([*rng.choice(commands), "--calibration-data", str(given)], path, how)


def _of_placement(rng: random.Random, base: Path, folder: Path) -> Case:
    path = folder / "placement.yaml"
    how = _mutated(rng, base / "cut" / "placement.yaml", path, (*TEXT, documents, documents, documents))
    arguments = ["apply", str(base / "mixed.onnx"), "--placement", str(path), "-o", str(folder / f"{OUT}.onnx")]
    return Case([*arguments, "--calibration-data", str(base / "mixed.npz")], path, how)


def _of_cache(rng: random.Random, base: Path, folder: Path) -> Case:
    path = folder / "cache.yaml"
    source = base / "region" / "autotuner_state_pattern_cache.yaml"
    how = _mutated(rng, source, path, (*TEXT, documents, documents, documents))
    arguments = ["autotune", "-m", str(base / "mixed.onnx"), *FAKE, *PLAIN, "--builds", "6", "--no-cut-seed"]
    data = ["--calibration-data", str(base / "mixed.npz"), "-o", str(folder / OUT)]
    return Case([*arguments, "--pattern-cache", str(path), *data], path, how)


def _of_ranges(rng: random.Random, base: Path, folder: Path) -> Case:
    """A calibration cache, in one of the forms in which other tools write them."""
    path, given = folder / "cache", folder / "given"
    names = ["x", "a", "b", "c", "d", "e", "f", "g", "y"]
    if rng.random() < 0.5:
        lines = [f"{name}: {struct.pack('>f', 0.01 * i + 0.01).hex()}" for i, name in enumerate(names)]
        given.write_text("\n".join(["TRT-8601-EntropyCalibration2", *lines, ""]))
    else:
        given.write_text(json.dumps({name: [-1.0 - i, 2.0 + i] for i, name in enumerate(names)}))
    how = _mutated(rng, given, path, (*TEXT, lines_of_numbers))
    given.unlink()
    arguments = ["quantize", str(base / "mixed.onnx"), "--calibration-cache", str(path)]
    return Case([*arguments, "-o", str(folder / f"{OUT}.onnx")], path, how)


def lines_of_numbers(rng: random.Random, content: bytes) -> bytes:
    """A file whose numbers are others."""
    number = str(rng.choice([*NUMBERS, *FLOATS])).encode()
    return re.sub(rb"[0-9a-f.]{3,}", lambda m: number if rng.random() < 0.3 else m[0], content)


def _of_run(rng: random.Random, base: Path, folder: Path) -> Case:
    """A file that an earlier run has left: it goes on."""
    mode = rng.choice(["cut", "region", "subgraph", "front"])
    shutil.copytree(base / mode, folder / OUT)
    name = rng.choice([STATE, STATE, STATE, STATE, ".qdqtune", "summary.json"])
    hows = {STATE: (*TEXT, records, records, records, records, records, records), "summary.json": (*TEXT, jsons, jsons)}
    path = folder / OUT / name
    how = _mutated(rng, base / mode / name, path, hows.get(name, TEXT))
    if mode == "front" and name == "summary.json":
        front = json.loads((base / mode / name).read_text())["front"]
        return Case(["tune", str(base / "mixed.onnx"), "-o", str(folder / OUT), "--pick", front[0]["name"]], path, how)
    data = ["--calibration-data", str(base / "mixed.npz"), *PLAIN]
    return Case(["tune", str(base / "mixed.onnx"), *FAKE, *data, *RUNS[mode], "-o", str(folder / OUT)], path, how)


def _of_finished(rng: random.Random, base: Path, folder: Path) -> Case:
    """A file of a finished run: it is shown, explained, or taken as the source of data."""
    mode = rng.choice(list(RUNS))
    shutil.copytree(base / mode, folder / OUT)
    texts = {STATE: (*TEXT, records, records), "summary.json": (*TEXT, jsons, jsons, jsons), "placement.yaml":
             (*TEXT, documents, documents)}  # fmt: skip
    name = rng.choice(list(texts))
    path = folder / OUT / name
    how = _mutated(rng, base / mode / name, path, texts[name])
    out = str(folder / OUT)
    commands = [
        ["report", out],
        ["explain", out],
        ["explain", out, "*", "--json"],
        ["apply", str(base / "mixed.onnx"), "--placement", f"{out}/placement.yaml", "-o", f"{out}.onnx"],
        ["check", f"{out}/optimized_final.onnx", "--engine", "fake"],
        ["debug", str(base / "mixed.onnx"), f"{out}/optimized_final.onnx", "--engine", "fake"],
        ["compare", str(base / "mixed.onnx"), f"{out}/optimized_final.onnx", "--engine", "fake", "--json"],
    ]
    return Case(rng.choice(commands), path, how)


NAMED = ["x\x00.onnx", "loop", "loop/x", "dangling", "up", "up/nowhere/x", "", ".", "a" * 300, "a" * 5000, "d",
         "pipe", "-", "--x", "\udc80", "\ud800", "é\n.npz", "given.py:f", "loop:f", "x\x00:f", "nothing:f", ":",
         ":f"]  # fmt: skip
"""Names of what is no usual file, in the folder of a case."""


def _of_names(rng: random.Random, base: Path, folder: Path) -> Case:
    """A name in place of a file that a command reads or writes."""
    path = folder / "d"
    path.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "given.py").write_text("def f():\n    return 7\n")
    data, out = ["--calibration-data", str(base / "mixed.npz"), *PLAIN], ["-o", str(folder / f"{OUT}.onnx")]
    model, placement = str(base / "mixed.onnx"), str(base / "cut" / "placement.yaml")
    quantized, fake = str(base / "mixed_quantized.onnx"), ["--engine", "fake"]
    commands = [
        ["quantize", model, *data, *out],
        ["quantize", model, "--calibration-cache", str(folder / "cache"), *out],
        ["quantize", model, *data, *out, "--evaluate", f"{folder / 'given.py'}:f"],
        ["tune", model, *FAKE, *data, "--builds", "3", "-o", str(folder / OUT)],
        ["autotune", "-m", model, *FAKE, *data, "--builds", "5", "-o", str(folder / OUT), "--state-file",
         str(folder / OUT / "s"), "--pattern-cache", str(folder / "pattern")],
        ["autotune", "-m", model, *FAKE, *data, "--builds", "3", "-o", str(folder / OUT), "--mode", "subgraph",
         "--graph-json", str(folder / "graph")],
        ["tune", model, *FAKE, *data, "--builds", "3", "-o", str(folder / OUT), "--node-filter",
         str(folder / "nodes")],
        ["apply", model, *data, "--placement", placement, *out],
        ["inspect", model],
        ["check", quantized, *fake],
        ["check", "--layers", model, *fake],
        ["check", "--layers", model, "--graph-json", str(folder / "graph"), "--profile-json", str(folder / "profile")],
        ["compare", model, quantized, *fake, "--calibration-data", str(base / "mixed.npz")],
        ["compare", model, quantized, *fake, "--workload", f"{base / 'mixed.npz'}:1"],
        ["debug", model, quantized, "--calibration-data", str(base / "mixed.npz")],
        ["build", model, "--engine", "onnxruntime", *out],
        ["explain", str(base / "cut"), "*"],
        ["run", str(folder / "jobs.yaml")],
    ]  # fmt: skip
    chosen = rng.choice(commands)
    spots = [i for i, text in enumerate(chosen) if "/" in text]
    name = rng.choice(NAMED)
    at = rng.choice(spots)
    chosen[at] = str(folder / name) if name and rng.random() < 0.8 else name
    return Case(chosen, path, f"beside {name[:20]!r}", writes_elsewhere=True)


def _of_groups(rng: random.Random, base: Path, folder: Path) -> Case:
    path, whole_file = folder / "graph.json", folder / "whole.json"
    layers = [
        {"Name": n, "LayerType": "k", "Metadata": f"[ONNX Layer: {n}]"} for n in ("first", "relu", "second", "skip")
    ]
    whole_file.write_text(json.dumps({"Layers": layers}))
    how = _mutated(rng, whole_file, path, (*TEXT, jsons, jsons))
    whole_file.unlink()
    data = ["--calibration-data", str(base / "mixed.npz"), *PLAIN, "-o", str(folder / OUT)]
    arguments = ["autotune", "-m", str(base / "mixed.onnx"), *FAKE, "--mode", "subgraph", "--builds", "4"]
    return Case([*arguments, "--graph-json", str(path), *data], path, how)


KINDS: dict[int, Callable[[random.Random, Path, Path], Case]] = dict(
    enumerate(
        [_of_model] * 6
        + [_of_data, _of_ranges, _of_placement, _of_cache, _of_run, _of_run, _of_groups, _of_finished, _of_names]
    )
)
"""Kinds of cases, models the most."""

# ---------------------------------------------------------------- what is owed


def broken(code: int, out: str, err: str, before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """What is wrong with how a command ended, and with what it left in the folder of its case."""
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    wrong = []
    if code not in PROMISED:
        wrong.append(f"exit code {code}")
    if "Traceback" in out + err:
        wrong.append("a traceback")
    if code in (2, 5) and len(told) != 1:
        wrong.append(f"{len(told)} lines of error")
    if code == 0 and told:
        wrong.append("an error, and exit code 0")
    if any(ord(c) < 32 and c not in "\n\t" for c in err):
        wrong.append("a control character on standard error")
    ours = {name for name in before if name.split("/")[0] == OUT}
    wrong += [f"{name} was changed" for name in before.keys() - ours if after.get(name) != before[name]]
    wrong += [f"{name} was written" for name in after.keys() - before.keys() if not name.startswith((OUT, LIST))]
    wrong += [f"{name} is left" for name in after if ".qdqtune-" in name or "/candidates/" in name or "worker-" in name]
    if code not in (0, 3, 4):
        wrong += [f"{name} is there" for name in after.keys() - before.keys() if name == f"{OUT}.onnx"]
    return wrong


def temporary(folder: Path) -> Path:
    """Where the temporary files of a case go."""
    return folder.with_name(f"{folder.name}-tmp")


def run(seed: int, base: Path, folder: Path) -> tuple[Case, list[str]]:
    """The case of a seed, run in this process, and what is wrong with how it ended."""
    made = case(seed, base, folder)
    aside = temporary(folder)
    aside.mkdir()
    before, out, err = contents(folder), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, in_process(), redirect_stdout(out), redirect_stderr(err):
        patch.setattr(tempfile, "tempdir", str(aside))
        patch.chdir(folder)  # where names without a folder lie
        code = _call(*made.arguments)
    after = contents(folder)
    if made.writes_elsewhere:
        after = {name: data for name, data in after.items() if name in before}
    wrong = broken(code, out.getvalue(), err.getvalue(), before, after)
    if "--json" in made.arguments and out.getvalue():
        json.loads(out.getvalue())
    wrong += [f"{name} is left among temporary files" for name in contents(aside)]
    return made, [*wrong, err.getvalue()[-3000:]] if wrong else []


def apart(seeds: range, base: Path, folder: Path, answer: Connection[Any, Any]) -> None:
    """Cases of a long run, in a process of their own."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        own = folder / str(seed)
        own.mkdir()
        made, wrong = run(seed, base, own)
        answer.send([str(made), *wrong] if wrong else [])
        for left in (own, temporary(own)):
            shutil.rmtree(left)
