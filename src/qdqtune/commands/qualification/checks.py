"""The claims about an engine, `CHECKS`, and how each is checked for one subject: a graph, a fault, a mode."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx

from qdqtune.commands.qualification import graphs
from qdqtune.commands.qualification.engine_at_hand import QUICKLY, BrokenError, EngineAtHand, NotApplicableError
from qdqtune.commands.tune import TuneOptions, tune
from qdqtune.engines import LAUNCHED, execution
from qdqtune.engines.devices import Device
from qdqtune.engines.process import WorkerProcess
from qdqtune.engines.runner import Runner, as_workloads
from qdqtune.errors import EngineRefused, first_of, rewording
from qdqtune.explanation.unfused import check, is_low
from qdqtune.graph.loading import load
from qdqtune.graph.operators import COMPUTE
from qdqtune.numerics.accuracy import NOT_FINITE, is_finite, sqnr_db
from qdqtune.numerics.simulation import Outputs, with_integer_softmax
from qdqtune.system.interpreter import end_group
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.comparison import Comparer, ComparisonRequest
from qdqtune.tuning.contexts import Context
from qdqtune.tuning.options import Mode
from qdqtune.types import EQUAL_DB, Sample

FLOAT_DB, LOST_DB = 40.0, 3.0
"""The least SQNR of float outputs, which TF32 and float16 reach; and how far the SQNR of a quantized model may be below
that of the simulation, of which what lies above `FLOAT_DB` is not asked for. Chosen, not measured."""

TUNE_SECONDS, STOPPED_SECONDS = 60.0, 1.0
"""The time budget of a search, and the time limit of a request while the engine is stopped. Chosen, not measured."""

ROUNDS, LAUNCHED_ROUNDS = 24, 12
"""Rounds of a comparison, the latter where each turn starts a process. Chosen, not measured."""

STRANGE = 0.1
"""The largest share of the time that rows of a profile may take that fit no layer. Chosen, not measured."""

PLAIN, ITSELF, DEEPER = "convolutions", "a file and itself", "a file and one of four times its layers"


def _stop_group(leader: int) -> None:
    os.killpg(leader, signal.SIGSTOP)


FAULTS: Mapping[str, tuple[str, Callable[[int], None], int, str]] = {
    "killed while it builds": ("build", end_group, 2, "crash"),
    "killed while it runs": ("run", end_group, 2, "crash"),
    "stopped until the time limit": ("build", _stop_group, 1, "timeout"),
}
"""What happens to an engine process: the request during which it is ended or stopped, how often (a request that crashes
is repeated once), and the stage of the failure."""


@dataclass(frozen=True)
class Check:
    """A claim about an engine. `look` checks it for one of the `subjects`, and gives what was seen. What it raises says
    that the claim did not hold, except for `NotApplicableError`."""

    name: str
    claim: str
    subjects: tuple[str, ...]
    look: Callable[[EngineAtHand, str], str]


def _builds_float(engine: EngineAtHand, name: str) -> str:
    return f"built in {engine.loaded(engine.files(name).plain).build_seconds:.2f} s"


def _builds_quantized(engine: EngineAtHand, name: str) -> str:
    return f"built in {engine.loaded(engine.quantized(name)).build_seconds:.2f} s"


def _reports_layers(engine: EngineAtHand, name: str) -> str:
    counts = []
    for file in (engine.files(name).plain, engine.quantized(name)):
        layers = engine.layers(file, engine.files(name).samples[0])
        ops = {node.name: node.op for node in load(file).nodes}
        named = Counter(node for layer in layers for node in layer.nodes)
        computed = {node for layer in layers for node in layer.nodes if layer.kind == "compute"}
        for what, names in {
            "nodes in no layer": ops.keys() - named.keys(),
            "nodes in several layers": {node for node, count in named.items() if count > 1},
            "layers with names that are no nodes": named.keys() - ops.keys(),
            "products outside of layers that compute": {n for n, op in ops.items() if op in COMPUTE} - computed,
        }.items():
            if names:
                raise BrokenError(f"{file.name} has {what}: {first_of(sorted(names))}")
        counts.append(f"{len(ops)} nodes in {len(layers)} layers")
    return " in float, ".join(counts)


def _times_layers(engine: EngineAtHand, name: str) -> str:
    engine.insist_on_device()
    layers = engine.layers(engine.quantized(name), engine.files(name).samples[0])
    running = [layer for layer in layers if layer.kind != "folded"]
    times = [layer.time_ms for layer in running if layer.time_ms is not None]
    if not times:
        raise NotApplicableError("the engine gives no times of layers")
    strange = sum(layer.time_ms or 0.0 for layer in running if layer.kind == "unknown")
    told = f"{sum(times):.4g} ms in {len(times)} of {len(running)} layers, {strange:.4g} ms in rows that fit no layer"
    if len(times) < len(running) or min(times) < 0 or not 0 < sum(times) < np.inf or strange > STRANGE * sum(times):
        raise BrokenError(told)
    return told


def _keeps_8_bits(engine: EngineAtHand, name: str) -> str:
    """Convolutions and products with pairs run in 8 bits, and products read weights in weight formats themselves. What
    else `qdqtune check` finds, such as conversions between 8 bits and float, costs time and is counted."""
    file, how = engine.quantized(name), graphs.GRAPHS[name].how
    model, layers, numbers = load(file), engine.layers(file, engine.files(name).samples[0]), None
    if "weight_only" not in how:
        numbers = engine.runner.numeric_format(how.get("quant_type", "int8"))
    found = check(model, layers, numbers)
    failing = [finding for finding in found if finding.fails]
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
    plain, quantized, samples = engine.files(name).plain, engine.quantized(name), engine.files(name).samples
    exact = _simulated(engine, plain, samples)
    with rewording("the float file does not run"):
        level = _db(exact, engine.runner.outputs(engine.loaded(plain), samples))
    expected = _db(exact, _simulated(engine, quantized, samples))
    with rewording("the quantized file does not run"):
        measured = _db(exact, engine.runner.outputs(engine.loaded(quantized), samples))
    told = f"{measured:.1f} dB, {expected:.1f} dB in the simulation; in float {level:.0f} dB"
    if level < FLOAT_DB or measured < min(expected, FLOAT_DB) - LOST_DB:
        raise BrokenError(told)
    return told


def _simulated(engine: EngineAtHand, file: Path, samples: Sequence[Sample]) -> Outputs:
    model = with_integer_softmax(load(file)) if engine.spec.name == "onnxruntime" else load(file)
    with rewording("ONNX Runtime does not run the file"):
        return engine.simulation.outputs(model, "simulated", samples)


def _db(exact: Outputs, outputs: Outputs) -> float:
    if not is_finite(outputs):
        raise BrokenError(NOT_FINITE.reason)
    level = sqnr_db(exact, outputs)
    return EQUAL_DB if level is None else level


def _tells_apart(engine: EngineAtHand, subject: str) -> str:
    engine.insist_on_device()
    files, other = engine.files(PLAIN), engine.folder / "deeper.onnx"
    onnx.save(graphs.convolutions(depth=16), other)
    plan = Plan((LAUNCHED_ROUNDS if engine.spec.name in LAUNCHED else ROUNDS,))
    context = Context(None, engine.runner, as_workloads(files.samples[0]))
    second = files.plain if subject == ITSELF else other
    with rewording("the files cannot be timed"):
        ratio = Comparer(plan, 0).compare(ComparisonRequest("", files.plain, second, context)).ratio
    told = f"the second file is {ratio.verdict}, {ratio.speedup}"
    if ratio.verdict != ("undecided" if subject == ITSELF else "slower"):
        raise BrokenError(told)
    return told


class Disturbed(WorkerProcess):
    """An engine process that `harm` ends or stops during requests of one kind, as often as `left` has items."""

    def __init__(
        self,
        log: Path,
        device: Device,
        check: execution.Check | None,
        *,
        what: str,
        harm: Callable[[int], None],
        left: list[int],
    ):
        super().__init__(log, device, check)
        self._what, self._harm, self._left = what, harm, left

    def request(
        self, name: str, arguments: tuple[Any, ...], limit: float, check: execution.Check | None = None
    ) -> tuple[bool, Any]:
        """`Worker.request`."""
        if name == self._what and self._left:
            self._left.pop()
            self._harm(self._process.pid)
            limit = min(limit, STOPPED_SECONDS)
        return super().request(name, arguments, limit, check)


def _survives(engine: EngineAtHand, subject: str) -> str:
    what, harm, times, stage = FAULTS[subject]
    files, start = engine.files(PLAIN), partial(Disturbed, what=what, harm=harm, left=[0] * times)
    if what == "run":
        engine.insist_on_device()
    with Runner(engine.spec, execution=engine.execution, log_dir=engine.folder / "faults", start=start) as runner:
        runs = partial(runner.outputs_of, files.plain, files.samples[:1])
        ask: Callable[[], object] = runs if what == "run" else partial(runner.load, files.plain)
        return _fails_once(ask, ask, (stage,))


def _survives_lack_of_memory(engine: EngineAtHand, subject: str) -> str:
    engine.insist_on_device()
    files, large = engine.files(PLAIN), engine.folder / "boundless.onnx"
    onnx.save(graphs.boundless(), large)
    spoiled = partial(engine.runner.outputs_of, large, [{"x": np.ones(1, np.float32)}])
    ask = partial(engine.runner.outputs_of, files.plain, files.samples[:1])
    return _fails_once(spoiled, ask, ("build", "run", "resources", "crash"))


def _fails_once(spoiled: Callable[[], object], ask: Callable[[], object], stages: Sequence[str]) -> str:
    """What became of a request that must fail at one of some stages, if the next one works."""
    try:
        spoiled()
    except EngineRefused as refused:
        failure = refused.failure
    else:
        raise BrokenError("the request was answered as if nothing had happened")
    if failure.stage not in stages or not failure.reason:
        raise BrokenError(f"the failure is told as {failure.stage!r}: {failure.reason}")
    with rewording("the next request fails"):
        ask()
    return failure.stage if failure.stage == "timeout" else f"{failure.stage}: {failure.reason}"


def _tunes(engine: EngineAtHand, mode: str) -> str:
    engine.insist_on_device()
    files, folder = engine.files(PLAIN), engine.folder / f"tune_{mode}"
    given: dict[str, Any] = {"engine": engine.spec, "mode": mode, "effort": "quick", "time_budget": TUNE_SECONDS}
    given |= {"calibration_data": files.data, "output_dir": folder, **QUICKLY}
    done = tune(TuneOptions(files.plain, **given).settings(), engine.observer)
    if done.improved and (done.ratio is None or done.ratio.verdict != "faster"):
        raise BrokenError(f"a file ships that is not proven to be faster: {done.ratio}")
    with rewording("the engine does not run what ships"):
        engine.runner.outputs_of(done.file, files.samples[:1])
    return done.in_words() if done.ratio is None else f"proven, {done.ratio.speedup}"


_ALL = tuple(graphs.GRAPHS)
_FLOAT = tuple(name for name, graph in graphs.GRAPHS.items() if not graph.how)

CHECKS = (
    Check("float", "float graphs build", _FLOAT, _builds_float),
    Check("pairs", "graphs build with pairs, or stored weights, by our rules", _ALL, _builds_quantized),
    Check("layers", "each node is in one layer of the report", _ALL, _reports_layers),
    Check("layer times", "each layer that runs has a time", _ALL, _times_layers),
    Check("8 bits", "convolutions and products with pairs run in 8 bits", _ALL, _keeps_8_bits),
    Check("numbers", "outputs are as accurate as in the simulation", _ALL, _agrees_with_simulation),
    Check("times", "equal files are not told apart, others are", (ITSELF, DEEPER), _tells_apart),
    Check("faults", "what ends or stops the engine is told, and the next request works", tuple(FAULTS), _survives),
    Check("memory", "lack of memory is told, and the next request works", ("2^46 values",), _survives_lack_of_memory),
    Check("search", "a search ends, and ships what is proven, or float", get_args(Mode), _tunes),
)
"""The claims, in the order in which they are checked."""
