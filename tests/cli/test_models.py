from pathlib import Path
from types import SimpleNamespace

from qdqtune.cli import models
from qdqtune.cli.models import apply_command, inspect_command
from qdqtune.commands.apply import Applied, ApplyOptions
from qdqtune.commands.inspect import Inspection, InspectOptions
from qdqtune.types import Edge, Placement


def test_options_of_apply_reach_it(monkeypatch, call, tuned, tmp_path):
    given = SimpleNamespace()

    def caught(options: ApplyOptions, _: object) -> Applied:
        given.options = options
        return Applied(target, Placement(), (Edge("t", "n", 1),))

    monkeypatch.setattr(models, "apply", caught)
    target, placement = tmp_path / "made.onnx", tuned.parent / "out" / "placement.yaml"
    code, out, _ = call("apply", tuned, "--placement", placement, "--output", target, "--engine", "onnxruntime",
                          "--calibration_data", "d.npz", "--calibration-samples", 2, "--input-shape", "x:1x2",
                          "--seed", 3, "--calibration-method", "percentile:99",
                          "--precision", "fp16")  # fmt: skip
    assert code == 0
    assert given.options == apply_command.kind(
        tuned, output=target, precision="fp16", calibration_data="d.npz", calibration_samples=2,
        input_shapes={"x": (1, 2)}, seed=3, placement=placement, engine="onnxruntime",
        calibration_method="percentile:99",
    )  # fmt: skip
    assert out == f"{target}: 0 tensors with a Q/DQ pair\n"
    call("apply", tuned, "--placement", placement)
    assert given.options == apply_command.kind(tuned, placement=placement)


def test_options_of_inspect_reach_it(monkeypatch, call):
    given: list[InspectOptions] = []
    monkeypatch.setattr(Inspection, "overview", lambda _: ["overview"])
    monkeypatch.setattr(Inspection, "lines", lambda _, **shown: ["named" if shown["verbose"] else "shown"])
    monkeypatch.setattr(models, "inspect", lambda options: given.append(options) or Inspection({}))
    code, out, _ = call("inspect", "m.onnx", "--regions", "topology", "--max_sequence_size", 4,
                        "--include-all-regions", "--fix-input", "sr=1", "-v")  # fmt: skip
    assert (code, out) == (0, "overview\n\nnamed\n")
    assert given == [
        inspect_command.kind(
            Path("m.onnx"), fix_inputs={"sr": 1}, regions="topology", max_sequence_size=4, include_all_regions=True,
            verbose=True,
        )
    ]  # fmt: skip


def test_inspect_prints_the_regions(call, tuned):
    code, out, err = call("inspect", tuned, "--include-all-regions", "--verbose")
    assert (code, err) == (0, "")
    assert "8/8 nodes (100.0%)" in out
    assert "  - third" in out
