"""ONNX Runtime, on the CPU unless another execution provider is asked for.

Layers are read from the profile of a session and from the optimized graph that it wrote. The optimizer keeps most
names. A fused node has the name of one of its nodes with a suffix (`conv_nchwc`, `fc/MatMulAddFusion`, `add_token_3`),
or writes the tensor of the last of them. An inserted node reads or writes tensors that the model lacks.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module, metadata
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnxruntime import InferenceSession as Session

from qdqtune.engines import devices, formats, output_to, translated
from qdqtune.engines.coverage import Claim, cover, read_model, readers
from qdqtune.engines.facts import CPU_PROVIDER, EngineFacts, facts_of_provider
from qdqtune.engines.library_settings import DENORMALS_AS_ZERO, OnnxRuntimeOptions, session_settings
from qdqtune.engines.machine import instruction_sets, processor_name, simulated
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.graph.loading import data_files, nbytes
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import QDQ
from qdqtune.graph.saving import ONE_FILE_LIMIT
from qdqtune.types import Array, Layer, LayerKind, NumericFormat, QuantType, Tensors

LOG_VERBOSE, LOG_WARNING, LOG_ERROR = 0, 2, 3

LOADED_ONCE = 2**28
"""Models of at least so many bytes are not loaded a second time to be profiled: the profiler's overhead is negligible
in such long inferences. Chosen, not measured."""

NOWHERE = "constants"
"""Name of the file for the weights of an optimized model, which is deleted, as only the nodes are needed."""

BLOCK = 4
"""Inferences in a row with the profiler, then without it, so that drift affects both. Chosen, not measured."""

refusals_in_words = partial(
    translated,
    "ONNX Runtime",
    {
        re.compile(
            r"^\[ONNXRuntimeError\] : \d+ : (\w+ : Load model from .*? failed:)?((\w+ : )?/\S+:\d+ .*?\) (?=[A-Z]))?"
            r"(\w+ : Non-zero status code returned while running (?=\w+ node))?"
        ): "",
        re.compile(r"^(?:Unsupported|ONNX Runtime only) .*?(IR version|Opset):? (\d+).*(?:: |till opset )(\d+).*"): (
            r"\1 \2 is later than its \3: pip install -U onnxruntime, or export with a lower opset"
        ),
        re.compile(r"Fatal error: (\S+)\(\S+ is not a registered function/op"): r"it has no \1: export without it",
    },
)
"""`translated`, with a pattern that removes temporary file names and places in ONNX Runtime's sources from messages."""

INPUT_FOLDER = "session.model_external_initializers_file_folder_path"
KEEP_PAIRS = "session.disable_quant_qdq"
STOP_SPINNING = "session.force_spinning_stop"
"""Threads of a session would spin for some 30 ms after an inference, and slow down the session that is timed next."""

CONSTANTS_FILE = "session.optimized_model_external_initializers_file_name"
NO_PREPACKING = "session.disable_prepacking"
CUDA_GRAPHS = "enable_cuda_graph"
RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"


def create(options: OnnxRuntimeOptions) -> OnnxRuntime:
    table = facts_of_provider(options.provider)
    if CUDA_GRAPHS in (options.provider_options or {}):  # they read inputs where the first inference had them
        raise BadOption(f"`provider_options` {CUDA_GRAPHS} wants inputs in fixed places: leave it out")
    if not table.plugin:
        available = ort.get_available_providers()
        if options.provider not in available:
            how = f": {table.install}" if table.install else ""
            raise EngineUnavailable(
                f"ONNX Runtime here has no provider {options.provider!r}; it has {', '.join(available)}{how}"
            )
        return OnnxRuntime(options)
    plugin = import_module(table.plugin)
    try:
        _register(options.provider, plugin.get_library_path())
    except Exception as error:  # what ONNX Runtime raises has no common class
        raise EngineUnavailable(f"provider {options.provider} does not load: {one_line(error)}") from error
    found = [device for device in ort.get_ep_devices() if device.ep_name == options.provider]
    if not found:
        raise EngineUnavailable(f"provider {options.provider} loads, and finds no device on this machine")
    return OnnxRuntime(options, found[:1])


@cache
def _register(provider: str, library: str) -> None:
    ort.register_execution_provider_library(provider, library)


