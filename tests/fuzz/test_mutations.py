"""Damaged and made up files: a promised exit code, one line, nothing of the user's changed, nothing left behind.

A seed names a case: which file of which kind is mutated, how, and what is run on it. Each case has a folder of its own.
`pytest tests/fuzz --fuzz 5000 -n 2` runs that many cases; `--fuzz-from` says where to begin.
"""

from __future__ import annotations

import io
import json
import random
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from command_lines import exit_code
from models import ATTENTION, build, conv_net, normal
from qdqtune.graph.saving import save
from qdqtune.system.checks import LIST
from qdqtune.tuning.store import line_of
from runs import contents, mixed, write
from sample_files import cache_of_scales
from workers import in_process

PROMISED = (0, 2, 3, 4, 5)
"""Exit codes: done, bad input, nothing faster, a limit unmet, no engine."""

OUT = "out"
PLAIN = "--calibration-method minmax --no-bias-correction"
FAKE = "--engine fake --engine-option asymmetric=true -q"
TUNE = f"tune {{base}}/mixed.onnx {FAKE} --calibration-data {{base}}/mixed.npz {PLAIN}"

RUNS = {
    "cut": "--builds 5",
    "region": "--mode region --builds 8",
    "subgraph": "--mode subgraph --builds 4",
    "front": "--front --builds 14",
}
"""What runs have been told whose files are mutated."""

TEXTS = ["", "x", "\x00", "a\x00b", "loop", "nowhere/x", "\x1b[2J", "a\nb", "\u202e", "../../etc/passwd", "/",
         "a" * 5000, "é\ud7ff", "0", "%s{}", "[red]x[/red]", "-1", "None", " "]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 255, 2**20, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan")]
VALUES: list[Any] = [*TEXTS, *NUMBERS, *FLOATS, None, True, [], {}, [[]], {"a": 1}, [1, "x"], 1e308]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are mutated: models, samples, and what runs have left."""
    folder = tmp_path_factory.mktemp("whole")
    names = ("wq", "wk", "wv", "wo")
    weights = {name: normal(16, 16, scale=0.3, seed=i) for i, name in enumerate(names)}
    write(mixed(batch=2), folder, "mixed")
    write(conv_net(), folder, "conv")
    write(build(ATTENTION, weights | {"gamma": normal(16), "beta": normal(16, seed=1)}), folder, "attention")
    for name in ("mixed_quantized", "conv_quantized"):
        save(conv_net(), folder / f"{name}.onnx")
    ranges = {name: [-1.0 - i, 2.0 + i] for i, name in enumerate("xabcdefgy")}
    cache_of_scales(folder / "cache", {name: high / 127 for name, (_, high) in ranges.items()}, "")
    (folder / "cache.json").write_text(json.dumps(ranges))
    layers = [
        {"Name": n, "LayerType": "k", "Metadata": f"[ONNX Layer: {n}]"} for n in ("first", "relu", "second", "skip")
    ]
    (folder / "graph.json").write_text(json.dumps({"Layers": layers}))
    with in_process(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for name in ("mixed", "conv"):
            data = f"--calibration-data {{base}}/{name}.npz {PLAIN}"
            _call(f"quantize {{base}}/{name}.onnx {data} -o {{base}}/{name}_quantized.onnx", base=folder)
        for name, more in RUNS.items():
            _call(f"{TUNE} {more} -o {{base}}/{name}", base=folder)
    return folder


def _call(command: str, **places: object) -> int:
    """Run a command line in this process: its exit code."""
    return exit_code(*(word.format(**places) for word in shlex.split(command)))


def raw(rng: random.Random, content: bytes) -> bytes:
    """A bit turned over, or a part cut off, taken out, doubled, zeroed, or made random."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + rng.choice([1, 16, 4096, len(content)]))
    part = content[a:b]
    flipped = bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:] if part else b""
    new = rng.choice([b"", part * 2, bytes(len(part)), rng.randbytes(len(part)), flipped, flipped])
    return content[:a] if rng.random() < 0.2 else content[:a] + new + content[b:]


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
    """Clear a field, take out or double one of its items, or give it another value that its type can hold."""
    there = [field for field, _ in message.ListFields()]
    field = rng.choice(there) if there and rng.random() < 0.8 else rng.choice(list(message.DESCRIPTOR.fields))
    items: Any = getattr(message, field.name)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if rng.random() < 0.2 or (field.is_repeated and not items) or (is_message and not field.is_repeated):
        message.ClearField(field.name)
        return
    if field.is_repeated and rng.random() < 0.3:
        del items[rng.randrange(len(items))]
        return
    if is_message:
        items.add().CopyFrom(rng.choice(list(items)))
        return
    for _ in range(99):
        value = rng.choice([*VALUES, *range(-4, 40)])
        with suppress(TypeError, ValueError, AttributeError):
            if field.is_repeated:
                items[rng.randrange(len(items))] = value.encode() if isinstance(items[0], bytes) else value
            else:
                setattr(message, field.name, value.encode() if isinstance(items, bytes) else value)
            return


