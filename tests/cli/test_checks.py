"""`qdqtune check` as a user meets it."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from engine_contract import quantized_conv_model
from models import INT8


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
    assert [" ".join(line[:2]) for line in lines] == ["float compute", "standalone pair", "standalone pair"]
    assert [line[4] for line in lines] == ["conv", "QuantizeLinear_0", "DequantizeLinear_1"]
    reason = "conv (Conv) runs in float: its output carries no pair on the way to the model's output"
    assert " ".join(lines[0][5:]) == reason
    assert {" ".join(line[5:]) for line in lines[1:]} == {"as above"}
    assert "3 findings, 0." in last
    assert " ms, 0 notes" in last
    accepted = re.match(r"what is meant to be so is accepted with --allow-boundary (\S+), all of it with", advice)
    assert accepted is not None
    assert call("check", spoiled, "--engine", "fake", "--allow-boundary", accepted[1])[0] == 0


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


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_a_float_model_has_no_pairs_and_runs_nothing(json_flag, call, float_file, workers):
    code, out, err = call("check", float_file, *json_flag)
    assert (code, err) == (0, "")
    if json_flag:
        assert (json.loads(out)["pairs"], json.loads(out)["findings"]) == (0, [])
    else:
        assert out == f"{float_file}: no pairs, nothing to check\n"
    assert workers.started == 0


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["missing.onnx"], 2, "missing.onnx: cannot read the model: No such file or directory"),
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
    found, out, err = call("check", *arguments)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {words}")
