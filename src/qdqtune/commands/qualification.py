"""Requirements that every engine must meet: checked by the tests of engines, and by `doctor --qualify` on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import inf, prod
from pathlib import Path
from re import fullmatch
from typing import Any, Literal, get_args

import numpy as np
import onnx
from onnx import numpy_helper, parser

from qdqtune.calibration.observe import Session, onnxruntime_session
from qdqtune.commands.doctor import DoctorOptions
from qdqtune.commands.inputs import execution_of, sample_source
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import with_timing_cache
from qdqtune.engines.runner import Handle, Runner, temporary_runner
from qdqtune.engines.tensorrt.options import Span, with_spans
from qdqtune.errors import (
    BadOption,
    ConstraintUnmet,
    EngineFailure,
    EngineUnavailable,
    QdqtuneError,
    first_of,
    rewording,
)
from qdqtune.explanation.unfused import check as findings_of
from qdqtune.explanation.unfused import is_low
from qdqtune.graph.loading import load
from qdqtune.graph.operators import COMPUTE
from qdqtune.numerics.accuracy import NOT_FINITE, is_finite, sqnr_db
from qdqtune.numerics.simulation import with_integer_softmax
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.observer import Observer
from qdqtune.types import EQUAL_DB, Layer, Sample
from qdqtune.version import __version__

State = Literal["held", "not held", "not applicable"]

RUNS = 5
"""Profiled inferences of a file. Chosen, not measured."""

FLOAT_DB, LOST_DB = 40.0, 3.0
"""The least SQNR in dB of float outputs, which TF32 and float16 reach; and by how much the SQNR of a quantized model
may be below the simulation's (or below `FLOAT_DB`, if that is less). Chosen, not measured."""

STRANGE = 0.1
"""The largest share of the time for rows of a profile that belong to no layer. Chosen, not measured."""

OPEN, SIZES = "tokens", ((2, 64, 128), (4, 96, 128), (8, 128, 128))
"""The input of the graph with dynamic shapes, and its smallest, usual and largest sizes."""

SAMPLES, WIDTH, SIDE, HEADS, ROWS = 8, 64, 28, 4, 128
"""Samples of each graph; channels and pixels of images, heads and tokens of attention: enough that 8 bits pay on most
engines. Chosen, not measured."""

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
"""Header of models in ONNX's text format: new enough for LayerNormalization, old enough for TensorRT 8.6."""

PLAIN = "convolutions"


def samples_of(file: Path) -> list[Sample]:
    random, (value,) = np.random.default_rng(1), onnx.load(file).graph.input
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    shapes = [SIZES[i % 3] if value.name == OPEN else sizes for i in range(SAMPLES)]
    return [{value.name: random.standard_normal(shape).astype(np.float32)} for shape in shapes]


def _model(shape: Sequence[int | str], nodes: str, name: str = "x", constants: str = "") -> onnx.ModelProto:
    """A model of nodes in ONNX's text format, from the input `name` to the output `y`. Constants such as
    `weight_a_64x32` get values: weights are random, scaled to keep the variance of activations."""
    sizes = ",".join(map(str, shape))
    model = parser.parse_model(f"{HEAD} net (float[{sizes}] {name}) => (float y) <{constants}> {{{nodes}}}")
    random, graph = np.random.default_rng(0), model.graph
    graph.output[0].type.tensor_type.ClearField("shape")
    for constant in dict.fromkeys(tensor for node in graph.node for tensor in node.input):
        if parts := fullmatch(r"(weight|bias|one)_\w+?_([0-9x]+)", constant):
            dims = [int(size) for size in parts[2].split("x")]
            summands = {1: 16, 2: dims[0]}.get(len(dims), prod(dims[1:]))
            values = np.ones(dims) if parts[1] == "one" else random.standard_normal(dims) / np.sqrt(summands)
            graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), constant))
    for number, node in enumerate(graph.node):
        node.name = f"/{node.op_type.lower()}_{number}"
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def _conv(x: str, y: str, before: int = WIDTH, after: int = WIDTH, kernel: int = 3, group: int = 1) -> str:
    sizes = f"{after}x{before // group}x{kernel}x{kernel}"
    how = f"pads: ints = {[kernel // 2] * 4}, group: int = {group}"
    return f"{y} = Conv <{how}> ({x}, weight_{y}_{sizes}, bias_{y}_{after})"


