"""No command prints a result below 20 dB without a word about it."""

from pathlib import Path

import numpy as np
import pytest

from conftest import Call
from models import build, feeds, normal
from qdqtune.graph.saving import save

WARNED = "below 20 dB a model"


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """A model whose outputs hang on the small values of an input of wide range: 8 bits leave nothing of them."""
    net = build(
        "net (float[2,256] x) => (float[2,256] y) "
        "{ [first] h = MatMul(x, w) [clip] c = Clip(h, a, b) [last] y = MatMul(c, v) }",
        {"w": normal(256, 256), "v": normal(256, 256, seed=1), "a": np.float32(-0.05),
         "b": np.float32(0.05)},
    )  # fmt: skip
    path = tmp_path / "loud.onnx"
    save(net, path)
    x = np.concatenate([sample["x"] for sample in feeds(net, 6)])
    x[0, 0] = 1e4
    np.savez(tmp_path / "data.npz", x=x.reshape(6, 2, 256))
    return path


def test_quantize_and_compare_warn(loud: Path, call: Call, tmp_path: Path) -> None:
    data = ("--calibration-data", loud.parent / "data.npz")
    quantized = tmp_path / "quantized.onnx"
    code, _, err = call("quantize", loud, *data, "-o", quantized)
    assert code == 0
    assert WARNED in err
    code, _, err = call("compare", loud, quantized, "--engine", "fake", *data)
    assert f"{quantized} against {loud}: the output SQNR is" in err
    assert WARNED in err


def test_tune_ships_no_such_model_unless_asked_to(loud: Path, call: Call, tmp_path: Path) -> None:
    tune = ("tune", loud, "--engine", "fake", "--builds", "8", "--calibration-data", loud.parent / "data.npz", "-q")
    code, _, err = call(*tune, "-o", tmp_path / "held")
    assert WARNED not in err
    held = code
    code, _, err = call(*tune, "-o", tmp_path / "free", "--min-sqnr", "none")
    assert code == 0
    assert WARNED in err
    assert held in (0, 4)
    placement = tmp_path / "free" / "placement.yaml"
    _, _, err = call("apply", loud, "--placement", placement, "--calibration-data", loud.parent / "data.npz",
                     "-o", tmp_path / "applied.onnx")  # fmt: skip
    assert WARNED in err
