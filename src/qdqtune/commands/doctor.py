"""`qdqtune doctor`: the engines of this machine or another one, its hardware, and what to install; with `qualify`,
whether an engine meets the requirements that the tests of engines check as well."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf, nan, prod
from re import fullmatch
from typing import Any, Literal

import numpy as np
import onnx
from onnx import numpy_helper, parser

from qdqtune.calibration.observe import Session, onnxruntime_session
from qdqtune.commands.inputs import execution_of, on_disk
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.devices import nvidia_smi
from qdqtune.engines.execution import Execution
from qdqtune.engines.facts import ENGINES, PROVIDERS, facts_of
from qdqtune.engines.machine import consequence, instruction_sets, processor_name, simulated
from qdqtune.engines.options import ON, EngineOptions, with_timing_cache
from qdqtune.engines.remote import Destination
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.engines.tensorrt.options import Span, with_spans
from qdqtune.errors import BadOption, ConstraintUnmet, EngineUnavailable, QdqtuneError, first_of, rewording
from qdqtune.explanation.formatting import counted
from qdqtune.explanation.unfused import check as findings_of
from qdqtune.explanation.unfused import is_low
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COMPUTE
from qdqtune.numerics.accuracy import is_finite, sqnr_db
from qdqtune.numerics.simulation import with_integer_softmax
from qdqtune.options import SWITCH
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer
from qdqtune.types import EQUAL_DB, Layer, NumericFormat, QType
from qdqtune.version import __version__

OPENING_SECONDS = 120.0
"""How long an engine may take to open. Chosen, not measured."""


class DoctorOptions(EngineOptions):
    qualify: bool = SWITCH(
        "Check what qdqtune claims of `engine`, on small graphs of its own: builds, layers, 8 bits and outputs. With "
        "--json, to send with a report.",
        "Engine",
        "check what we claim of the engine",
    )
    on: str | None = ON


@dataclass(frozen=True)
class EngineState:
    """Whether an engine runs models here, simulates that, only builds them, or nothing; why, and what to install."""

    name: str
    status: Literal["usable", "simulated", "builds only", "missing"]
    version: str = ""
    device: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class EnginesState(Shown):
    """The engines and execution providers, and the hardware of this machine: name, cores, instruction sets of the
    processor; name, driver, compute capability and memory of each GPU. `gpu_note` says why none was found."""

    engines: tuple[EngineState, ...]
    processor: Mapping[str, Any]
    gpus: Sequence[Mapping[str, str]]
    gpu_note: str
    providers: tuple[EngineState, ...] = ()

    @property
    def exit_code(self) -> int:
        is_usable = any(e.status != "missing" for e in self.engines if not facts_of(e.name).is_modelled)
        return 0 if is_usable else EngineUnavailable.exit_code

    def in_words(self) -> str:
        return f"engines here: {', '.join(e.name for e in self.engines if e.status != 'missing')}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> Iterator[str | Table]:
        for kind, states in (("engine", self.engines), ("provider", self.providers)):
            rows = [(e.name, e.status, e.version, e.device) for e in states]
            yield Table((kind, "status", "version", "device"), rows)
        cores, isa = counted(self.processor["cores"], "core"), " ".join(self.processor["isa"])
        yield "CPU: {name}, {} ({}); {consequence}".format(cores, isa or "no known instruction sets", **self.processor)
        for gpu in self.gpus:
            yield "GPU: {name}, {memory}, compute capability {compute_capability}, driver {driver}".format_map(gpu)
        if self.gpu_note:
            yield f"GPU: none ({self.gpu_note})"
        for engine in (*self.engines, *self.providers):
            if engine.reason:
                yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))


def examine() -> EnginesState:
    """Try to open every engine, each in its own process, and read the hardware. Failures are part of the result."""
    gpus, note = find_gpus()
    engines = tuple(engine_state(name) for name in ENGINES if name not in PROVIDERS)
    isa = instruction_sets()
    follows = consequence(platform.machine(), isa)
    processor = {"name": processor_name(), "cores": devices.usable_cores(), "isa": isa, "consequence": follows}
    return EnginesState(engines, processor, gpus, note, tuple(map(engine_state, PROVIDERS)))


def doctor_elsewhere(on: str, *flags: str) -> int:
    """Run `doctor` on the remote machine that the option `on` names, print its output, and return its exit code."""
    destination = Destination.parsed(on)
    destination.facts()  # which says in one line what is missing
    words = destination.command(" ".join(("qdqtune doctor", *flags)))
    code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stdout.fileno(), check=False).returncode
    if code not in (0, EngineUnavailable.exit_code):
        raise EngineUnavailable(f"qdqtune doctor on {destination.host} fails with exit code {code}")
    return code


def engine_state(name: str) -> EngineState:
    """Open an engine or execution provider with default options; if that fails, try to build for an absent device."""
    facts = facts_of(name)
    if not all(map(importlib.util.find_spec, facts.packages)):
        return EngineState(name, "missing", reason="not installed", remedy=facts.install)
    try:
        described = _described(EngineSpec(name))
        version = described.get("plugin", described["version"])
        return EngineState(name, "simulated" if simulated(name) else "usable", version, described["device"])
    except QdqtuneError as error:
        reason = str(error)
    if facts.ahead_of_time:
        with suppress(QdqtuneError):
            described = _described(EngineSpec(name, facts.ahead_of_time))
            return EngineState(name, "builds only", described["version"], described["device"], reason)
    return EngineState(name, "missing", reason=reason)


def _described(spec: EngineSpec) -> dict[str, str]:
    with temporary_runner(spec, Execution(OPENING_SECONDS)) as runner:
        return runner.describe()


def find_gpus() -> tuple[list[dict[str, str]], str]:
    rows, reason = nvidia_smi("name,driver_version,compute_cap,memory.total")
    return [dict(zip(("name", "driver", "compute_capability", "memory"), row, strict=True)) for row in rows], reason


# What every engine must do. The graphs have enough channels and tokens that 8 bits pay on most engines.

FLOAT_DB, LOST_DB = 40.0, 3.0
"""The least SQNR in dB of float outputs, which TF32 and float16 reach; and by how much the SQNR of a quantized model
may be below the simulation's (or below `FLOAT_DB`, if that is less). Chosen, not measured."""

