"""How far the estimate of a run is from the truth: `tune --dry-run`, then the same run, for each model in a folder.

A model is calibrated on the .npz file beside it, where there is one. The aim is a factor of 1.5. Options behind `--` go
to tune: `python benchmarks/estimate.py models -- --effort quick --time-budget 5m`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

AIM = 1.5


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders of models, or models")
    parser.add_argument("options", nargs="*", default=[], help="of tune, behind --")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    models = [m for path in given.models for m in (sorted(path.rglob("*.onnx")) if path.is_dir() else [path])]
    print(f"{'model':32} {'estimate, s':>12} {'truth, s':>10} {'factor':>7}")
    for model in models:
        expected, took = measured(model, options)
        if expected is None:
            print(f"{model.parent.name + '/' + model.stem:32} {'failed':>12}", flush=True)
            continue
        factor = max(expected / took, took / expected)
        mark = "" if factor <= AIM else "  beyond the aim"
        print(
            f"{model.parent.name + '/' + model.stem:32} {expected:12.1f} {took:10.1f} {factor:7.2f}{mark}", flush=True
        )


def measured(model: Path, options: Sequence[str]) -> tuple[float | None, float]:
    """Seconds that `--dry-run` expects, None if it fails, and those that the run took."""
    data = next((["--calibration-data", str(d)] for d in sorted(model.parent.glob("*.npz"))), [])
    with tempfile.TemporaryDirectory() as folder:
        tune = [sys.executable, "-m", "qdqtune", "tune", str(model), "-o", f"{folder}/out", "--json", "-q"]
        asked = [*tune, *data, *options]
        dry = subprocess.run([*asked, "--dry-run"], stdout=subprocess.PIPE, text=True, check=False)
        if dry.returncode:
            return None, 0.0
        begun = time.monotonic()
        done = subprocess.run(asked, stdout=subprocess.DEVNULL, check=False)
        took = time.monotonic() - begun
    return (json.loads(dry.stdout)["seconds"] if done.returncode in (0, 3, 4) else None), took


if __name__ == "__main__":
    main()
