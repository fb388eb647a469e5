"""No command tells accuracy on inputs that are made up, or a result below 20 dB without a word about it."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import Call
from models import build, feeds, normal
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from runs import mixed, write

FAKE = ("--engine", "fake")
TUNE = (*FAKE, "--builds", "8", "--min-sqnr", "none", "--no-report", "-q")
TELLS = {"sqnr_db", "output_sqnr_db", "accuracy", "lowest_db", "agreement", "top1", "output_db"}
"""Keys of JSON that hold accuracy."""


class Ran(NamedTuple):
    """A float model with samples, the folder of its run, and the same files where no run is."""

    model: Path
    out: Path
    alone: Path


@pytest.fixture(scope="session")
def ran(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    out, alone = tuned.parent / "out", tmp_path_factory.mktemp("alone")
    for file in ("optimized_final.onnx", "baseline.onnx", "placement.yaml"):
        shutil.copy(out / file, alone)
    return Ran(tuned, out, alone)


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
TEXT, JSON = (), ("--json",)
MADE_UP = [*product(COMMANDS, [TEXT]), *product(("compare", "quantize", "apply"), [JSON])]
BESIDE = [("compare", TEXT), ("compare", JSON), ("debug", JSON), ("debug of one", TEXT)]


def line(name: str, form: tuple[str, ...], ran: Ran, at: Path, new: Path) -> list[str]:
    return [part.format(at=at, model=ran.model, new=new) for part in (*COMMANDS[name], *form)]


def accuracies(value: Any) -> list[object]:
    """What the keys that hold accuracy hold, at any depth."""
    if isinstance(value, list):
        return [found for part in value for found in accuracies(part)]
    if not isinstance(value, dict):
        return []
    own = [part for key, part in value.items() if key in TELLS and part is not None]
    return own + [found for part in value.values() for found in accuracies(part)]


@pytest.mark.parametrize(("name", "form"), MADE_UP)
def test_random_inputs_tell_no_accuracy(name: str, form: tuple[str, ...], ran: Ran, tmp_path: Path, call: Call) -> None:
    code, out, err = call(*line(name, form, ran, ran.alone, tmp_path / "new.onnx"))
    assert " dB" not in out + err
    assert "computes something else" not in out + err
    assert name == "tune" or not accuracies(json.loads(out) if form and out else {})
    refuses = name.startswith("debug") or name.endswith("--report")
    assert (code == 2) is refuses, err
    assert "--calibration-data" in err or name in ("layers", "check")


@pytest.mark.parametrize(("name", "form"), BESIDE)
def test_beside_a_run_the_inputs_are_its_own(
    name: str, form: tuple[str, ...], ran: Ran, tmp_path: Path, call: Call
) -> None:
    code, out, err = call(*line(name, form, ran, ran.out, tmp_path / "new.onnx"))
    assert code in (0, 4), err
    if form:
        assert accuracies(json.loads(out))
    else:
        assert "dB" in out


def test_inputs_that_are_not_what_the_run_was_fed_are_none(ran: Ran, tmp_path: Path, call: Call) -> None:
    """The files have changed, are gone, or are code that somebody else names."""
    changed, folder = tmp_path / "changed.npz", shutil.copytree(ran.out, tmp_path / "out")
    changed.write_bytes(ran.model.with_suffix(".npz").read_bytes() + b"changed")
    told = json.loads((folder / "run.json").read_text())
    for source in (str(changed), "evil:feed", "/nowhere.npz"):
        told["settings"]["calibration_data"] = source
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
        assert "no output is taken for scores of classes: y holds no floats" in told


def test_outputs_that_are_named_as_scores_are_judged_by_their_best_class(tmp_path: Path, call: Call) -> None:
    model, made = write(mixed(), tmp_path), tmp_path / "q.onnx"
    data = ("--calibration-data", model.with_suffix(".npz"))
    (output,) = load(model).outputs
    _, plain, _ = call("quantize", model, *data, "-o", made)
    _, text, _ = call("quantize", model, *data, "-o", made, "--scores", output)
    assert "agreement" not in plain
    assert f"taken for scores of classes: {output} (" in text
    assert ", agreement " in text
    _, text, _ = call("quantize", model, *data, "-o", made, "--scores", f"{output}:-1", "--json")
    assert json.loads(text)["scores"][0]["output"] == output
    _, text, _ = call("compare", model, made, *data, *FAKE, "--scores", output, "--json")
    assert json.loads(text)["scores"][0]["output"] == output
    assert json.loads(text)["others"][0]["accuracy"]["top1"] is not None
    tune = ("tune", model, *TUNE, *data, "-o", tmp_path / "out", "--json")
    assert json.loads(call(*tune, "--scores", output)[1])["scores"][0]["output"] == output
    again = ("apply", model, "--placement", tmp_path / "out" / "placement.yaml", "-o", made, *data)
    assert json.loads(call(*again, "--scores", output, "--json")[1])["accuracy"]["top1"] is not None
    none = call("quantize", model, *data, "-o", made, "--scores", "none")[1]
    assert "no output is taken for scores of classes: --scores is none" in none
    before = made.read_bytes()
    assert call(*again, "--scores", f"{output}:7")[0] == 2
    assert made.read_bytes() == before
    assert call(*tune, "--scores", "none")[0] == 2  # another run: what candidates were judged by has changed
    for command in (("quantize", model, "-o", made), ("compare", model, model, *FAKE), ("tune", model, *TUNE)):
        code, _, err = call(*command, *data, "--scores", "other")
        assert code == 2
        assert "--scores other names no output: there are " in err


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


def test_quantize_and_compare_warn(loud: Path, call: Call, tmp_path: Path) -> None:
    data = ("--calibration-data", loud.parent / "data.npz")
    quantized = tmp_path / "quantized.onnx"
    code, _, err = call("quantize", loud, *data, "-o", quantized)
    assert code == 0
    assert WARNED in err
    code, _, err = call("compare", loud, quantized, "--engine", "fake", *data)
    assert f"{quantized} against {loud}: the output SQNR is" in err
    assert WARNED in err


def test_tune_ships_no_such_model_unless_asked_to(loud: Path, call: Call, tmp_path: Path) -> None:
    tune = ("tune", loud, "--engine", "fake", "--builds", "8", "--calibration-data", loud.parent / "data.npz", "-q")
    code, _, err = call(*tune, "-o", tmp_path / "held")
    assert WARNED not in err
    held = code
    code, _, err = call(*tune, "-o", tmp_path / "free", "--min-sqnr", "none")
    assert code == 0
    assert WARNED in err
    assert held in (0, 4)
    placement = tmp_path / "free" / "placement.yaml"
    _, _, err = call("apply", loud, "--placement", placement, "--calibration-data", loud.parent / "data.npz",
                     "-o", tmp_path / "applied.onnx")  # fmt: skip
    assert WARNED in err
