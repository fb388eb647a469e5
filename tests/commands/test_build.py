"""`build`: what an engine saves of a model arrives whole, and replaces nothing that is read."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from engine_contract import IMAGE, conv_model
from qdqtune.commands import build as building
from qdqtune.engines import open_engine
from qdqtune.errors import EngineFailure
from qdqtune.system.checks import HEAD, LIST


def test_build_writes_what_the_engine_saves(call, float_file, tmp_path):
    target = tmp_path / "built.onnx"
    code, out, err = call("build", float_file, "-o", target)
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: an optimized ONNX file, 0.0 MB, built in ")
    outputs = ReferenceEvaluator(conv_model()).run(None, IMAGE)
    session = open_engine(building.EngineSpec("onnxruntime")).build(target, tmp_path / "log")
    np.testing.assert_allclose(session.run(IMAGE)["y"], outputs[0], atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LIST, "built.onnx", "float.onnx", "log"]


@pytest.mark.parametrize("threshold", [0, 64, 2**20])
@pytest.mark.parametrize("location", ["weights.bin", "built.onnx.data", "sub/weights.bin"])
def test_a_model_with_external_data_is_built(threshold, location, call, tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "out" / "built.onnx"
    onnx.save(conv_model(), source, save_as_external_data=True, location=location, size_threshold=threshold)
    code, _, err = call("build", source, "-o", target)
    assert (code, err) == (0, "")
    shutil.rmtree(tmp_path / "in")
    session = open_engine(building.EngineSpec("onnxruntime")).build(target, tmp_path / "log")
    np.testing.assert_allclose(session.run(IMAGE)["y"], ReferenceEvaluator(conv_model()).run(None, IMAGE)[0], atol=1e-4)


@dataclass
class Saves:
    """An engine that writes a file with another one beside it, or refuses."""

    refusal: str = ""

    def describe(self) -> dict[str, str]:
        return {}

    def build(self, model: Path, log: Path) -> "Saves":
        return self

    def save(self, path: Path) -> None:
        path.write_text("half")
        if self.refusal:
            raise EngineFailure(self.refusal)
        path.with_suffix(".bin").write_text("weights")


def test_all_files_that_an_engine_writes_arrive(call, float_file, tmp_path, workers):
    workers.opener = lambda _: Saves()
    asked = ("build", float_file, "-o", tmp_path / "m.xml", "--engine", "openvino")
    code, out, _ = call(*asked)
    assert code == 0
    assert out.startswith(f"{tmp_path}/m.bin and {tmp_path}/m.xml: an OpenVINO IR, ")
    assert (tmp_path / "m.bin").read_text() == "weights"
    told = json.loads(call(*asked, "--json")[1])
    assert told.pop("seconds") >= 0
    assert told == {
        "engine": "openvino", "files": [f"{tmp_path}/m.bin", f"{tmp_path}/m.xml"], "bytes": len("halfweights")
    }  # fmt: skip


def test_weights_of_the_model_are_never_replaced(call, tmp_path, workers):
    workers.opener = lambda _: Saves()
    onnx.save(conv_model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    before = (tmp_path / "m.bin").read_bytes()
    code, out, err = call("build", tmp_path / "m.onnx", "-o", tmp_path / "m.xml", "--engine", "openvino")
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path}/m.bin would overwrite the model: choose another --output\n"
    assert (tmp_path / "m.bin").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.onnx"]


def test_a_failed_build_leaves_what_was_there(call, float_file, tmp_path, workers):
    target = tmp_path / "m.plan"
    target.write_text("ftrt good")
    (tmp_path / LIST).write_text(f"{HEAD}\nm.plan (build)\n")
    workers.opener = lambda _: Saves("TensorRT: no")
    code, _, err = call("build", float_file, "-o", target, "--engine", "tensorrt")
    assert (code, err) == (5, "error: TensorRT: no\n")
    assert target.read_text() == "ftrt good"
    assert sorted(p.name for p in tmp_path.iterdir()) == [LIST, "float.onnx", "m.plan"]


def test_an_engine_without_a_format_names_those_that_have_one(call, float_file, tmp_path):
    code, _, err = call("build", float_file, "-o", tmp_path / "m", "--engine", "fake")
    able = "onnxruntime, openvino, tensorrt, tensorrt-rtx, trtexec, cuda"
    assert (code, err) == (5, f"error: engine 'fake' has no format of its own to save; these have: {able}\n")
