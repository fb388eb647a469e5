"""`qdqtune doctor`: the engines of this machine or another one, its hardware, and what to install; with `--qualify`
what holds of our claims about an engine, checked on small graphs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from math import prod
from pathlib import Path
from time import monotonic
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import onnx
from onnx import numpy_helper, parser

from qdqtune.calibration.observe import Session, onnxruntime_session
from qdqtune.commands.inputs import execution_of, sample_source
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.tune import TuneOptions, tune
from qdqtune.engines import LAUNCHED, MODULES, TENSORRT_FAMILY, EngineSpec, devices
from qdqtune.engines.coverage import has_sensible_times, wrong_nodes
from qdqtune.engines.devices import nvidia_smi
from qdqtune.engines.execution import Execution
from qdqtune.engines.library_settings import OnnxRuntimeOptions, OpenVinoOptions
from qdqtune.engines.machine import (
    DOT_PRODUCTS,
    architecture,
    emulation,
    instruction_sets,
    is_simulated,
    lacks_dot_products,
    processor_name,
    simulated,
)
from qdqtune.engines.options import EngineOptions, on_option, with_timing_cache
from qdqtune.engines.providers import PROVIDERS
from qdqtune.engines.remote.connection import Destination
from qdqtune.engines.runner import Handle, Runner, as_workloads
from qdqtune.engines.tensorrt.options import CachedOptions, Span, with_spans
from qdqtune.engines.tensorrt.rtx import RtxOptions
from qdqtune.engines.tensorrt.trtexec import TrtexecOptions
from qdqtune.errors import (
    BadOption,
    ConstraintUnmet,
    EngineFailure,
    EngineUnavailable,
    QdqtuneError,
    one_line,
    rewording,
)
from qdqtune.explanation.formatting import counted
from qdqtune.explanation.unfused import check as findings_of
from qdqtune.explanation.unfused import is_low
from qdqtune.graph.loading import load
from qdqtune.graph.operators import COMPUTE
from qdqtune.numerics.accuracy import NOT_FINITE, is_finite, sqnr_db
from qdqtune.numerics.simulation import with_integer_softmax
from qdqtune.options import SWITCH, Flag, MaybeFile, MaybeText, Values, option, writes
from qdqtune.system.checks import record
from qdqtune.system.writing import temporary_folder
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.contexts import views_of
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import Mode
from qdqtune.types import EQUAL_DB, Layer, Sample
from qdqtune.version import __version__

PRETENDS = "fake"
"""The engine that is always usable, since it measures nothing."""

AHEAD_OF_TIME = {"tensorrt-rtx": {"target": "sm89"}}
"""Options with which an engine builds for a device that is not present."""

NEEDS = {
    "onnxruntime": (("onnxruntime",), "pip install onnxruntime"),
    "openvino": (("openvino",), "pip install 'qdqtune[openvino]'"),
    "tensorrt": (("tensorrt", "cuda"), "pip install 'qdqtune[tensorrt]'"),
    "tensorrt-rtx": (("tensorrt_rtx_bindings",), "pip install 'qdqtune[tensorrt-rtx]'"),
}
"""The Python packages without which an engine cannot be opened, and the command that installs them."""

OPTIONS = {
    "onnxruntime": OnnxRuntimeOptions,
    "openvino": OpenVinoOptions,
    "tensorrt": CachedOptions,
    "tensorrt-rtx": RtxOptions,
    "trtexec": TrtexecOptions,
}
"""The options of each real engine."""

OPENING_SECONDS = 120.0
"""How long an engine may take to open. Chosen, not measured."""


def _usual_record(values: Values) -> Path | None:
    return Path(f"qualification_{values['engine']}.json") if values["qualify"] else None


@dataclass(kw_only=True)
class DoctorOptions(EngineOptions):
    qualify: Flag = option(
        SWITCH,
        False,
        "Check what qdqtune claims of `engine`, on small graphs of its own: builds, layers, 8 bits, outputs, times, "
        "failures and searches. Takes some minutes.",
        "Engine",
        short="check what we claim of the engine",
    )
    output: MaybeFile = option(
        writes(record, _usual_record),
        None,
        "With `qualify`: the JSON file of what held, to send with a report.",
        "Output",
        short="with --qualify: where to write what held",
        flags="-o --output",
        default_in_words="qualification_ENGINE.json",
    )
    on: MaybeText = on_option()

    @property
    def record(self) -> Path:
        """The file of what `qualify` found to hold."""
        return self.output or Path(f"qualification_{self.engine}.json")


@dataclass(frozen=True)
class EngineState:
    """Whether an engine runs models here, simulates that, only builds them, or neither; why, and what would help."""

    name: str
    status: Literal["usable", "simulated", "builds only", "missing"]
    version: str = ""
    device: str = ""
    reason: str = ""
    remedy: str = ""
    takes: str = ""
    """What numbers an execution provider takes, and what not."""


@dataclass(frozen=True)
class Processor:
    """The CPU: usable cores, instruction sets for low precision, and their consequence for int8."""

    name: str
    cores: int
    isa: tuple[str, ...]
    consequence: str


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as nvidia-smi reports it."""

    name: str
    driver: str
    compute_capability: str
    memory: str


