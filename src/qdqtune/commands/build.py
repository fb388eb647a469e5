"""`qdqtune build`: a model in an engine's own format, ready to deploy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qdqtune.engines import MODULES, EngineSpec
from qdqtune.engines.runner import Handle, Runner, unlogged
from qdqtune.engines.shapes import check_inputs
from qdqtune.errors import EngineFailure
from qdqtune.graph.loading import files_of, read
from qdqtune.graph.model import Model
from qdqtune.graph.outputs import appearing, check_output
from qdqtune.types import Failure

FORMATS = {
    "onnxruntime": "an optimized ONNX file",
    "openvino": "an OpenVINO IR",
    "tensorrt": "a TensorRT plan",
    "tensorrt-rtx": "a TensorRT-RTX plan",
    "trtexec": "a TensorRT plan",
}
"""Engines that can save what they build, and what that is. A plan runs on one version, on one kind of GPU."""


@dataclass(frozen=True)
class Artifact:
    """What was written: the files (weights may have one of their own), their size, and how long the build took."""

    files: tuple[Path, ...]
    nbytes: int
    seconds: float


def build(model: Path, output: Path, spec: EngineSpec, *, time_limit_s: float) -> Artifact:
    """Build the model in a file, and write it in the engine's format. `output` appears whole or not at all.

    Raises:
        BadModel: the file cannot be read.
        BadOption: what is written would replace the model or its weights, or an engine option cannot be used.
        OutputError: `output` cannot be written.
        EngineUnavailable, EngineFailure: the engine cannot be opened, refuses the model, cannot save it, or does not
            load what it has saved.
    """
    check_inputs(spec, Model(read(model)))
    inputs = {"model": files_of(model)}
    check_output(output, inputs)
    if spec.name in MODULES and spec.name not in FORMATS:
        able = ", ".join(FORMATS)
        raise EngineFailure(f"engine {spec.name!r} has no format of its own to save; these have: {able}")
    with unlogged(spec, time_limit_s=time_limit_s) as runner, appearing(output) as fresh:
        handle = _saved(runner, model, fresh)
        made = sorted(path for path in fresh.parent.iterdir() if path.is_file())
        for path in made:
            check_output(output.with_name(path.name), inputs)
        nbytes = sum(path.stat().st_size for path in made)
    return Artifact(tuple(output.with_name(path.name) for path in made), nbytes, handle.build_seconds)


def _saved(runner: Runner, model: Path, target: Path) -> Handle:
    handle = runner.load(model, "build")
    if isinstance(handle, Failure):
        raise EngineFailure(handle.reason)
    if failure := runner.save(handle, target):
        raise EngineFailure(failure.reason)
    return handle
