"""Builds and times the model of settings.json with trtexec. Read `GPU Compute Time`."""

import json
import shutil
import subprocess
from argparse import ArgumentParser
from pathlib import Path

parser = ArgumentParser(description=__doc__)
parser.add_argument("runs", type=int, nargs="?", default=100, help="inferences that are timed [100]")
runs = parser.parse_args().runs
here = Path(__file__).resolve().parent
if not (here / "settings.json").exists():
    raise SystemExit(f"settings.json is missing: copy it from the folder deploy to {here}")
settings = json.loads((here / "settings.json").read_text(encoding="utf-8"))
model = here.parent / settings["model"]
if not model.exists():
    model = here / model.name
if not model.exists():
    raise SystemExit(f"{model.name} is missing: copy it from the folder of the run to {here}")
library = settings["library"]
if shutil.which(library["program"]) is None:
    raise SystemExit(f"{library['program']} is missing: put the folder of TensorRT's trtexec on PATH")
print(settings["told"], flush=True)
onnx, plan = f"--onnx={model}", here / "model.plan"
subprocess.run([library["program"], onnx, *library["build"], f"--saveEngine={plan}", "--skipInference"], check=True)
run = [f"--loadEngine={plan}", *library["run"], f"--iterations={runs}"]
subprocess.run([library["program"], *run], check=True)
plan.unlink()