def declared(rng: random.Random, content: bytes) -> bytes:
    """A model that lists another type or other sizes of a tensor than it has, or a sequence in its place."""
    proto = onnx.ModelProto()
    proto.ParseFromString(content)
    graph = proto.graph
    listed = rng.choice([graph.input, graph.output, graph.value_info])
    if listed is graph.value_info:
        listed.add().name = rng.choice([name for node in graph.node for name in node.output if name])
    value = rng.choice(list(listed))
    kind = rng.choice([1, *(n for n in onnx.TensorProto.DataType.values() if n)])
    make = rng.choice([onnx.helper.make_tensor_value_info] * 3 + [onnx.helper.make_tensor_sequence_value_info])
    value.CopyFrom(make(value.name, kind, [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]))
    return proto.SerializeToString()


def lines(rng: random.Random, content: bytes) -> bytes:
    """A line taken out, doubled elsewhere, nested deeply, or with a word changed."""
    rows = content.split(b"\n")
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    words = rows[i].split(b" ")
    words[rng.randrange(len(words))] = str(rng.choice(VALUES)).encode(errors="replace")
    deep = rng.choice([b"[", b"{", b"a: &a [*a]", b"- "]) * rng.choice([1, 2000])
    rows[i : i + 1] = rng.choice([[], [rows[i], rows[j]], [rows[j]], [b" ".join(words)], [deep]])
    return b"\n".join(rows)


