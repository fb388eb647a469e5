"""`check`: what it finds in pairs, also in those that a run has measured, and the layers that an engine runs."""

import gzip
import json
import re
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from command_lines import errors
from conftest import Call
from engine_contract import IMAGE, conv_model, quantized_conv_model
from models import INT8, build, normal
from qdqtune.commands import check
from qdqtune.commands.check import Layers
from qdqtune.commands.shown import MOST_ROWS
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.facts import ENGINES
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import EngineFailure
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.system.checks import HEAD, LIST
from qdqtune.types import Layer
from runs import write

DATA = Path(__file__).parents[1] / "data" / "tensorrt"


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


def test_a_fused_model_passes(call, fused):
    code, out, err = call("check", fused, "--engine", "fake")
    assert (code, err) == (0, "")
    *notes, last = out.splitlines()
    for words in ("first Q behind a float input of the model", "last DQ in front of a float output of the model"):
        assert [line.split()[:2] for line in notes if words in line] == [["boundary", "note"]]
    assert last.startswith(f"{fused} on fake: 3 tensors with a Q/DQ pair, 1 of 3 layers in 8 bits; 0 findings, 2 notes")


def test_a_model_that_is_not_fused_fails_with_nodes_reason_and_times(call, spoiled):
    code, out, _ = call("check", spoiled, "--engine", "fake")
    assert code == 4
    *table, last, advice = out.splitlines()
    lines = [line.split() for line in table if "failure" in line]
    assert [line[4] for line in lines] == ["conv", "QuantizeLinear_0", "DequantizeLinear_1"]
    assert " ".join(lines[0][5:]).startswith("conv (Conv) runs in float: its output carries no pair")
    assert {" ".join(line[5:]) for line in lines[1:]} == {"as above"}
    assert "3 findings, 0." in last
    assert " ms, 0 notes" in last
    accepted = re.match(r"what is meant to be so is accepted with --allow-boundary (\S+), all of it with", advice)
    assert call("check", spoiled, "--engine", "fake", "--allow-boundary", accepted[1])[0] == 0
    found: dict[str, Any] = json.loads(call("check", spoiled, "--engine", "fake", "--json", "--runs", 1)[1])
    assert (found["pairs"], found["layers"], found["layers_in_8_bits"], found["failing"]) == (2, 3, 0, 3)
    assert (found["passes"], found["measured"]) == (False, False)
    assert found["time_ms"] == pytest.approx(sum(f["time_ms"] for f in found["findings"]))
    assert found["findings"][0].items() >= {"kind": "standalone pair", "cause": "conv", "fails": True}.items()


def test_the_first_notes_of_a_kind_are_listed_and_with_v_all(call, spoiled, monkeypatch):
    monkeypatch.setattr("qdqtune.commands.check.MOST_NOTES", 1)
    given = ("check", spoiled, "--engine", "fake", "--allow-boundary", "*")
    few, every = (call(*given, *more)[1].splitlines() for more in ((), ("-v",)))
    assert [sum(" note " in line for line in lines) for lines in (few, every)] == [1, 3]
    assert few[-3:] == ["… and 2 more notes of kind boundary", "-v shows all", every[-1]]


def test_samples_may_hold_an_input_that_was_made_constant(call: Call, tmp_path: Path) -> None:
    net = build(
        "n (float[2,8] x, float[1] s) => (float[2,8] y) { a = MatMul(x, w) y = Mul(a, s) }", {"w": normal(8, 8)}
    )
    whole, fixed = write(net, tmp_path), tmp_path / "fixed.onnx"
    save(load(whole, fix_inputs={"s": 3}), fixed)
    data = ("--layers", "--engine", "fake", "--calibration-data", whole.with_suffix(".npz"))
    for file in (whole, fixed):
        assert call("check", file, *data, "--fix-input", "s=3")[0] == 0
    assert "has an array 's' that is no input" in errors(call("check", fixed, *data))[1]