OPEN, SIZES = "tokens", ((2, 64, 256), (4, 96, 256), (8, 128, 256))
"""The input of the graph with dynamic shapes, and its smallest, usual and largest sizes."""


def model_of(text: str) -> onnx.ModelProto:
    """The model of a graph in ONNX's text format. Constants such as `weight_a_64x32` get values: weights are random,
    scaled to keep the variance of activations. The opset has LayerNormalization, and TensorRT 8.6 reads it."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    random, graph = np.random.default_rng(0), model.graph
    for constant in dict.fromkeys(tensor for node in graph.node for tensor in node.input):
        if parts := fullmatch(r"(weight|bias|one)_\w+?_([0-9x]+)", constant):
            dims = [int(size) for size in parts[2].split("x")]
            summands = {1: 16, 2: dims[0]}.get(len(dims), prod(dims[1:]))
            values = np.ones(dims) if parts[1] == "one" else random.standard_normal(dims) / np.sqrt(summands)
            graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), constant))
    for number, node in enumerate(graph.node):
        node.name = f"/{node.op_type.lower()}_{number}"
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


CONVOLUTIONS = """(float[1,3,28,28] x) => (float[1,64,28,28] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, weight_a_64x3x3x3, bias_a_64) b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1]> (b, weight_c_64x64x3x3, bias_c_64) d = Relu(c)
    e = Conv <pads = [1, 1, 1, 1]> (d, weight_e_64x64x3x3, bias_e_64) f = Relu(e)
    g = Conv <pads = [1, 1, 1, 1]> (f, weight_g_64x64x3x3, bias_g_64) y = Relu(g)
}"""

RESIDUAL = """(float[1,64,28,28] x) => (float[1,16] y) <float low = {0}, float high = {6}> {
    a = Conv(x, weight_a_128x64x1x1, bias_a_128) b = Clip(a, low, high)
    c = Conv <group = 128, pads = [1, 1, 1, 1]> (b, weight_c_128x1x3x3, bias_c_128) d = Clip(c, low, high)
    e = Conv(d, weight_e_64x128x1x1, bias_e_64) f = Add(e, x)
    g = GlobalAveragePool(f) h = Flatten(g) y = Gemm(h, weight_y_64x16)
}"""
"""An inverted residual: 1x1, depthwise, 1x1, and an Add around all; then a global average and a Gemm."""


def transformer(head: int) -> str:
    """A transformer layer with four heads of size `head`: attention (one product makes Q, K and V) and an MLP."""
    n = 4 * head
    return f"""(float[1,128,{n}] x) => (float[1,128,{n}] y) <
        int64[5] five = {{0, 0, 3, 4, {head}}}, int64[1] first = {{0}}, int64[3] three = {{0, 0, {n}}},
        float scale = {{{head**-0.5}}}, float root = {{{2**0.5}}}, float unit = {{1}}, float half = {{0.5}}
    > {{
        normed = LayerNormalization <axis = -1> (x, one_a_{n}, bias_a_{n})
        all_0 = MatMul(normed, weight_all_{n}x{3 * n}) all = Add(all_0, bias_all_{3 * n}) apart = Reshape(all, five)
        turned = Transpose <perm = [2, 0, 3, 1, 4]> (apart) a, b, c = Split <axis = 0> (turned)
        q = Squeeze(a, first) k = Squeeze(b, first) v = Squeeze(c, first)
        t = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, t) scaled = Mul(scores, scale)
        shares = Softmax <axis = -1> (scaled) mixed = MatMul(shares, v)
        joined = Transpose <perm = [0, 2, 1, 3]> (mixed) flat = Reshape(joined, three)
        out_0 = MatMul(flat, weight_out_{n}x{n}) out = Add(out_0, bias_out_{n}) middle = Add(out, x)
        m = LayerNormalization <axis = -1> (middle, one_m_{n}, bias_m_{n})
        wide_0 = MatMul(m, weight_wide_{n}x{4 * n}) wide = Add(wide_0, bias_wide_{4 * n})
        d = Div(wide, root) e = Erf(d) f = Add(e, unit) g = Mul(wide, f) h = Mul(g, half)
        last_0 = MatMul(h, weight_last_{4 * n}x{n}) last = Add(last_0, bias_last_{n}) y = Add(last, middle)
    }}"""


def products(rows: str, name: str = "x") -> str:
    return f"""(float[{rows},256] {name}) => (float[{rows},256] y) {{
        a = MatMul({name}, weight_a_256x512) b = Add(a, bias_b_512) c = Relu(b)
        d = MatMul(c, weight_d_512x512) e = Add(d, bias_e_512) f = Relu(e)
        g = MatMul(f, weight_g_512x256) y = Add(g, bias_y_256)
    }}"""


GRAPHS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "convolutions": (CONVOLUTIONS, {}),
    "residual": (RESIDUAL, {}),
    **{f"transformer, heads of {size}": (transformer(size), {}) for size in (16, 32, 64)},
    "dynamic shapes": (products("batch,rows", OPEN), {}),
    "weights of 8 bits": (products("1,4"), {"weight_only": "w8"}),
    "weights of 4 bits": (products("1,4"), {"weight_only": "w4"}),
    "fp8": (CONVOLUTIONS, {"quant_type": "fp8"}),
}
"""Graphs by name: the float model, and the options of `quantize` that differ from the defaults."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a graph, the `subject` of a check. States: held, not held, not applicable."""

    check: str
    subject: str
    state: str
    told: str


