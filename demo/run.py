"""Tune the bundled digits classifier as a user would, then check its accuracy on images that nothing has seen.

make demo
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from digits import INPUT_NAME, Images, load

ROOT = Path(__file__).parent.parent
MODEL = Path(__file__).with_name("digits.onnx")
SAMPLES = Path(__file__).with_name("samples.npz")
BUDGET = ("--effort", "quick", "--time-budget", "2m", "--threads", "1")
"""Half a minute on a quiet machine. At one thread, where other processes disturb the fewest rounds."""

TUNED, UNCHANGED = 0, 3

Start = Callable[[Sequence[str]], subprocess.CompletedProcess[bytes]]


def demo(folder: Path, budget: Sequence[str] = BUDGET, images: int | None = None, start: Start = subprocess.run) -> int:
    """Tune into `folder`, print latency and accuracy on the first `images` test images (all by default). `start` runs a
    command to its end.

    Returns 0 also where nothing faster was found: on a noisy machine that is an honest answer. Any other exit code of
    the tuning run is returned as it is.
    """
    output = folder / "tuned"
    arguments = ["tune", _shown(MODEL), "--calibration-data", _shown(SAMPLES), "--output-dir", _shown(output),
                 *budget, "--restart"]  # fmt: skip
    print(f"$ {shlex.join(['qdqtune', *arguments])}", flush=True)
    code = start([sys.executable, "-m", "qdqtune", *arguments]).returncode
    if code not in (TUNED, UNCHANGED):
        return code
    summary = json.loads((output / "summary.json").read_text())
    unseen = load().test
    test = Images(unseen.pixels[:images], unseen.digits[:images])
    before, after = (accuracy(output / name, test) for name in ("baseline.onnx", "optimized_final.onnx"))
    print()
    print(f"{'':31}{'before':>12}{'after':>12}")
    print(f"{'latency':31}{summary['baseline_ms']:>9.2f} ms{summary['final_ms']:>9.2f} ms")
    print(f"{f'accuracy on {len(test.digits)} unseen images':31}{before:>12.2%}{after:>12.2%}")
    print()
    if code == UNCHANGED:
        print("Nothing was faster beyond the noise of this machine, so the model stays as it was. Try again when it is")
        print("less busy; a processor without fast 8-bit instructions may have little to gain.")
    else:
        print(f"{1 / summary['ratio']:.2f} times as fast: {_shown(output / 'optimized_final.onnx')}")
    return 0


def accuracy(model: Path, images: Images) -> float:
    """The share of images that a model reads right."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    guesses = [session.run(None, {INPUT_NAME: image[None]})[0].argmax() for image in images.pixels]
    return float((np.array(guesses) == images.digits).mean())


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(demo(ROOT / "demo_output"))
