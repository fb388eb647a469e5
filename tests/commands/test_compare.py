"""`compare`: files of a user against the first of them."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from conftest import Call
from models import INT8, build, joined, normal, ranges
from qdqtune import compare
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Placement
from runs import mixed, write


@pytest.mark.usefixtures("workers")
def test_options_of_compare_reach_the_measurement(monkeypatch, call, tmp_path):
    path = write(mixed(batch=None), tmp_path)
    given = SimpleNamespace()
    monkeypatch.setattr("qdqtune.commands.compare.compare_files", lambda *a, **k: given.__dict__.update(a=a, **k) or [])
    code, _, _ = call("compare", path, path, "--engine", "fake", "--input-shape", "x:5x64x64",
                      "--calibration_samples", 2, "--seed", 4, "--timing_runs", 30, "--warmup-runs", 1)  # fmt: skip
    assert code == 0
    compared, _, samples, plan = given.a
    assert (compared, given.seed, plan.looks, plan.warmup) == ((path, path), 4, (30,), 1)
    assert [s["x"].shape for s in samples] == [(5, 64, 64)] * 2


def test_compare_prints_a_table(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    code, out, err = call("compare", tuned, tuned, final, "--engine", "fake")
    assert code == 0
    assert f"first: {tuned}" in out
    assert re.search(r"1\.00x \[1\.00x, 1\.00x\] +equal files ", out)
    assert "output SQNR over 3 samples" in out
    assert re.search(rf"^ {final} .* \d\.\d\dx \[\d\.\d\dx, \d\.\d\dx\] +faster +[\d.]+ *$", out, re.MULTILINE)
    assert err.splitlines() == [
        "running model.onnx",
        "running model.onnx",
        "running optimized_final.onnx",
        "timing model.onnx, optimized_final.onnx against model.onnx",
        f"note: no --calibration-data: the inputs are those of the run beside it, {tuned.with_suffix('.npz')}",
    ]


def test_compare_tells_each_number_of_threads(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    at = ("--engine", "fake", "--engine-option", "threads=1", "--threads", "1,4")
    code, out, _ = call("compare", tuned, final, *at)
    assert code == 0
    assert re.search(rf"{final}, 1 thread .*faster", out)
    assert re.search(rf"{final}, 4 threads .*faster", out)
    rows = json.loads(call("compare", tuned, final, *at, "--json")[1])["others"]
    assert [(row["threads"], row["verdict"]) for row in rows] == [(1, "faster"), (4, "faster")]
    assert all(row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"] < 1 for row in rows)
    assert call("compare", tuned, final, "--engine", "fake", "--threads", "1;4")[0] == 2


def test_compare_goes_on_behind_a_file_that_the_engine_refuses(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    faults = 'faults={"refuse": "*"}'
    code, out, err = call("compare", tuned, final, tuned, "--engine", "fake", "--engine-option", faults)
    assert code == 5
    assert re.search(r" failed ", out)
    assert re.search(r" equal files ", out)
    assert err.splitlines()[-1].startswith(f"error: {final} cannot be compared: fake engine: ")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{ l = Log(n) \n y = Add(x, l) }", "the outputs hold NaN or infinite values"),
        ("{ z = Relu(x) }", "they have other names"),
    ],
)
def test_outputs_that_cannot_be_compared_are_told(body: str, why: str, call: Call, tmp_path: Path) -> None:
    name = "z" if "z =" in body else "y"
    first = write(build("net (float[1,4] x) => (float[1,4] y) { y = Relu(x) }", {}), tmp_path)
    other = write(
        build(f"net (float[1,4] x) => (float[1,4] {name}) {body}", {"n": np.float32([-1])}), tmp_path, "other"
    )
    code, out, err = call("compare", first, other, "--engine", "fake", "--calibration-data", first.with_suffix(".npz"))
    assert code == 0
    assert f"outputs were not compared: {why}" in " ".join((out + err).split())
    assert "SQNR" not in out
    assert "scores of classes" not in out


def test_the_worst_slice_is_told_and_a_lost_one_warned_of(call: Call, tmp_path: Path) -> None:
    net = joined()
    first, other = write(net, tmp_path), tmp_path / "other.onnx"
    known = ranges(net)
    save(insert(net, Placement.of(possible_edges(net, known)), known, INT8), other)
    code, out, err = call("compare", first, other, "--engine", "fake", "--calibration-data", first.with_suffix(".npz"))
    assert code == 0
    assert re.search(rf"^worst slice of {other}: y\[:, :, 4:12\] -[\d.]+ dB \(lost\)$", out, re.MULTILINE)
    assert f"note: {other} against {first}: y[:, :, 4:12] lost its values: " in err


def test_a_simulator_is_not_timed(call, tuned, monkeypatch, tmp_path):
    monkeypatch.setattr("qdqtune.commands.compare.is_simulated", lambda name, machine: True)
    final = tuned.parent / "out" / "optimized_final.onnx"
    code, out, err = call("compare", tuned, final, "--engine", "fake")
    assert code == 0
    assert re.search(rf"^ {final} +not timed +[\d.]+ *$", out, re.MULTILINE)
    assert f"fake is a simulator on this machine, whose times mean nothing: outputs are against {tuned} on ONNX" in err
    told = call("compare", tuned, final, "--engine", "fake", "--json")[1]
    (row,) = json.loads(told)["others"]
    assert (row["ratio"], row["ms"], row["reason"]) == (None, None, "")
    assert row["sqnr_db"] > 10


def test_a_simulator_that_is_not_installed_is_told_without_data_too(call: Call, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    model = write(mixed(), tmp_path)
    code, _, err = call("compare", model, model, "--engine", "qnn")
    assert code == 5
    assert "qdqtune[qnn]" in err


@pytest.mark.usefixtures("workers")
def test_a_file_is_compared_with_one_whose_input_was_made_constant(tmp_path: Path) -> None:
    text = "n (float[2,8] x, float[1] s) => (float[2,8] y) { [m] a = MatMul(x, w) [k] y = Mul(a, s) }"
    save(build(text, {"w": normal(8, 8)}), tmp_path / "open.onnx")
    save(load(tmp_path / "open.onnx", fix_inputs={"s": 3}), tmp_path / "fixed.onnx")
    files, data = (tmp_path / "open.onnx", tmp_path / "fixed.onnx"), {"x": normal(4, 2, 8)}
    for pair in (files, files[::-1]):
        found = compare(*pair, calibration_data=data, engine="fake", fix_inputs={"s": 3})
        assert found.rows[0].sqnr_db is None  # equal
        assert found.rows[0].accuracy is not None
    with pytest.raises(BadOption, match="`fix_inputs` names those that were made constant"):
        compare(*files, calibration_data=data, engine="fake")


def test_files_that_differ_in_their_external_data_are_not_called_equal(call: Call, tmp_path: Path) -> None:
    files = [tmp_path / name / "model.onnx" for name in ("a", "b", "same")]
    for file, seed in zip(files, (0, 1, 0), strict=True):
        file.parent.mkdir()
        model = build("net (float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }", {"w": normal(64, 64, seed=seed)})
        onnx.save(model.to_proto(), file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert files[0].read_bytes() == files[1].read_bytes()
    code, out, _ = call("compare", *files, "--engine", "fake")
    assert code == 0
    (other,), (same,) = ([line for line in out.splitlines() if f" {file} " in line] for file in files[1:])
    assert "equal files" not in other
    assert "equal files" in same