def _product(x: str, y: str, rows: int, columns: int) -> str:
    return f"{y}_0 = MatMul({x}, weight_{y}_{rows}x{columns}) {y} = Add({y}_0, bias_{y}_{columns})"


def _norm(x: str, y: str, width: int) -> str:
    return f"{y} = LayerNormalization <axis: int = -1> ({x}, one_{y}_{width}, bias_{y}_{width})"


def convolutions() -> onnx.ModelProto:
    more = "".join(f" r{n} = Relu(c{n - 1}) {_conv(f'r{n}', f'c{n}')}" for n in range(1, 4))
    return _model((1, 3, SIDE, SIDE), f"{_conv('x', 'c0', 3)} {more} y = Relu(c3)")


def residual() -> onnx.ModelProto:
    """An inverted residual: 1x1, depthwise, 1x1, and an Add around all; then a global average and a Gemm."""
    nodes = f"""
        {_conv("x", "a", WIDTH, 2 * WIDTH, 1)} b = Clip(a, low, high)
        {_conv("b", "c", 2 * WIDTH, 2 * WIDTH, 3, 2 * WIDTH)} d = Clip(c, low, high)
        {_conv("d", "e", 2 * WIDTH, WIDTH, 1)} f = Add(e, x)
        g = GlobalAveragePool(f) h = Flatten(g) y = Gemm(h, weight_last_{WIDTH}x16)"""
    return _model((1, WIDTH, SIDE, SIDE), nodes, constants="float low = {0}, float high = {6}")


def transformer(head: int) -> onnx.ModelProto:
    """A transformer layer with heads of size `head`: attention (one product makes Q, K and V) and an MLP."""
    width = HEADS * head
    nodes = f"""
        {_norm("x", "n", width)} {_product("n", "all", width, 3 * width)} apart = Reshape(all, five)
        turned = Transpose <perm: ints = [2, 0, 3, 1, 4]> (apart) a, b, c = Split <axis: int = 0> (turned)
        q = Squeeze(a, first) k = Squeeze(b, first) v = Squeeze(c, first)
        t = Transpose <perm: ints = [0, 1, 3, 2]> (k) scores = MatMul(q, t) scaled = Mul(scores, scale)
        shares = Softmax <axis: int = -1> (scaled) mixed = MatMul(shares, v)
        joined = Transpose <perm: ints = [0, 2, 1, 3]> (mixed) flat = Reshape(joined, three)
        {_product("flat", "out", width, width)} middle = Add(out, x) {_norm("middle", "m", width)}
        {_product("m", "wide", width, 4 * width)} d = Div(wide, root) e = Erf(d) f = Add(e, unit)
        g = Mul(wide, f) h = Mul(g, half) {_product("h", "last", 4 * width, width)} y = Add(last, middle)"""
    constants = f"""int64[5] five = {{0, 0, 3, {HEADS}, {head}}}, int64[1] first = {{0}},
        int64[3] three = {{0, 0, {width}}}, float scale = {{{head**-0.5}}},
        float root = {{{2**0.5}}}, float unit = {{1}}, float half = {{0.5}}"""
    return _model((1, ROWS, width), nodes, constants=constants)


def products(shape: Sequence[int | str] = (1, 4, 256), name: str = "x") -> onnx.ModelProto:
    width = int(shape[-1])
    nodes = f"""
        {_product(name, "a", width, 2 * width)} b = Relu(a)
        {_product("b", "c", 2 * width, 2 * width)} d = Relu(c)
        {_product("d", "y", 2 * width, width)}"""
    return _model(shape, nodes, name)


GRAPHS: Mapping[str, tuple[Callable[[], onnx.ModelProto], Mapping[str, Any]]] = {
    PLAIN: (convolutions, {}),
    "residual": (residual, {}),
    **{f"transformer, heads of {size}": (partial(transformer, size), {}) for size in (16, 32, 64)},
    "dynamic shapes": (partial(products, ("batch", "rows", SIZES[0][-1]), OPEN), {}),
    "weights of 8 bits": (products, {"weight_only": "w8"}),
    "weights of 4 bits": (products, {"weight_only": "w4"}),
    "fp8": (convolutions, {"quant_type": "fp8"}),
}
"""Graphs by name: the model in float, and the options of `quantize` that differ from the defaults."""