@dataclass(frozen=True, repr=False)
class Qualification(Shown):
    engine: Mapping[str, str]
    checks: tuple[Seen, ...]

    @property
    def exit_code(self) -> int:
        return ConstraintUnmet.exit_code if any(seen.state == "not held" for seen in self.checks) else 0

    def in_words(self) -> str:
        states = Counter(seen.state for seen in self.checks).most_common()
        counts = ", ".join(f"{count} {state}" for state, count in states)
        return "{engine} {version} on {device}: of {} checks {}".format(len(self.checks), counts, **self.engine)

    def table(self) -> Table:
        rows = [(seen.state, seen.check, seen.subject, seen.told) for seen in self.checks if seen.state != "held"]
        return Table(("state", "check", "of", "why"), rows)

    def to_dict(self) -> dict[str, Any]:
        return {"qdqtune": __version__, "holds": not self.exit_code, **asdict(self)}


CHECKS = ("layers", "8 bits", "numbers")

Finding = tuple[str, bool, str]
"""The name of a check, whether what was seen is right, and what was seen."""


def _examine(graph: str, engine: str, runner: Runner, simulation: Session, time_limit: float) -> Iterator[Finding]:
    """Build a graph in float and quantized, and check outputs and layers of both. `simulation` is ONNX Runtime without
    fusion. Raises BadOption if the engine, or its device, lacks what the graph needs."""
    (text, options), folder = GRAPHS[graph], runner.log_dir / graph.replace(" ", "_")
    model, random = model_of(text), np.random.default_rng(1)
    (value,) = model.graph.input
    fixed = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    shapes = [*SIZES] * 3 if value.name == OPEN else [fixed] * 8
    samples = [{value.name: random.standard_normal(shape).astype(np.float32)} for shape in shapes]
    folder.mkdir()
    files = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(model, files[0])
    with rewording("float.onnx is not built"):
        in_float = runner.load(files[0])
    given = QuantizeOptions(
        files[0], output=files[1], engine=engine, calibration_data=samples, time_limit=time_limit, **options
    )
    with on_disk(given) as here:
        quantize(here)
    numbers = None if "weight_only" in options else runner.numeric_format(options.get("quant_type", "int8"))
    is_fp8 = numbers is not None and numbers.activation is QType.FP8  # GPUs before compute capability 8.9 have none
    with rewording("the device has no FP8", BadOption) if is_fp8 else rewording("quantized.onnx is not built"):
        builds = in_float, runner.load(files[1])
    models = [load(file) for file in files]
    if runner.describe()["device"] != "none":
        rounded = [with_integer_softmax(each) for each in models] if engine == "onnxruntime" else models
        with rewording("a file does not run"):
            exact, expected = (simulation.outputs(each, "simulated", samples) for each in rounded)
            outputs = expected, *(runner.outputs(build, samples) for build in builds)
        levels = (sqnr_db(exact, each) if is_finite(each) else nan for each in outputs)
        expected_db, float_db, db = (EQUAL_DB if level is None else level for level in levels)
        told = f"{db:.1f} dB, {expected_db:.1f} dB in the simulation; in float {float_db:.0f} dB"
        yield "numbers", float_db >= FLOAT_DB and db >= min(expected_db, FLOAT_DB) - LOST_DB, told
    runner.feed(samples[0])
    with rewording("the engine has no layers"):
        reports = [runner.layers(build, 5) for build in builds]
    for file, each, layers in zip(files, models, reports, strict=True):
        yield from _check_layers(file.name, each, layers)
    is_float = not any(is_low(layer.precision) for layer in reports[0] if layer.kind != "folded")
    yield "8 bits", is_float, f"{'no' if is_float else 'a'} layer of the float model is said to run in 8 bits"
    yield from _check_precision(models[1], reports[1], numbers)


