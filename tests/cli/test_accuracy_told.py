"""No command tells accuracy on inputs that are made up, or a result below 20 dB without a word about it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_lines import is_refused
from conftest import Call
from models import build, feeds, normal
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from runs import mixed, write

FAKE = ("--engine", "fake")
TUNE = (*FAKE, "--builds", "8", "--min-sqnr", "none", "--no-report", "-q")
TELLS = {"sqnr_db", "output_sqnr_db", "accuracy", "lowest_db", "agreement", "top1", "output_db"}
"""Keys of JSON that hold accuracy."""


@pytest.fixture(scope="session")
def alone(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has written, where no run is."""
    folder = tmp_path_factory.mktemp("alone")
    for file in ("optimized_final.onnx", "baseline.onnx", "placement.yaml"):
        shutil.copy(tuned.parent / "out" / file, folder)
    return folder


COMMANDS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", "{at}/baseline.onnx", "{at}/optimized_final.onnx", *FAKE),
    "check": ("check", "{at}/optimized_final.onnx"),
    "quantize": ("quantize", "{model}", "-o", "{new}"),
    "quantize of weights": ("quantize", "{model}", "-o", "{new}", "--weight-only", "w8"),
    "quantize --report": ("quantize", "{model}", "-o", "{new}", "--report"),
    "apply": ("apply", "{model}", "--placement", "{at}/placement.yaml", "-o", "{new}", "--engine", "onnxruntime"),
    "debug": ("debug", "{model}", "{at}/optimized_final.onnx"),
    "debug of one": ("debug", "{at}/optimized_final.onnx"),
    "tune": ("tune", "{model}", *TUNE, "-o", "{new}"),
    "layers": ("check", "--layers", "{at}/optimized_final.onnx", *FAKE),
}
MADE_UP = [*COMMANDS, "compare --json", "quantize --json", "apply --json"]
BESIDE = ["compare", "compare --json", "debug --json", "debug of one"]


def line(name: str, model: Path, at: Path, new: Path) -> list[str]:
    words, form = COMMANDS[name.removesuffix(" --json")], ["--json"] * name.endswith("--json")
    return [part.format(at=at, model=model, new=new) for part in (*words, *form)]