def test_a_float_model_has_no_pairs_and_runs_nothing(call, float_file, workers):
    assert call("check", float_file) == (0, f"{float_file}: no pairs, nothing to check\n", "")
    told = json.loads(call("check", float_file, "--json")[1])
    assert (told["pairs"], told["findings"]) == (0, [])
    assert workers.started == 0


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["missing.onnx"], 2, "cannot read the model missing.onnx: No such file or directory; check the path"),
    (["float.onnx", "--profile-json", "p.json"], 2, "--profile-json goes with --graph-json"),
    (["fused.onnx", "--engine", "nonsense"], 2, "unknown engine 'nonsense'; there are"),
    (["fused.onnx", "--engine", "trtexec", "--engine-option", "trtexec=no-such-program"], 5,
     "there is no program 'no-such-program'"),
    (["fused.onnx", "--graph-json", "none.json"], 2, "cannot read the layer information none.json: No such file"),
    (["fused.onnx", "--engine", "fake", "--engine-option", 'faults={"refuse": "*"}'], 5,
     "fake has no layers of fused.onnx: fake engine: no implementation for a quantized node"),
])  # fmt: skip
def test_what_goes_wrong_is_one_line(arguments, code, words, call, fused, float_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, error = errors(call("check", *arguments))
    assert found == code
    assert error.startswith(words)


# Pairs that a run has measured
def test_what_a_tuning_run_has_measured_fails_elsewhere_only(call, final, tmp_path):
    """Away from the records, on an engine that differs, with other pairs, and with damaged records."""
    tuned = shutil.copytree(final.parent, tmp_path / "out") / final.name
    code, out, _ = call("check", tuned, "--engine", "fake")
    assert code == 0
    assert "nothing to do, as a search on this engine has found these pairs" in out.splitlines()[-1]
    found = json.loads(call("check", tuned, "--engine", "fake", "--json")[1])
    assert (found["measured"], found["failing"]) == (True, 0)
    assert any(f["kind"] != "boundary" for f in found["findings"])
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


def test_a_tensorrt_report(call, tmp_path):
    model = DATA / "int8_conv_relu_add_fp16.onnx"
    text, path = gzip.decompress((DATA / "rtx1.7_sm89.json.gz").read_bytes()), tmp_path / "layers.json"
    path.write_text(json.dumps(json.loads(text)[model.stem]))
    code, out, _ = call("check", model, "--graph-json", path, "--json")
    found = json.loads(out)
    assert (code, found["engine"], found["time_ms"], found["failing"]) == (0, "tensorrt", None, 0)
    assert [(f["kind"], f["nodes"]) for f in found["findings"]] == [("boundary", ["xd_Q"])]
    code, out, _ = call("check", model, "--graph-json", path)
    assert code == 0
    assert re.search(r"^ boundary +note +xd_Q ", out, re.MULTILINE)


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

    monkeypatch.setitem(ENGINES, "fake", replace(ENGINES["fake"], source="https://"))
    assert "all " in call("check", model, "--engine", "fake")[1].splitlines()[-1]
    monkeypatch.setattr(check, "_profile", profiled)
    code, out, _ = call("check", model, "--engine", "fake")
    assert code == 0
    assert re.search(r"^\d+ of \d+ nodes run elsewhere, \d+ borders?.*on the CPU: no kernel", out, re.MULTILINE)
    assert re.search(r"^ elsewhere +note ", out, re.MULTILINE)
    told = json.loads(call("check", model, "--engine", "fake", "--json")[1])
    assert {left["reason"] for left in told["fallback"]["left"]} == {"on the CPU: no kernel"}
    assert told["passes"]


# Layers
@pytest.fixture
def exports(tmp_path: Path) -> list[str | Path]:
    found: list[str | Path] = [tmp_path / "m.onnx"]
    for kind in ("graph", "profile"):
        path = tmp_path / f"{kind}.json"
        path.write_bytes(gzip.decompress((DATA / f"resnet18_torch_A100_qat.{kind}.json.gz").read_bytes()))
        found += [f"--{kind}-json", path]
    names = [name for layer in read_report(tmp_path / "graph.json", None, None) for name in layer.nodes]
    tensors = ["x", *names]
    nodes = [onnx.helper.make_node("Identity", [a], [b], b) for a, b in pairwise(tensors)]
    floats = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", names[-1])]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", floats[:1], floats[1:])), found[0])
    return found


def test_files_of_an_export(call: Call, exports: list[str | Path]) -> None:
    code, out, _ = call("check", "--layers", *exports)
    assert code == 0
    assert any("quantize" in line and "0.06144" in line for line in out.splitlines())
    assert "37 layers" in out.splitlines()[-1]
    assert "1.096 ms" in out.splitlines()[-1]
    found: dict[str, Any] = json.loads(call("check", "--layers", *exports, "--json")[1])
    assert (found["engine"], len(found["layers"])) == ("tensorrt", 37)
    assert found["layers"][0] == {"name": "QuantizeLinear_2", "nodes": ["QuantizeLinear_2"], "precision": "INT8",
                                  "time_ms": 0.06144, "kind": "quantize", "elsewhere": ""}  # fmt: skip


def test_an_engine_runs_the_model_and_has_no_times_where_these_mean_nothing(call, float_file, monkeypatch):
    monkeypatch.setattr("qdqtune.commands.check.simulated", lambda name, _: "a simulator")
    code, out, _ = call("check", "--layers", float_file, "--engine", "fake", "--json")
    found = json.loads(out)
    assert (code, found["engine"]) == (0, "fake")
    assert {layer["time_ms"] for layer in found["layers"]} == {None}
    assert [(x["nodes"], x["kind"]) for x in found["layers"]] == [(["conv", "relu"], "compute")]


def test_the_model_names_the_nodes_of_a_file(call: Call, float_file: Path, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps({"Layers": ["w + conv"], "Bindings": []}))
    code, out, _ = call("check", "--layers", float_file, "--graph-json", tmp_path / "g.json", "--json")
    assert (code, json.loads(out)["layers"][0]["nodes"]) == (0, ["conv", "relu"])


def test_the_table_tells_what_runs_elsewhere_escapes_names_and_ends() -> None:
    here = Layer("<script>alert(1)</script>", ("a&b",), "INT8", 1.0, "compute")
    assert "runs elsewhere" not in Layers("qnn", (here,)).table().filled.columns
    told = Layers("qnn", (here, replace(here, elsewhere="on the CPU: no such kernel")))
    at = list(told.table().columns).index("runs elsewhere")
    assert [row[at] for row in told.table().rows] == ["", "on the CPU: no such kernel"]
    text = Layers("fake", (here,) * (MOST_ROWS + 5))._repr_markdown_()
    assert r"\<script\>" in text
    assert "<script>" not in text
    assert text.count("\n| a") == MOST_ROWS
    assert "and 5 more" in text


# `build`: what an engine saves of a model arrives whole, and replaces nothing that is read
@pytest.mark.parametrize("threshold", [0, 64])
@pytest.mark.parametrize("location", ["built.onnx.data", "sub/weights.bin"])
def test_a_model_with_external_data_is_built(threshold, location, call, tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "out" / "built.onnx"
    onnx.save(conv_model(), source, save_as_external_data=True, location=location, size_threshold=threshold)
    assert call("build", source, "-o", target)[::2] == (0, "")
    shutil.rmtree(tmp_path / "in")
    session = open_engine(EngineSpec("onnxruntime")).build(target, tmp_path / "log")
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
