"""Before a search begins: work that no pair can reach, and engines that time nothing here, with the way out."""

from pathlib import Path

import numpy as np
import pytest

from conftest import Call
from models import build, normal
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.graph.saving import save
from qdqtune.tuning.subject import check_device


def write(folder: Path, rates: list[int]) -> Path:
    path = folder / "model.onnx"
    text = """net (int64 rate, float[1,8] x) => (float[1,8] y) {
        [test] is_fast = Equal(rate, fast)
        [branch] y = If (is_fast) <
            then_branch = then_graph () => (float[1,8] a) { [one] a = MatMul(x, w) },
            else_branch = else_graph () => (float[1,8] b) { [two] b = MatMul(x, w) }
        >
    }"""
    save(build(text, {"fast": np.asarray(16000), "w": normal(8, 8)}), path)
    np.savez(path.with_suffix(".npz"), x=normal(len(rates), 1, 8), rate=np.asarray(rates))
    return path


HIDDEN = (
    "note: operators that gain from 8 bits (MatMul) are in bodies of If, where no pair can be: give the value that you "
    "deploy with, --fix-input rate=VALUE, and it is folded"
)


@pytest.mark.parametrize("more", [["--dry-run"], ["--builds", "4", "--calibration-method", "minmax"]])
def test_work_in_the_bodies_of_an_if_is_named_with_the_way_out(more: list[str], call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [16000, 8000])
    data = ("--calibration-data", path.with_suffix(".npz"))
    code, out, err = call("tune", path, "--engine", "fake", *data, *more, "-o", tmp_path / "out")
    assert HIDDEN in err
    if more == ["--dry-run"]:
        assert "builds: up to 1, " in out
    else:
        assert code == 3
        assert out.splitlines()[-1].startswith("Nothing was tried in ")


def test_the_option_that_is_named_helps(call: Call, tmp_path: Path) -> None:
    path = write(tmp_path, [16000] * 3)
    data = ("--calibration-data", path.with_suffix(".npz"))
    assert "--fix-input rate=16000," in call("quantize", path, *data, "-o", tmp_path / "q.onnx")[2]
    _, out, err = call(
        "tune", path, "--engine", "fake", *data, "--fix-input", "rate=16000", "--dry-run", "-o", tmp_path / "out"
    )
    assert "note: all operators" not in err
    assert "builds: up to 8, " in out


def test_a_model_that_is_quantized_already_is_told(call: Call, tmp_path: Path) -> None:
    text = "net (uint8[4,8] x) => (int32[4,8] y) { [product] y = MatMulInteger(x, w) }"
    save(build(text, {"w": np.ones((8, 8), np.int8)}), tmp_path / "m.onnx")
    _, _, err = call("tune", tmp_path / "m.onnx", "--engine", "fake", "--dry-run", "-o", tmp_path / "out")
    assert "quantized already, and its integer operators (MatMulInteger) stay: tune the float model" in err


class Described:
    """A runner that only describes its engine."""

    def __init__(self, device: str | Exception) -> None:
        self._device = device

    def describe(self) -> dict[str, str]:
        if isinstance(self._device, Exception):
            raise self._device
        return {"device": self._device}


@pytest.mark.parametrize("engine", ["tensorrt", "trtexec", "tensorrt-rtx"])
@pytest.mark.parametrize("device", ["none", EngineUnavailable("TensorRT cannot be loaded")])
def test_without_a_gpu_the_error_names_other_commands(engine: str, device: str | Exception) -> None:
    way = "quantize MODEL --engine tensorrt.*check quantized.onnx --engine tensorrt-rtx --engine-option target=sm89"
    with pytest.raises(EngineUnavailable, match=way):
        check_device(EngineSpec(engine), Described(device))


def test_engines_with_a_device_are_accepted() -> None:
    check_device(EngineSpec("onnxruntime"), Described("CPU"))
    for error in (EngineUnavailable("no plug-in"), BadOption("no such option")):
        with pytest.raises(type(error), match=rf"^{error}$"):
            check_device(EngineSpec("openvino"), Described(error))
