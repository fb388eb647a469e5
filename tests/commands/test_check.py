"""`check`: what it finds in pairs that a run has measured, on engines, and in reports of TensorRT."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from conftest import Call
from engine_contract import quantized_conv_model
from models import UINT8, build, normal
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.commands import check
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.types import Edge, Placement
from runs import write

DATA = Path(__file__).parents[1] / "data" / "tensorrt"
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
    assert advice.startswith("a search on this engine has found these pairs")
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
    assert re.search(r"^ boundary +note +xd_Q ", out, re.MULTILINE)


def test_an_fp8_report(call, tmp_path):
    model = DATA / "fp8_attention.onnx"
    code, out, _ = call("check", model, "--graph-json", exported(tmp_path, model.stem), "--json")
    assert code == 0
    assert {tuple(f["nodes"]) for f in json.loads(out)["findings"]} >= {("qd_Q",), ("vd_Q",)}


def test_of_a_provider_without_a_table_nobody_looks(call, model, monkeypatch, tmp_path):
    code, _, err = call("check", model, "--engine-option", "provider=ROCMExecutionProvider")
    assert code == 0
    assert "note: ROCMExecutionProvider has no table in qdqtune: nobody looks at what it leaves to the CPU" in err


def test_what_a_provider_leaves_is_told_of_float_models_too(call, model, monkeypatch, tmp_path):
    """A table is put over the fake engine, whose first layer is said to run elsewhere."""

    layers_of_engine = check._profile

    def profiled(*given):
        ran = layers_of_engine(*given)
        first, *rest = ran.layers
        return replace(ran, layers=(replace(first, elsewhere="on the CPU: no kernel"), *rest))

    monkeypatch.setattr("qdqtune.commands.check.PROVIDERS", {"fake": None})
    assert "all " in call("check", model, "--engine", "fake")[1].splitlines()[-1]
    monkeypatch.setattr(check, "_profile", profiled)
    code, out, _ = call("check", model, "--engine", "fake")
    assert code == 0
    assert re.search(r"^\d+ of \d+ nodes run elsewhere, \d+ borders?.*on the CPU: no kernel", out, re.MULTILINE)
    assert re.search(r"^ elsewhere +note ", out, re.MULTILINE)
    told = json.loads(call("check", model, "--engine", "fake", "--json")[1])
    assert {left["reason"] for left in told["fallback"]["left"]} == {"on the CPU: no kernel"}
    assert told["passes"]


@pytest.mark.parametrize(
    ("saturate", "reduced", "is_told"), [(True, False, True), (True, True, False), (False, False, False)]
)
@pytest.mark.usefixtures("workers")
def test_weights_that_overflow_on_this_processor_are_told(
    saturate: bool, reduced: bool, is_told: bool, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtune.engines.formats.products_saturate", lambda: saturate)
    text = "net (float[8,64] x) => (float[8,64] y) { [product] y = MatMul(x, w) }"
    model = build(text, {"w": normal(64, 64)})
    edges = Placement.of([Edge("x", "product", 0), Edge("w", "product", 1)])
    known = Ranges({"x": Range(-3.0, 3.0), "y": Range(-30.0, 30.0)})
    save(insert(model, edges, known, replace(UINT8, reduced_weights=reduced)), tmp_path / "q.onnx")
    _, out, err = call("check", tmp_path / "q.onnx", "--engine", "onnxruntime", "--allow-boundary", "*")
    told = "1 weight of 8 bits: sums of products overflow here"
    assert (told in " ".join((out + err).split())) is is_told
