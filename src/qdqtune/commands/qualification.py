"""`qdqtune doctor --qualify`: checks what qdqtune claims of an engine on this machine, on small graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args

import numpy as np
import onnx

from qdqtune.commands import qualification_graphs as graphs
from qdqtune.commands.doctor import DoctorOptions, find_gpus, this_processor
from qdqtune.commands.inputs import execution_of, sample_source
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.tune import TuneOptions, tune
from qdqtune.engines import LAUNCHED, TENSORRT_FAMILY, EngineSpec, contract
from qdqtune.engines.execution import Execution
from qdqtune.engines.machine import is_simulated, simulated
from qdqtune.engines.options import with_timing_cache
from qdqtune.engines.runner import Handle, Runner, as_workloads
from qdqtune.engines.tensorrt.options import Span, with_spans
from qdqtune.errors import BadOption, EngineRefused, EngineUnavailable, QdqtuneError, rewording
from qdqtune.explanation.unfused import check as findings_of
from qdqtune.explanation.unfused import is_low
from qdqtune.graph.loading import load
from qdqtune.graph.operators import COMPUTE
from qdqtune.numerics.accuracy import NOT_FINITE, is_finite, sqnr_db
from qdqtune.numerics.simulation import Outputs, Session, onnxruntime_session, with_integer_softmax
from qdqtune.system.writing import temporary_folder
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.contexts import views_of
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import Mode
from qdqtune.types import EQUAL_DB, Layer, Sample
from qdqtune.version import __version__

State = Literal["held", "not held", "not applicable"]
STATES: tuple[State, ...] = get_args(State)

QUICKLY: Mapping[str, Any] = {"calibration_method": "minmax", "bias_correction": False}
"""How ranges are found: their accuracy is not what is checked."""

FP8_SINCE = 8.9
"""The first compute capability of NVIDIA's with FP8."""

RUNS = 5
"""Profiled inferences of a file. Chosen, not measured."""

FLOAT_DB, LOST_DB = 40.0, 3.0
"""The least SQNR of float outputs, which TF32 and float16 reach; and how far the SQNR of a quantized model may be below
that of the simulation, of which what lies above `FLOAT_DB` is not asked for. Chosen, not measured."""

TUNE_SECONDS = 60.0
"""The time budget of a search. Chosen, not measured."""

ROUNDS, LAUNCHED_ROUNDS = 24, 12
"""Rounds of a comparison, the latter where each turn starts a process. Chosen, not measured."""

PLAIN, ITSELF, DEEPER = "convolutions", "a file and itself", "a file and one of four times its layers"


class BrokenError(Exception):
    """A claim did not hold; the message says why."""


class NotApplicableError(Exception):
    """The engine cannot do what a claim is about; the message says why."""


@dataclass(frozen=True)
class Seen:
    """Whether a claim held for one subject, what was seen or why it did not, and the seconds that it took."""

    subject: str
    state: State
    told: str
    seconds: float


@dataclass(frozen=True)
class CheckResult:
    """What a check saw of each subject. A claim holds if it does for one subject, and fails for none."""

    name: str
    claim: str
    state: State
    seen: tuple[Seen, ...]