def _node(rng: random.Random, value: Any) -> Any:
    """A value in a tree of lists and maps replaced, or taken out."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(changed)) if isinstance(changed, dict) else rng.randrange(len(changed))
    if rng.random() < 0.15:
        del changed[key]
    else:
        changed[key] = _node(rng, changed[key])
    return changed


def documents(rng: random.Random, content: bytes) -> bytes:
    """A JSON or YAML file of which one value is another, as JSON, which YAML includes."""
    return json.dumps(_node(rng, yaml.safe_load(content))).encode()


def records(rng: random.Random, content: bytes) -> bytes:
    """A state file with a record that is whole by its checksum, and made up."""
    kept = unsigned(content)
    i = rng.randrange(len(kept))
    changed = _node(rng, kept[i])
    kept[i] = changed if isinstance(changed, dict) else {"key": changed}
    with suppress(ValueError):  # NaN has no place in such a file
        return b"".join(map(line_of, kept))
    kept[i] = {key: str(value) for key, value in kept[i].items()}
    return b"".join(map(line_of, kept))


def unsigned(state: bytes) -> list[dict[str, Any]]:
    """The records of a state file without their checksums."""
    return [{key: value for key, value in json.loads(row).items() if key != "crc"} for row in state.splitlines()]


Mutate = Callable[[random.Random, bytes], bytes]


class Kind(NamedTuple):
    """Files of one kind, how they are mutated, and what is run on them: `{file}` is the mutated one, `{base}` the
    folder of the others, `{out}` where outputs go. With `in_run`, the file stays in a copy of its run at `{out}`."""

    files: tuple[str, ...]
    hows: tuple[Mutate, ...]
    commands: tuple[str, ...]
    in_run: bool = False


DATA = f"--calibration-data {{data}} {PLAIN}"
MODELS = Kind(
    ("mixed.onnx", "mixed.onnx", "conv.onnx", "attention.onnx", "conv_quantized.onnx", "mixed_quantized.onnx"),
    (fields, fields, raw, declared),
    (
        f"quantize {{file}} {DATA} -o {{out}}.onnx",
        "quantize {file} --calibration-data {data} -o {out}.onnx",
        f"quantize {{file}} {DATA} --engine tensorrt --precision bf16 -o {{out}}.onnx",
        f"quantize {{file}} {DATA} --engine openvino -o {{out}}.onnx",
        f"tune {{file}} {FAKE} {DATA} --builds 3 --mode subgraph -o {{out}}",
        f"tune {{file}} {FAKE} {DATA} --builds 5 --mode region -o {{out}}",
        f"tune {{file}} {FAKE} {DATA} --builds 3 --from-qdq -o {{out}}",
        f"apply {{file}} {DATA} --placement {{base}}/cut/placement.yaml -o {{out}}.onnx",
        "inspect {file} --json",
        "check {file} --engine fake",
        "check --layers {file} --engine fake",
        "debug {file}",
        "debug {float} {file} --calibration-data {data}",
        "debug {file} {base}/mixed_quantized.onnx --calibration-data {data}",
        "compare {float} {file} --engine fake --calibration-data {data}",
    ),
)
TEXT, RECORDS, DOCUMENTS = (raw, lines), (raw, lines, records, records), (raw, lines, documents, documents)
GUEST = f"autotune -m {{base}}/mixed.onnx {FAKE} --calibration-data {{base}}/mixed.npz {PLAIN} -o {{out}}"
KINDS = (
    *[MODELS] * 6,
    Kind(
        ("mixed.npz",),
        (raw,),
        (f"tune {{base}}/mixed.onnx {FAKE} --calibration-data {{file}} {PLAIN} --builds 3 -o {{out}}",),
    ),
    Kind(("cache", "cache.json"), TEXT, ("quantize {base}/mixed.onnx --calibration-cache {file} -o {out}.onnx",)),
    Kind(
        ("cut/placement.yaml",),
        DOCUMENTS,
        ("apply {base}/mixed.onnx --placement {file} --calibration-data {base}/mixed.npz -o {out}.onnx",),
    ),
    Kind(
        ("region/autotuner_state_pattern_cache.yaml",),
        DOCUMENTS,
        (f"{GUEST} --builds 6 --no-cut-seed --pattern-cache {{file}}",),
    ),
    Kind(("graph.json",), DOCUMENTS, (f"{GUEST} --builds 4 --mode subgraph --graph-json {{file}}",)),
    *[
        Kind(
            (f"{mode}/autotuner_state.yaml",),
            RECORDS,
            (f"{TUNE} {more} -o {{out}}", "report {out}", "explain {out} '*' --json"),
            in_run=True,
        )
        for mode, more in RUNS.items()
    ],
    Kind(
        ("cut/summary.json", "front/summary.json", "cut/placement.yaml", "cut/.qdqtune"),
        DOCUMENTS,
        (
            "report {out}",
            "explain {out}",
            f"{TUNE} {RUNS['cut']} -o {{out}}",
            "apply {base}/mixed.onnx --placement {out}/placement.yaml -o {out}.onnx",
            "check {out}/optimized_final.onnx --engine fake",
            "compare {base}/mixed.onnx {out}/optimized_final.onnx --engine fake --json",
        ),
        in_run=True,
    ),
)
"""Kinds of cases, models the most."""


@dataclass(frozen=True)
class Case:
    """What is run on a mutated file, in a folder of its own."""

    command: str
    path: Path
    how: str

    def __str__(self) -> str:
        return f"{self.path.name} {self.how}: {self.command}"


def case(seed: int, base: Path, folder: Path) -> Case:
    """The case of a seed, its files written to `folder`; those of `base` stay as they are."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    name = rng.choice(kind.files)
    path = folder / Path(name).name
    if kind.in_run:
        shutil.copytree(base / name.split("/")[0], folder / OUT)
        path = folder / OUT / Path(name).name
    how = rng.choice(kind.hows)
    path.write_bytes(how(rng, (base / name).read_bytes()))
    return Case(rng.choice(kind.commands), path, how.__name__)


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


