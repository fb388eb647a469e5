"""Which attentions TensorRT-RTX fuses, and whether `qdqtune check` names the condition that the others miss.

    python benchmarks/attention.py [--target sm89]

Needs no GPU: every case is built for the target, and its layers are read. A case is right if it is fused and nothing is
said, or split and the words are those expected.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import temporary_runner
from qdqtune.explanation.reasons_for_attention import splits
from qdqtune.graph.loading import load
from qdqtune.types import Failure

ALL = ("q", "k", "p", "v", "o")
"""Queries, keys, probabilities, values, and what the second product gives."""

FP8 = ALL[:4]


@dataclass(frozen=True)
class Case:
    """One attention of four heads and the product behind it. `says` is part of the reason if it is not fused."""

    name: str
    says: str = ""
    pairs: Sequence[str] = ALL
    head: int = 64
    positions: int = 64
    half: bool = True
    fp8: bool = False
    mask: bool = False
    between: bool = False
    scale: str = "after"


CASES = (
    Case("heads of 16", head=16),
    Case("heads of 32", head=32),
    Case("heads of 64"),
    Case("heads of 24", "size 24", head=24),
    Case("heads of 48", "size 48", head=48),
    Case("heads of 128", "size 128", head=128),
    Case("512 positions", positions=512),
    Case("520 positions", "520 positions", positions=520),
    Case("1024 positions", "1024 positions", positions=1024, head=32),
    Case("197 positions", positions=197),
    Case("masked", mask=True),
    Case("scaled before", scale="before"),
    Case("pair behind copies", pairs=("q", "k", "p", "v", "r")),
    Case("no pair on the queries", "its queries carry no pair", pairs=("k", "p", "v", "o")),
    Case("no pair on the keys", "its keys carry no pair", pairs=("q", "p", "v", "o")),
    Case("no pair on the values", "its values carry no pair", pairs=("q", "k", "p", "o")),
    Case("no pair on the probabilities", "its probabilities carry no pair", pairs=("q", "k", "v", "o")),
    Case("no pair behind", "behind the second product", pairs=FP8),
    Case("pair in front of the Softmax", "between the first product and the Softmax", between=True),
    Case("float16", pairs=()),
    Case("float32", "float16 only", pairs=(), half=False),
    Case("float16, heads of 320", "size 320", pairs=(), head=320),
    Case("fp8", pairs=FP8, fp8=True),
    Case("fp8, heads of 256", pairs=FP8, fp8=True, head=256),
    Case("fp8, heads of 320", "size 320", pairs=FP8, fp8=True, head=320),
    Case("fp8, masked", pairs=FP8, fp8=True, mask=True),
    Case("fp8, 1024 positions", pairs=FP8, fp8=True, positions=1024),
    Case("fp8, float32", "float16 graphs only", pairs=FP8, fp8=True, half=False),
    Case("fp8, no pair on the probabilities", "its probabilities carry no pair", pairs=("q", "k", "v"), fp8=True),
    Case("fp8, no pair on the values", "its values carry no pair", pairs=("q", "k", "p"), fp8=True),
    Case("fp8, pair in front of the Softmax", "between the first product", pairs=FP8, fp8=True, between=True),
)


def model_of(case: Case) -> onnx.ModelProto:
    """The case as a model."""
    kind, dtype = (TensorProto.FLOAT16, np.float16) if case.half else (TensorProto.FLOAT, np.float32)
    heads, width = 4, 4 * case.head
    zero = helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN if case.fp8 else TensorProto.INT8, [], [0])
    constants, nodes = [zero], []

    def constant(name: str, values: object) -> str:
        constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(op: str, output: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], output, None, None, None, **attributes))
        return output

    def paired(role: str, tensor: str, wanted: bool | None = None) -> str:
        if not (role in case.pairs if wanted is None else wanted):
            return tensor
        step = constant(f"{tensor}_step", dtype(1 / 127 if role == "p" else 0.02))
        return node("DequantizeLinear", f"{tensor}_back", node("QuantizeLinear", f"{tensor}_low", tensor, step, "zero"),
                    step, "zero")  # fmt: skip

    factor = constant("factor", dtype(case.head**-0.5))
    queries = node("Mul", "scaled", "q", factor) if case.scale == "before" else "q"
    inputs = {role: paired(role, tensor) for role, tensor in (("q", queries), ("k", "k"), ("v", "v"))}
    scores = paired("s", node("MatMul", "scores", inputs["q"], inputs["k"]), case.between)
    if case.scale == "after":
        scores = node("Mul", "scaled", scores, factor)
    if case.mask:
        scores = node("Add", "masked", scores, "mask")
    probabilities = paired("p", node("Softmax", "softmax", scores, axis=-1))
    result = paired("o", node("MatMul", "context", probabilities, inputs["v"]))
    turned = node("Transpose", "turned", result, perm=[0, 2, 1, 3])
    rows = paired("r", node("Reshape", "rows", turned, constant("sizes", [1, case.positions, width])))
    weights = np.random.default_rng(0).normal(scale=0.05, size=(width, width))
    node("MatMul", "y", rows, paired("w", constant("weights", weights.astype(dtype)), bool({"o", "r"} & {*case.pairs})))
    shapes = {
        "q": [1, heads, case.positions, case.head],
        "k": [1, heads, case.head, case.positions],
        "v": [1, heads, case.positions, case.head],
    } | ({"mask": [1, 1, case.positions, case.positions]} if case.mask else {})
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", kind, [1, case.positions, width])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 if a case is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm89", help="the architecture to build for (sm89)")
    target = parser.parse_args(argv).target
    right = 0
    print("| case | TensorRT-RTX | what check says | as expected |\n| --- | --- | --- | --- |")
    with (
        TemporaryDirectory() as folder,
        temporary_runner(EngineSpec("tensorrt-rtx", {"target": target}), Execution(600)) as runner,
    ):
        for number, case in enumerate(CASES):
            file = Path(folder) / f"{number}.onnx"
            onnx.save(model_of(case), file)
            layers = runner.report(file, {}, 1, "case")
            if isinstance(layers, Failure):
                print(f"| {case.name} | {layers.reason} | | no |")
                continue
            found = list(splits(load(file), layers))
            said = "; ".join(split.reason for split in found)
            fits = case.says in said if case.says and found else not case.says and not found
            right += fits
            print(f"| {case.name} | {'split' if found else 'fused'} | {said} | {'yes' if fits else 'no'} |", flush=True)
    split = sum(bool(case.says) for case in CASES)
    print(f"\n{right} of {len(CASES)} as expected, {split} of them seeded faults")
    return int(right < len(CASES))


if __name__ == "__main__":
    sys.exit(main())