@dataclass(frozen=True, repr=False)
class Qualification(Shown):
    """What held of the claims about an engine. `engine` is its description, `machine` names the hardware."""

    engine: Mapping[str, str]
    machine: Mapping[str, str]
    checks: tuple[CheckResult, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        return all(check.state != "not held" for check in self.checks)

    def in_words(self) -> str:
        counts = Counter(check.state for check in self.checks)
        told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        engine = f"{self.engine['engine']} {self.engine['version']} on {self.engine['device']}"
        return f"{engine}: of {len(self.checks)} claims {told}; {self.seconds:.0f} s"

    def table(self) -> Table:
        """A row for each claim."""
        rows = []
        for check in self.checks:
            counts = Counter(seen.state for seen in check.seen)
            held = (
                "" if check.state == "not applicable" else f"{counts['held']} of {counts['held'] + counts['not held']}"
            )
            seconds = sum(seen.seconds for seen in check.seen)
            rows.append((check.name, check.claim, check.state, held, f"{seconds:.0f}"))
        columns = ("check", "claim", "result", "held for", "seconds")
        return Table(columns, rows, left=columns[:4])

    def notable(self) -> Iterator[str]:
        """What did not hold, and then what is not applicable, once a reason."""
        told = set()
        for state in ("not held", "not applicable"):
            for check in self.checks:
                for seen in check.seen:
                    if seen.state == state and (state, seen.told) not in told:
                        yield f"{state}: {check.name}, {seen.subject}: {seen.told}"
                        told |= {(state, seen.told)} if state == "not applicable" else set()

    def to_dict(self) -> dict[str, Any]:
        return {"qdqtune": __version__, "holds": self.holds, **asdict(self), "seconds": round(self.seconds, 1)}


@dataclass
class EngineAtHand:
    """An engine with the files and layers of graphs, which are made when they are first asked for. `simulation` is ONNX
    Runtime without fusion."""

    spec: EngineSpec
    folder: Path
    runner: Runner
    simulation: Session
    observer: Observer
    execution: Execution
    described: Mapping[str, str]
    data: dict[str, str] = field(default_factory=dict)
    _layers: dict[Path, tuple[Layer, ...]] = field(default_factory=dict)

    def plain(self, name: str) -> Path:
        """The float file of a graph; its samples are in the folder or file `data[name]`."""
        file = self.folder / name.replace(" ", "_") / "float.onnx"
        if name not in self.data:
            file.parent.mkdir()
            onnx.save(graphs.GRAPHS[name].make(), file)
            self.data[name] = str(sample_source(graphs.samples_of(onnx.load(file)), file.parent, self.execution))
        return file

    def samples(self, name: str) -> list[Sample]:
        return graphs.samples_of(onnx.load(self.plain(name)))

    def quantized(self, name: str) -> Path:
        """The file of a graph with pairs by the engine's rules, or with weight formats.

        Raises:
            NotApplicableError: the engine has no such numbers.
            QdqtuneError: the file cannot be made.
        """
        capability = self.described.get("compute_capability", "")
        if name == "fp8" and re.fullmatch(r"\d+\.\d+", capability) and float(capability) < FP8_SINCE:
            raise NotApplicableError(f"GPUs of compute capability {capability} have no FP8")
        plain, how = self.plain(name), graphs.GRAPHS[name].how
        file = plain.with_name("quantized.onnx")
        if file.exists():
            return file
        given: dict[str, Any] = {"engine": self.spec.name, "time_limit": self.execution.seconds, **QUICKLY, **how}
        try:
            if "quant_type" in how:
                self.runner.numeric_format(how["quant_type"])
            quantize(QuantizeOptions(plain, file, calibration_data=self.data[name], **given))
        except BadOption as error:
            if not how:  # pairs in 8 bits are for every engine
                raise
            raise NotApplicableError(str(error)) from error
        return file

    def loaded(self, file: Path) -> Handle:
        with rewording(f"{file.name} is not built"):
            return self.runner.load(file)

    def outputs(self, file: Path, name: str) -> Outputs:
        with rewording(f"the {file.stem} file does not run"):
            return self.runner.outputs(self.loaded(file), self.samples(name))

    def layers(self, file: Path, name: str) -> tuple[Layer, ...]:
        if file not in self._layers:
            self.runner.feed(self.samples(name)[0])
            handle = self.loaded(file)
            with rewording(f"{file.name} has no layers"):
                self._layers[file] = self.runner.layers(handle, RUNS)
        return self._layers[file]

    def insist_on_device(self) -> None:
        """Go on only where models can run.

        Raises:
            NotApplicableError: the engine only builds here.
        """
        if self.described["device"] == "none":
            raise NotApplicableError("the engine only builds here: its device is not present")


@contextmanager
def opened(spec: EngineSpec, observer: Observer, execution: Execution) -> Iterator[EngineAtHand]:
    """An engine in a temporary folder.

    Raises:
        EngineUnavailable, BadOption: the engine cannot be opened.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        spec = with_timing_cache(spec, folder)
        sized = with_spans(spec, {graphs.OPEN: Span(*graphs.SIZES)}) if spec.name in TENSORRT_FAMILY else spec
        runner = stack.enter_context(Runner(sized, execution=execution, log_dir=folder / "logs"))
        described = runner.describe()
        if spec.name == "trtexec" and (gpus := find_gpus()[0]):  # it does not say this of its GPU
            described["compute_capability"] = gpus[0].compute_capability
        exact = onnxruntime_session(execution, fuse=False, rewrite=spec.name == "onnxruntime")
        yield EngineAtHand(spec, folder, runner, stack.enter_context(exact), observer, execution, described)


def _builds_float(engine: EngineAtHand, name: str) -> str:
    return f"built in {engine.loaded(engine.plain(name)).build_seconds:.2f} s"


def _builds_quantized(engine: EngineAtHand, name: str) -> str:
    return f"built in {engine.loaded(engine.quantized(name)).build_seconds:.2f} s"


def _reports_layers(engine: EngineAtHand, name: str) -> str:
    counts = []
    for file in (engine.plain(name), engine.quantized(name)):
        layers = engine.layers(file, name)
        operators = {node.name: node.op for node in load(file).nodes}
        if wrong := contract.wrong_nodes(operators, layers):
            raise BrokenError(f"{file.name} has {wrong}")
        counts.append(f"{len(operators)} nodes in {len(layers)} layers")
    return " in float, ".join(counts)


def _times_layers(engine: EngineAtHand, name: str) -> str:
    engine.insist_on_device()
    layers = [layer for layer in engine.layers(engine.quantized(name), name) if layer.kind != "folded"]
    times = [layer.time_ms for layer in layers if layer.time_ms is not None]
    if not times:
        raise NotApplicableError("the engine gives no times of layers")
    told = f"{sum(times):.4g} ms in {len(times)} of {len(layers)} layers"
    if not contract.has_sensible_times(layers):
        raise BrokenError(told)
    return told


def _keeps_8_bits(engine: EngineAtHand, name: str) -> str:
    """Convolutions and products with pairs run in 8 bits, and products read weights in weight formats themselves. What
    else `qdqtune check` finds, such as conversions between 8 bits and float, costs time and is counted."""
    file, how = engine.quantized(name), graphs.GRAPHS[name].how
    model, layers = load(file), engine.layers(file, name)
    numbers = None if "weight_only" in how else engine.runner.numeric_format(how.get("quant_type", "int8"))
    failing = [finding for finding in findings_of(model, layers, numbers) if finding.fails]
    products = {node.name for node in model.nodes if node.op in COMPUTE}
    lost = [f for f in failing if numbers is None or (f.kind == "float compute" and not products.isdisjoint(f.nodes))]
    running = [layer for layer in layers if layer.kind != "folded"]
    low = sum(is_low(layer.precision) for layer in running)
    if lost:
        raise BrokenError(f"{len(lost)} of {len(running)} layers, the first: {lost[0].reason}")
    if not low and numbers is not None:
        raise BrokenError(f"none of {len(running)} layers runs in 8 bits")
    return f"{low} of {len(running)} layers in 8 bits, {len(failing)} other findings of `qdqtune check`"


def _agrees_with_simulation(engine: EngineAtHand, name: str) -> str:
    engine.insist_on_device()
    plain, quantized = engine.plain(name), engine.quantized(name)
    exact = _simulated(engine, plain, name)
    level = _db(exact, engine.outputs(plain, name))
    expected = _db(exact, _simulated(engine, quantized, name))
    measured = _db(exact, engine.outputs(quantized, name))
    told = f"{measured:.1f} dB, {expected:.1f} dB in the simulation; in float {level:.0f} dB"
    if level < FLOAT_DB or measured < min(expected, FLOAT_DB) - LOST_DB:
        raise BrokenError(told)
    return told


def _simulated(engine: EngineAtHand, file: Path, name: str) -> Outputs:
    model = with_integer_softmax(load(file)) if engine.spec.name == "onnxruntime" else load(file)
    with rewording("ONNX Runtime does not run the file"):
        return engine.simulation.outputs(model, "simulated", engine.samples(name))


def _db(exact: Outputs, outputs: Outputs) -> float:
    if not is_finite(outputs):
        raise BrokenError(NOT_FINITE.reason)
    level = sqnr_db(exact, outputs)
    return EQUAL_DB if level is None else level


def _tells_apart(engine: EngineAtHand, subject: str) -> str:
    engine.insist_on_device()
    plain, other = engine.plain(PLAIN), engine.folder / "deeper.onnx"
    onnx.save(graphs.convolutions(depth=16), other)
    plan = Plan((LAUNCHED_ROUNDS if engine.spec.name in LAUNCHED else ROUNDS,))
    mix = as_workloads(engine.samples(PLAIN)[0])
    engine.runner.feed(mix)
    racer = Racer(engine.runner, plan, 0, views_of(mix, (None,)))
    with rewording("the files cannot be timed"):
        race = racer.race([plain, plain if subject == ITSELF else other], [(0, 1)], "apart")
    (compared,) = race.compared(0, 1)
    ratio = compared.ratio
    told = f"the second file is {ratio.verdict}, {ratio.speedup}"
    if ratio.verdict != ("undecided" if subject == ITSELF else "slower"):
        raise BrokenError(told)
    return told


def _survives_lack_of_memory(engine: EngineAtHand, subject: str) -> str:
    engine.insist_on_device()
    large = engine.folder / "boundless.onnx"
    onnx.save(graphs.boundless(), large)
    try:
        engine.runner.outputs_of(large, [{"x": np.ones(1, np.float32)}])
    except EngineRefused as refused:
        failure = refused.failure
    else:
        raise BrokenError("the request was answered as if nothing had happened")
    with rewording("the next request fails"):
        engine.runner.outputs_of(engine.plain(PLAIN), engine.samples(PLAIN)[:1])
    return f"{failure.stage}: {failure.reason}"


def _tunes(engine: EngineAtHand, mode: str) -> str:
    engine.insist_on_device()
    plain, folder = engine.plain(PLAIN), engine.folder / f"tune_{mode}"
    given: dict[str, Any] = {"engine": engine.spec, "mode": mode, "effort": "quick", "time_budget": TUNE_SECONDS}
    options = TuneOptions(plain, calibration_data=engine.data[PLAIN], output_dir=folder, **given, **QUICKLY)
    done = tune(options.settings(), engine.observer)
    if done.improved and (done.ratio is None or done.ratio.verdict != "faster"):
        raise BrokenError(f"a file ships that is not proven to be faster: {done.ratio}")
    with rewording("the engine does not run what ships"):
        engine.runner.outputs_of(done.file, engine.samples(PLAIN)[:1])
    return done.in_words() if done.ratio is None else f"proven, {done.ratio.speedup}"


@dataclass(frozen=True)
class Check:
    """A claim about an engine. `look` checks it for one of the `subjects`, and gives what was seen. What it raises says
    that the claim did not hold, except for `NotApplicableError`."""

    name: str
    claim: str
    subjects: tuple[str, ...]
    look: Callable[[EngineAtHand, str], str]


_ALL = tuple(graphs.GRAPHS)
_FLOAT = tuple(name for name, graph in graphs.GRAPHS.items() if not graph.how)

CHECKS = (
    Check("float", "float graphs build", _FLOAT, _builds_float),
    Check(
        "pairs",
        "graphs build with pairs, or stored weights, by our rules",
        _ALL,
        _builds_quantized,
    ),
    Check("layers", "each node is in one layer of the report", _ALL, _reports_layers),
    Check("layer times", "each layer that runs has a time", _ALL, _times_layers),
    Check("8 bits", "convolutions and products with pairs run in 8 bits", _ALL, _keeps_8_bits),
    Check("numbers", "outputs are as accurate as in the simulation", _ALL, _agrees_with_simulation),
    Check("times", "equal files are not told apart, others are", (ITSELF, DEEPER), _tells_apart),
    Check("memory", "lack of memory is told, and the next request works", ("2^46 values",), _survives_lack_of_memory),
    Check("search", "a search ends, and ships what is proven, or float", get_args(Mode), _tunes),
)
"""The claims, in the order in which they are checked."""


def qualify(options: DoctorOptions, observer: Observer) -> Qualification:
    """Check the claims about an engine on this machine.

    Raises:
        EngineUnavailable, BadOption: the engine cannot be opened, or is simulated.
    """
    begun = monotonic()
    if is_simulated(options.engine_name):
        told = simulated(options.engine_name)
        raise EngineUnavailable(f"{told}, and most claims are about times: leave `qualify` out, check and compare work")
    with opened(options.spec(), observer, execution_of(options)) as engine:
        checks = tuple(_result(engine, check) for check in CHECKS)
        cpu, gpus = this_processor(), find_gpus()[0]
        machine = {"cpu": f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.isa)}"}
        machine["gpu"] = "; ".join(f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in gpus)
        return Qualification(engine.described, machine, checks, monotonic() - begun)


def _result(engine: EngineAtHand, check: Check) -> CheckResult:
    seen = []
    for subject in check.subjects:
        engine.observer.stage(f"{check.name}: {subject}")
        begun, state = monotonic(), STATES[0]
        try:
            told = check.look(engine, subject)
        except NotApplicableError as error:
            state, told = "not applicable", str(error)
        except (BrokenError, QdqtuneError) as error:
            state, told = "not held", str(error)
        seen.append(Seen(subject, state, told, round(monotonic() - begun, 2)))
    states = {one.state for one in seen}
    worst = next(state for state in ("not held", "held", "not applicable") if state in states)
    return CheckResult(check.name, check.claim, worst, tuple(seen))