def _check_layers(file: str, model: Model, layers: Sequence[Layer]) -> Iterator[Finding]:
    """Each node is in one layer, with a time."""
    operators = {node.name: node.op for node in model.nodes}
    named = Counter(chain.from_iterable(layer.nodes for layer in layers))
    computed = set[str]().union(*(layer.nodes for layer in layers if layer.kind == "compute"))
    wrong = {
        "nodes in no layer": operators.keys() - named.keys(),
        "nodes in several layers": {node for node, count in named.items() if count > 1},
        "layers with names that are no nodes": named.keys() - operators.keys(),
        "products outside of layers that compute": {n for n, op in operators.items() if op in COMPUTE} - computed,
        "a layer behind that of folded nodes": {x.name for x in layers[:-1] if x.kind == "folded"},
    }
    for what, names in wrong.items():
        yield "layers", not names, f"{file}: {what}: {first_of(sorted(names)) if names else 'none'}"
    running = [layer for layer in layers if layer.kind != "folded"]
    times = [layer.time_ms for layer in running if layer.time_ms is not None]
    strange = sum(layer.time_ms or 0.0 for layer in running if layer.kind == "unknown")
    is_whole = len(times) == len(running) and min(times) >= 0 and strange <= 0.1 * sum(times)
    is_sensible = not times or (is_whole and 0 < sum(times) < inf)
    told = f"{len(operators)} nodes in {len(layers)} layers, {sum(times):.4g} ms"
    yield "layers", is_sensible, f"{file}: {told}{'' if is_sensible else ', which are no sensible times'}"


