"""Rewrites of the float model in `quantize`, `apply` and `debug`: what is written, and that it is found again."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build, normal
from qdqtune.calibration.scales import Calibration
from qdqtune.commands.apply import ApplyOptions, apply
from qdqtune.commands.debug import DebugOptions, Diagnosis, debug
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.files import PlacementFile, read_placement_file, write_placement
from runs import write

pytestmark = pytest.mark.usefixtures("workers")

MINMAX = Calibration("minmax")
PLAIN: dict[str, Any] = {"calibration_method": "minmax", "bias_correction": False}
"""The same as options."""


def normalized(seed: int = 0) -> Model:
    """Two convolutions, each with a BatchNormalization behind it."""
    text = """net (float[N,3,8,8] image) => (float[N,8] y) {
        [first] c0 = Conv <pads=[1,1,1,1]> (image, w0)
        [first_norm] n0 = BatchNormalization(c0, g0, b0, m0, v0)
        [relu] r0 = Relu(n0)
        [second] c1 = Conv(r0, w1, b)
        [second_norm] n1 = BatchNormalization(c1, g1, b1, m1, v1)
        [mean] p = GlobalAveragePool(n1)
        [flat] y = Flatten(p)
    }"""
    norms = {f"{name}{i}": normal(8, seed=10 * i + k + seed) for i in range(2) for k, name in enumerate("gbm")}
    norms |= {f"v{i}": np.abs(normal(8, seed=i + seed)) + np.float32(0.2) for i in range(2)}
    return build(
        text, {"w0": normal(8, 3, 3, 3, scale=0.3), "w1": normal(8, 8, 3, 3, scale=0.2), "b": normal(8), **norms}
    )


def written(model: Model, folder: Path, name: str = "model") -> QuantizeOptions:
    path = write(model, folder, name, count=5)
    data = str(path.with_suffix(".npz"))
    return QuantizeOptions(path, output=folder / f"{name}.q.onnx", calibration_data=data, **PLAIN)


def asked(retrained: QuantizeOptions, target: Path) -> ApplyOptions:
    """The placement beside `target` on that model."""
    data, placement = retrained.calibration_data, target.with_name("placement.yaml")
    return ApplyOptions(retrained.model, output=target, calibration_data=data, placement=placement)


def looking(request: QuantizeOptions) -> Diagnosis:
    """What `debug` says of what `quantize` has written, none of which is good enough."""
    data, quantized = request.calibration_data, request.output
    return debug(DebugOptions(request.model, quantized=quantized, min_sqnr=60.0, calibration_data=data))


def ops(path: Path) -> Counter[str]:
    return Counter(node.op for node in load(path).nodes)


@pytest.mark.parametrize(("said", "left"), [("auto", 0), ("off", 2)])
def test_quantize_folds_unless_told_otherwise_and_debug_finds_it(said: str, left: int, tmp_path: Path) -> None:
    request = replace(written(normalized(), tmp_path), rewrites=said)
    done = quantize(request)
    assert ops(request.output)["BatchNormalization"] == left
    assert done.sqnr_db is not None
    assert done.sqnr_db > 25
    looked = looking(request)
    assert looked.by_numbers == pytest.approx(looked.noise, rel=0.5)


def test_apply_folds_retrained_weights_as_the_placement_says(tmp_path: Path) -> None:
    request = written(normalized(), tmp_path)
    placement = quantize(request).placed.placement
    retrained = written(normalized(seed=7), tmp_path, "retrained")
    expected = load(quantize(retrained).output)
    for made in (Rewrites(folded=True), Rewrites()):
        recorded = PlacementFile(placement, "int8", "onnxruntime", {}, MINMAX, made)
        write_placement(tmp_path / "placement.yaml", recorded, "model.onnx")
        target = tmp_path / "applied.onnx"
        done = apply(asked(retrained, target))
        assert not done.lost  # edges keep their names either way
        assert ops(target)["BatchNormalization"] == (0 if made.folded else 2)
        same = {name: c.array().tolist() for name, c in load(target).constants.items()}
        assert (same.keys() == expected.constants.keys()) is made.folded


def swishing(seed: int = 0) -> Model:
    """Two products with a HardSwish of four nodes between them."""
    text = """net (float[N,16] x) => (float[N,8] y) {
        [first] c = MatMul(x, w) [plus] a = Add(c, three) [clip] b = Clip(a, zero, six) [times] d = Mul(c, b)
        [sixth] e = Div(d, six) [second] y = MatMul(e, v)
    }"""
    numbers = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    return build(text, {"w": normal(16, 32, seed=seed), "v": normal(32, 8, seed=seed), **numbers})


def test_named_rewrites_are_made_again_by_apply_and_found_by_debug(tmp_path: Path) -> None:
    request = replace(written(swishing(), tmp_path), rewrites="hardswish")
    done = quantize(request)
    assert ops(request.output)["HardSwish"] == 1
    assert ops(request.output)["Clip"] == 0
    recorded = PlacementFile(done.placed.placement, "int8", "onnxruntime", {}, MINMAX, Rewrites(names=("hardswish",)))
    write_placement(tmp_path / "placement.yaml", recorded, "model.onnx")
    assert read_placement_file(tmp_path / "placement.yaml").rewrites == recorded.rewrites
    retrained, target = written(swishing(seed=7), tmp_path, "retrained"), tmp_path / "applied.onnx"
    again = apply(asked(retrained, target))
    assert not again.lost
    assert ops(target)["HardSwish"] == 1
    looked = looking(request)
    assert looked.by_numbers == pytest.approx(looked.noise, rel=0.5)
