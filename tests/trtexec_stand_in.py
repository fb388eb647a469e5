"""A program that behaves like trtexec of TensorRT 8.6, 10.0, 10.16 or 11.1 towards its caller: flags, messages, exit
codes, files. It needs no GPU: outputs come from ONNX's reference evaluator, layers from the model's nodes.

`stand_in` makes one for a test: the file `trtexec`, which runs this one, and beside it `trtexec.json` with `version`;
and optionally `unknown` (flags that it does not know), `refuse` (pattern of node names that fail to build), `hang` (in
builds), `silent` (no times in files) and `calls` (a file to which every command line is added).
`launch` runs it without a process.
"""

import io
import json
import os
import shlex
import statistics
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path

RELEASES = {"8.6": 8601, "10.0": 100001, "10.16": 101601, "11.1": 110100}
EVERYWHERE = (
    "avgRuns", "avgTiming", "builderOptimizationLevel", "device", "dumpLayerInfo", "dumpProfile", "duration",
    "dynamicPlugins", "exportLayerInfo", "exportOutput", "exportProfile", "exportTimes", "help", "iterations",
    "loadEngine", "loadInputs", "maxShapes", "memPoolSize", "minShapes", "noDataTransfers", "onnx", "optShapes",
    "percentile", "profilingVerbosity", "safe", "saveEngine", "separateProfileRun", "shapes", "skipInference",
    "staticPlugins", "timingCacheFile", "useCudaGraph", "useSpinWait", "verbose", "warmUp",
)  # fmt: skip
PRECISIONS = ("best", "fp16", "fp8", "int8")
BEFORE_11 = (*PRECISIONS, "layerPrecisions", "precisionConstraints")
COMPUTE = ("Conv", "ConvTranspose", "Gemm", "MatMul")
PLAN = b"stand-in plan\n"
STAMP = "[11/21/2025-02:00:00]"

WORDS, CONFIG, VERSION = [], {}, ()
"""The command line of this call, what the stand-in is, and its version."""


def stand_in(folder, version, **config):
    """A program `trtexec` in `folder`; its command lines go to the file `calls` beside it."""
    program = Path(folder, "trtexec")
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} "$0" "$@"\n')
    program.chmod(0o755)
    told = {"version": version, "calls": str(program.with_name("calls")), **config}
    program.with_suffix(".json").write_text(json.dumps(told))
    return str(program)


def calls(folder):
    """The command lines so far, each as flag name to value; `--help` is left out."""
    lines = [json.loads(line) for line in Path(folder, "calls").read_text().splitlines()]
    found = [{f.removeprefix("--").partition("=")[0]: f.partition("=")[2] for f in words} for words in lines]
    assert all(len(words) == len(flags) for words, flags in zip(lines, found, strict=True)), "a flag was passed twice"
    return [flags for flags in found if "help" not in flags]


def launch(command, printed):
    """What `trtexec.launch` does, in this process."""
    text, status = io.StringIO(), 0
    with redirect_stdout(text), redirect_stderr(text):
        try:
            main(command)
        except SystemExit as end:
            status = end.code
    printed.write(text.getvalue().encode())
    printed.flush()
    return status


def info(text):
    print(f"{STAMP} [I] {text}")


def fail(*errors):
    for text in errors:
        print(f"{STAMP} [E] {text}", file=sys.stderr)
    verdict("FAILED")
    sys.exit(1)


def verdict(word):
    if VERSION <= (10, 0) or word == "RUNNING":
        line = " ".join(WORDS)
        print(f"&&&& {word} TensorRT.trtexec [TensorRT v{RELEASES[CONFIG['version']]}] # {line}", flush=True)


