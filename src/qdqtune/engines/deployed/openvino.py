"""Runs the model of settings.json on OpenVINO, and prints the median latency."""

from qdqtune.engines.deployed.start import library, measure, model, settings

try:
    import numpy as np
    import openvino as ov
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install openvino numpy") from None

request = ov.Core().compile_model(str(model), "CPU", library["configuration"]).create_infer_request()

rng, inputs, which = np.random.default_rng(0), {}, "random inputs"
for name, (dtype, shape) in settings["inputs"].items():  # replace these by your own
    inputs[name] = (rng.standard_normal(shape) if "float" in dtype else np.ones(shape)).astype(dtype)
measure(lambda: request.infer(inputs, share_outputs=True), f"OpenVINO {ov.get_version()}, {which}")