@dataclass(frozen=True)
class EngineOption:
    """An option of engines (`--engine-option`): its type and default in words, and what it does."""

    name: str
    takes: str
    default: str
    engines: tuple[str, ...]
    help: str


@dataclass(frozen=True, repr=False)
class EnginesState(Shown):
    """The engines, among them execution providers, and the hardware of this machine. `gpu_note` says why there is no
    GPU."""

    engines: tuple[EngineState, ...]
    processor: Processor
    gpus: tuple[Gpu, ...]
    gpu_note: str
    providers: tuple[EngineState, ...] = ()
    options: tuple[EngineOption, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if a real engine can be used, if only to build."""
        is_usable = any(e.status != "missing" for e in self.engines if e.name != PRETENDS)
        return 0 if is_usable else EngineUnavailable.exit_code

    def in_words(self) -> str:
        return f"engines here: {', '.join(e.name for e in self.engines if e.status != 'missing')}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> Iterator[str | Table]:
        for kind, states in (("engine", self.engines), ("provider", self.providers)):
            rows = [(e.name, e.status, e.version, e.device, e.takes) for e in states]
            yield Table((kind, "status", "version", "device", "takes"), rows, least_widths={"takes": 30})
        options = [(o.name, o.takes, o.default, ", ".join(o.engines), o.help) for o in self.options]
        columns = ("engine option", "takes", "default", "engines", "meaning")
        yield Table(columns, options, least_widths={"meaning": 30})
        cpu = self.processor
        cores = counted(cpu.cores, "core")
        yield f"CPU: {cpu.name}, {cores} ({' '.join(cpu.isa) or 'no known instruction sets'}); {cpu.consequence}"
        for gpu in self.gpus:
            yield f"GPU: {gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
        if self.gpu_note:
            yield f"GPU: none ({self.gpu_note})"
        for engine in (*self.engines, *self.providers):
            if engine.reason:
                yield f"{engine.name}: " + ": ".join(filter(None, (engine.reason, engine.remedy)))


def examine() -> EnginesState:
    """Open every engine in a process of its own, and read the hardware. Failures are part of the result."""
    gpus, note = find_gpus()
    with temporary_folder() as folder:
        engines = tuple(engine_state(name, folder) for name in MODULES if name not in PROVIDERS)
        providers = tuple(engine_state(name, folder) for name in PROVIDERS)
    return EnginesState(engines, this_processor(), gpus, note, providers, engine_options())


def doctor_elsewhere(on: str, *flags: str) -> int:
    """Run `doctor` on the machine that the option `on` names, which prints here. Gives its exit code.

    Raises:
        EngineUnavailable: there is no way to it, no qdqtune of this version, or the command fails there.
    """
    destination = Destination.parsed(on)
    destination.facts()  # which says in one line what is missing
    words = destination.command(" ".join(("qdqtune doctor", *flags)))
    code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stdout.fileno(), check=False).returncode
    if code not in (0, EngineUnavailable.exit_code):
        raise EngineUnavailable(f"qdqtune doctor on {destination.host} fails with exit code {code}")
    return code


def engine_options() -> tuple[EngineOption, ...]:
    """All options of engines. Execution providers take those of onnxruntime."""
    engines: dict[tuple[str, str, str, str], list[str]] = {}
    for engine, kind in OPTIONS.items():
        types = get_type_hints(kind, include_extras=True)
        for one in fields(kind):
            hint, text = get_args(types[one.name])
            is_set = one.default not in (None, "", ())
            default = json.dumps(one.default).strip('"') if is_set else ""
            engines.setdefault((one.name, _type_in_words(hint), default, text), []).append(engine)
    return tuple(
        EngineOption(name, takes, default, tuple(of), text) for (name, takes, default, text), of in engines.items()
    )


def _type_in_words(hint: Any) -> str:
    one = next(part for part in get_args(hint) if part is not NoneType) if isinstance(hint, UnionType) else hint
    names = {bool: "true or false", int: "integer", str: "text", Sequence: "list of text", Mapping: "values by name"}
    return names[get_origin(one) or one]


def engine_state(name: str, log_dir: Path) -> EngineState:
    """Open one engine or execution provider without options; if that fails and the engine can, for a device that is not
    present."""
    table = PROVIDERS.get(name)
    if table is None:
        notes, (packages, command) = "", NEEDS.get(name, ((), ""))
    else:
        notes, packages, command = table.notes, (table.plugin,) if table.plugin else (), table.install
    is_complete = all(importlib.util.find_spec(package) for package in packages)
    if table is not None and not is_complete:
        return EngineState(name, "missing", reason="not installed", remedy=command, takes=notes)
    try:
        told = _described(EngineSpec(name), log_dir)
        version = told.get("plugin", told["version"])
        return EngineState(name, "simulated" if is_simulated(name) else "usable", version, told["device"], takes=notes)
    except QdqtuneError as error:
        reason = one_line(error)
    if table is not None or not is_complete:
        why = reason.removesuffix(f": {command}")
        return EngineState(name, "missing", reason=why, remedy=command, takes=notes)
    if name in AHEAD_OF_TIME:
        with contextlib.suppress(QdqtuneError):
            told = _described(EngineSpec(name, AHEAD_OF_TIME[name]), log_dir)
            return EngineState(name, "builds only", told["version"], told["device"], reason)
    return EngineState(name, "missing", reason=reason)


def _described(spec: EngineSpec, log_dir: Path) -> dict[str, str]:
    with Runner(spec, execution=Execution(OPENING_SECONDS), log_dir=log_dir) as runner:
        return runner.describe()


def this_processor() -> Processor:
    """The CPU of this machine."""
    isa = instruction_sets()
    follows = consequence(platform.machine(), isa, is_slow=lacks_dot_products())
    told = "; ".join(filter(None, (emulation(), follows)))
    return Processor(processor_name(), devices.usable_cores(), isa, told)


def consequence(machine: str, isa: Collection[str], *, is_slow: bool = False) -> str:
    """The consequence of a machine's instruction sets for int8; `is_slow` see `lacks_dot_products`."""
    is_arm = architecture(machine) == "ARM"
    if is_slow:
        return "no ASIMDDP: onnxruntime gets int8 activations, and int8 gains are moderate"
    if not isa:
        return "no instruction set that is known to matter: only a measurement tells what int8 gains"
    if "i8mm" in isa or "amx_int8" in isa:
        return f"{'I8MM' if is_arm else 'AMX'}: int8 matrix products in hardware, int8 gains most here"
    if is_arm or DOT_PRODUCTS & set(isa):
        return f"{'ASIMDDP' if is_arm else 'VNNI'}: int8 dot products in hardware, int8 gains much"
    return "no VNNI: weights take 7 bits, for sums of two 8-bit products saturate, and int8 gains are moderate"


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The NVIDIA GPUs, or why there is none."""
    rows, reason = nvidia_smi("name,driver_version,compute_cap,memory.total")
    return tuple(Gpu(*row) for row in rows), reason


# What holds of our claims


State = Literal["held", "not held", "not applicable"]

QUICKLY: Mapping[str, Any] = {"calibration_method": "minmax", "bias_correction": False}
"""How ranges are found: their accuracy is not what is checked."""

FP8_SINCE = 8.9
"""The first compute capability of NVIDIA's with FP8."""

RUNS, ROUNDS, LAUNCHED_ROUNDS, TUNE_SECONDS = 5, 24, 12, 60.0
"""Profiled inferences of a file; rounds of a comparison, the latter where each turn starts a process; the time budget
of a search. Chosen, not measured."""

FLOAT_DB, LOST_DB = 40.0, 3.0
"""The least SQNR of float outputs, which TF32 and float16 reach; and how far the SQNR of a quantized model may be below
that of the simulation, of which what lies above `FLOAT_DB` is not asked for. Chosen, not measured."""

OPEN, SIZES = "tokens", ((2, 64, 128), (4, 96, 128), (8, 128, 128))
"""The input of the graph with dynamic shapes, and its smallest, usual and largest sizes."""

SAMPLES, WIDTH, SIDE, HEADS, ROWS = 8, 64, 28, 4, 128
"""Samples of each graph; channels and pixels of images, heads and tokens of attention: enough that 8 bits pay on most
engines. Chosen, not measured."""

PLAIN, ITSELF, DEEPER = "convolutions", "a file and itself", "a file and one of four times its layers"


# Graphs


def samples_of(file: Path) -> list[Sample]:
    """Normally distributed inputs; those of the open input have its sizes in turn."""
    random, (value,) = np.random.default_rng(1), onnx.load(file).graph.input
    sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    shapes = [SIZES[i % 3] if value.name == OPEN else sizes for i in range(SAMPLES)]
    return [{value.name: random.standard_normal(shape).astype(np.float32)} for shape in shapes]


def _model(shape: Sequence[int | str], nodes: str, name: str = "x", constants: str = "") -> onnx.ModelProto:
    """A model of nodes in ONNX's text format, from the input `name` to the output `y`. Constants such as
    `weight_a_64x32` get values: weights are random, and keep the variance of values."""
    sizes = ",".join(map(str, shape))
    head = '<ir_version: 8, opset_import: ["": 17]>'  # with LayerNormalization, and for TensorRT 8.6 as well
    model = parser.parse_model(f"{head} net (float[{sizes}] {name}) => (float y) <{constants}> {{{nodes}}}")
    random, graph = np.random.default_rng(0), model.graph
    graph.output[0].type.tensor_type.ClearField("shape")
    for constant in dict.fromkeys(tensor for node in graph.node for tensor in node.input):
        if parts := re.fullmatch(r"(weight|bias|one)_\w+?_([0-9x]+)", constant):
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


def convolutions(depth: int = 4) -> onnx.ModelProto:
    more = "".join(f" r{n} = Relu(c{n - 1}) {_conv(f'r{n}', f'c{n}')}" for n in range(1, depth))
    return _model((1, 3, SIDE, SIDE), f"{_conv('x', 'c0', 3)} {more} y = Relu(c{depth - 1})")


def residual() -> onnx.ModelProto:
    """An inverted residual: 1x1, depthwise, 1x1, and an Add around all; then a global average and a Gemm."""
    nodes = f"""
        {_conv("x", "a", WIDTH, 2 * WIDTH, 1)} b = Clip(a, low, high)
        {_conv("b", "c", 2 * WIDTH, 2 * WIDTH, 3, 2 * WIDTH)} d = Clip(c, low, high)
        {_conv("d", "e", 2 * WIDTH, WIDTH, 1)} f = Add(e, x)
        g = GlobalAveragePool(f) h = Flatten(g) y = Gemm(h, weight_last_{WIDTH}x16)"""
    return _model((1, WIDTH, SIDE, SIDE), nodes, constants="float low = {0}, float high = {6}")


def transformer(head: int, is_fused: bool = False) -> onnx.ModelProto:
    """A layer of attention with heads of a size, and two products with a Gelu between them. Queries, keys and values
    come from one product or from three."""
    width = HEADS * head
    if is_fused:
        sizes = f"int64[5] five = {{0, 0, 3, {HEADS}, {head}}}, int64[1] first = {{0}}"
        heads = f"""
        {_product("n", "all", width, 3 * width)} apart = Reshape(all, five)
        turned = Transpose <perm: ints = [2, 0, 3, 1, 4]> (apart) a, b, c = Split <axis: int = 0> (turned)
        q = Squeeze(a, first) k = Squeeze(b, first) v = Squeeze(c, first)"""
    else:
        sizes = f"int64[4] four = {{0, 0, {HEADS}, {head}}}"
        heads = "".join(
            f"""
        {_product("n", f"{name}_1", width, width)} {name}_2 = Reshape({name}_1, four)
        {name} = Transpose <perm: ints = [0, 2, 1, 3]> ({name}_2)"""
            for name in "qkv"
        )
    nodes = f"""
        {_norm("x", "n", width)} {heads}
        t = Transpose <perm: ints = [0, 1, 3, 2]> (k) scores = MatMul(q, t) scaled = Mul(scores, scale)
        shares = Softmax <axis: int = -1> (scaled) mixed = MatMul(shares, v)
        joined = Transpose <perm: ints = [0, 2, 1, 3]> (mixed) flat = Reshape(joined, three)
        {_product("flat", "out", width, width)} middle = Add(out, x) {_norm("middle", "m", width)}
        {_product("m", "wide", width, 4 * width)} d = Div(wide, root) e = Erf(d) f = Add(e, unit)
        g = Mul(wide, f) h = Mul(g, half) {_product("h", "last", 4 * width, width)} y = Add(last, middle)"""
    constants = f"""{sizes}, int64[3] three = {{0, 0, {width}}}, float scale = {{{head**-0.5}}},
        float root = {{{2**0.5}}}, float unit = {{1}}, float half = {{0.5}}"""
    return _model((1, ROWS, width), nodes, constants=constants)


def products(shape: Sequence[int | str] = (1, 4, 256), name: str = "x") -> onnx.ModelProto:
    width = int(shape[-1])
    nodes = f"""
        {_product(name, "a", width, 2 * width)} b = Relu(a)
        {_product("b", "c", 2 * width, 2 * width)} d = Relu(c)
        {_product("d", "y", 2 * width, width)}"""
    return _model(shape, nodes, name)


GRAPHS: Mapping[str, tuple[Callable[[], onnx.ModelProto], Mapping[str, str]]] = {
    PLAIN: (convolutions, {}),
    "residual": (residual, {}),
    **{f"transformer, heads of {size}": (partial(transformer, size), {}) for size in (16, 32, 64)},
    "transformer, fused qkv": (partial(transformer, 32, is_fused=True), {}),
    "dynamic shapes": (partial(products, ("batch", "rows", SIZES[0][-1]), OPEN), {}),
    "weights of 8 bits": (products, {"weight_only": "w8"}),
    "weights of 4 bits": (products, {"weight_only": "w4"}),
    "fp8": (convolutions, {"quant_type": "fp8"}),
}
"""Graphs by name: the model in float, and the options of `quantize` that differ from the defaults."""


# Results


@dataclass(frozen=True)
class Seen:
    """Whether a claim held for one subject, what was seen or why it did not, and the seconds that it took."""

    check: str
    subject: str
    state: State
    told: str
    seconds: float


@dataclass(frozen=True, repr=False)
class Qualification(Shown):
    """What held of the claims about an engine. `engine` is its description, `machine` names the hardware."""

    engine: Mapping[str, str]
    machine: Mapping[str, str]
    checks: tuple[Seen, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        return all(seen.state != "not held" for seen in self.checks)

    def in_words(self) -> str:
        counts = Counter(seen.state for seen in self.checks)
        told = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
        engine = f"{self.engine['engine']} {self.engine['version']} on {self.engine['device']}"
        return f"{engine}: of {len(self.checks)} checks {told}; {self.seconds:.0f} s"

    def table(self) -> Table:
        rows = []
        for check in CHECKS:
            own = [seen for seen in self.checks if seen.check == check.name]
            counts = Counter(seen.state for seen in own)
            numbers = [str(counts[state]) for state in get_args(State)]
            rows.append((check.name, check.claim, *numbers, f"{sum(seen.seconds for seen in own):.0f}"))
        return Table(("check", "claim", *get_args(State), "seconds"), rows)

    @property
    def exit_code(self) -> int:
        return 0 if self.holds else ConstraintUnmet.exit_code

    def parts(self) -> Iterator[str | Table]:
        """The table, what did not hold or is not applicable, once a reason, and the counts."""
        yield self.table()
        lines: dict[tuple[State, str], str] = {}
        for seen in self.checks:
            line = f"{seen.state}: {seen.check}, {seen.subject}: {seen.told}"
            lines.setdefault((seen.state, seen.told), line)
        yield from (line for (state, _), line in lines.items() if state != "held")
        yield self.in_words()

    def to_dict(self) -> dict[str, Any]:
        return {"qdqtune": __version__, "holds": self.holds, **asdict(self), "seconds": round(self.seconds, 1)}


# Checks


class NotApplicableError(Exception):
    """The engine cannot do what a claim is about; the message says why."""


@dataclass
class EngineAtHand:
    """An engine with the files and layers of graphs, which are made when they are first asked for. `simulation` is ONNX
    Runtime without fusion."""

    spec: EngineSpec
    folder: Path
    runner: Runner
    simulation: Session
    execution: Execution
    observer: Observer
    capability: float
    """The compute capability of an NVIDIA GPU; infinite without one."""
    data: dict[str, str] = field(default_factory=dict)

    def plain(self, name: str) -> Path:
        """The float file of a graph; its samples are in the folder or file `data[name]`."""
        file = self.folder / name.replace(" ", "_") / "float.onnx"
        if name not in self.data:
            file.parent.mkdir()
            onnx.save(GRAPHS[name][0](), file)
            self.data[name] = str(sample_source(samples_of(file), file.parent, self.execution))
        return file

    def quantized(self, name: str) -> Path:
        """The file of a graph with pairs by the engine's rules, or with weight formats."""
        if name == "fp8" and self.capability < FP8_SINCE:
            raise NotApplicableError(f"GPUs of compute capability {self.capability} have no FP8")
        plain, how = self.plain(name), GRAPHS[name][1]
        file = plain.with_name("quantized.onnx")
        if file.exists():
            return file
        options: dict[str, Any] = {"engine": self.spec.name, "time_limit": self.execution.seconds, **QUICKLY, **how}
        try:
            if name == "fp8":
                self.runner.numeric_format("fp8")
            quantize(QuantizeOptions(plain, output=file, calibration_data=self.data[name], **options))
        except BadOption as error:
            if not how:  # pairs in 8 bits are for every engine
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


def _builds(engine: EngineAtHand, name: str) -> str:
    files = [engine.quantized(name)] if GRAPHS[name][1] else [engine.plain(name), engine.quantized(name)]
    return ", ".join(f"{file.stem} in {engine.loaded(file).build_seconds:.2f} s" for file in files)


def _reports_layers(engine: EngineAtHand, name: str) -> str:
    counts = []
    for file in (engine.plain(name), engine.quantized(name)):
        layers = engine.layers(file)
        operators = {node.name: node.op for node in load(file).nodes}
        if wrong := wrong_nodes(operators, layers):
            raise EngineFailure(f"{file.name} has {wrong}")
        times = [layer.time_ms for layer in layers if layer.kind != "folded" and layer.time_ms is not None]
        counts.append(f"{file.stem}: {len(operators)} nodes in {len(layers)} layers, {sum(times):.4g} ms")
        if times and not has_sensible_times(layers):
            raise EngineFailure(f"layers without sensible times in {counts[-1]}")
    return "; ".join(counts)


def _keeps_8_bits(engine: EngineAtHand, name: str) -> str:
    """Convolutions and products with pairs run in 8 bits, and products read weights in weight formats themselves. What
    else `qdqtune check` finds, such as conversions between 8 bits and float, costs time and is counted."""
    file, how = engine.quantized(name), GRAPHS[name][1]
    model, layers = load(file), engine.layers(file)
    numbers = None if "weight_only" in how else engine.runner.numeric_format("fp8" if name == "fp8" else "int8")
    failing = [finding for finding in findings_of(model, layers, numbers) if finding.fails]
    products = {node.name for node in model.nodes if node.op in COMPUTE}
    lost = [f for f in failing if numbers is None or (f.kind == "float compute" and not products.isdisjoint(f.nodes))]
    running = [layer for layer in layers if layer.kind != "folded"]
    low = sum(is_low(layer.precision) for layer in running)
    if lost:
        raise EngineFailure(f"{len(lost)} of {len(running)} layers, the first: {lost[0].reason}")
    if not low and numbers is not None:
        raise EngineFailure(f"none of {len(running)} layers runs in 8 bits")
    return f"{low} of {len(running)} layers in 8 bits, {len(failing)} other findings of `qdqtune check`"


def _agrees_with_simulation(engine: EngineAtHand, name: str) -> str:
    plain, quantized = engine.plain(name), engine.quantized(name)
    samples, levels = samples_of(plain), []
    models = [load(plain), load(quantized)]
    if engine.spec.name == "onnxruntime":
        models = [with_integer_softmax(model) for model in models]
    with rewording("a file does not run"):
        exact, expected = (engine.simulation.outputs(model, "simulated", samples) for model in models)
        in_float, measured = (engine.runner.outputs(engine.loaded(file), samples) for file in (plain, quantized))
    for outputs in (in_float, expected, measured):
        if not is_finite(outputs):
            raise EngineFailure(NOT_FINITE.reason)
        db = sqnr_db(exact, outputs)
        levels.append(EQUAL_DB if db is None else db)
    told = f"{levels[2]:.1f} dB, {levels[1]:.1f} dB in the simulation; in float {levels[0]:.0f} dB"
    if levels[0] < FLOAT_DB or levels[2] < min(levels[1], FLOAT_DB) - LOST_DB:
        raise EngineFailure(told)
    return told


def _tells_apart(engine: EngineAtHand, subject: str) -> str:
    plain, other = engine.plain(PLAIN), engine.folder / "deeper.onnx"
    onnx.save(convolutions(depth=16), other)
    plan = Plan((LAUNCHED_ROUNDS if engine.spec.name in LAUNCHED else ROUNDS,))
    mix = as_workloads(samples_of(plain)[0])
    engine.runner.feed(mix)
    racer = Racer(engine.runner, plan, 0, views_of(mix, (None,)))
    with rewording("the files cannot be timed"):
        race = racer.race([plain, plain if subject == ITSELF else other], [(0, 1)], "apart")
    (compared,) = race.compared(0, 1)
    told = f"the second file is {compared.ratio.verdict}, {compared.ratio.speedup}"
    if compared.ratio.verdict != ("undecided" if subject == ITSELF else "slower"):
        raise EngineFailure(told)
    return told


def _tunes(engine: EngineAtHand, mode: str) -> str:
    plain, folder = engine.plain(PLAIN), engine.folder / f"tune_{mode}"
    how: dict[str, Any] = {"engine": engine.spec, "mode": mode, "effort": "quick", "time_budget": TUNE_SECONDS}
    options = TuneOptions(plain, calibration_data=engine.data[PLAIN], output_dir=folder, **how, **QUICKLY)
    done = tune(options.settings(), engine.observer)
    if done.improved and (done.ratio is None or done.ratio.verdict != "faster"):
        raise EngineFailure(f"a file ships that is not proven to be faster: {done.ratio}")
    with rewording("the engine does not run what ships"):
        engine.runner.outputs_of(done.file, samples_of(plain)[:1])
    return done.in_words() if done.ratio is None else f"proven, {done.ratio.speedup}"


class Check(NamedTuple):
    """A claim about an engine. `look` checks it for one of the `subjects`, and gives what was seen; a QdqtuneError says
    that it did not hold. It is asked only where models can run if it `runs` them."""

    name: str
    claim: str
    subjects: tuple[str, ...]
    look: Callable[[EngineAtHand, str], str]
    runs: bool = False


CHECKS = (
    Check("builds", "graphs build in float, and with pairs or stored weights by our rules", tuple(GRAPHS), _builds),
    Check("layers", "each node is in one layer of the report, with its time", tuple(GRAPHS), _reports_layers),
    Check("8 bits", "convolutions and products with pairs run in 8 bits", tuple(GRAPHS), _keeps_8_bits),
    Check("numbers", "outputs are as accurate as in the simulation", tuple(GRAPHS), _agrees_with_simulation, runs=True),
    Check("times", "equal files are not told apart, others are", (ITSELF, DEEPER), _tells_apart, runs=True),
    Check("search", "a search ends, and ships what is proven, or float", get_args(Mode), _tunes, runs=True),
)
"""The claims, in the order in which they are checked."""


def qualify(options: DoctorOptions, observer: Observer) -> Qualification:
    """Check the claims about an engine on this machine.

    Raises:
        EngineUnavailable, BadOption: the engine cannot be opened, or is simulated.
    """
    begun, execution, spec = monotonic(), execution_of(options), options.spec()
    if is_simulated(spec.name):
        told = simulated(spec.name)
        raise EngineUnavailable(f"{told}, and most claims are about times: leave `qualify` out, check and compare work")
    cpu, gpus = this_processor(), find_gpus()[0]
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        spec = with_timing_cache(spec, folder)
        sized = with_spans(spec, {OPEN: Span(*SIZES)}) if spec.name in TENSORRT_FAMILY else spec
        runner = stack.enter_context(Runner(sized, execution=execution, log_dir=folder / "logs"))
        described = runner.describe()
        told = gpus[0].compute_capability if gpus and spec.name in TENSORRT_FAMILY else ""
        told = described.get("compute_capability", told)  # of the GPU that the engine runs on, if it says so
        capability = float(told) if re.fullmatch(r"\d+\.\d+", told) else float("inf")
        exact = onnxruntime_session(execution, fuse=False, rewrite=spec.name == "onnxruntime")
        simulation = stack.enter_context(exact)
        engine = EngineAtHand(spec, folder, runner, simulation, execution, observer, capability)
        can_run = described["device"] != "none"
        checks = []
        for check in CHECKS:
            for subject in check.subjects:
                observer.stage(f"{check.name}: {subject}")
                started, state = monotonic(), get_args(State)[0]
                try:
                    if check.runs and not can_run:
                        raise NotApplicableError("the engine only builds here: its device is not present")
                    told = check.look(engine, subject)
                except NotApplicableError as error:
                    state, told = "not applicable", str(error)
                except QdqtuneError as error:
                    state, told = "not held", str(error)
                checks.append(Seen(check.name, subject, state, told, round(monotonic() - started, 2)))
    machine = {"cpu": f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.isa)}"}
    machine["gpu"] = "; ".join(f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in gpus)
    return Qualification(described, machine, tuple(checks), monotonic() - begun)
