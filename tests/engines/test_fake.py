import math
from pathlib import Path

import numpy as np
import pytest

from engine_contract import IMAGE, EngineContract, built_by, conv_model, model_of, quantized_conv_model
from models import build, run
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.fake import latency


class TestFake(EngineContract):
    spec = EngineSpec("fake")
    saved = None
    unmet = frozenset({"8 bits"})  # its model of costs fuses no product without a pair behind it


def test_pairs_on_constants_are_folded() -> None:
    constants = {"w": np.ones((64, 64), np.float32), "s": np.float32(0.1), "z": np.int8(0)}
    net = "n (float[8,64] x) => (float[8,64] y) { %s [mm] y = MatMul(x, %s) }"
    pair = "[q] wq = QuantizeLinear(w, s, z) [d] wd = DequantizeLinear(wq, s, z)"
    with_pair, without = (build(net % how, constants).to_proto() for how in ((pair, "wd"), ("", "w")))
    assert latency(with_pair) == latency(without)


def _samples(tmp_path: Path, count: int, **options: object) -> np.ndarray:
    built = built_by(open_engine(EngineSpec("fake", options)), conv_model(), tmp_path)
    return np.array([built.time(IMAGE, 1) for _ in range(count)]) / latency(conv_model())


def test_noise_follows_the_seed_and_the_call(tmp_path: Path) -> None:
    first = _samples(tmp_path, 50, seed=1, noise=0.05)
    assert (first == _samples(tmp_path, 50, seed=1, noise=0.05)).all()
    assert (first != _samples(tmp_path, 50, seed=2, noise=0.05)).all()
    assert (_samples(tmp_path, 5) == 1).all()
    noise = np.log(_samples(tmp_path, 2000, noise=0.05))
    assert math.isclose(noise.std(), 0.05, rel_tol=0.1)
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.1


def test_fake_runs_fp8(tmp_path: Path) -> None:
    engine = open_engine(EngineSpec("fake"))
    quantized = built_by(engine, quantized_conv_model(engine.numeric_format("fp8")), tmp_path).run(IMAGE)["y"]
    exact = built_by(engine, conv_model(), tmp_path).run(IMAGE)["y"]
    assert 0 < np.abs(quantized - np.clip(exact, 0, 4)).max() < 0.5


@pytest.mark.parametrize("opset", [10, 13, 19])
def test_fake_dequantizes_as_onnxruntime_does(opset: int, tmp_path: Path) -> None:
    """With and without zero point, and the scales of channels along any axis, in all opsets."""
    axis = "" if opset < 13 else "<axis=-1>"
    scale = np.float32(0.5) if opset < 13 else np.array([0.5, 2, 3, 0.1], np.float32)
    constants = {"q": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "s": np.asarray(scale),
                 "z": np.full(scale.shape, 9, np.uint8)}  # fmt: skip
    body = f"a = DequantizeLinear{axis}(q, s, z) b = DequantizeLinear{axis}(q, s) c = Add(a, b) y = Add(c, x)"
    model, feed = model_of(body, "2,3,4", constants, opset), {"x": np.ones((2, 3, 4), np.float32)}
    outputs = built_by(open_engine(EngineSpec("fake")), model, tmp_path).run(feed)
    (expected,) = run(model, [feed])
    np.testing.assert_array_equal(outputs["y"], expected["y"], strict=True)
