"""`make demo`, with less to do: it tunes, says what it typed, and prints latency and accuracy before and after."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest

import digits
import run
from documents import ROOT
from qdqtune.cli import tune

TABLE = re.compile(r"""
 +before +after
latency +([\d.]+) ms +([\d.]+) ms
accuracy on 20 unseen images +([\d.]+)% +([\d.]+)%
""")


def test_what_it_types_is_what_it_runs_and_starts_anew(tmp_path, capsys):
    start = Mock(return_value=SimpleNamespace(returncode=5))
    assert run.demo(tmp_path, start=start) == 5
    (typed,) = capsys.readouterr().out.splitlines()
    (ran,) = start.call_args.args
    assert list(ran[:4]) == [sys.executable, "-m", "qdqtune", "tune"]
    program, command, *arguments = shlex.split(typed.removeprefix("$ "))
    assert (program, command) == ("qdqtune", "tune")
    assert ran[-len(arguments) :] == arguments
    given = tune.tune_command.make_context("tune", arguments).params
    assert given["options"].time_budget <= 120
    assert given["options"].restart
    with np.load(given["options"].calibration_data) as arrays:
        assert arrays[digits.INPUT_NAME].shape == (48, 1, digits.SIZE, digits.SIZE)


def test_its_environment_holds_nothing_but_what_the_package_needs() -> None:
    planned = subprocess.run(["make", "-n", "-B", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (installed,) = [line.partition(" install ")[2] for line in planned.splitlines() if " install " in line]
    assert installed.endswith(" -c requirements.lock -e ."), "the lock bounds versions, it names no packages to install"


@pytest.mark.parametrize(("final_ms", "words"), [(6.2, "1.53 times as fast: "), (9.5, "Nothing was faster")])
def test_it_prints_latency_and_accuracy_before_and_after(final_ms: float, words: str, tmp_path, capsys):
    def tuned(command: Sequence[str]) -> SimpleNamespace:
        output = Path(command[command.index("--output-dir") + 1])
        output.mkdir(parents=True)
        shutil.copyfile(run.MODEL, output / "baseline.onnx")
        spoiled = onnx.load(run.MODEL)
        for tensor in spoiled.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
        onnx.save(spoiled, output / "optimized_final.onnx")
        summary = {"baseline_ms": 9.5, "final_ms": final_ms, "ratio": final_ms / 9.5}
        (output / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0 if final_ms < 9.5 else 3)

    assert run.demo(tmp_path, images=20, start=tuned) == 0
    printed = capsys.readouterr().out
    before, after, *accuracies = map(float, TABLE.search(printed).groups())
    assert (before, after) == (9.5, final_ms)
    assert accuracies[0] > 90 > accuracies[1]
    assert words in printed
    assert ("times as fast" in printed) != ("Nothing was faster" in printed)


# The committed demo model: small enough to ship, valid, and right on images that it never saw
MODEL = Path(__file__).parents[2] / "demo" / "digits.onnx"


def test_the_file_is_a_valid_model_under_4_mb() -> None:
    assert MODEL.stat().st_size < 4_000_000
    model = onnx.load(MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == [digits.INPUT_NAME]


def test_it_reads_the_held_out_digits() -> None:
    test = digits.load().test
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
    logits = [session.run(None, {digits.INPUT_NAME: image[None]})[0] for image in test.pixels]
    guesses = np.concatenate(logits).argmax(axis=1)
    assert (guesses == test.digits).mean() >= 0.97


def test_training_calibration_and_test_share_no_image() -> None:
    split = digits.load()
    parts = [{image.tobytes() for image in part.pixels} for part in (split.train, split.calibration, split.test)]
    assert [len(part.digits) for part in (split.train, split.calibration, split.test)] == [1299, 48, 450]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    for part in (split.train, split.calibration, split.test):
        assert part.pixels.shape == (len(part.digits), 1, digits.SIZE, digits.SIZE)
        assert set(part.digits) == set(range(10))
