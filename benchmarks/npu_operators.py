"""How exactly Qualcomm's NPU, in its simulator, computes single operators in 16 and in 8 bits: the SQNR against float,
beside that of ONNX Runtime's CPU with the same pairs. Values above zero are spread evenly in their logarithm. `<` marks
what loses more than 10 dB on the NPU.

python benchmarks/npu_operators.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import parser

from qdqtune import compare
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.loading import load_proto
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Array, Placement

LOSS_DB = 10.0
UNARY = {
    "Log": [(0.5, 4.0), (0.001, 4.0), (1.0, 3000.0)],
    "Exp": [(-3.0, 3.0), (0.0, 10.0)],
    "Sqrt": [(0.01, 4.0)],
    "Softplus": [(-0.5, 0.5), (-10.0, 10.0)],
    "Sigmoid": [(-10.0, 10.0)],
    "Tanh": [(-5.0, 5.0)],
    "Gelu": [(-6.0, 6.0)],
    "Elu": [(-6.0, 6.0)],
    "HardSwish": [(-10.0, 10.0)],
    "Softmax": [(-10.0, 10.0)],
    "Sin": [(-6.0, 6.0)],
    "Atan": [(-4.0, 4.0), (-0.04, 0.04)],
    "GlobalAveragePool": [(-4.0, 4.0)],
}
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "MatMul")
MORE = {
    "MaxPool": "MaxPool<kernel_shape=[2,2]>(x)",
    "CumSum": "CumSum(x, axis)",
    "DepthToSpace": "DepthToSpace<blocksize=2>(x)",
    "LpNormalization": "LpNormalization<axis=1>(x)",
}


def decibels(text: str, samples: dict[str, Array], folder: Path) -> list[list[float | None]]:
    """For 16 and 8 bits, the SQNR of an operator with pairs on the CPU and on the NPU; None where one refuses it."""
    inputs = ", ".join(f"float[1,4,32,32] {name}" for name in samples)
    axis = "<int64 axis = {2}>" if "axis)" in text else ""
    graph = f"n ({inputs}) => (float[a,b,c,d] y) {axis} {{ [op] y = {text} }}"
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {graph}')
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    results = [session.run(None, {n: a[[i]] for n, a in samples.items()})[0] for i in range(len(samples["x"]))]
    for size, dimension in zip(results[0].shape, proto.graph.output[0].type.tensor_type.shape.dim, strict=True):
        dimension.dim_value = size
    model = load_proto(proto)
    values = samples | {"y": np.concatenate(results)}
    known = Ranges({name: Range(float(array.min()), float(array.max())) for name, array in values.items()})
    save(model, folder / "float.onnx")
    np.savez(folder / "samples.npz", allow_pickle=False, **samples)
    edges, found = possible_edges(model, known), list[list[float | None]]()
    for wide in (edges, ()):
        save(insert(model, Placement.of(edges, (), wide), known, numeric_format("qnn", "int8")), folder / "pairs.onnx")
        row: list[float | None] = []
        for engine in ("onnxruntime", "qnn"):
            told = compare(
                folder / "float.onnx",
                folder / "pairs.onnx",
                calibration_data=folder / "samples.npz",
                engine=engine,
                threads=1,
            )
            row.append(told.rows[-1].sqnr_db)
        found.append(row)
    return found


def cell(cpu: float | None, npu: float | None) -> str:
    """Both numbers."""
    if cpu is None or npu is None:
        return "refused"
    return f"{cpu:.0f}, {npu:.0f}{' <' * (npu < cpu - LOSS_DB)}"


def main() -> None:
    draw = np.random.default_rng(0)
    cases = [
        (f"{op} of {low:g} to {high:g}", f"{op}(x)", (low, high)) for op, spans in UNARY.items() for low, high in spans
    ]
    cases += [(op, f"{op}(x, z)", (-4.0, 4.0)) for op in BINARY]
    cases += [(op, text, (-4.0, 4.0)) for op, text in MORE.items()]
    print("| operator | 16 bits: CPU, NPU (dB) | 8 bits |\n| --- | --- | --- |")
    for name, text, (low, high) in cases:
        shape = 2, 4, 32, 32
        spread = np.exp(draw.uniform(np.log(low), np.log(high), shape)) if low > 0 else draw.uniform(low, high, shape)
        samples = {"x": spread.astype(np.float32)}
        if "z" in text:
            samples["z"] = draw.uniform(0.2, 4.0, shape).astype(np.float32)
        with tempfile.TemporaryDirectory() as folder:
            wide, narrow = decibels(text, samples, Path(folder))
        print(f"| {name} | {cell(*wide)} | {cell(*narrow)} |", flush=True)


if __name__ == "__main__":
    main()
