"""What formats give on a GPU with ONNX Runtime's CUDA provider: float32, float16, weights in 8 and 4 bits by ONNX
Runtime's own quantizer, 8-bit pairs by the rules, and what `tune` ships; time to float32 with its interval, and SQNR.

Every file is a session with inputs and outputs in the memory of the GPU. `--recorded` has the provider record the
kernels of an inference and start them together (`enable_cuda_graph`): without it the CPU, which starts each kernel,
often needs longer than the GPU. `--wide` adds one decode step of two layers of a language model of 7 B parameters,
with a cache of 512 tokens, and its prefill of 256 tokens. A call of a model whose name holds `decode` makes one token.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zoo
from formats import cell, nbits
from onnx import TensorProto, helper, numpy_helper

from qdqtune import quantize
from qdqtune.calibration.samples import open_samples
from qdqtune.calibration.scales import Calibration
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.graph.float16 import converted
from qdqtune.graph.loading import load
from qdqtune.graph.saving import nbytes, save
from qdqtune.placement.files import read_placement_file
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import FINAL, PLACEMENT
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings

WIDTH, HEADS, INNER, WORDS, LAYERS = 4096, 32, 11008, 32000, 2
SAMPLES, UNSEEN = 4, 4
PLAN = Plan((12, 24))

LARGE = 2**30
"""Bytes from which a model gets no file with pairs, which takes minutes to make."""


def wide(path: Path, tokens: int, past: int) -> None:
    """A decoder as wide as one of 7 B parameters, with `LAYERS` layers and seeded random weights."""
    rng, nodes = np.random.default_rng(0), list[onnx.NodeProto]()
    constants = list[onnx.TensorProto]()

    def weight(name: str, *shape: int) -> str:
        values = rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
        constants.append(numpy_helper.from_array(values, name))
        return name

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def heads(value: str, perm: list[int]) -> str:
        return node("Transpose", node("Reshape", value, "split"), perm=perm)

    size = WIDTH // HEADS
    constants += [
        numpy_helper.from_array(np.array(v, t), n)
        for n, v, t in (("split", [1, -1, HEADS, size], np.int64), ("join", [1, -1, WIDTH], np.int64),
                        ("root", size**0.5, np.float32), ("ones", np.ones(WIDTH), np.float32))
    ]  # fmt: skip
    inputs: list[tuple[str, tuple[int, ...]]] = [("hidden", (1, tokens, WIDTH))]
    x = "hidden"
    for n in range(LAYERS):
        normed = node("LayerNormalization", x, "ones")
        q, k, v = (node("MatMul", normed, weight(f"w{c}{n}", WIDTH, WIDTH)) for c in "qkv")
        q, k, v = heads(q, [0, 2, 1, 3]), heads(k, [0, 2, 1, 3]), heads(v, [0, 2, 1, 3])
        if past:
            inputs += [(f"{c}{n}", (1, HEADS, past, size)) for c in ("pk", "pv")]
            k, v = node("Concat", f"pk{n}", k, axis=2), node("Concat", f"pv{n}", v, axis=2)
        scores = node("Div", node("MatMul", q, node("Transpose", k, perm=[0, 1, 3, 2])), "root")
        mixed = node("MatMul", node("Softmax", scores), v)
        joined = node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), "join")
        x = node("Add", x, node("MatMul", joined, weight(f"wo{n}", WIDTH, WIDTH)))
        normed = node("LayerNormalization", x, "ones")
        gate, up = (node("MatMul", normed, weight(f"{c}{n}", WIDTH, INNER)) for c in ("gate", "up"))
        gated = node("Mul", node("Mul", gate, node("Sigmoid", gate)), up)
        x = node("Add", x, node("MatMul", gated, weight(f"down{n}", INNER, WIDTH)))
    logits = node("MatMul", x, weight("head", WIDTH, WORDS))
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    made = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, (1, tokens, WORDS))]
    model = helper.make_model(
        helper.make_graph(nodes, path.stem, given, made, constants),
        opset_imports=[helper.make_opsetid("", 21)], ir_version=10,
    )  # fmt: skip
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.data")


def files_of(entry: zoo.Entry, folder: Path) -> dict[str, Path]:
    """The file of each format, written once."""
    files = {name: folder / f"{entry.name}_{name}.onnx" for name in ("float16", "w8", "w4", "pairs")}
    if not files["float16"].exists():
        save(converted(load(entry.path), "fp16"), files["float16"])
    has_products = any(n.op_type == "MatMul" for n in onnx.load(entry.path, load_external_data=False).graph.node)
    for bits in (8, 4):
        if has_products and not files[f"w{bits}"].exists():
            nbits(files["float16"], files[f"w{bits}"], bits)
    if not files["pairs"].exists() and nbytes(entry.path) < LARGE:
        quantize(
            entry.path, output=files["pairs"], engine="tensorrt", precision="fp16", calibration_data=entry.data,
            quick=True, calibration_method="minmax",
        )  # fmt: skip
    return {name: path for name, path in files.items() if path.exists()}


def tuned(entry: zoo.Entry, spec: EngineSpec, folder: Path, seconds: float) -> tuple[Path, str]:
    """What `tune` ships, and after how many candidates and seconds."""
    begun = time.monotonic()
    settings = Settings(
        entry.path, output_dir=folder, engine=spec, calibration_data=entry.data, accuracy_samples=SAMPLES,
        time_budget=seconds, calibration=Calibration("minmax", bias_correction=False), price_cache=None,
    )  # fmt: skip
    result = tune(settings)
    placement = read_placement_file(folder / PLACEMENT).placement
    kinds = ", ".join(sorted({s.name for s in placement.weight_formats.values()}))
    told = (
        f"{len(placement.edges)} pairs, {len(placement.weight_only)} weights {kinds}; {len(result.history)} candidates"
    )
    return folder / FINAL, f"{result.shipped}: {told}, {time.monotonic() - begun:.0f} s"


def tokens_a_second(row: Row) -> str:
    """Calls a second of the second file."""
    return "" if row.ratio is None or not row.first_ms else f"{1e3 / (row.first_ms * row.ratio.median):.0f}"


def main() -> None:
    """Print a table, a row as soon as it is known."""
    asked = zoo.parser(__doc__, [])
    asked.add_argument("--keep", type=Path, required=True, help="folder of runs and files")
    asked.add_argument("--engine", default="cuda")
    asked.add_argument("--wide", action="store_true", help="also the wide language model, which is made in --models")
    asked.add_argument("--recorded", action="store_true", help="record kernels and start them together")
    asked.add_argument("--seconds", type=float, default=60.0, help="time budget of one run of tune")
    given = asked.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    zoo.print_machine()
    for name, tokens, past in (("wide_decode", 1, 512), ("wide_prefill", 256, 0)) if given.wide else ():
        if not (given.models / f"{name}.onnx").exists():
            wide(given.models / f"{name}.onnx", tokens, past)
    options = {"provider_options": {"enable_cuda_graph": "1"}} if given.recorded else {}
    spec, rows = EngineSpec(given.engine, options), []
    for entry in zoo.find(given.models, given.names):
        files = files_of(entry, given.keep)
        ours = given.keep / f"{entry.name}_tune{'_recorded' * given.recorded}"
        files["tune"], told = tuned(entry, spec, ours, given.seconds)
        judged = open_samples(entry.data, load(entry.path), seed=7).first(UNSEEN)
        with Runner(spec, log_dir=given.keep) as runner:
            found = compare_files([entry.path, *files.values()], runner, judged, PLAN, builds=4)
        known = dict(zip(files, found, strict=True))
        float_ms = next((row.first_ms for row in found if row.first_ms), None)
        cells = [cell(known[name]) if name in known else "" for name in ("float16", "w8", "w4", "pairs", "tune")]
        if "decode" in entry.name:
            cells = [f"{text}, {tokens_a_second(known[n])}/s" for n, text in zip(known, cells, strict=True)]
        rows.append((entry.name, "" if float_ms is None else f"{float_ms:.3f}", *cells, told))
        print("  ".join(rows[-1]), flush=True)
    print()
    zoo.print_table(("model", "float32, ms", "float16", "w8", "w4", "pairs", "tune", "what ships"), rows)


if __name__ == "__main__":
    main()
