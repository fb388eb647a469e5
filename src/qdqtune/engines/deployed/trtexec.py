"""Builds and times the model of settings.json with trtexec, which prints the latency as `GPU Compute Time`."""

import shutil
import subprocess

from qdqtune.engines.deployed.start import here, library, model, runs, settings

if shutil.which(library["program"]) is None:
    raise SystemExit(f"{library['program']} is missing: put the folder of TensorRT's trtexec on PATH")
print(settings["told"], flush=True)
onnx, plan = f"--onnx={model}", here / "model.plan"
subprocess.run([library["program"], onnx, *library["build"], f"--saveEngine={plan}", "--skipInference"], check=True)
run = [f"--loadEngine={plan}", *library["run"], f"--iterations={runs}"]
subprocess.run([library["program"], *run], check=True)
plan.unlink()
