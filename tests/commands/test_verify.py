"""`verify`: whether what a run has proven holds on another machine, played by a changed folder or engine."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtune
from command_lines import QUICK, errors
from conftest import Call
from models import build, normal
from qdqtune.calibration.samples import digest_of
from qdqtune.engines.execution import EXECUTION
from qdqtune.tuning.deploy import read_settings
from runs import hopeless, write
from workers import Workers


@pytest.fixture
def target(tuned: Path, tmp_path: Path) -> Path:
    """What is copied to another machine: two models, and how to run them."""
    folder = tmp_path / "target"
    for name in ("optimized_final.onnx", "baseline.onnx", "deploy/settings.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tuned.parent / "out" / name, folder / name)
    return folder


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "deploy" / "settings.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_it_holds_on_the_machine_of_the_run_with_its_samples(call: Call, tuned: Path) -> None:
    code, out, err = call("verify", tuned.parent / "out")
    assert code == 0
    last = out.splitlines()[-1]
    assert last.startswith("holds: ")
    assert " as fast as float here (proven: " in last
    assert "output SQNR" in last
    assert "note: no --calibration-data: the inputs are those of the run beside it" in err
    assert "proven with" not in err
    done = qdqtune.verify(tuned.parent / "out", calibration_data=str(tuned.with_suffix(".npz")))
    assert done.comparison is not None
    assert repr(done).startswith("<Verified: holds: ")
    assert done.to_dict()["gate"][0]["outcome"] == "holds"


def test_samples_that_are_not_those_of_the_run_are_all_taken_by_verify_and_compare(call, target, tuned):
    own = np.load(tuned.with_suffix(".npz"))
    fresh = target / "fresh.npz"
    np.savez(fresh, **{name: np.concatenate([(1 - n / 100) * a for n in range(14)]) for name, a in own.items()})
    code, out, _ = call("verify", target, "--calibration-data", fresh)
    assert code == 0
    assert out.splitlines()[-1].endswith(" dB on 42 samples")
    files = qdqtune.compare(tuned, target / "optimized_final.onnx", calibration_data=str(fresh), engine="fake")
    assert "output SQNR over 42 samples\n" in files.table().caption
    digest = digest_of(str(fresh), EXECUTION, ())
    changed(target, lambda content: content.update(data=digest))
    assert call("verify", target, "--calibration-data", fresh)[1].splitlines()[-1].endswith(" dB on 8 held-out samples")


def test_limits_of_the_run_hold_here_too_where_samples_are_given(call: Call, target: Path, tuned: Path) -> None:
    changed(target, lambda content: content["proven"].update(min_sqnr_db=200.0))
    code, out, _ = call("verify", target, "--calibration-data", tuned.with_suffix(".npz"))
    assert code == 4
    assert "does not hold: " in out
    assert "200 dB are asked for" in out
    code, out, err = call("verify", target)
    assert (code, "SQNR" in out) == (0, False)
    assert "outputs were not compared, which takes samples: give --calibration-data" in err
    assert errors(call("verify", target, "--min-sqnr", 20))[0] == 2
    assert "name the output folder of a finished qdqtune tune" in errors(call("verify", target.parent))[1]


def test_best_classes_are_compared_in_the_outputs_that_the_run_was_told(call: Call, target: Path, tuned: Path) -> None:
    changed(target, lambda content: content.update(scores=["y:-1"]))
    changed(target, lambda content: content["proven"].update(min_agreement=0.5))
    code, out, _ = call("verify", target, "--calibration-data", tuned.with_suffix(".npz"), "--json")
    assert code == 0
    (gated,) = (one for one in json.loads(out)["gate"] if one["limit"] == "agreement of at least 0.5")
    assert gated["outcome"] == "holds"


MANY_THREADS = {"spec": {"name": "onnxruntime", "options": {"threads": 4096}}}


@pytest.mark.parametrize(
    ("settings", "proven", "code", "told"),
    [
        (MANY_THREADS, {"threads": [4096]}, 3, "the proof took 4096 threads"),
        ({"model": "../target/optimized_final.onnx"}, {}, 2, "settings.json is not what a run has written"),
        ({"baseline": "."}, {}, 2, "settings.json is not what a run has written"),
    ],
)
def test_what_its_settings_rule_out(settings, proven, code, told, call, target):
    changed(target, lambda content: content.update(settings))
    changed(target, lambda content: content["proven"].update(proven))
    found, out, err = call("verify", target)
    assert found == code
    assert told in out + err


def test_what_nobody_has_checked_is_told(call: Call, target: Path, tuned: Path) -> None:
    out = target / "out"
    assert call("tune", tuned, *QUICK, "--min-sqnr", "none", "-o", out)[0] == 0
    assert json.loads((out / "deploy" / "settings.json").read_text())["proven"]["unchecked"] is True
    code, _, err = call("verify", out)
    assert code == 0
    assert "note: nobody has checked the accuracy of optimized_final.onnx: give --calibration-data" in err
    assert "nobody has checked" not in call("verify", out, "--calibration-data", tuned.with_suffix(".npz"))[2]
    assert "nobody has checked" not in call("verify", target)[2]


def test_another_engine_a_smaller_gain_and_options_that_name_files_are_told(call: Call, target: Path) -> None:
    """No program or library is taken from a folder."""
    options = {
        "trtexec": "/bin/false",
        "provider_options": {"a": "evil.so"},
        "plugin_libraries": ["evil.so"],
        "asymmetric": True,
    }
    changed(target, lambda content: content.update(spec={"name": "fake", "options": options}))
    changed(target, lambda content: content["engine"].update(version="0", isa="amx"))
    changed(target, lambda content: content["proven"].update(ratio=0.01, low=0.009, high=0.011))
    code, _, err = call("verify", target)
    assert code == 0
    assert "note: version: proven with 0, here 1\n" in err
    assert "note: isa: proven with amx, here none\n" in err
    assert "it is less than was proven, 100.00x [90.91x, 111.11x]" in err
    told = " ".join(err.split())
    assert "note: trtexec, provider_options, plugin_libraries: not taken from " in told
    assert "; --engine-option gives it again" in told


def test_what_is_slower_here_does_not_hold(call: Call, target: Path, workers: Workers) -> None:
    workers.slower = lambda build: 9.0 if "optimized" in build.path.name else 1.0
    code, out, _ = call("verify", target)
    assert code == 4
    assert out.splitlines()[-1].startswith("does not hold: ")


def test_what_cannot_be_told_has_a_code_of_its_own(call: Call, target: Path, workers: Workers) -> None:
    code, out, _ = call("verify", target, "--engine-option", "noise=2.0", "--timing-runs", 12)
    assert code == 3
    assert out.splitlines()[-1].startswith("cannot tell: ")
    shutil.copy(target / "optimized_final.onnx", target / "baseline.onnx")
    code, out, _ = call("verify", target)
    assert code == 3
    assert "baseline.onnx is not the file of the proof: copy it" in out


def test_a_file_that_is_missing_is_named(call: Call, target: Path, workers: Workers) -> None:
    final, baseline = target / "optimized_final.onnx", target / "baseline.onnx"
    baseline.unlink()
    assert errors(call("verify", target)) == (2, f"{baseline} is missing: copy it from the folder of the run")
    final.unlink()
    assert errors(call("verify", target)) == (2, f"{final} is missing: copy it from the folder of the run")
    assert workers.started == 0


def test_float_that_ships_holds_without_a_measurement(call: Call, tmp_path: Path) -> None:
    model = write(hopeless(), tmp_path)
    assert call("tune", model, *QUICK, "--calibration-data", model.with_suffix(".npz"), "-o", tmp_path / "out")[0] == 3
    settings = read_settings(tmp_path / "out")
    assert (settings.shipped, settings.proven.ratio) == ("baseline", None)
    assert "is the float model: nothing faster was proven" in settings.told
    code, out, _ = call("verify", tmp_path / "out")
    assert (code, "nothing faster was proven" in out) == (0, True)


@pytest.mark.parametrize("place", ["/nowhere/weights.bin", "a pipe"])
def test_external_data_outside_of_the_folder_are_not_read(call, target, workers, place):
    os.mkfifo(target / "a pipe")  # to read it would wait for ever
    final = target / "optimized_final.onnx"
    proto = onnx.load(final)
    weight = proto.graph.initializer[0]
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=place)
    final.write_bytes(proto.SerializeToString())
    code, out, _ = call("verify", target)
    assert (code, workers.started) == (4, 0)
    assert "optimized_final.onnx is not the file that was proven" in out


def test_samples_of_the_run_may_hold_inputs_that_it_made_constant(call: Call, tmp_path: Path) -> None:
    text = (
        "n (float[8,128] x, float[1] rate) => (float[8,128] y) { a = MatMul(x, w) b = MatMul(a, w) y = Mul(b, rate) }"
    )
    model, out = write(build(text, {"w": normal(128, 128, scale=0.1)}), tmp_path), tmp_path / "out"
    data = ("--calibration-data", model.with_suffix(".npz"))
    assert call("tune", model, *QUICK, *data, "--fix-input", "rate=2.0", "-o", out, "--min-sqnr", "none")[0] == 0
    code, told, _ = call("verify", out, *data)
    assert code == 0
    assert "output SQNR" in told.splitlines()[-1]
