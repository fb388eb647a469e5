"""No command tells accuracy on inputs that are made up; beside a run they are that run's."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import Call
from qdqtune.cli import main
from runs import mixed, write
from workers import in_process

FAKE = ("--engine", "fake")
TUNE = (*FAKE, "--builds", "8", "--timing-runs", "12", "--min-sqnr", "none", "--no-report", "-q")
TELLS = {"sqnr_db", "output_sqnr_db", "output_cosine", "accuracy", "lowest_db", "agreement", "top1", "with_db"}
"""Keys of JSON that hold accuracy."""


class Ran(NamedTuple):
    """A float model with samples, the folder of its run, and the same files where no run is."""

    model: Path
    out: Path
    alone: Path


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    model, alone = write(mixed(), folder), tmp_path_factory.mktemp("alone")
    data = ("--calibration-data", str(model.with_suffix(".npz")))
    with in_process(), pytest.raises(SystemExit):
        main.main(["tune", str(model), *TUNE, "-o", str(folder / "out"), *data])
    for file in ("optimized_final.onnx", "baseline.onnx", "placement.yaml"):
        shutil.copy(folder / "out" / file, alone)
    return Ran(model, folder / "out", alone)


COMMANDS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", "{at}/baseline.onnx", "{at}/optimized_final.onnx", *FAKE),
    "check": ("check", "{at}/optimized_final.onnx"),
    "quantize": ("quantize", "{model}", "-o", "{new}"),
    "quantize of weights": ("quantize", "{model}", "-o", "{new}", "--weight-only", "w8"),
    "quantize --report": ("quantize", "{model}", "-o", "{new}", "--report"),
    "apply": ("apply", "{model}", "--placement", "{at}/placement.yaml", "-o", "{new}", "--engine", "onnxruntime"),
    "debug": ("debug", "{model}", "{at}/optimized_final.onnx"),
    "debug of one": ("debug", "{at}/optimized_final.onnx"),
    "debug of float": ("debug", "{at}/baseline.onnx"),
    "tune": ("tune", "{model}", *TUNE, "-o", "{new}"),
    "layers": ("layers", "{at}/optimized_final.onnx", *FAKE),
}
BESIDE = [name for name in COMMANDS if name.startswith(("compare", "debug"))]
FORMS = ((), ("--json",))


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


@pytest.mark.parametrize(("name", "form"), [*product(COMMANDS, FORMS)])
def test_random_inputs_tell_no_accuracy(name: str, form: tuple[str, ...], ran: Ran, tmp_path: Path, call: Call) -> None:
    code, out, err = call(*line(name, form, ran, ran.alone, tmp_path / "new.onnx"))
    assert " dB" not in out + err
    assert "computes something else" not in out + err
    assert name == "tune" or not accuracies(json.loads(out) if form and out else {})
    refuses = name.startswith("debug") or name.endswith("--report")
    assert (code == 2) is refuses, err
    assert "--calibration-data" in err or name in ("layers", "check")


@pytest.mark.parametrize(("name", "form"), [*product(BESIDE, FORMS)])
def test_beside_a_run_the_inputs_are_its_own(
    name: str, form: tuple[str, ...], ran: Ran, tmp_path: Path, call: Call
) -> None:
    code, out, err = call(*line(name, form, ran, ran.out, tmp_path / "new.onnx"))
    assert code in (0, 4), err
    if form:
        assert name == "debug of float" or accuracies(json.loads(out))
    else:
        assert "dB" in out


def test_inputs_that_are_not_what_the_run_was_fed_are_none(ran: Ran, tmp_path: Path, call: Call) -> None:
    """The files have changed, are gone, or are code that somebody else names."""
    for number, (source, what) in enumerate(product((None, "evil:feed", "/nowhere.npz"), ("changed",))):
        folder = shutil.copytree(ran.out, tmp_path / str(number))
        told = json.loads((folder / "run.json").read_text())
        other = tmp_path / "other.npz"
        shutil.copy(ran.model.with_suffix(".npz"), other)
        other.write_bytes(other.read_bytes() + what.encode())
        told["settings"]["calibration_data"] = source or str(other)
        (folder / "run.json").write_text(json.dumps(told))
        _, out, err = call("compare", folder / "baseline.onnx", folder / "optimized_final.onnx", *FAKE)
        assert "inputs are random" in err
        assert "dB" not in out
