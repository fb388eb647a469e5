"""TensorRT through its command line program trtexec, of TensorRT 8.6, 10 or 11.

Every build and every measurement is a process of its own, which loads the plan again. So measuring is slower than with
the engine `tensorrt`, but no Python package is needed, and any flag of trtexec can be used. trtexec prints outputs with
six digits: enough for accuracy, not for bit-exact comparison.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

import numpy as np
import onnx

from qdqtune.engines import formats
from qdqtune.engines.devices import gpu
from qdqtune.engines.library_settings import BETTER_DEFAULTS, QUICK
from qdqtune.engines.tensorrt.options import CachedOptions, builder_flags, sizes_text, split_arguments
from qdqtune.engines.tensorrt.report import layers_of
from qdqtune.errors import BadModel, BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.graph.loading import read
from qdqtune.graph.model import Model
from qdqtune.system.writing import append
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

OLDEST = (8, 6)

RESERVED = frozenset({
    "exportLayerInfo", "exportOutput", "exportProfile", "exportTimes", "help", "loadEngine", "loadInputs", "onnx",
    "saveEngine", "skipInference",
})  # fmt: skip
PROFILING = frozenset({"exportLayerInfo", "exportProfile", "profilingVerbosity", "separateProfileRun"})
REPEATABLE = frozenset({"dynamicPlugins", "plugins", "staticPlugins"})

FORMER = re.compile(r"--workspace=(\d+)")
"""A flag of trtexec up to 8, in MiB; later ones only know its other name, which 8.6 knows as well."""

UNKNOWN_OPTION = re.compile(r"Unknown option: -*(\w+)")
ERROR_LINE = re.compile(r"\[[EF]\] (?:\[TRT\] )?(.*)")

STRONG_TYPING = (10, 0)

PRECISION_FLAGS = frozenset({"best", "bf16", "fp16", "fp8", "int4", "int8"})
CONSTRAINT_FLAGS = frozenset({"layerOutputTypes", "layerPrecisions", "precisionConstraints"})
"""Flags of 8.6 and 10 that set the precision of single layers, which strong typing forbids."""

SHAPE_FLAGS = frozenset({"maxShapes", "minShapes", "optShapes", "shapes"})

ONCE = ("--iterations=1", "--avgRuns=1", "--warmUp=0", "--duration=0")

TIMED_SECONDS = 0.2
"""Least seconds for which a process times a model: a tenth of what its start usually takes. Chosen, not measured."""

PRINTED_AFTER = 100_000
"""trtexec prints a mean every so many inferences: set so high that it never does, as all times are read from a file."""

FINAL_SHAPE = re.compile(r"Final shape is (.*?) reported by the output allocator\.\s*")
EXPORTED_OUTPUT = re.compile(r'"name" : "(.*?)"\s*, "dimensions" : "(.*?)"\s*, "values" : \[(.*?)\]\s*\}', re.DOTALL)


def launch(command: Sequence[str], printed: BinaryIO) -> int:
    """Run a command, write its output to `printed`, and return its exit status (negative: a signal). The child stays in
    the worker's process group, so that both are killed together."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, check=False).returncode


@dataclass(frozen=True)
class TrtexecOptions(CachedOptions):
    """Options of the engine. Without shapes, a model is built for the shapes of the inputs that it is run on."""

    trtexec: Annotated[str, "the program: a path, or a name on the PATH"] = "trtexec"
    trtexec_args: Annotated[str, "flags for every call, which win over qdqtune's own: '--useCudaGraph --noTF32'"] = ""


def create(options: TrtexecOptions) -> Trtexec:
    words = [FORMER.sub(r"--memPoolSize=workspace:\1", word) for word in split_arguments(options.trtexec_args)]
    for word in words:
        if flag_name(word) in RESERVED:
            raise BadOption(f"trtexec_args: --{flag_name(word)} is set by qdqtune; leave it out")
    # As in trtexec itself, the last value of a flag counts.
    last = {word if flag_name(word) in REPEATABLE else flag_name(word): word for word in words}
    path = shutil.which(options.trtexec)
    if path is None:
        raise EngineUnavailable(
            f"there is no program {options.trtexec!r}: it comes with TensorRT (in its bin folder; in NVIDIA's "
            "containers /usr/src/tensorrt/bin/trtexec); give its place with `engine_options` trtexec=PATH"
        )
    return Trtexec(path, _version(path), tuple(last.values()), options)


