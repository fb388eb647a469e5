"""Calibration caches of known scales: whether every one arrives exactly, and whether TensorRT-RTX builds the result.

For each model a cache is written as TensorRT's calibrators do it: one line for every float tensor of the network that
its parser makes of the file, under the parser's own names, with a scale that follows from the name. `exact`, `derived`
and `left` are tensors with the scale of their own entry, with a neighbour's, and without one; `passed over` are entries
for constants and for tensors that only TensorRT has, `strange` all other entries that are not used. `pairs` are
activations with a pair by the rules, in float32 and float16: how many of them have the very scale of the file, rounded
to float16 in the latter. Then, in float16 with pairs, layers that run in 8 bits of all layers that compute, for an
RTX 4090 (sm89) and without a GPU: by the rules, and with --placement-like implicit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tensorrt_rtx_bindings as trt
import zoo

from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.matching import CONSTANT, TENSORRTS_OWN, from_file
from qdqtune.commands.quantize import quantize
from qdqtune.commands.quantize_options import QuantizeOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadModel
from qdqtune.graph.float16 import Precision, converted, load_for
from qdqtune.graph.loading import load
from qdqtune.types import Failure

COLUMNS = ("model", "entries", "exact", "derived", "left", "passed over", "strange", "pairs", "fp32 exact",
           "fp16 exact", "8-bit layers, rules", "implicit")  # fmt: skip
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")


class Silent(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: Any, message: str) -> None:
        pass


LOGGER = Silent()


def names(model: Path) -> Iterator[str]:
    """Every float tensor of the network that TensorRT's parser makes of a file, in its order."""
    network = trt.Builder(LOGGER).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, LOGGER)
    if not parser.parse_from_file(str(model)):
        raise SystemExit(f"{model}: {parser.get_error(0).desc()}")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [layer.get_output(k) for layer in layers for k in range(layer.num_outputs)]
    return (tensor.name for tensor in tensors if tensor.dtype == trt.float32)


def scale(name: str) -> np.float32:
    """A scale between 0.001 and 0.017, of the name."""
    return np.float32(0.001 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:3]) * 1e-9)


def write_cache(file: Path, tensors: list[str]) -> None:
    lines = [f"{name}: {struct.unpack('>I', struct.pack('>f', scale(name)))[0]:x}" for name in tensors]
    file.write_text("\n".join(["TRT-101600-EntropyCalibration2", *lines]))


def kept(file: Path, source: dict[str, str]) -> tuple[int, int]:
    """Activations with a pair, and those of them whose scale is exactly that of the entry that it comes from."""
    model = load(file)
    pairs = [node for node in model.nodes if node.op == "QuantizeLinear"]
    exact = 0
    for node in pairs:
        found = model.constants[node.inputs[1]].array()
        exact += found.tobytes() == scale(source[node.inputs[0]]).astype(found.dtype).tobytes()
    return len(pairs), exact


def sources(entry: zoo.Entry, cache: Path, precision: Precision) -> dict[str, str]:
    """The entry that the scale of each tensor comes from."""
    file = entry.path
    model = converted(load_for(file, precision, entry.fixed, 13), precision)
    matched = from_file(cache, model, file)
    origin = {name: name for name in matched.exact}
    pending = {name: words.split(", ")[0] for name, words in matched.derived.items()}
    for node in model.nodes:  # the casts of a conversion have the scale of what they convert
        if node.op == "Cast":
            pair = node.inputs[0], node.outputs[0]
            pending.update({a: b for a, b in (pair, pair[::-1]) if b in matched.exact and a not in origin})
    for name in pending:
        first = pending[name]
        while first in pending and first not in origin:
            first = pending[first]
        origin[name] = origin.get(first, first)
    return origin


def layers(runner: Runner, file: Path) -> str:
    handle = runner.load(file, file.stem)
    found = handle if isinstance(handle, Failure) else runner.layers(handle, 1)
    if isinstance(found, Failure):
        return f"refused: {found.reason}"
    computing = [layer for layer in found if layer.kind == "compute"]
    return f"{sum(layer.precision == 'INT8' for layer in computing)} of {len(computing)}"


def row(entry: zoo.Entry, folder: Path) -> list[str]:
    cache = folder / "calib.cache"
    tensors = list(dict.fromkeys(names(entry.path)))
    write_cache(cache, tensors)
    matched = from_file(cache, load(entry.path, fix_inputs=entry.fixed), entry.path)
    passed = sum(why in (CONSTANT, TENSORRTS_OWN) for why in matched.unused.values())
    cells = [entry.name, str(len(tensors)), str(len(matched.exact)), str(len(matched.derived)),
             str(len(matched.lacking)), str(passed), str(len(matched.unused) - passed)]  # fmt: skip
    exact = list[str]()
    for precision in PRECISIONS:
        output = folder / f"{precision}.onnx"
        how: dict[str, Any] = {"engine": "tensorrt-rtx", "calibration_cache": cache, "fix_inputs": entry.fixed}
        quantize(QuantizeOptions(entry.path, output=output, precision=precision, **how))
        pairs, same = kept(output, sources(entry, cache, precision))
        exact += [str(pairs)] * (not exact) + [str(same)]
    implicit = folder / "implicit.onnx"
    quantize(QuantizeOptions(entry.path, output=implicit, precision="fp16", placement_like="implicit", **how))
    shapes = {
        spec.name: [size or 1 for size in spec.shape] for spec in input_specs(load(entry.path, fix_inputs=entry.fixed))
    }
    spec = EngineSpec("tensorrt-rtx", {"target": "sm89", "opt_shapes": shapes})
    with Runner(spec, execution=Execution(600), log_dir=folder / "logs") as runner:
        return [*cells, *exact, *(layers(runner, folder / f"{name}.onnx") for name in ("fp16", "implicit"))]


def main() -> None:
    given = zoo.parser(__doc__, ()).parse_args()
    rows = []
    for entry in zoo.find(given.models, given.names):
        try:
            with TemporaryDirectory() as folder:
                rows.append(row(entry, Path(folder)))
        except BadModel as error:  # the rules may find nothing to quantize
            print(error, flush=True)
            continue
        print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