class OnnxRuntime:
    """Builds each model as a session, all with the same options. `plugged_in` are a plug-in's devices."""

    def __init__(self, options: OnnxRuntimeOptions, plugged_in: Sequence[ort.OrtEpDevice] = ()) -> None:
        self._options, self._plugged_in = options, plugged_in
        self.table = facts = facts_of_provider(options.provider)
        is_simulator = bool(facts.simulated_as) and simulated(facts.name)
        self._own = {**(facts.simulated_as if is_simulator else {}), **(options.provider_options or {})}

    def describe(self) -> dict[str, str]:
        options, table, own = self._options, self.table, self._own
        device, driver = processor_name(), ""
        gpus = devices.gpus_here() if table.is_gpu else ()
        if gpus:
            device, driver = devices.gpu(gpus[0])
        elif table.simulated_on and simulated(table.name):
            device = f"simulator on {device}"
        unfused = "after rewrites" if options.rewrite else "no"
        told = {
            "engine": table.name,
            "version": ort.__version__,
            "provider": options.provider,
            "plugin": metadata.version(table.plugin) if table.plugin else "",
            "provider_options": " ".join(f"{name}={own[name]}" for name in sorted(own)),
            "threads": str(options.threads),
            "device": device,
            "driver": driver,
            "isa": " ".join(instruction_sets()),
            "fuse": "" if options.fuse else unfused,
            "fuse_pairs": "" if options.fuse_pairs else "no",
        }
        return {name: text for name, text in told.items() if text}

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        """The format from `formats`; for a provider without a record symmetric int8, which all providers run."""
        numbers = formats.numeric_format(self.table.name, quant_type)
        return numbers if self._options.provider == CPU_PROVIDER else self.table.numbers

    def build(self, model: Path, log: Path) -> OnnxRuntimeModel:
        with output_to(log), refusals_in_words():
            session = self.session(model)
        provider = self._options.provider
        if provider not in session.get_providers():  # its driver is missing: ONNX Runtime warns and uses the CPU
            raise EngineUnavailable(f"ONNX Runtime cannot start provider {provider!r} on this machine; see {log}")
        return OnnxRuntimeModel(self, model, session)

    def session(self, model: Path | bytes, entries: Mapping[str, str] = MappingProxyType({}), **more: Any) -> Session:
        """Load a model, a file or its bytes, as a session. `more` are further attributes of `SessionOptions`, `entries`
        further config entries."""
        chosen, levels = self._options, ort.GraphOptimizationLevel
        unfused = levels.ORT_ENABLE_BASIC if chosen.rewrite else levels.ORT_DISABLE_ALL
        usual = session_settings(chosen.threads)
        attributes = usual | {
            "execution_mode": getattr(ort.ExecutionMode, usual["execution_mode"]),
            "graph_optimization_level": getattr(levels, usual["graph_optimization_level"]) if chosen.fuse else unfused,
            "log_severity_level": LOG_WARNING,
            "enable_mem_pattern": chosen.fuse,  # planning memory takes a time quadratic in the nodes of the graph
        }
        own = ({} if chosen.fuse_pairs else {KEEP_PAIRS: "1"}) | ({STOP_SPINNING: "1"} if chosen.threads > 1 else {})
        own[DENORMALS_AS_ZERO] = "1"
        options = ort.SessionOptions()
        for name, value in (attributes | more).items():
            setattr(options, name, value)
        for name, value in {**own, **entries}.items():
            options.add_session_config_entry(name, value)
        content = model if isinstance(model, bytes) else str(model)
        given = {**self.table.options, **self._own}
        if self._plugged_in:
            options.add_provider_for_devices(self._plugged_in, given)
            return Session(content, options)
        return Session(content, options, providers=[(chosen.provider, given)])


