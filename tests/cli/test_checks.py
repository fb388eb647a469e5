"""`qdqtune build` and `qdqtune check` as a user meets them."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from conftest import Call
from engine_contract import IMAGE, conv_model, quantized_conv_model
from models import INT8, UINT8, build, normal
from qdqtune.cli import checks
from qdqtune.commands import build as building
from qdqtune.engines import MODULES, open_engine
from qdqtune.errors import EngineFailure
from qdqtune.explanation.findings import Finding, allow
from runs import write

DATA = Path(__file__).parents[1] / "data" / "tensorrt"


@pytest.fixture
def float_file(tmp_path: Path) -> Path:
    onnx.save(conv_model(), tmp_path / "float.onnx")
    return tmp_path / "float.onnx"


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    """A model that engines with symmetric numbers fuse."""
    onnx.save(quantized_conv_model(INT8), tmp_path / "fused.onnx")
    return tmp_path / "fused.onnx"


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """The same without the pair on its result."""
    model = quantized_conv_model(INT8)
    last, _ = model.graph.node.pop(), model.graph.node.pop()
    model.graph.node[-1].output[0] = last.output[0]
    onnx.save(model, tmp_path / "spoiled.onnx")
    return tmp_path / "spoiled.onnx"


# check


def test_a_fused_model_passes(call, fused):
    code, out, err = call("check", fused, "--engine", "fake")
    assert (code, err) == (0, "")
    *notes, last = out.splitlines()
    assert notes[::2] == [
        "first Q behind a float input of the model",
        "last DQ in front of a float output of the model",
    ]
    assert [note.split()[0] for note in notes[1::2]] == ["boundary", "boundary"]
    assert last.startswith(f"{fused} on fake: 2 tensors with a Q/DQ pair, 1 of 3 layers in 8 bits; 0 findings, 2 notes")


def test_a_model_that_is_not_fused_fails_with_nodes_reason_and_times(call, spoiled):
    code, out, _ = call("check", spoiled, "--engine", "fake")
    assert code == 4
    head, *lines, last, advice = out.splitlines()
    assert head == "conv (Conv) runs in float: its output carries no pair on the way to the model's output"
    assert [line.split()[:2] for line in lines] == [
        ["float", "compute"],
        ["standalone", "pair"],
        ["standalone", "pair"],
    ]
    assert [line.split()[-1] for line in lines] == ["conv", "QuantizeLinear_0", "DequantizeLinear_1"]
    assert all(" ms " in line for line in lines)
    assert "3 findings, 0." in last
    assert " ms, 0 notes" in last
    accepted = re.match(r"what is meant to be so is accepted with --allow-boundary (\S+), all of it with", advice)
    assert accepted is not None
    assert call("check", spoiled, "--engine", "fake", "--allow-boundary", accepted[1])[0] == 0


def test_findings_without_a_name_are_accepted_all_together():
    nameless = Finding("standalone pair", "cast", (), 0.1, "the engine names no node for it")
    (advice,) = checks._advice([nameless], measured=False)
    assert advice.startswith("what is meant to be so is accepted with --allow-boundary '*';")
    assert not any(f.fails for f in allow([nameless], ["*"]))


def test_check_as_json(call, spoiled):
    code, out, _ = call("check", spoiled, "--engine", "fake", "--json", "--runs", 1)
    found: dict[str, Any] = json.loads(out)
    assert code == 4
    assert list(found) == ["model", "engine", "pairs", "layers", "layers_in_8_bits", "time_ms", "failing", "findings",
                           "passes", "measured"]  # fmt: skip
    assert not found["measured"]
    assert (found["engine"], found["pairs"], found["layers"], found["failing"]) == ("fake", 2, 3, 3)
    assert found["time_ms"] == pytest.approx(sum(f["time_ms"] for f in found["findings"]))
    assert found["findings"][0] == {
        "kind": "standalone pair", "layer": "QuantizeLinear_0", "nodes": ["QuantizeLinear_0"],
        "time_ms": found["findings"][0]["time_ms"], "cause": "conv", "fails": True,
        "reason": "conv (Conv) runs in float: its output carries no pair on the way to the model's output",
    }  # fmt: skip


def test_allowed_boundaries(call, spoiled):
    code, out, _ = call(
        "check", spoiled, "--engine", "fake", "--json", "--allow-boundary", "Q*", "--allow-boundary", "D*"
    )
    assert code == 4
    assert [f["kind"] for f in json.loads(out)["findings"] if f["fails"]] == ["float compute"]


RESIDUE = """net (float[64,64] x) => (float[64,64] y) {
    [first] a = MatMul(x, w0)
    [softmax] b = Softmax(a)
    [second] y = MatMul(b, w1)
}"""


@pytest.fixture
def tuned(call: Call, tmp_path: Path) -> Path:
    """The result of a tuning run whose optimum keeps conversions around a Softmax."""
    write(build(RESIDUE, {"w0": normal(64, 4096, scale=0.1), "w1": normal(4096, 64, scale=0.1)}), tmp_path)
    data = ["--calibration-data", tmp_path / "model.npz", "--calibration-method", "minmax", "--no-bias-correction"]
    assert call("tune", tmp_path / "model.onnx", "--engine", "fake", *data, "-o", tmp_path / "out", "-q")[0] == 0
    return tmp_path / "out" / "optimized_final.onnx"


def test_what_a_tuning_run_has_measured_does_not_fail(call, tuned):
    code, out, _ = call("check", tuned, "--engine", "fake")
    *_, last, advice = out.splitlines()
    assert code == 0
    assert re.search(r"; [1-9]\d* findings, ", last)
    assert advice.startswith("these pairs were measured on this engine")
    code, out, _ = call("check", tuned, "--engine", "fake", "--json")
    found = json.loads(out)
    assert (code, found["measured"], found["failing"]) == (0, True, 0)
    assert any(f["kind"] != "boundary" for f in found["findings"])


def test_elsewhere_the_same_pairs_fail(call, tuned, tmp_path):
    """Away from the records, on an engine that differs, with other pairs, and with damaged records."""
    copy = shutil.copy(tuned, tmp_path / "copy.onnx")
    assert call("check", copy, "--engine", "fake")[0] == 4
    assert call("check", tuned, "--engine", "fake", "--engine-option", "asymmetric=true")[0] == 4
    placement = tuned.with_name("placement.yaml")
    lines = placement.read_text().splitlines(keepends=True)
    for damaged in ("".join(lines[:-1]), "version: 0\n"):
        placement.write_text(damaged)
        assert call("check", tuned, "--engine", "fake")[0] == 4
    placement.write_text("".join(lines))
    assert call("check", tuned, "--engine", "fake")[0] == 0
    summary = tuned.with_name("summary.json")
    for damaged in ("no JSON", "[]", json.dumps(json.loads(summary.read_text()) | {"shipped": "baseline"})):
        summary.write_text(damaged)
        assert call("check", tuned, "--engine", "fake")[0] == 4


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_a_float_model_has_no_pairs_and_runs_nothing(json_flag, call, float_file, workers):
    code, out, err = call("check", float_file, *json_flag)
    assert (code, err) == (0, "")
    if json_flag:
        assert (json.loads(out)["pairs"], json.loads(out)["findings"]) == (0, [])
    else:
        assert out == f"{float_file}: no pairs, nothing to check\n"
    assert workers.started == 0


def test_onnxruntime_fuses_its_own_format_and_says_what_it_misses(call, tmp_path):
    path = tmp_path / "m.onnx"
    model = quantized_conv_model(UINT8)  # its zero points are in the middle, so that the Relu has work to do
    onnx.save(model, path)
    code, out, _ = call("check", path, "--input-shape", "x:1x4x8x8", "--json")
    failing = {f["kind"]: f for f in json.loads(out)["findings"] if f["fails"]}
    assert code == 4
    assert failing["float compute"]["reason"] == (
        "conv (Conv) runs in float: relu (Relu) behind it has to run, since QuantizeLinear_6 keeps values below 0"
    )
    assert failing["float compute"]["nodes"] == ["conv"]
    assert failing["standalone pair"]["cause"] == "conv"
    zero = next(t for t in model.graph.initializer if t.name == "z")
    zero.CopyFrom(onnx.helper.make_tensor("z", onnx.TensorProto.UINT8, [], [0]))
    onnx.save(model, path)
    code, out, _ = call("check", path, "--input-shape", "x:1x4x8x8", "--json")
    found = json.loads(out)
    assert (code, found["failing"]) == (0, 0)
    assert found["layers_in_8_bits"] >= 1
    assert found["time_ms"] > 0


def exported(folder: Path, case: str) -> Path:
    text = gzip.decompress((DATA / "rtx1.7_sm89.json.gz").read_bytes())
    path = folder / "layers.json"
    path.write_text(json.dumps(json.loads(text)[case]))
    return path


def test_a_tensorrt_report(call, tmp_path):
    model = DATA / "int8_conv_relu_add_fp16.onnx"
    code, out, _ = call("check", model, "--graph-json", exported(tmp_path, model.stem), "--json")
    found = json.loads(out)
    assert (code, found["engine"], found["time_ms"], found["failing"]) == (0, "tensorrt", None, 0)
    assert [(f["kind"], f["nodes"]) for f in found["findings"]] == [("boundary", ["xd_Q"])]
    code, out, _ = call("check", model, "--graph-json", tmp_path / "layers.json")
    assert code == 0
    assert out.splitlines()[1].split() == ["boundary", "xd_Q"]


def test_an_fp8_report(call, tmp_path):
    model = DATA / "fp8_attention.onnx"
    code, out, _ = call("check", model, "--graph-json", exported(tmp_path, model.stem), "--json")
    assert code == 0
    assert {tuple(f["nodes"]) for f in json.loads(out)["findings"]} >= {("qd_Q",), ("vd_Q",)}


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["missing.onnx"], 2, "missing.onnx: cannot read the model: No such file or directory"),
    (["float.onnx", "--profile-json", "p.json"], 2, "--profile-json goes with --graph-json"),
    (["fused.onnx", "--engine", "nonsense"], 2, "unknown engine 'nonsense'; there are"),
    (["fused.onnx", "--engine", "trtexec", "--engine-option", "trtexec=no-such-program"], 5,
     "there is no program 'no-such-program'"),
    (["fused.onnx", "--graph-json", "none.json"], 2, "cannot read the layer information none.json: No such file"),
    (["fused.onnx", "--engine", "fake", "--engine-option", 'faults={"refuse": "*"}'], 5,
     "fused.onnx cannot be checked: fake engine: no implementation for a quantized node"),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(arguments, code, words, call, fused, float_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, out, err = call("check", *arguments)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {words}")


# build


def test_build_writes_what_the_engine_saves(call, float_file, tmp_path):
    target = tmp_path / "built.onnx"
    code, out, err = call("build", float_file, "-o", target)
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: an optimized ONNX file, 0.0 MB, built in ")
    outputs = ReferenceEvaluator(conv_model()).run(None, IMAGE)
    session = open_engine(building.EngineSpec("onnxruntime")).build(target, tmp_path / "log")
    np.testing.assert_allclose(session.run(IMAGE)["y"], outputs[0], atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["built.onnx", "float.onnx", "log"]


def test_build_as_json(call, float_file, tmp_path):
    code, out, _ = call("build", float_file, "--output", tmp_path / "b.onnx", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["seconds"] > 0
    assert (told["engine"], told["files"], told["bytes"]) == (
        "onnxruntime", [str(tmp_path / "b.onnx")], (tmp_path / "b.onnx").stat().st_size
    )  # fmt: skip


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


@pytest.mark.parametrize("engine", building.FORMATS)
@pytest.mark.parametrize("suffix", [*building.SUFFIXES, "", ".bin"])
def test_a_suffix_that_says_something_else_is_told(engine, suffix):
    told = building.Artifact(engine, (Path(f"d{suffix}"),), 0, 0.0).in_words()
    assert told.startswith(f"d{suffix}: {building.FORMATS[engine]}")
    usual = {"onnxruntime": [".onnx"], "openvino": [".xml"]}.get(engine, [".plan", ".engine", ".trt"])
    assert (f"in spite of the suffix {suffix}," in told) is (suffix in set(building.SUFFIXES) - set(usual))


@dataclass
class Saves:
    """An engine that writes a file with another one beside it, or refuses."""

    refusal: str = ""

    def describe(self) -> dict[str, str]:
        return {}

    def build(self, model: Path, log: Path) -> Saves:
        return self

    def save(self, path: Path) -> None:
        path.write_text("half")
        if self.refusal:
            raise EngineFailure(self.refusal)
        path.with_suffix(".bin").write_text("weights")


def test_all_files_that_an_engine_writes_arrive(call, float_file, tmp_path, workers):
    workers.opener = lambda _: Saves()
    code, out, _ = call("build", float_file, "-o", tmp_path / "m.xml", "--engine", "openvino")
    assert code == 0
    assert out.startswith(f"{tmp_path}/m.bin and {tmp_path}/m.xml: an OpenVINO IR, ")
    assert (tmp_path / "m.bin").read_text() == "weights"


def test_weights_of_the_model_are_never_replaced(call, tmp_path, workers):
    workers.opener = lambda _: Saves()
    onnx.save(conv_model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    before = (tmp_path / "m.bin").read_bytes()
    code, out, err = call("build", tmp_path / "m.onnx", "-o", tmp_path / "m.xml", "--engine", "openvino")
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path}/m.bin would overwrite the model: choose another --output\n"
    assert (tmp_path / "m.bin").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.bin", "m.onnx"]


@pytest.mark.parametrize("how", ["same", "symlink", "hard link", "other spelling"])
def test_the_model_is_never_replaced(how, call, float_file, tmp_path):
    before = float_file.read_bytes()
    target = tmp_path / "out.onnx"
    if how == "same":
        target = float_file
    elif how == "symlink":
        target.symlink_to(float_file)
    elif how == "hard link":
        os.link(float_file, target)
    else:
        target = tmp_path / ".." / tmp_path.name / "float.onnx"
    code, _, err = call("build", float_file, "-o", target)
    assert (code, err) == (2, f"error: {target} would overwrite the model: choose another --output\n")
    assert float_file.read_bytes() == before


def test_a_failed_build_leaves_what_was_there(call, float_file, tmp_path, workers):
    target = tmp_path / "m.plan"
    target.write_text("ftrt good")
    workers.opener = lambda _: Saves("TensorRT: no")
    code, _, err = call("build", float_file, "-o", target, "--engine", "tensorrt")
    assert (code, err) == (5, "error: TensorRT: no\n")
    assert target.read_text() == "ftrt good"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["float.onnx", "m.plan"]


@pytest.mark.parametrize(("target", "code", "words"), [
    ("no/such/folder/m.plan", 2, "cannot write no/such/folder/m.plan: there is no folder no/such/folder"),
    (".", 2, "cannot write .: it is a folder"),
    ("float.onnx/m.plan", 2, "cannot write float.onnx/m.plan: there is no folder float.onnx"),
])  # fmt: skip
def test_an_output_that_cannot_be_written(target, code, words, call, float_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("build", float_file, "-o", target) == (code, "", f"error: {words}\n")


def test_an_engine_without_a_format_names_those_that_have_one(call, float_file, tmp_path):
    code, _, err = call("build", float_file, "-o", tmp_path / "m", "--engine", "fake")
    able = "onnxruntime, openvino, tensorrt, tensorrt-rtx, trtexec"
    assert (code, err) == (5, f"error: engine 'fake' has no format of its own to save; these have: {able}\n")


def test_every_engine_but_the_fake_has_a_format():
    assert building.FORMATS.keys() >= MODULES.keys() - {"fake"}


@pytest.mark.parametrize(("content", "words"), [
    (None, "m.onnx: cannot read the model: No such file or directory"),
    (b"no model", "m.onnx: not an ONNX file, or damaged"),
    (b"", "m.onnx: not an ONNX file, or cut short: it holds no graph"),
])  # fmt: skip
def test_a_model_that_cannot_be_read(content, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("m.onnx").write_bytes(content)
    Path("layers.json").write_text('{"Layers": ["a"]}')
    for arguments in (("build", "m.onnx", "-o", "out.onnx"), ("layers", "m.onnx", "--graph-json", "layers.json")):
        assert call(*arguments) == (2, "", f"error: {words}\n")


@pytest.mark.skipif(shutil.which("trtexec") is not None, reason="trtexec is installed")
def test_an_engine_that_is_not_there(call, float_file, tmp_path):
    code, _, err = call("build", float_file, "-o", tmp_path / "m.plan", "--engine", "trtexec")
    assert code == 5
    assert len(err.splitlines()) == 1
