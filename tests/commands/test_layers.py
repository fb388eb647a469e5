"""`layers`: what an engine runs for a model, or has exported."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest

from conftest import Call
from qdqtune.commands.check import Layers
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.types import Layer

DATA = Path(__file__).parents[1] / "data" / "tensorrt"


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
    assert list(found) == ["engine", "layers"]
    assert found["engine"] == "tensorrt"
    assert len(found["layers"]) == 37
    assert all(list(x) == ["name", "nodes", "precision", "time_ms", "kind", "elsewhere"] for x in found["layers"])
    assert found["layers"][0] == {"name": "QuantizeLinear_2", "nodes": ["QuantizeLinear_2"], "precision": "INT8",
                                  "time_ms": 0.06144, "kind": "quantize", "elsewhere": ""}  # fmt: skip


def test_the_table_tells_what_runs_elsewhere() -> None:
    here = Layer("a", ("a",), "INT8", 1.0, "compute")
    there = Layer("b", ("b",), "FP32", 2.0, "compute", elsewhere="on the CPU: no such kernel")
    assert "runs elsewhere" not in Layers("qnn", (here,)).table().columns
    told = Layers("qnn", (here, there)).table()
    at = list(told.columns).index("runs elsewhere")
    assert [row[at] for row in told.rows] == ["on the CPU: no such kernel", ""]


def test_an_engine_runs_the_model_and_has_no_times_where_these_mean_nothing(
    call: Call, float_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtune.commands.check.is_simulated", lambda name, _: name == "fake")
    code, out, _ = call("check", "--layers", float_file, "--engine", "fake", "--json")
    found = json.loads(out)
    assert (code, found["engine"]) == (0, "fake")
    assert {layer["time_ms"] for layer in found["layers"]} == {None}
    assert [(x["nodes"], x["kind"]) for x in found["layers"]] == [(["conv", "relu"], "compute")]


def test_the_model_names_the_nodes_of_a_file(call: Call, float_file: Path, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps({"Layers": ["w + conv"], "Bindings": []}))
    code, out, _ = call("check", "--layers", float_file, "--graph-json", tmp_path / "g.json", "--json")
    assert (code, json.loads(out)["layers"][0]["nodes"]) == (0, ["conv", "relu"])
