"""Runs the model of settings.json on OpenVINO, and prints the median latency."""

import json
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

try:
    import numpy as np
    import openvino as ov
except ImportError as error:
    raise SystemExit(f"{error.name} is missing: pip install openvino numpy") from None

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
request = ov.Core().compile_model(str(model), "CPU", settings["library"]["configuration"]).create_infer_request()

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