class OnnxRuntimeModel:
    def __init__(self, engine: OnnxRuntime, path: Path, session: Session) -> None:
        self._engine = engine
        self._path = path
        self._session = session
        self._inputs = frozenset(given.name for given in session.get_inputs())
        self._outputs = [output.name for output in session.get_outputs()]
        self._reuses_outputs = True

    def run(self, inputs: Tensors) -> dict[str, Array]:
        with refusals_in_words():
            given = self._known_inputs(inputs)
            return dict(zip(self._outputs, self._session.run(self._outputs, given), strict=True))

    def time(self, inputs: Tensors, runs: int) -> float:
        """`Built.time`, with inputs and outputs on the device."""
        with refusals_in_words():
            given = self._known_inputs(inputs)
            binding = self._session.io_binding()
            for name, array in given.items():
                binding.bind_cpu_input(name, np.asarray(array, order="C"))  # copies to the provider's device, if any
            binding.synchronize_inputs()
            try:
                return self._seconds(binding, runs)
            except RuntimeError:
                if not self._reuses_outputs:
                    raise
                self._reuses_outputs = False
                return self._seconds(binding, runs)

    def _seconds(self, binding: ort.IOBinding, runs: int) -> float:
        """Seconds per inference. The first one allocates the outputs, the others reuse them.

        Where an output has another shape than declared, ONNX Runtime refuses to reuse it: then each allocates anew.
        """
        start = time.perf_counter()
        for run in range(runs):
            if run == 0 or not self._reuses_outputs:
                binding.clear_binding_outputs()
                for name in self._outputs:
                    binding.bind_output(name, self._engine.table.memory)
            self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return (time.perf_counter() - start) / runs

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`, from a second, profiled session in which fused nodes are named after their parts."""
        model, feed = read_model(self._path), self._known_inputs(inputs)
        if self._engine.table.compiles:  # a second session tells which nodes it runs as one, its log why not others
            with TemporaryDirectory(prefix="profile-") as name:
                log, entries = Path(name) / "log", {INPUT_FOLDER: str(self._path.parent), RECORD_ASSIGNMENT: "1"}
                with output_to(log), refusals_in_words():
                    source = model.proto.SerializeToString()
                    session = self._engine.session(source, entries, log_severity_level=LOG_VERBOSE)
                    found = session.get_provider_graph_assignment_info()
                parts = [(part.ep_name, [(node.name, node.op_type) for node in part.get_nodes()]) for part in found]
                return assigned_layers(model, parts, self._engine.table, log.read_text(errors="replace"))
        is_large = nbytes(self._path) >= LOADED_ONCE
        with TemporaryDirectory(prefix="profile-") as name:
            folder = Path(name)
            (folder / NOWHERE).symlink_to(os.devnull)
            written = {"optimized_model_filepath": str(folder / "optimized.onnx"), "log_severity_level": LOG_ERROR}
            profiled = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
            make = partial(self._engine.session, model.proto.SerializeToString())
            beside = {INPUT_FOLDER: str(self._path.parent)}
            with refusals_in_words():
                plain = [self.time(inputs, 1) for _ in range(runs)] if is_large else []
                if is_large:  # a session that writes its graph keeps all weights as they were before packing
                    del self._session
                    make({**beside, CONSTANTS_FILE: NOWHERE, NO_PREPACKING: "1"}, **written)
                    session = self._session = make(beside, **profiled)
                else:
                    session = make({**beside, CONSTANTS_FILE: NOWHERE}, **written, **profiled)
                session.run(self._outputs, feed)
                for first in range(0, runs, BLOCK):
                    block = min(BLOCK, runs - first)
                    if not is_large:
                        plain += [self.time(inputs, 1) for _ in range(block)]
                    for _ in range(block):
                        session.run(self._outputs, feed)
                profile = Path(session.end_profiling())
            files = folder / "optimized.onnx", profile
            return report(model, *files, plain, self._engine.table)

    def save(self, path: Path) -> None:
        """Write the optimized model as an ONNX file, and load it. If the model has external data or more than 2 GB, its
        constants go to `<name>.data` beside it.

        The file holds the fusions that any machine can use; layouts are chosen on the CPU where it is opened.
        """
        is_split = bool(data_files(self._path)) or nbytes(self._path) >= ONE_FILE_LIMIT
        entries = {CONSTANTS_FILE: f"{path.name}.data"} if is_split else {}
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        with refusals_in_words():
            self._engine.session(
                self._path, entries, optimized_model_filepath=str(path), graph_optimization_level=level
            )
            self._engine.session(path)

    def _known_inputs(self, inputs: Tensors) -> dict[str, Array]:
        """The arrays that the model has inputs for: in some candidates, inputs have become constants."""
        return {name: array for name, array in inputs.items() if name in self._inputs}

    def close(self) -> None:
        del self._session


Event = Mapping[str, Any]

MEMORY_COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
CONVERSIONS = frozenset({"Cast", "ReorderInput", "ReorderOutput", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
INSERTED = MEMORY_COPIES | QDQ | CONVERSIONS
"""Operators that the optimizer may insert; nodes of other operators come from the model."""

PASSIVE = QDQ | CONVERSIONS | {"Flatten", "Gather", "Identity", "MaxPool", "Slice", "Split"}
"""Operators across which the optimizer moves Q and DQ nodes."""

TYPE_NAMES: Mapping[str, str] = {"float": "FP32", "float16": "FP16", "int8": "INT8", "uint8": "INT8"}
SUFFIX = "_kernel_time"

MOST_OVERHEAD = 0.9
"""At most this share of a layer's reported time is subtracted as profiling overhead. Chosen, not measured."""

OVERHEAD_STEPS = 40

TRIMMED_SHARE = 0.25
"""Share of the shortest and of the longest times that `trimmed_mean` leaves out. Unlike a median, it resolves fractions
of a microsecond, the unit of the profile."""

FEW = 12
"""With at most so many times, `trimmed_mean` leaves out the upper half. Chosen, not measured."""


def report(
    model: Model, optimized: Path, profile: Path, plain: Sequence[float], table: EngineFacts
) -> tuple[Layer, ...]:
    """The layers of a session, in the order in which it ran them; see `Built.layers`.

    The first profiled inference, which allocates, is ignored. `plain` are seconds of inferences without the profiler,
    run in between: what the layers' times exceed them by is overhead and subtracted. `table` is the provider's record.
    """
    try:
        nodes = onnx.load(optimized, load_external_data=False).graph.node
        events = json.loads(profile.read_text(encoding="utf-8"), strict=False)
    except (DecodeError, ValueError) as error:  # ONNX Runtime does not say that a write has failed
        reason = f"its files in {profile.parent} are cut short, as with no space left on the disk"
        raise EngineFailure(f"ONNX Runtime: {reason}") from error
    runs = _inferences(events, nodes)[1:]
    covered, folded = cover(model, _claims(model, nodes))
    total, every = 1e3 * trimmed_mean(plain), range(len(nodes))
    whole = np.array([trimmed_mean([run[i][0]["dur"] for run in runs]) for i in every]) / 1e3
    spent = np.array([trimmed_mean([sum(run[i][1]) for run in runs]) for i in every]) / 1e3
    between = np.maximum(0.0, whole - spent)  # two kernels of a body: to start the next, and overhead
    spent += between * np.clip((total - spent.sum()) / max(between.sum(), 1e-9), 0.0, 1.0)
    kernels = np.array([np.mean([len(run[i][1]) for run in runs]) for i in every])
    times = without_overhead(spent, total, kernels)
    layers = []
    for i, (node, names, time_ms) in enumerate(zip(nodes, covered, times.tolist(), strict=True)):
        name = node.name or " + ".join(names) or node.output[0]
        event, kind = runs[-1][i][0]["args"], _kind(node, names)
        ep = event.get("provider", "")
        is_away = table.source and ep not in ("", table.ep) and kind != "copy"
        where = elsewhere(name, ep, table, {}) if is_away else ""
        layers.append(Layer(name, names, _precision(node, event), time_ms, kind, elsewhere=where))
    return (*layers, *folded)


def trimmed_mean(times: Sequence[float]) -> float:
    """The mean without the `TRIMMED_SHARE` shortest and longest times. Of at most `FEW` times, which are of long
    inferences, it leaves out the upper half: other work on the machine slows down some kernel in each."""
    cut = int(TRIMMED_SHARE * len(times))
    end = len(times) - cut if len(times) > FEW else max(cut + 1, len(times) // 2)
    return float(np.mean(np.sort(times)[cut:end]))


def without_overhead(
    times: npt.NDArray[np.float64], total: float, kernels: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Layer times minus an equal overhead for each kernel of a layer (`kernels` counts them), so that they add up to
    `total`. At most the share `MOST_OVERHEAD` of a time is subtracted; nothing if they add up to less."""
    most = MOST_OVERHEAD * times
    excess = float(times.sum()) - total
    low, high = 0.0, float((most / kernels).max(initial=0.0))
    if excess <= 0.0 or high == 0.0:
        return times
    for _ in range(OVERHEAD_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * kernels, most).sum() < excess else (low, middle)
    return times - np.minimum(high * kernels, most)


def _inferences(profile: Iterable[Event], nodes: Sequence[onnx.NodeProto]) -> list[list[tuple[Event, list[float]]]]:
    """Group the profile's kernel events by inference and, within each, by node of the optimized graph, which lists
    nodes in the order in which they run: the event of the node, and the durations of its kernels in microseconds.

    An If or Loop has the kernels of its body. Its own event is much longer, as the profiler writes between two kernels.
    """
    if not nodes:  # all of the model was constant
        return []
    kernels = [e for e in profile if e["cat"] == "Node" and e["name"].endswith(SUFFIX)]
    kernels.sort(key=lambda e: (e["ts"], -e["dur"]))
    ran: list[tuple[Event, list[float]]] = []
    end = -1
    for event, after in zip_longest(kernels, kernels[1:]):
        node = nodes[len(ran) % len(nodes)]
        is_next = event["args"]["op_name"] == node.op_type and event["name"].startswith(node.name)
        is_inside = event["ts"] < end
        if not is_inside and is_next:
            ran.append((event, []))
            is_inside, end = True, event["ts"] + event["dur"]
        if is_inside and (after is None or after["ts"] >= event["ts"] + event["dur"]):
            ran[-1][1].append(event["dur"])
    if not ran or len(ran) % len(nodes):
        raise EngineFailure("ONNX Runtime: its profile does not show every node of the optimized graph")
    return [ran[i : i + len(nodes)] for i in range(0, len(ran), len(nodes))]


def _claims(model: Model, nodes: Sequence[onnx.NodeProto]) -> list[Claim]:
    """For each node of the optimized graph the model's nodes in it, found by its name or its outputs."""

    def tensor_named(name: str) -> str:
        return next((part for part in _prefixes(name) if part in model.producers or part in model.consumers), "")

    def maker(tensor: str) -> str:
        """The model's node that writes a tensor or has this name; "" if there is none."""
        writer = model.maker(tensor)
        return (tensor if tensor in model.index_of else "") if writer is None else writer.name

    def origin(name: str) -> str:
        """The model's node that an optimized node's name, less its suffixes, refers to directly or through a tensor."""
        return next(filter(None, map(maker, _prefixes(name))), "")

    tensors = {name: tensor_named(name) for node in nodes for name in (*node.input, *node.output)}
    producer = {tensor: i for i, node in enumerate(nodes) for tensor in node.output if tensor}

    written = [list(filter(None, (maker(tensors[t] or t) for t in node.output))) for node in nodes]
    for i in reversed(range(len(nodes))):  # the results of an inserted node count for the node in front of it
        node = nodes[i]
        is_own = any(_stands_for(node, model.node(n)) for n in written[i])
        if node.op_type in INSERTED and not is_own and node.input[0] in producer and not tensors[node.input[0]]:
            written[producer[node.input[0]]] += written[i]

    exact = {node.name for node in nodes if node.name in model.index_of}
    claimed = list[list[str]]()
    for node, guesses in zip(nodes, written, strict=True):
        named_after = "" if node.name in exact else origin(node.name)
        if named_after:
            guesses = [named_after, *guesses]
        if node.op_type in INSERTED:  # it is a node of the model, or comes from none
            guesses = [g for g in guesses if _stands_for(node, model.node(g))]
        claimed.append([node.name] * (node.name in exact) + [g for g in guesses if g not in exact])

    free = set(model.index_of).difference(*claimed)
    for i, node in enumerate(nodes):  # a moved pair: the next one behind its input, if only data are moved in between
        if node.op_type not in QDQ or claimed[i]:
            continue
        source = node.input[0]
        while not (tensors[source] or maker(source)) and source in producer:
            before = nodes[producer[source]]
            if before.op_type not in INSERTED:
                break
            source = before.input[0]
        start, writer = [tensors[source]] if tensors[source] else [], origin(source)
        if not start and writer:
            start = list(model.node(writer).outputs)
        for behind in _behind(model, start):
            if behind.name in free and behind.op == node.op_type:
                claimed[i] = [behind.name]
                free.remove(behind.name)
                break
    borders = [[frozenset(tensors[t] for t in part) - {""} for part in (n.input, n.output)] for n in nodes]
    return [Claim(tuple(names), *around) for names, around in zip(claimed, borders, strict=True)]


def _behind(model: Model, tensors: Sequence[str]) -> Iterator[Node]:
    """The nodes that read one of the tensors, directly or through nodes that only move data, nearest first."""
    seen, queue = set(tensors), deque(tensors)
    while queue:
        for node in readers(model, queue.popleft()):
            yield node
            if node.op in PASSIVE:
                queue.extend(t for t in node.outputs if t not in seen)
                seen.update(node.outputs)


def _stands_for(optimized: onnx.NodeProto, node: Node) -> bool:
    return optimized.op_type == node.op or {optimized.op_type, node.op} <= CONVERSIONS


def _prefixes(name: str) -> Iterator[str]:
    """A name, then the name without its last suffix, and so on: `a_token_3`, `a_token`, `a`."""
    return (name[:end] for end in range(len(name), 0, -1) if end == len(name) or name[end] in "/_")


def _kind(node: onnx.NodeProto, names: Sequence[str]) -> LayerKind:
    if node.op_type in MEMORY_COPIES:
        return "copy"
    if node.op_type in QDQ:
        return "quantize"
    return "reformat" if node.op_type in CONVERSIONS and not names else "compute"


def _precision(node: onnx.NodeProto, event: Mapping[str, Any]) -> str:
    """INT8 if a kernel reads 8-bit values, W4 or W8 if only its weights are quantized, else the type that it writes."""
    if node.op_type == "DynamicQuantizeMatMul":
        return "INT8"
    if node.op_type == "MatMulNBits":
        return f"W{next(a.i for a in node.attribute if a.name == 'bits')}"
    read, written = ([next(iter(t)) for t in event[key]] for key in ("input_type_shape", "output_type_shape"))
    if node.op_type != "DequantizeLinear" and read[:1] in (["int8"], ["uint8"]):
        return "INT8"
    return TYPE_NAMES.get(written[0], written[0].upper()) if written else ""


IN_PASSES = "/duplicated"


def assigned_layers(
    model: Model,
    parts: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    table: EngineFacts,
    log: str,
) -> tuple[Layer, ...]:
    """Layers without times: one for each group of nodes that the provider runs as a whole, and for each node that it
    leaves to another provider.

    `parts` are the groups as ONNX Runtime assigned them: provider, and name and operator of each node. `log` is what it
    and the provider printed meanwhile.
    """
    names = [tuple(name.removesuffix(IN_PASSES) for name, _ in nodes) for _, nodes in parts]
    covered, folded = cover(model, [Claim(each) for each in names])
    told, layers = own_words(table, log), list[Layer]()
    for (ep, nodes), own, nodes_here in zip(parts, names, covered, strict=True):
        name, op = own[0], nodes[0][1]
        kind: LayerKind = "quantize" if op in QDQ else "compute"
        if ep != table.ep:
            layers.append(Layer(name, nodes_here, "", None, kind, elsewhere=elsewhere(name, ep, table, told)))
            continue
        label = f"{table.ep} {1 + sum(not layer.elsewhere for layer in layers)}"
        precision = "INT8" if any(op in QDQ for _, op in nodes) else ""
        layers.append(Layer(label, nodes_here, precision, None, "compute"))
    return (*layers, *folded)


def elsewhere(node: str, ep: str, table: EngineFacts, told: Mapping[str, str]) -> str:
    """The value of `Layer.elsewhere` for a node that provider `ep` runs in place of that of `table`, with the reason
    from `told`, if the log gave one."""
    where = "on the CPU" if ep == CPU_PROVIDER else f"on {ep}"
    return f"{where}: {told.get(node, f'{table.ep} says no reason; {table.source} lists what it takes')}"


def own_words(table: EngineFacts, log: str) -> dict[str, str]:
    """The reasons that a provider's log gives, by name of the node that it does not run."""
    told: dict[str, str] = {}
    for pattern in table.words:
        here: dict[str, str] = {}
        for found in re.finditer(pattern, log):
            here |= {name.removesuffix(IN_PASSES): found["reason"].strip(" .") for name in found["nodes"].split()}
        told = here | told
    return told