def flag_name(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


def _version(program: str) -> Version:
    """The version that the program prints: `[TensorRT v8601]` up to 9; from 10 on two digits each, `v100001`."""
    with tempfile.TemporaryFile() as file:
        status, printed = _call([program, "--help"], cast(BinaryIO, file))
    banner = re.search(r"\[TensorRT v(\d+)\]", printed)
    if banner is None:
        words = one_line(printed.strip() or f"status {status}")
        raise EngineUnavailable(f"{program} --help tells no TensorRT version ({words:.200}): is it trtexec?")
    number = int(banner[1])
    major, rest = divmod(number, 10_000 if number >= 100_000 else 1000)
    version = Version(major, *divmod(rest, 100))
    if version < OLDEST:
        raise EngineUnavailable(f"{program} is of TensorRT {version}: 8.6 or later is needed")
    return version


def _call(command: Sequence[str], file: BinaryIO) -> tuple[int, str]:
    """Run a command; returns its exit status, and what it printed, which is appended to the file."""
    start = file.seek(0, os.SEEK_END)
    status = launch(command, file)
    file.seek(start)
    return status, file.read().decode(errors="replace")


class Version(NamedTuple):
    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


def _reason(status: int, printed: str) -> str:
    """A one-line reason from a failed call's output: the first error is the cause, the last names the stage."""
    if status < 0:
        return f"ended with signal {signal.Signals(-status).name}"
    errors = [text for text in ERROR_LINE.findall(printed) if text.strip()]
    lines = errors or [line for line in printed.splitlines() if line and not line.startswith("&&&&")]
    return one_line("; ".join(dict.fromkeys([lines[0], lines[-1]]))) if lines else f"exit status {status}"


@dataclass
class Trtexec:
    """Builds and times plans with the program at `path`. `arguments` are the user's flags, added to every call."""

    path: str
    version: Version
    arguments: tuple[str, ...]
    options: TrtexecOptions
    profiles: bool = True
    """Whether the program accepts the flags `PROFILING`; False after it has refused one."""

    def describe(self) -> dict[str, str]:
        device = next((f.partition("=")[2] for f in self.arguments if flag_name(f) == "device"), "0")
        name, driver = gpu(device)
        strong = self.version >= STRONG_TYPING and not self._sets(PRECISION_FLAGS | CONSTRAINT_FLAGS)
        return {
            "engine": "trtexec",
            "version": str(self.version),
            "device": name,
            "driver": driver,
            "threads": "1",
            "typing": "strong" if strong else "weak",
            "arguments": shlex.join(self.arguments),
            **self.options.described(),
        }

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return formats.tensorrt_of(quant_type, str(self.version), self.version >= STRONG_TYPING)

    def run(self, flags: Iterable[str], log: Path) -> None:
        """Call the program, and append its output to the log.

        A call that is refused for a profiling flag is repeated without profiling flags, and later calls omit them.
        """
        own = {flag_name(flag) for flag in self.arguments} - REPEATABLE
        plugins = [f"--staticPlugins={library}" for library in self.options.plugin_libraries]
        ours = [flag for flag in (*plugins, *flags) if flag_name(flag) not in own]
        merged = list(dict.fromkeys([*ours, *self.arguments]))
        plain = [flag for flag in merged if flag_name(flag) not in PROFILING]
        attempts = [merged, plain] if self.profiles else [plain]
        for words in attempts:
            append(log, f"$ {shlex.join([self.path, *words])}\n")
            with log.open("a+b") as file:
                status, printed = _call([self.path, *words], file)
            if not (status and PROFILING & set(UNKNOWN_OPTION.findall(printed))):
                break
            self.profiles = False
        if status or re.search(r"^&&&& FAILED", printed, re.MULTILINE):
            raise EngineFailure(f"trtexec: {_reason(status, printed)}")

    def build(self, model: Path, log: Path) -> TrtexecModel:
        """A plan in a temporary folder. The output of this and later calls of trtexec is appended to the log."""
        log.write_bytes(b"")
        try:
            graph = Model(read(model))
        except BadModel as error:
            append(log, f"{error}\n")
            raise EngineFailure(f"trtexec: {error}") from error
        for tensor in graph.proto.graph.initializer:
            tensor.ClearField("raw_data")  # weights, which would take memory as long as the build is held
        flags = [f"--onnx={model}", "--skipInference", "--profilingVerbosity=detailed"]
        if self.version < BETTER_DEFAULTS and not self._sets(PRECISION_FLAGS):  # trtexec takes no other beside
            if self.version >= STRONG_TYPING and not self._sets(CONSTRAINT_FLAGS):
                flags.append("--stronglyTyped")
            else:
                has_pairs = any(node.op == "QuantizeLinear" for node in graph.nodes)
                flags += ["--fp16", "--int8"] if has_pairs else ["--fp16"]
        if self.options.timing_cache is not None:
            flags.append(f"--timingCacheFile={Path(self.options.timing_cache).absolute()}")
        flags += builder_flags(vars(self.options))
        built = TrtexecModel(self, model, graph, flags, log)
        try:
            built.plan({name: [size or 1 for size in graph.tensors[name].shape or ()] for name in graph.inputs})
        except (EngineFailure, BadOption):
            built.close()
            raise
        return built

    def _sets(self, flags: frozenset[str]) -> bool:
        return any(flag_name(flag) in flags for flag in self.arguments)

    def shape_flags(self, sizes: Mapping[str, Sequence[int]]) -> list[str]:
        """Flags for dynamic inputs: the shapes that the user gave, else `sizes`; none if `trtexec_args` has some."""
        if self._sets(SHAPE_FLAGS) or not sizes:
            return []
        spans = {name: self.options.shapes(name) for name in sizes}
        ranges = {name: span or (sizes[name],) * 3 for name, span in spans.items()}
        return [
            f"--{which}Shapes=" + sizes_text({name: span[i] for name, span in ranges.items()})
            for i, which in enumerate(("min", "opt", "max"))
        ]


class TrtexecModel:
    """A model with its plans: one, or without shapes from the user one for each set of input sizes."""

    def __init__(self, engine: Trtexec, model: Path, graph: Model, flags: Sequence[str], log: Path) -> None:
        self._engine, self._model, self._graph, self._flags, self._log = engine, model, graph, flags, log
        self._folder = tempfile.TemporaryDirectory(prefix="trtexec-")
        self._plans: dict[tuple[str, ...], Path] = {}
        self._kept: dict[str, dict[str, Array]] = {}

    def plan(self, sizes: Mapping[str, Sequence[int]]) -> Path:
        """The plan for inputs of these sizes, built at the first call."""
        shapes = tuple(self._engine.shape_flags({name: sizes[name] for name in _dynamic(self._graph)}))
        if shapes not in self._plans:
            plan = self._file(f"{len(self._plans)}.plan")
            self._engine.run([*self._flags, *shapes, f"--saveEngine={plan}"], self._log)
            self._plans[shapes] = plan
        return self._plans[shapes]

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """`Built.run`; trtexec prints values with six digits."""
        kept = self._kept.pop(_digest(inputs), None) if self._kept else None
        if kept is not None:
            return kept
        self._infer(inputs, [*ONCE, f"--exportOutput={self._file('outputs.json')}"])
        return self._outputs()

    def _outputs(self) -> dict[str, Array]:
        outputs = dict(_outputs(_read_and_delete(self._file("outputs.json"))))
        try:
            return {name: outputs[name].astype(_dtype(self._graph, name)) for name in self._graph.outputs}
        except KeyError as error:
            raise EngineFailure(f"trtexec: it gives no output {error}") from error

    def time_and_keep(self, inputs: Tensors, runs: int) -> float:
        """`Launched.time_and_keep`. trtexec copies outputs after the last timed inference, so this costs no time."""
        seconds = self.time(inputs, runs, f"--exportOutput={self._file('outputs.json')}")
        self._kept[_digest(inputs)] = self._outputs()
        return seconds

    def time(self, inputs: Tensors, runs: int, *flags: str) -> float:
        """`Built.time`: the median GPU time of at least `runs` inferences and at least `TIMED_SECONDS`, as a CUDA graph
        if possible."""
        target = self._file("times.json")
        least = [f"--iterations={runs}", f"--avgRuns={max(runs, PRINTED_AFTER)}", f"--duration={TIMED_SECONDS:g}"]
        quick = QUICK if self._engine.version < BETTER_DEFAULTS else ()
        self._infer(inputs, [*least, f"--exportTimes={target}", *flags, *quick])
        try:
            return median(float(entry["computeMs"]) for entry in json.loads(_read_and_delete(target))) / 1e3
        except (ValueError, KeyError, TypeError) as error:  # an empty list as well
            raise EngineFailure("trtexec: it has exported no times of inferences") from error

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        """`Built.layers`. trtexec's layer information is kept as `<log's stem>.graph.json` beside the log."""
        graph, profile = self._file("graph.json"), self._file("profile.json")
        flags = [
            f"--iterations={runs}",
            f"--avgRuns={runs}",
            "--duration=0",  # its own default is 3 seconds
            "--profilingVerbosity=detailed",
            f"--exportLayerInfo={graph}",
            f"--exportProfile={profile}",
        ]
        separate = ["--separateProfileRun"] if self._engine.version < BETTER_DEFAULTS else []
        self._infer(inputs, flags + separate)
        if not self._engine.profiles:
            raise EngineFailure("trtexec: this one knows no profiling flags, so it cannot tell its layers")
        shutil.copyfile(graph, self._log.with_suffix(".graph.json"))
        return layers_of(self._model, graph, profile, "trtexec")

    def save(self, path: Path) -> None:
        shapes, plan = list(self._plans.items())[-1]
        shutil.copyfile(plan, path)
        usual = shapes[1].partition("=")[2] if shapes else ""
        self._run_plan(path, usual, ONCE)

    def close(self) -> None:
        self._folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _infer(self, inputs: Tensors, flags: Sequence[str]) -> None:
        arrays = _arrays(self._graph, inputs)
        plan = self.plan({name: array.shape for name, array in arrays.items()})
        files = {name: self._file(f"{number}.bin") for number, name in enumerate(arrays)}
        for name, array in arrays.items():
            # Before version 10 TensorRT has no 64-bit integers: its parser makes them 32 bits wide.
            narrow = array.dtype == np.int64 and self._engine.version < STRONG_TYPING
            array.astype(np.int32 if narrow else array.dtype).tofile(files[name])
        sizes = sizes_text({name: arrays[name].shape for name in _dynamic(self._graph)})
        loaded = "--loadInputs=" + ",".join(f"{name}:{file}" for name, file in files.items())
        self._run_plan(plan, sizes, [loaded, *flags])

    def _run_plan(self, plan: Path, sizes: str, flags: Sequence[str]) -> None:
        shapes = [f"--shapes={sizes}"] if sizes else []
        self._engine.run([f"--loadEngine={plan}", *shapes, *flags], self._log)


def _dynamic(graph: Model) -> list[str]:
    return [name for name in graph.inputs if None in (graph.tensors[name].shape or ())]


def _dtype(graph: Model, tensor: str) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(graph.tensors[tensor].dtype or onnx.TensorProto.FLOAT))