def judged(made: Case, base: Path, folder: Path) -> list[str]:
    """What is wrong with how a case ends, which is run in this process."""
    plain = made.path.stem.removesuffix("_quantized") if made.path.suffix == ".onnx" else "mixed"
    places = {"file": made.path, "base": base, "out": folder / OUT}
    places |= {"data": base / f"{plain}.npz", "float": base / f"{plain}.onnx"}
    aside = folder.with_name(f"{folder.name}-tmp")
    aside.mkdir()
    before, out, err = contents(folder), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, in_process(), redirect_stdout(out), redirect_stderr(err):
        patch.setattr(tempfile, "tempdir", str(aside))
        patch.chdir(folder)
        code = _call(made.command, **places)
    wrong = broken(code, out.getvalue(), err.getvalue(), before, contents(folder))
    if "--json" in made.command and out.getvalue():
        json.loads(out.getvalue())
    wrong += [f"{name} is left among temporary files" for name in contents(aside)]
    return [*wrong, err.getvalue()[-3000:]] if wrong else []


CASES = 16
"""Cases in every run of the tests: always the same."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        option = metafunc.config.getoption
        first = option("--fuzz-from")
        metafunc.parametrize("seed", range(first, first + (option("--fuzz") or CASES)))


def test_any_file_ends_in_one_line_and_changes_nothing(base: Path, tmp_path: Path, seed: int) -> None:
    own = tmp_path / "case"
    own.mkdir()
    made = case(seed, base, own)
    assert not judged(made, base, own), made


def test_models_that_long_runs_have_found(base: Path, tmp_path: Path) -> None:
    """One takes no time, and the types that the other lists are wrong."""
    empty, scalar = (onnx.load(base / "mixed.onnx") for _ in range(2))
    del empty.graph.node[:]
    empty.graph.output[0].CopyFrom(empty.graph.input[0])
    product = next(node for node in scalar.graph.node if node.op_type == "MatMul")
    scalar.graph.value_info.append(onnx.helper.make_tensor_value_info(product.output[0], 1, []))
    for name, model, command in (
        ("empty", empty, "compare {float} {file} --engine fake --calibration-data {data}"),
        ("scalar", scalar, "debug {file} {base}/mixed_quantized.onnx --calibration-data {data}"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        made = Case(command, folder / "mixed.onnx", name)
        onnx.save(model, made.path)
        assert not judged(made, base, folder)


def test_a_run_that_has_measured_pairs_which_the_model_does_not_have(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "case"
    shutil.copytree(base / "front", own / OUT)
    state = own / OUT / "autotuner_state.yaml"
    kept = unsigned(state.read_bytes())
    trial = next(row for row in kept if str(row["key"]).startswith("trial:"))
    trial["value"]["proposal"]["placement"]["edges"] = [["nothing", "nowhere", 0]]
    state.write_bytes(b"".join(map(line_of, kept)))
    assert not judged(Case(f"{TUNE} {RUNS['front']} -o {{out}}", state, "edges"), base, own)
