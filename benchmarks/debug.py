"""`debug` on files with one seeded fault each: whether the tensor is named.

Each model is quantized by `quantize`; then a pair is drawn, of an activation, a weight or a bias, and spoiled: its
scale off by 2^3 to 2^6 or 2^-3 to 2^-6, its zero point off by a quarter to a half of all steps, or its scale NaN (of a
weight: of one channel). The limit is 20 dB, or 3 dB below what the sane file has where that is less than 23. A fault
that leaves the outputs above the limit breaks nothing: another one is drawn, and 'harmless' counts them.
'others' are tensors named beside the fault, which break the limit
by themselves, or make half of the error that is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import zoo
from onnx import numpy_helper

from qdqtune.commands.debug import DebugOptions, Diagnosis, debug
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines import EngineSpec
from qdqtune.numerics.accuracy import FLOOR_DB
from qdqtune.types import Array

COLUMNS = (
    "model",
    "pairs",
    "sane dB",
    "limit dB",
    "fault",
    "tensor",
    "broken dB",
    "named",
    "others",
    "harmless",
)
KINDS = ("scale", "zero point", "NaN")
DRAWS = 20


def initializers(model: onnx.ModelProto) -> Mapping[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def spoiled(sane: Path, file: Path, kind: str, rng: np.random.Generator) -> tuple[str, str]:
    """Write `sane` with a fault of a kind; the tensor that it is in, and what it is."""
    model = onnx.load(sane)
    pairs = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    if kind == "zero point":
        known = initializers(model)
        pairs = [n for n in pairs if known[n.input[2]].data_type != onnx.TensorProto.INT32]
    node = pairs[rng.integers(len(pairs))]
    tensor = initializers(model)[node.input[2 if kind == "zero point" else 1]]
    values, told = changed(numpy_helper.to_array(tensor), kind, rng)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, file)
    source = next((n.input[0] for n in model.graph.node if n.output[0] == node.input[0]), None)
    name = source or node.input[0].removesuffix("_quantized")
    return name.removesuffix("_QuantizeLinear_Input"), told


def changed(values: Array, kind: str, rng: np.random.Generator) -> tuple[Array, str]:
    if kind == "zero point":
        ends = np.iinfo(values.dtype)
        steps = int(rng.integers(64, 129))
        up = int(values.max()) + steps <= ends.max
        shifted = np.clip(values.astype(int) + (steps if up else -steps), ends.min, ends.max)
        return shifted.astype(values.dtype), f"zero point {steps if up else -steps:+d}"
    if kind == "NaN":
        broken = np.array(values)
        broken[rng.integers(values.size) if values.ndim else ()] = np.nan
        return broken, "NaN"
    power = int(rng.integers(3, 7)) * int(rng.choice((-1, 1)))
    return (values * np.float32(2.0**power)).astype(values.dtype), f"scale 2^{power}"


def rows(entry: zoo.Entry, faults: int, spec: EngineSpec, seed: int, first: int) -> list[list[str]]:
    """A row for each fault of one model."""
    found = []
    with TemporaryDirectory() as name:
        sane, file = Path(name) / "sane.onnx", Path(name) / "broken.onnx"
        how: dict[str, Any] = {"engine": spec.name, "calibration_data": entry.data, "fix_inputs": entry.fixed}
        quantize(QuantizeOptions(entry.path, output=sane, **how))
        level = -10 * log10(debug(DebugOptions(entry.path, quantized=sane, min_sqnr=-100.0, **how)).noise)
        limit = min(FLOOR_DB, level - 3)
        rng = np.random.default_rng((seed, *map(ord, entry.name)))
        for number in range(first, first + faults):
            harmless = 0
            while True:
                tensor, told = spoiled(sane, file, KINDS[number % len(KINDS)], rng)
                done = debug(DebugOptions(entry.path, quantized=file, min_sqnr=limit, **how))
                if not done.is_healthy or harmless == DRAWS - 1:
                    break
                harmless += 1
            if done.is_healthy:
                print(f"{entry.name}: {DRAWS} faults of kind {KINDS[number % len(KINDS)]} and none does harm")
                continue
            found.append([entry.name, *row(done, tensor, told, level, limit), str(harmless)])
            print("  ".join(found[-1]), flush=True)
    return found


def row(done: Diagnosis, tensor: str, told: str, level: float, limit: float) -> list[str]:
    named = [suspect.tensor for suspect in done.guilty]
    return [
        str(done.pairs),
        f"{level:.1f}",
        f"{limit:.1f}",
        told,
        tensor.rpartition("/")[2],
        f"{-10 * log10(done.noise):.1f}",
        "yes" if tensor in named else "NO",
        str(len(named) - (tensor in named)),
    ]


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--faults", type=int, default=2, help="faults of each model (%(default)s)")
    arguments.add_argument("--engine", default="onnxruntime", help="engine (%(default)s)")
    arguments.add_argument("--seed", type=int, default=0, help="of the faults (%(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    table: list[list[str]] = []
    for entry in zoo.find(given.models, given.names):
        table += rows(entry, given.faults, EngineSpec(given.engine), given.seed, len(table))
    zoo.print_table(COLUMNS, table)
    named = sum(line[7] == "yes" for line in table)
    alone = [line for line in table if line[8] == "0" and line[7] == "yes"]
    print(f"named {named} of {len(table)}, {len(alone)} of them alone")


if __name__ == "__main__":
    main()