@dataclass(frozen=True)
class Seen:
    check: str
    subject: str
    state: State
    told: str


@dataclass(frozen=True, repr=False)
class Qualification(Shown):
    engine: Mapping[str, str]
    checks: tuple[Seen, ...]

    @property
    def exit_code(self) -> int:
        return ConstraintUnmet.exit_code if any(seen.state == "not held" for seen in self.checks) else 0

    def in_words(self) -> str:
        counts = Counter(seen.state for seen in self.checks)
        states = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
        engine = "{engine} {version} on {device}".format_map(self.engine)
        return f"{engine}: of {len(self.checks)} checks {states}"

    def table(self) -> Table:
        rows = [(seen.state, seen.check, seen.subject, seen.told) for seen in self.checks if seen.state != "held"]
        return Table(("state", "check", "of", "why"), rows)

    def to_dict(self) -> dict[str, Any]:
        return {"qdqtune": __version__, "holds": not self.exit_code, **asdict(self)}


class NotApplicableError(QdqtuneError): ...


@dataclass
class Bench:
    """An engine with the files of test models, which are written when first needed. `simulation` is ONNX Runtime
    without fusion; no request takes longer than `time_limit`."""

    engine: str
    folder: Path
    runner: Runner
    simulation: Session
    time_limit: float

    def plain(self, graph: str) -> Path:
        file = self.folder / graph.replace(" ", "_") / "float.onnx"
        if not file.exists():
            file.parent.mkdir()
            onnx.save(GRAPHS[graph][0](), file)
            sample_source(samples_of(file), file.parent, EXECUTION)
        return file

    def quantized(self, graph: str) -> Path:
        plain, options = self.plain(graph), GRAPHS[graph][1]
        file = plain.with_name("quantized.onnx")
        is_fp8 = graph == "fp8"  # GPUs before compute capability 8.9 have none
        try:
            with rewording("the device has no FP8", NotApplicableError) if is_fp8 else nullcontext():
                if not file.exists():
                    quantize(
                        QuantizeOptions(
                            plain,
                            output=file,
                            engine=self.engine,
                            calibration_data=str(plain.with_name("samples")),
                            calibration_method="minmax",  # accuracy of ranges is not what is checked
                            bias_correction=False,
                            time_limit=self.time_limit,
                            **options,
                        )
                    )
                if is_fp8:
                    self.runner.numeric_format("fp8")
                    self.runner.load(file)
        except BadOption as error:
            if not options:  # pairs in 8 bits are for every engine
                raise
            raise NotApplicableError(str(error)) from error
        return file

    def loaded(self, file: Path) -> Handle:
        with rewording(f"{file.name} is not built"):
            return self.runner.load(file)

    def layers(self, file: Path) -> tuple[Layer, ...]:
        self.runner.feed(samples_of(file)[0])
        handle = self.loaded(file)
        with rewording(f"{file.name} has no layers"):
            return self.runner.layers(handle, RUNS)


def _reports_layers(bench: Bench, graph: str) -> str:
    """Test models build in float, with our pairs, and with weight formats; each node is in one layer, with a time."""
    counts = []
    for file in (bench.plain(graph), bench.quantized(graph)):
        layers, operators = bench.layers(file), {node.name: node.op for node in load(file).nodes}
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
            if names:
                raise EngineFailure(f"{file.name} has {what}: {first_of(sorted(names))}")
        running = [layer for layer in layers if layer.kind != "folded"]
        times = [layer.time_ms for layer in running if layer.time_ms is not None]
        strange = sum(layer.time_ms or 0.0 for layer in running if layer.kind == "unknown")
        counts.append(f"{file.stem}: {len(operators)} nodes in {len(layers)} layers, {sum(times):.4g} ms")
        is_sensible = len(times) == len(running) and min(times) >= 0 and 0 < sum(times) < inf
        if times and not (is_sensible and strange <= STRANGE * sum(times)):
            raise EngineFailure(f"layers without sensible times in {counts[-1]}")
    return "; ".join(counts)


