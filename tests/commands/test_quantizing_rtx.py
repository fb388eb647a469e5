"""TensorRT-RTX takes what `quantize` writes for TensorRT, without a GPU, and runs it in 8 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaded_modules import CUDA, absent
from models import attention, build, conv_net, normal
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.commands.doctor import model_of, transformer
from qdqtune.commands.quantize import Quantized, QuantizeOptions, quantize
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Layer
from sample_files import cache_of_scales
from workers import Workers

pytest.importorskip("tensorrt_rtx_bindings")

PASSING = """net (float[1,32,16,16] x) => (float[1,32,8,8] y) {
    [left] l = Conv <pads=[1,1,1,1]> (x, w)
    [gate] g = Sigmoid(l)
    [swish] s = Mul(l, g)
    [pool] m = MaxPool <kernel_shape=[2,2], strides=[2,2]> (s)
    [right] r = Conv <pads=[1,1,1,1]> (m, w)
    [add] a = Add(r, m)
    [up] u = Resize <mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"> (a, , scales)
    [down] d = AveragePool <kernel_shape=[2,2], strides=[2,2]> (u)
    [concat] c = Concat <axis=1> (a, d)
    [last] y = Conv <pads=[1,1,1,1]> (c, wide)
}"""

NEXT = """net (float[1,3,16,16] x) => (float[1,64,4,4] y) {
    [stem] p = Conv <strides=[2,2]> (x, w0)
    [turn] t = Transpose <perm=[0,2,3,1]> (p)
    [norm] n = LayerNormalization <axis=-1> (t, g, b)
    [up] u = MatMul(n, w1)
    [down] m = MatMul(u, w2)
    [add] a = Add(t, m)
    [norm2] n2 = LayerNormalization <axis=-1> (a, g, b)
    [back] c = Transpose <perm=[0,3,1,2]> (n2)
    [shrink] y = Conv <strides=[2,2]> (c, w3)
}"""


def passing() -> Model:
    """SiLU, a pool, a residual, a Resize, an average pool and a Concat between convolutions."""
    return build(PASSING, {"w": normal(32, 32, 3, 3, scale=0.1), "wide": normal(32, 64, 3, 3, scale=0.1),
                           "scales": np.float32([1, 1, 2, 2])})  # fmt: skip


def convnext() -> Model:
    """LayerNormalization behind a convolution, and behind a residual Add in front of one."""
    return build(NEXT, {"w0": normal(32, 3, 2, 2), "w1": normal(32, 64, scale=0.1), "w2": normal(64, 32, scale=0.1),
                        "w3": normal(64, 32, 2, 2, scale=0.1), "g": np.ones(32, "f"), "b": normal(32)})  # fmt: skip


LOUD = """net (float[1,32,16,16] x) => (float[1,32,16,16] y) {
    [left] l = Conv <pads=[1,1,1,1]> (x, w)
    [square] s = Mul(l, l)
    [root] r = Sqrt(s)
    [right] y = Conv <pads=[1,1,1,1]> (r, w)
}"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    """As on a machine without a GPU, also where there is one."""
    absent(monkeypatch, CUDA)


def quantized_layers(model: Model, folder: Path, **options: Any) -> tuple[Quantized, tuple[Layer, ...]]:
    """What `quantize` tells of a model, and the layers of what it wrote."""
    save(model, folder / "model.onnx")
    output = folder / "q.onnx"
    done = quantize(QuantizeOptions(folder / "model.onnx", output=output, engine="tensorrt-rtx", **options))
    shapes = {name: [d or 2 for d in model.tensors[name].shape or ()] for name in model.inputs}
    engine = open_engine(EngineSpec("tensorrt-rtx", {"target": "sm89", "opt_shapes": shapes}))
    return done, engine.build(output, folder / "build.log").layers({}, 1)


def heads() -> Model:
    """Attention whose products all run in 8 bits."""
    return load_proto(model_of(transformer(32)))


@pytest.mark.parametrize(
    ("make", "quant_type", "precision"),
    [(passing, "int8", "fp16"), (passing, "fp8", "fp32"), (convnext, "int8", "fp32"), (convnext, "fp8", "fp16"),
     (heads, "int8", "fp16"), (heads, "fp8", "fp16"), (attention, "int8", "fp32"), (conv_net, "int8", "fp32")],
)  # fmt: skip
def test_it_builds_and_runs_in_8_bits(make: Any, quant_type: str, precision: str, tmp_path: Path) -> None:
    _, layers = quantized_layers(make(), tmp_path, quant_type=quant_type, precision=precision)
    assert {quant_type.upper(), precision.upper()} <= {layer.precision for layer in layers}
    if make is heads:  # with pairs on its inputs alone, that of queries, keys and values runs in float16
        products = [layer for layer in layers if any("matmul" in node for node in layer.nodes)]
        assert {layer.precision for layer in products} == {quant_type.upper()}


def test_scales_of_a_calibration_cache_build_and_run_in_8_bits(tmp_path: Path) -> None:
    model, cache = passing(), tmp_path / "calib.cache"
    cache_of_scales(cache, {tensor: 0.0137 + 1e-6 * n for n, tensor in enumerate(candidate_tensors(model))})
    _, layers = quantized_layers(model, tmp_path, precision="fp16", calibration_cache=cache)
    convolutions = [layer for layer in layers if {"left", "right", "last"}.intersection(layer.nodes)]
    assert [layer.precision for layer in convolutions] == ["INT8"] * 3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_with_nodes_in_float32_builds(precision: str, tmp_path: Path) -> None:
    model = build(LOUD, {"w": normal(32, 32, 3, 3, scale=20.0)})
    done, layers = quantized_layers(model, tmp_path, precision=precision)
    kept = [note for note in done.notes if "square (s reaches" in note and "root (s reaches" in note]
    assert len(kept) == (1 if precision == "fp16" else 0)
    assert {n for layer in layers if layer.precision == "INT8" for n in layer.nodes} >= {"left", "right"}
