"""Builds and times the model of settings.json with trtexec: python run.py [RUNS]. Read `GPU Compute Time`."""

import json
import subprocess
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
settings = json.loads((here / "settings.json").read_text(encoding="utf-8"))
library, runs = settings["library"], sys.argv[1] if len(sys.argv) > 1 else "100"
print(settings["told"], flush=True)
onnx, plan = f"--onnx={here.parent / settings['model']}", here / "model.plan"
subprocess.run([library["program"], onnx, *library["build"], f"--saveEngine={plan}", "--skipInference"], check=True)
run = [f"--loadEngine={plan}", *library["run"], f"--iterations={runs}"]
subprocess.run([library["program"], *run], check=True)
plan.unlink()