def accuracies(value: Any) -> list[object]:
    """What the keys that hold accuracy hold, at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in accuracies(part)]
    if not isinstance(value, dict):
        return []
    own = [part for key, part in value.items() if key in TELLS and part is not None]
    return own + [found for part in value.values() for found in accuracies(part)]


@pytest.mark.parametrize("name", MADE_UP)
def test_random_inputs_tell_no_accuracy(name: str, tuned: Path, alone: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call(*line(name, tuned, alone, tmp_path / "new.onnx"))
    assert " dB" not in out + err
    assert "usually worse" not in out + err
    assert not name.endswith("--json") or not accuracies(json.loads(out))
    refuses = name.startswith("debug") or name.endswith("--report")
    assert (code == 2) is refuses, err
    assert "--calibration-data" in err or name in ("layers", "check")


@pytest.mark.parametrize("name", BESIDE)
def test_beside_a_run_the_inputs_are_its_own(name: str, tuned: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call(*line(name, tuned, tuned.parent / "out", tmp_path / "new.onnx"))
    assert code in (0, 4), err
    assert accuracies(json.loads(out)) if name.endswith("--json") else "dB" in out


def test_inputs_that_are_not_what_the_run_was_fed_are_none(tuned: Path, tmp_path: Path, call: Call) -> None:
    """The files have changed, are gone, or are code that somebody else names."""
    changed, folder = tmp_path / "changed.npz", shutil.copytree(tuned.parent / "out", tmp_path / "out")
    changed.write_bytes(tuned.with_suffix(".npz").read_bytes() + b"changed")
    told = json.loads((folder / "run.json").read_text())
    for source in (str(changed), "evil:feed", "/nowhere.npz"):
        told["calibration_data"] = source
        (folder / "run.json").write_text(json.dumps(told))
        _, out, err = call("compare", folder / "baseline.onnx", folder / "optimized_final.onnx", *FAKE)
        assert "inputs are random" in err
        assert "dB" not in out


def test_of_integers_alone_the_agreement_is_told_and_no_ratio(tmp_path: Path, call: Call) -> None:
    net = build("net (float[256,256] x) => (int64[256,1] y) { h = MatMul(x, w) y = ArgMax <axis=1> (h) }",
                {"w": normal(256, 256)})  # fmt: skip
    model, made, out = write(net, tmp_path), tmp_path / "q.onnx", tmp_path / "out"
    data = ("--calibration-data", model.with_suffix(".npz"))
    _, quantized, _ = call("quantize", model, *data, "-o", made)
    assert re.search(r"^outputs: \d+\.\d% of the integers equal, on 3 samples", quantized, re.MULTILINE)
    _, compared, _ = call("compare", model, made, *data, *FAKE)
    _, tuned, _ = call("tune", model, *FAKE, *data, "--builds", 6, "--min-agreement", 0, "-o", out, "--no-report")
    assert "integers as in float" in tuned
    for told in (quantized, compared, tuned):
        assert "dB" not in told.replace("SQNR, dB", "")
        assert "no scores of classes recognised in y: if it holds some, add --scores y" in told


def test_outputs_that_are_named_as_scores_are_judged_by_their_best_class(tmp_path: Path, call: Call) -> None:
    model, made = write(mixed(), tmp_path), tmp_path / "q.onnx"
    data, (output,) = ("--calibration-data", model.with_suffix(".npz")), load(model).outputs
    tune = ("tune", model, *TUNE, *data, "-o", tmp_path / "out")
    again = ("apply", model, "--placement", tmp_path / "out" / "placement.yaml", "-o", made, *data)
    quantize, compare = ("quantize", model, *data, "-o", made), ("compare", model, made, *data, *FAKE)

    def told(command: tuple[object, ...], scores: str) -> Any:
        return json.loads(call(*command, "--scores", scores, "--json")[1])

    assert "agreement" not in call(*quantize)[1]
    _, text, _ = call(*quantize, "--scores", output)
    assert f"taken for scores of classes: {output} (" in text
    assert ", agreement " in text
    assert told(quantize, f"{output}:-1")["scores"][0]["output"] == output
    assert told(compare, output)["others"][0]["accuracy"]["top1"] is not None
    assert told(tune, output)["scores"][0]["output"] == output
    assert told(again, output)["accuracy"]["top1"] is not None
    assert "best classes are not compared: --scores is none" in call(*quantize, "--scores", "none")[1]
    is_refused(call, tmp_path, "", *again, "--scores", f"{output}:7")
    is_refused(call, tmp_path, "", *tune, "--scores", "none")  # another run: what judged its candidates has changed
    for command in (quantize, compare, tune):
        is_refused(call, tmp_path, "--scores other names no output: the model has ", *command, "--scores", "other")


# Below 20 dB

WARNED = "below 20 dB a model"


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """A model whose outputs hang on the small values of an input of wide range: 8 bits leave nothing of them."""
    net = build(
        "net (float[2,256] x) => (float[2,256] y) "
        "{ [first] h = MatMul(x, w) [clip] c = Clip(h, a, b) [last] y = MatMul(c, v) }",
        {"w": normal(256, 256), "v": normal(256, 256, seed=1), "a": np.float32(-0.05),
         "b": np.float32(0.05)},
    )  # fmt: skip
    path = tmp_path / "loud.onnx"
    save(net, path)
    x = np.concatenate([sample["x"] for sample in feeds(net, 6)])
    x[0, 0] = 1e4
    np.savez(tmp_path / "data.npz", x=x.reshape(6, 2, 256))
    return path


def test_all_commands_warn_and_tune_ships_no_such_model_unless_asked_to(loud: Path, call: Call, tmp_path: Path) -> None:
    data = ("--calibration-data", loud.parent / "data.npz")
    quantized, free = tmp_path / "quantized.onnx", tmp_path / "free"
    tune = ("tune", loud, *FAKE, "--builds", "8", *data, "-q")
    _, _, err = call(*tune, "-o", tmp_path / "held")
    assert WARNED not in err
    for command in (
        ("quantize", loud, *data, "-o", quantized),
        ("compare", loud, quantized, *FAKE, *data),
        (*tune, "-o", free, "--min-sqnr", "none"),
        ("apply", loud, "--placement", free / "placement.yaml", *data, "-o", tmp_path / "applied.onnx"),
    ):
        assert WARNED in call(*command)[2]
