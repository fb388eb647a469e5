"""Runs the model of settings.json on OpenVINO, and prints the median latency."""

import time
from statistics import median

from qdqtune.engines.deployed.start import library, model, runs, settings

try:
    import numpy as np
    import openvino as ov
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install openvino numpy") from None

request = ov.Core().compile_model(str(model), "CPU", library["configuration"]).create_infer_request()

rng, inputs, times = np.random.default_rng(0), {}, []
for name, (dtype, shape) in settings["inputs"].items():  # replace these by your own
    values = rng.standard_normal(shape) if "float" in dtype else np.ones(shape)
    inputs[name] = values.astype(dtype)
for _ in range(runs):
    begun = time.perf_counter()
    request.infer(inputs, share_outputs=True)
    times.append(time.perf_counter() - begun)
print(settings["told"])
print(f"median of {runs} runs: {1e3 * median(times):.3f} ms, OpenVINO {ov.get_version()}")
