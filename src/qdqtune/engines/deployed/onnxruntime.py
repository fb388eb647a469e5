"""Runs the model of settings.json on ONNX Runtime, and prints the median latency."""

from importlib import import_module

from qdqtune.engines.deployed.start import library, measure, model, settings

try:
    import numpy as np
    import onnxruntime as ort
except ModuleNotFoundError as error:
    what = f"pip install numpy, and the package of ONNX Runtime that has {library['provider']}"
    raise SystemExit(f"{error.name} is missing: {what}") from None

provider, provider_options = library["provider"], library["provider_options"]

options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, library["graph_optimization_level"])
options.execution_mode = getattr(ort.ExecutionMode, library["execution_mode"])
options.intra_op_num_threads = library["intra_op_num_threads"]
for name, value in library["config_entries"].items():
    options.add_session_config_entry(name, value)
if library["plugin"]:
    file = import_module(library["plugin"]).get_library_path()
    ort.register_execution_provider_library(provider, file)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == provider]
    options.add_provider_for_devices(devices[:1], provider_options)
    session = ort.InferenceSession(str(model), options)
else:
    session = ort.InferenceSession(str(model), options, providers=[(provider, provider_options)])

rng, inputs, which = np.random.default_rng(0), {}, "random inputs"
for name, (dtype, shape) in settings["inputs"].items():  # replace these by your own
    inputs[name] = (rng.standard_normal(shape) if "float" in dtype else np.ones(shape)).astype(dtype)
measure(lambda: session.run(None, inputs), f"ONNX Runtime {ort.__version__}, {session.get_providers()[0]}, {which}")