def main(command):
    global WORDS, CONFIG, VERSION
    WORDS, CONFIG = command, json.loads(Path(f"{command[0]}.json").read_text())
    VERSION = tuple(map(int, CONFIG["version"].split(".")))
    if "calls" in CONFIG:
        with open(CONFIG["calls"], "a") as file:
            file.write(json.dumps(WORDS[1:]) + "\n")
    verdict("RUNNING")
    flags = {}
    for word in WORDS[1:]:
        name, _, value = word.removeprefix("--").partition("=")
        flags.setdefault(name, []).append(value)
    known = {
        *EVERYWHERE,
        *(BEFORE_11 if VERSION < (11,) else ()),
        *(["stronglyTyped"] if VERSION >= (10,) else []),
    }
    known -= set(CONFIG.get("unknown", ()))
    if "help" in flags:
        print("=== Model Options ===\n" + "\n".join(f"  --{name}" for name in sorted(known)))
        return
    if unknown := [name for name in flags if name not in known]:
        fail(*(f"Unknown option: --{name} {flags[name][0]}" for name in unknown))
    if VERSION >= (11,):
        for name in {"useCudaGraph", "useSpinWait", "noDataTransfers", "separateProfileRun"} & set(flags):
            print(f"{STAMP} [W] --{name} has been enabled by default", file=sys.stderr)
    if "stronglyTyped" in flags:
        if "best" in flags and VERSION >= (10, 10):
            fail("Cannot set both --stronglyTyped and --best")
        for name in set(PRECISIONS) & set(flags):
            print(f"{STAMP} [W] Ignoring --{name} because --stronglyTyped is set", file=sys.stderr)
            del flags[name]
    for library in flags.get("staticPlugins", []):
        if not os.path.exists(library):
            fail(f"Could not load plugin library {library}")
    if "onnx" in flags:
        plan = build(flags)
        if "saveEngine" in flags:
            write_plan(flags["saveEngine"][0], *plan)
    else:
        plan = read_plan(flags["loadEngine"][0])
    if "skipInference" in flags:
        info("Skipped inference phase since --skipInference is added.")
    else:
        infer(flags, *plan)
    verdict("PASSED")


def build(flags):
    import onnx

    path = flags["onnx"][0]
    try:
        onnx.checker.check_model(path)
        model = onnx.load(path)
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except Exception as error:  # noqa: BLE001
        line = " ".join(str(error).split())[:200]
        fail(f"[TRT] ModelImporter.cpp:771: While parsing: {line}", "Failed to parse onnx file",
             "Parsing model failed", "Failed to create engine from model or file.", "Engine set up failed")  # fmt: skip
    quantized = any(n.op_type == "QuantizeLinear" for n in model.graph.node)
    if quantized and VERSION < (10,) and not {"int8", "best"} & set(flags):
        fail("[TRT] 4: [network.cpp::validate::3015] Error Code 4: Internal Error (Int8 precision has been set for a "
             "layer or layer output, but int8 is not configured in the builder)", "Building engine failed",
             "Engine set up failed")  # fmt: skip
    if "hang" in CONFIG:
        time.sleep(3600)
    for node in model.graph.node:
        if "refuse" in CONFIG and fnmatchcase(node.name, CONFIG["refuse"]):
            fail(f"[TRT] 10: Error Code 10: Internal Error (Could not find any implementation for node {node.name}.)",
                 "Engine could not be created from network", "Building engine failed",
                 "Engine set up failed")  # fmt: skip
    if cache := flags.get("timingCacheFile"):
        with open(cache[0], "ab") as file:
            file.write(b"kernels\0")  # no text: such a file would be somebody's notes
    detailed = flags.get("profilingVerbosity") == ["detailed"]
    return {"ranges": ranges(flags, model.graph), "layers": layers(model), "detailed": detailed}, model


def ranges(flags, graph):
    """Least and most sizes of each input."""
    constants = {t.name for t in graph.initializer}
    usual = shapes(flags, "shapes")
    if not {"minShapes", "maxShapes"} & set(flags):  # the usual sizes alone are the least and the most as well
        usual = shapes(flags, "optShapes") or usual
    given = [shapes(flags, f"{which}Shapes") or usual for which in ("min", "max")]
    found = {}
    for value in graph.input:
        if value.name in constants:
            continue
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if all(dims):
            if any(given):
                fail("Static model does not take explicit shapes since the shape of inference tensors will be "
                     "determined by the model itself", "Network And Config setup failed",
                     "Engine set up failed")  # fmt: skip
            found[value.name] = [dims, dims]
        elif value.name in given[0]:
            found[value.name] = [side[value.name] for side in given]
        else:
            print(f"{STAMP} [W] Dynamic dimensions required for input: {value.name}, but no shapes were provided. "
                  "Automatically overriding shape to: " + "x".join(str(d or 1) for d in dims))  # fmt: skip
            found[value.name] = [[d or 1 for d in dims]] * 2
    return found


def shapes(flags, name):
    pairs = [part.rpartition(":") for part in flags.get(name, [""])[0].split(",") if part]
    return {tensor: [int(d) for d in sizes.split("x")] for tensor, _, sizes in pairs}


def write_plan(path, header, model):
    with open(path, "wb") as file:
        file.write(PLAN + json.dumps(header).encode() + b"\n" + model.SerializeToString())


