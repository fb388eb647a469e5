from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from rich.console import Console

from engine_contract import conv_model, quantized_conv_model, static
from qdqtune.cli import main, models
from qdqtune.cli.models import layers_table
from qdqtune.commands.apply import Applied, ApplyOptions
from qdqtune.commands.inspect import Inspection
from qdqtune.types import Edge, Layer, NumericFormat, Placement, QType
from trtexec_stand_in import stand_in

DATA = Path(__file__).parents[1] / "data" / "tensorrt"


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main.main(["layers", *map(str, arguments)])
    return end.value.code if isinstance(end.value.code, int) else 1


@pytest.fixture
def exports(tmp_path: Path) -> list[str | Path]:
    found: list[str | Path] = []
    for kind in ("graph", "profile"):
        path = tmp_path / f"{kind}.json"
        path.write_bytes(gzip.decompress((DATA / f"resnet18_torch_A100_qat.{kind}.json.gz").read_bytes()))
        found += [f"--{kind}-json", path]
    return found


def test_files_as_json(exports: list[str | Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*exports, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert list(found) == ["engine", "layers"]
    assert found["engine"] == "tensorrt"
    assert len(found["layers"]) == 37
    assert all(list(x) == ["name", "nodes", "precision", "time_ms", "kind"] for x in found["layers"])
    assert found["layers"][0] == {"name": "QuantizeLinear_2", "nodes": ["QuantizeLinear_2"], "precision": "INT8",
                                  "time_ms": 0.06144, "kind": "quantize"}  # fmt: skip


def test_files_as_a_table(exports: list[str | Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*exports) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("quantize" in line and "0.0614" in line and "5.6" in line for line in lines)
    assert any("37 layers" in line and "1.0957" in line for line in lines)


def test_an_engine_runs_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(conv_model(), tmp_path / "m.onnx")
    assert run(tmp_path / "m.onnx", "--engine", "fake", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "fake"
    assert [(x["nodes"], x["kind"]) for x in found["layers"]] == [(["conv", "relu"], "compute")]


def test_trtexec_runs_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = static(quantized_conv_model(NumericFormat(QType.INT8, QType.INT8, symmetric=True)))
    onnx.save(model, tmp_path / "m.onnx")
    program = stand_in(tmp_path, "11.1")
    assert run(tmp_path / "m.onnx", "--engine", "trtexec", "--engine-option", f"trtexec={program}", "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert sum(len(x["nodes"]) for x in layers) == len(model.graph.node)
    assert [x["precision"] for x in layers if x["kind"] == "compute"] == ["INT8"]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        ((), "give a MODEL, or --graph-json", 2),
        (("m.onnx", "--profile-json", "p.json"), "--profile-json goes with --graph-json", 2),
        (("--graph-json", "none.json"), "cannot read the layer information", 2),
        (("none.onnx", "--engine", "fake"), "none.onnx", 2),
        (("m.onnx", "--engine", "trtexec", "--engine-option", "trtexec=no-such-program"), "no-such-program", 5),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], words: str, code: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    onnx.save(conv_model(), "m.onnx")
    assert run(*arguments) == code
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not printed.out


def test_the_model_names_the_nodes_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(conv_model(), tmp_path / "m.onnx")
    (tmp_path / "g.json").write_text(json.dumps({"Layers": ["w + conv"], "Bindings": []}))
    assert run(tmp_path / "m.onnx", "--graph-json", tmp_path / "g.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["nodes"] == ["conv", "relu"]
    assert run(tmp_path / "none.onnx", "--graph-json", tmp_path / "g.json") == 2
    assert "none.onnx" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_names_with_brackets_and_unknown_times_fit_the_table(width: int) -> None:
    layers = [Layer("[bold]a" * 30, ("x[0]",), "", None, "compute"), Layer("b", (), "FP32", 0.0, "copy")]
    console = Console(width=width)
    with console.capture() as capture:
        console.print(layers_table(layers, console.width))
    text = capture.get()
    assert "[bold]a" in text
    assert "…" in text
    assert "x[0]" in text
    assert max(map(len, text.splitlines())) <= width
    assert "compute" in text


def test_options_of_apply_reach_it(monkeypatch, call, tuned, tmp_path):
    given = SimpleNamespace()

    def caught(options: ApplyOptions, _: object) -> Applied:
        given.options = options
        return Applied(target, Placement(), (Edge("t", "n", 1),), random_data=False)

    monkeypatch.setattr(models, "apply", caught)
    target, placement = tmp_path / "made.onnx", tuned.parent / "out" / "placement.yaml"
    code, out, err = call("apply", tuned, "--placement", placement, "--output", target, "--engine", "onnxruntime",
                          "--calibration_data", "d.npz", "--calibration-samples", 2, "--input-shape", "x:1x2",
                          "--seed", 3, "--calibration-method", "percentile", "--percentile", 99,
                          "--precision", "fp16")  # fmt: skip
    assert code == 0
    assert given.options == ApplyOptions(
        tuned, output=target, precision="fp16", calibration_data="d.npz", calibration_samples=2,
        input_shapes={"x": (1, 2)}, seed=3, placement=placement, engine="onnxruntime", calibration_method="percentile",
        percentile=99,
    )  # fmt: skip
    assert out == f"{target}: 0 tensors with a Q/DQ pair\n"
    assert "note: 1 edges are not in this model, the first: t -> n[1]\n" in err
    call("apply", tuned, "--placement", placement)
    assert given.options == ApplyOptions(tuned, output=tuned.with_suffix(".qdq.onnx"), placement=placement)


def test_options_of_inspect_reach_it(monkeypatch, call):
    given: dict[str, Any] = {}
    found = Inspection({}, ("shown",), ("named",))
    monkeypatch.setattr(models, "inspect", lambda options: given.update(vars(options)) or found)
    code, out, _ = call("inspect", "m.onnx", "--regions", "topology", "--max_sequence_size", 4,
                        "--include-all-regions", "--fix-input", "sr=1", "-v")  # fmt: skip
    assert (code, out) == (0, "named\n")
    assert given == {"model": Path("m.onnx"), "fix_inputs": {"sr": 1}, "regions": "topology", "max_sequence_size": 4,
                     "include_all_regions": True, "tree": False}  # fmt: skip


def test_inspect_prints_the_regions(call, tuned):
    code, out, err = call("inspect", tuned, "--include-all-regions", "--verbose")
    assert (code, err) == (0, "")
    assert "8/8 nodes (100.0%)" in out
    assert "  - third" in out