def _arrays(graph: Model, inputs: Tensors) -> dict[str, Array]:
    """The array of each input. Raises if one is missing, as trtexec would use random values."""
    arrays = {}
    for name in graph.inputs:
        if name not in inputs:
            raise EngineFailure(f"trtexec: there is no array for input {name!r}")
        array, dtype, sizes = np.asarray(inputs[name]), _dtype(graph, name), graph.tensors[name].shape or ()
        fitting = [size or have for size, have in zip(sizes, array.shape, strict=False)]
        if array.dtype != dtype or len(sizes) != array.ndim or fitting != list(array.shape):
            told = f"{array.dtype} of {array.shape}"
            raise EngineFailure(f"trtexec: input {name!r} is {dtype} of sizes {sizes}, not {told}")
        arrays[name] = array
    return arrays


def _digest(inputs: Tensors) -> str:
    found = sha256()
    for name, array in sorted(inputs.items()):
        found.update(f"{name}:{np.shape(array)}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _read_and_delete(path: Path) -> str:
    """The text of a file that trtexec wrote, "" if it did not. It is deleted, so that the next call cannot read it."""
    if not path.is_file():
        return ""
    text = path.read_text(errors="replace")
    path.unlink()
    return text


def _outputs(text: str) -> Iterable[tuple[str, Array]]:
    """Names and values of exported outputs. They are not valid JSON: names are not escaped, and values may be nan.

    Sizes that depend on data are -1; from version 10.7 on the final ones come before the values.
    """
    for name, sizes, values in EXPORTED_OUTPUT.findall(text):
        final = FINAL_SHAPE.search(values)
        numbers = np.array([float(v) for v in FINAL_SHAPE.sub("", values).split(",") if v.strip()])
        known = [int(size) for size in re.findall(r"-?\d+", final[1] if final else sizes)]
        try:
            yield name, numbers.reshape(known)
        except ValueError as error:
            raise EngineFailure(f"trtexec: output {name!r} has {numbers.size} values for sizes {sizes}") from error
