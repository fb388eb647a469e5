"""Runs the model of settings.json on OpenVINO, and prints the median latency: python run.py [RUNS]."""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import openvino as ov

here = Path(__file__).resolve().parent
runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
settings = json.loads((here / "settings.json").read_text(encoding="utf-8"))
model = str(here.parent / settings["model"])
request = ov.Core().compile_model(model, "CPU", settings["library"]["configuration"]).create_infer_request()

rng, inputs, times = np.random.default_rng(0), {}, []
for name, (dtype, shape) in settings["inputs"].items():  # replace these by your own
    values = rng.standard_normal(shape) if "float" in dtype else np.ones(shape)
    inputs[name] = values.astype(str if dtype == "object" else dtype)
for _ in range(runs):
    begun = time.perf_counter()
    request.infer(inputs, share_outputs=True)
    times.append(time.perf_counter() - begun)
print(settings["told"])
print(f"median of {runs} runs: {1e3 * median(times):.3f} ms, OpenVINO {ov.get_version()}")
