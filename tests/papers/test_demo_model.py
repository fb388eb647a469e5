"""The committed demo model: small enough to ship, valid, and right on images that it never saw."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import digits

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