def _check_precision(model: Model, layers: Sequence[Layer], numbers: NumericFormat | None) -> Iterator[Finding]:
    """Convolutions and products with pairs run in 8 bits, and products read weights in weight formats directly. What
    else `qdqtune check` finds, such as conversions between 8 bits and float, only costs time and is counted."""
    failing = [finding for finding in findings_of(model, layers, numbers) if finding.fails]
    products = {node.name for node in model.nodes if node.op in COMPUTE}
    lost = [f for f in failing if numbers is None or (f.kind == "float compute" and not products.isdisjoint(f.nodes))]
    running = [layer for layer in layers if layer.kind != "folded"]
    low = sum(is_low(layer.precision) for layer in running)
    yield "8 bits", not lost, f"{len(lost)} of {len(running)} layers: {first_of([f.reason for f in lost])}"
    told = f"{low} of {len(running)} layers in 8 bits, {len(failing)} other findings of `qdqtune check`"
    yield "8 bits", low > 0 or numbers is None, told


def qualify(options: DoctorOptions, observer: Observer, graphs: Collection[str] = ()) -> Qualification:
    execution, spec = execution_of(options), options.spec()
    if why := simulated(spec.name):
        raise EngineUnavailable(f"{why}, and claims are about devices: leave `qualify` out, check and compare work")
    checks = list[Seen]()
    with ExitStack() as stack:
        sized = with_timing_cache(spec, stack.enter_context(temporary_folder()))
        if spec.facts.is_tensorrt:
            sized = with_spans(sized, {OPEN: Span(*SIZES)})
        runner = stack.enter_context(temporary_runner(sized, execution))
        described = runner.describe()
        exact = stack.enter_context(onnxruntime_session(execution, fuse=False, rewrite=spec.name == "onnxruntime"))
        absent = BadOption("the engine only builds here: its device is not present")
        for graph in graphs or GRAPHS:
            observer.stage(graph)
            seen: dict[str, Seen] = {}
            unseen: QdqtuneError = absent
            try:
                for check, is_right, told in _examine(graph, spec.name, runner, exact, execution.seconds):
                    if check not in seen or seen[check].state == "held":
                        seen[check] = Seen(check, graph, "held" if is_right else "not held", told)
            except QdqtuneError as error:
                unseen = error
            # Pairs in 8 bits, without other options, are for every engine.
            is_lacking = isinstance(unseen, BadOption) and bool(GRAPHS[graph][1])
            state = "not applicable" if unseen is absent or is_lacking else "not held"
            checks += [seen.get(check) or Seen(check, graph, state, str(unseen)) for check in CHECKS]
    return Qualification(described, tuple(checks))