def read_plan(path):
    try:
        with open(path, "rb") as file:
            good = file.readline() == PLAN
            header = json.loads(file.readline())
            body = file.read()
    except (OSError, ValueError):
        good = False
    if not good:
        fail(f"Error opening engine file: {path}", "Engine set up failed")
    return header, body


def layers(model):
    """Layers in a neutral form: names of the parts, ONNX nodes, operator, types of input, weights and output."""
    graph = model.graph
    maker = {name: n for n in graph.node for name in n.output}
    users = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    fixed = {t.name for t in graph.initializer}
    for node in graph.node:
        if all(t in fixed for t in node.input if t):
            fixed.update(node.output)
    gone, found = set(), []

    def title(node):
        return node.name or f"node_of_{node.output[0]}"

    def dequantized(tensor):
        return tensor in maker and maker[tensor].op_type == "DequantizeLinear"

    def take(node, layer, part=None):
        gone.add(title(node))
        layer["parts"].append(part or title(node))
        layer["nodes"].append(title(node))

    for node in graph.node:
        if title(node) in gone or all(t in fixed for t in node.input if t):
            continue
        if node.op_type == "DequantizeLinear" and any(u.op_type in COMPUTE for u in users.get(node.output[0], [])):
            continue  # absorbed by its reader
        layer = {"parts": [], "nodes": [], "op": node.op_type, "in": "FP32", "weights": "FP32", "out": "FP32"}
        found.append(layer)
        end = node
        if node.op_type in COMPUTE:
            if node.input[1] in fixed:
                source = node.input[1]
                while source in maker:
                    source = maker[source].input[0]
                layer["parts"].append(source)
            if dequantized(node.input[0]) and dequantized(node.input[1]):
                layer["in"] = layer["weights"] = "Int8"
                weight_q = maker.get(maker[node.input[1]].input[0])
                if weight_q is not None:
                    take(weight_q, layer)
            take(node, layer)
            after = users.get(end.output[0], [])
            if len(after) == 1 and after[0].op_type in ("Relu", "Clip"):
                end = after[0]
                take(end, layer, f"PWN({title(end)})" if end.op_type == "Clip" else None)
            after = users.get(end.output[0], [])
            if layer["in"] == "Int8" and after and all(u.op_type == "QuantizeLinear" for u in after):
                layer["out"] = "Int8"
                gone.update(title(u) for u in after)  # without trace
        else:
            take(node, layer)
            layer["in"] = "Int8" if node.op_type == "DequantizeLinear" else "FP32"
            layer["out"] = "Int8" if node.op_type == "QuantizeLinear" else "FP32"
        layer["tensors"] = [node.input[0], end.output[0]]
    return found


def layer_json(plan):
    names, entries = [], []
    for layer in plan["layers"]:
        name = " + ".join(layer["parts"])
        pair = layer["op"] in ("QuantizeLinear", "DequantizeLinear")
        if layer["op"] in COMPUTE and layer["in"] == "FP32":
            copy = f"Reformatting CopyNode for Input Tensor 0 to {name}"
            names.append(copy)
            entries.append(entry(copy, "Reformat", "Reformat", layer | {"nodes": [], "out": "FP32"}, "REFORMAT"))
        names.append(name)
        kind = "Reformat" if pair else "CaskConvolution" if layer["op"] in COMPUTE else layer["op"]
        entries.append(
            entry(name, kind, "Convolution" if layer["op"] in COMPUTE else kind, layer, "QDQ" if pair else "")
        )
    return names, {"Layers": entries if plan["detailed"] else names, "Bindings": list(plan["ranges"])}


def entry(name, kind, parameter, layer, origin):
    found = {"Name": name, "LayerType": kind, "ParameterType": parameter}
    for side, tensor, dtype in (("Inputs", 0, layer["in"]), ("Outputs", 1, layer["out"])):
        form = "Row major Int8 format" if dtype == "Int8" else f"Row major linear {dtype}"
        found[side] = [{"Name": layer["tensors"][tensor], "Dimensions": [1], "Format/Datatype": form}]
    if VERSION >= (10,) and layer["op"] in COMPUTE:  # all that such a kernel is given stands among its inputs
        flag = {"Name": "mask", "Format/Datatype": "Row major linear BOOL"}
        factors = [{"Name": f"__mye34{name}_{end}", "Format/Datatype": "Row major linear FP32"}
                   for end in ("alpha", "beta")]  # fmt: skip
        found["Inputs"] = [flag, *found["Inputs"], *factors]
    if layer["op"] in COMPUTE and parameter == "Convolution":
        found["Weights"] = {"Type": layer["weights"].replace("FP32", "Float"), "Count": 8}
    if origin:
        found["Origin"] = origin
    found["Metadata"] = "\x1e".join(f"[ONNX Layer: {node}]" for node in layer["nodes"])
    return found


