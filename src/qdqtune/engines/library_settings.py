"""Options of ONNX Runtime and OpenVINO and the settings passed to these libraries, by the engines and by the scripts in
deploy/; readable without the libraries. Also: which options a file from elsewhere may set."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from qdqtune.engines import EngineSpec, deployed, normal
from qdqtune.engines.facts import CPU_PROVIDER
from qdqtune.engines.tensorrt.options import builder_flags, libraries_in, sizes_text

DENORMALS_AS_ZERO = "session.set_denormal_as_zero"
"""Many CPUs take a hundred times as long for numbers below 1.2e-38, and a pair rounds them to zero, so that a quantized
model would be faster for this reason alone. It is set for the threads that a session starts; for the thread that makes
it, only the first session of a process counts."""

BETTER_DEFAULTS = (11,)
"""From this version on CUDA graphs, spinning, no transfers and a separate profiling run are defaults of trtexec."""

QUICK = ("--useCudaGraph", "--useSpinWait", "--noDataTransfers")
"""Flags for older versions of trtexec that make it time a model as a program would run it."""


@dataclass(frozen=True)
class OnnxRuntimeOptions:
    """Options of ONNX Runtime.

    Without `fuse` each operator runs exactly as the file has it: this shows how pairs change the values, but not the
    speed. `rewrite` lets ONNX Runtime move pairs and round weights.
    """

    threads: Annotated[int, "CPU threads", Meta(ge=1)] = 1
    provider: Annotated[str, "execution provider, by ONNX Runtime's name"] = CPU_PROVIDER
    fuse: Annotated[bool, "fuse operators"] = True
    fuse_pairs: Annotated[bool, "fuse Q/DQ pairs with operators"] = True
    rewrite: Annotated[bool, "without fuse: let ONNX Runtime rewrite the graph first"] = False
    provider_options: Annotated[Mapping[str, str] | None, "options of the provider, beside its usual ones"] = None


@dataclass(frozen=True)
class OpenVinoOptions:
    threads: Annotated[int, "CPU threads", Meta(ge=1)] = 1
    precision: Annotated[Literal["f32", "f16", "bf16"], "of all that carries no Q/DQ pair"] = "f32"


def session_settings(threads: int) -> dict[str, Any]:
    """Attributes of ONNX Runtime's `SessionOptions` by name; values of enumerations by their name."""
    return {
        "graph_optimization_level": "ORT_ENABLE_ALL",
        "execution_mode": "ORT_SEQUENTIAL",
        "intra_op_num_threads": threads,
        "inter_op_num_threads": 1,
    }


def openvino_configuration(threads: int, precision: str) -> dict[str, Any]:
    """The properties that OpenVINO gets to compile a model."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # activations are quantized at Q/DQ pairs only
        "ENABLE_CPU_PINNING": False,
        "CPU_DENORMALS_OPTIMIZATION": True,
    }


def library_settings(
    spec: EngineSpec, described: Mapping[str, str], sizes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The settings that the deployed script of an engine (`script_of`) passes to the vendor's library, as JSON values.
    `described` is `Engine.describe()`, `sizes` those of dynamic inputs. The fake engine's files run on ONNX Runtime."""
    options, facts, threads = spec.options, spec.facts, int(spec.options.get("threads", 1))
    if facts.script == "openvino":
        return {"configuration": openvino_configuration(threads, described.get("precision", "f32"))}
    if facts.script == "trtexec":
        return _trtexec(spec, described, sizes)
    if facts.script == "tensorrt":
        builder = {n: options[n] for n in ("workspace_mb", "builder_level") if options.get(n) is not None}
        module = {"module": facts.packages[0], "plugin_libraries": libraries_in(options)}
        return {**module, **_shapes(spec, sizes), **builder}
    told = described.get("provider_options", "").split()
    chip = {k: v for k, v in facts.simulated_as.items() if f"{k}={v}" in told}
    return {
        "provider": facts.ep or CPU_PROVIDER,
        "provider_options": {**facts.options, **chip, **(options.get("provider_options") or {})},
        "plugin": facts.plugin,
        **session_settings(threads),
        "config_entries": {DENORMALS_AS_ZERO: "1"},
    }


def _shapes(spec: EngineSpec, sizes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, list[int]]]:
    usual = {name: [*shape] for name, shape in sizes.items()}
    return {which: usual | dict(spec.options.get(f"{which}_shapes") or {}) for which in ("min", "opt", "max")}


def _trtexec(spec: EngineSpec, described: Mapping[str, str], sizes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    plugins = [f"--staticPlugins={library}" for library in libraries_in(spec.options)]
    is_old = int(described["version"].partition(".")[0] or 0) < BETTER_DEFAULTS[0]
    types = ["--fp16", "--int8"]
    if described.get("typing") == "strong":
        types = ["--stronglyTyped"] if is_old else []
    shapes = _shapes(spec, sizes)
    build = [f"--{which}Shapes={sizes_text(named)}" for which, named in shapes.items() if named]
    build += builder_flags(spec.options)
    run = [f"--shapes={sizes_text(shapes['opt'])}"] if shapes["opt"] else []
    return {
        "program": spec.options.get("trtexec") or "trtexec",
        "build": [*plugins, *types, *build, *shlex.split(described.get("arguments", ""))],
        "run": [*plugins, *run, *(QUICK if is_old else ())],
    }


PLAIN_OPTIONS = frozenset({
    "threads", "provider", "fuse", "fuse_pairs", "rewrite", "precision",
    "min_shapes", "opt_shapes", "max_shapes", "workspace_mb", "builder_level", "target",
    "seed", "noise", "asymmetric", "wide", "build_seconds", "faults", "hide_times",
})  # fmt: skip
"""Options of any engine that name no file, library or program."""


def plain(spec: EngineSpec) -> tuple[EngineSpec, list[str]]:
    """The engine that an untrusted file describes, with `PLAIN_OPTIONS` only; and the names of options left out."""
    spec = normal(spec)
    options = {name: value for name, value in spec.options.items() if name in PLAIN_OPTIONS}
    return EngineSpec(spec.name, options), [name for name in spec.options if name not in options]


def script_of(spec: EngineSpec) -> str:
    """The source of the script that runs a file on an engine, with the settings of `library_settings`."""
    folder = Path(deployed.__path__[0])
    text = (folder / f"{spec.facts.script}.py").read_text(encoding="utf-8")
    _, start = (folder / "start.py").read_text(encoding="utf-8").split("\n\n", 1)
    before, _, behind = text.partition("from qdqtune")
    return before + start + behind.partition("\n")[2]