def _keeps_8_bits(bench: Bench, graph: str) -> str:
    """Convolutions and products with pairs run in 8 bits, and products read weights in weight formats directly. What
    else `qdqtune check` finds, such as conversions between 8 bits and float, only costs time and is counted."""
    file, options = bench.quantized(graph), GRAPHS[graph][1]
    model, layers = load(file), bench.layers(file)
    numbers = None if "weight_only" in options else bench.runner.numeric_format("fp8" if graph == "fp8" else "int8")
    failing = [finding for finding in findings_of(model, layers, numbers) if finding.fails]
    products = {node.name for node in model.nodes if node.op in COMPUTE}
    lost = [f for f in failing if numbers is None or (f.kind == "float compute" and not products.isdisjoint(f.nodes))]
    running = [layer for layer in layers if layer.kind != "folded"]
    low = sum(is_low(layer.precision) for layer in running)
    if lost:
        raise EngineFailure(f"{len(lost)} of {len(running)} layers, the first: {lost[0].reason}")
    if not low and numbers is not None:
        raise EngineFailure(f"none of {len(running)} layers runs in 8 bits")
    if any(is_low(layer.precision) for layer in bench.layers(bench.plain(graph))):
        raise EngineFailure("a layer of the float model is said to run in 8 bits")
    return f"{low} of {len(running)} layers in 8 bits, {len(failing)} other findings of `qdqtune check`"


def _agrees_with_simulation(bench: Bench, graph: str) -> str:
    if bench.runner.describe()["device"] == "none":
        raise NotApplicableError("the engine only builds here: its device is not present")
    files = bench.plain(graph), bench.quantized(graph)
    samples, models = samples_of(files[0]), list(map(load, files))
    if bench.engine == "onnxruntime":
        models = list(map(with_integer_softmax, models))
    with rewording("a file does not run"):
        exact, expected = (bench.simulation.outputs(model, "simulated", samples) for model in models)
        in_float, measured = (bench.runner.outputs(bench.loaded(file), samples) for file in files)
    if not all(map(is_finite, (in_float, expected, measured))):
        raise EngineFailure(NOT_FINITE.reason)
    levels = (sqnr_db(exact, outputs) for outputs in (in_float, expected, measured))
    float_db, expected_db, measured_db = (EQUAL_DB if db is None else db for db in levels)
    levels_text = f"{measured_db:.1f} dB, {expected_db:.1f} dB in the simulation; in float {float_db:.0f} dB"
    if float_db < FLOAT_DB or measured_db < min(expected_db, FLOAT_DB) - LOST_DB:
        raise EngineFailure(levels_text)
    return levels_text


CHECKS: Mapping[str, Callable[[Bench, str], str]] = {
    "layers": _reports_layers,
    "8 bits": _keeps_8_bits,
    "numbers": _agrees_with_simulation,
}
"""The requirements, in the order in which they are checked: functions of a bench and a graph that return what was seen,
or raise a QdqtuneError if the requirement is not met."""


def qualify(options: DoctorOptions, observer: Observer, graphs: Collection[str] = ()) -> Qualification:
    execution, spec = execution_of(options), options.spec()
    why = simulated(spec.name)
    if why:
        raise EngineUnavailable(f"{why}, and claims are about devices: leave `qualify` out, check and compare work")
    checks = []
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        spec = with_timing_cache(spec, folder)
        sized = with_spans(spec, {OPEN: Span(*SIZES)}) if spec.facts.is_tensorrt else spec
        runner = stack.enter_context(temporary_runner(sized, execution))
        described = runner.describe()
        exact = onnxruntime_session(execution, fuse=False, rewrite=spec.name == "onnxruntime")
        bench = Bench(spec.name, folder, runner, stack.enter_context(exact), execution.seconds)
        for name, look in CHECKS.items():
            for graph in graphs or GRAPHS:
                observer.stage(f"{name}: {graph}")
                state: State = "held"
                try:
                    seen = look(bench, graph)
                except QdqtuneError as error:
                    state, seen = "not applicable" if isinstance(error, NotApplicableError) else "not held", str(error)
                checks.append(Seen(name, graph, state, seen))
    return Qualification(described, tuple(checks))