def layer_ms(layer):
    return (0.05 if layer["op"] in COMPUTE else 0.01) * (0.4 if layer["in"] == "Int8" else 1.0)


def infer(flags, plan, model):
    sizes = shapes(flags, "shapes")
    for name, (least, most) in plan["ranges"].items():
        sizes.setdefault(name, most)
        if any(not low <= size <= high for size, low, high in zip(sizes[name], least, most, strict=True)):
            fail(f"[TRT] 3: [executionContext.cpp::setInputShape] Error Code 3: API Usage Error (input {name} does not "
                 "satisfy any optimization profiles)", "Inference set up failed")  # fmt: skip
    ms = sum(map(layer_ms, plan["layers"])) / 1.15
    iterations = int(flags.get("iterations", ["10"])[0])
    count = max(iterations, round(1e3 * float(flags.get("duration", ["3"])[0]) / ms))
    samples = [ms * (1 + 0.01 * (i % 5)) for i in range(count)]
    names, graph = layer_json(plan)
    if path := flags.get("exportLayerInfo"):
        with open(path[0], "w") as file:
            json.dump(graph, file)
    if "exportProfile" in flags and VERSION <= (10, 0) and "separateProfileRun" not in flags:
        info("The e2e network timing is not reported since it is inaccurate due to the extra synchronizations")
    else:
        summary(samples, flags)
    if path := flags.get("exportOutput"):
        export_output(path[0], flags, sizes, model)
    if path := flags.get("exportProfile"):
        export_profile(path[0], names, plan["layers"], count)


def summary(samples, flags):
    info(f"GPU Compute Time: median = {statistics.median(samples):g} ms")
    if (path := flags.get("exportTimes")) and not CONFIG.get("silent"):
        rows = [f'{{ "startComputeMs" : {i}, "computeMs" : {ms:g}, "d2hMs" : 7, "latencyMs" : {ms + 7:g} }}\n'
                for i, ms in enumerate(samples[:100])]  # fmt: skip
        with open(path[0], "w") as file:
            file.write("[\n  " + ", ".join(rows) + "]\n")


def export_profile(path, names, found, count):
    times = iter(found)
    rows = []
    for name in names:
        ms = 0.002 if name.startswith("Reformatting") else layer_ms(next(times))
        rows.append(f', {{ "name" : "{name}", "timeMs" : {ms * count:g}, "averageMs" : {ms:g}, "medianMs" : {ms:g}, '
                    '"percentage" : 1 }\n')  # fmt: skip
    if VERSION >= (10,):  # a kernel of the compiler's own, which the layer information does not list
        rows.append(', { "name" : "__myl_Fill", "timeMs" : 0.1, "averageMs" : 0.001, "medianMs" : 0.001, '
                    '"percentage" : 1 }\n')  # fmt: skip
    with open(path, "w") as file:
        file.write(f'[\n  {{ "count" : {count} }}\n' + "".join(rows) + "]\n")


def export_output(path, flags, sizes, model):
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    if isinstance(model, bytes):
        model = onnx.load_from_string(model)
    files = dict(part.rpartition(":")[::2] for part in flags["loadInputs"][0].split(","))
    inputs = {}
    for value in model.graph.input:
        if value.name in sizes:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            stored = np.dtype(np.int32) if dtype == np.int64 and VERSION < (10,) else dtype
            data = np.fromfile(files[value.name], stored)
            if data.size != np.prod(sizes[value.name], dtype=int):
                fail(f"Buffer for input {value.name} has a wrong size", "Inference set up failed")
            inputs[value.name] = data.reshape(sizes[value.name]).astype(dtype)
    evaluator = ReferenceEvaluator(model)
    with open(path, "w") as file:
        file.write("[\n")
        for i, (name, array) in enumerate(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True)):
            values = ", ".join(map("{:g}".format, np.asarray(array, float).reshape(-1).tolist()))
            dims = "x".join(map(str, np.shape(array)))
            file.write(f'{", " if i else "  "}{{ "name" : "{name}"\n  , "dimensions" : "{dims}"\n'
                       f'  , "values" : [ {values} ]\n  }}\n')  # fmt: skip
        file.write("]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
