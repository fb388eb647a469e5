"""`qdqtune build`: a model in an engine's own format, ready to deploy."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from qdqtune.commands.outputs import check_output
from qdqtune.engines import MODULES, EngineSpec
from qdqtune.engines.runner import Handle, Runner
from qdqtune.engines.shapes import check_spans
from qdqtune.errors import EngineFailure, OutputError, writing
from qdqtune.graph.loading import read
from qdqtune.graph.model import Model
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
        EngineUnavailable, EngineFailure: the engine cannot be opened, refuses the model, or cannot save it.
    """
    proto = read(model)
    check_spans(spec, Model(proto))
    inputs = [model, *(model.parent / place for place in _places(proto))]
    check_output(output, {"model": inputs})
    if output.is_dir():
        raise OutputError(f"cannot write {output}: it is a folder")
    if spec.name in MODULES and spec.name not in FORMATS:
        able = ", ".join(FORMATS)
        raise EngineFailure(f"engine {spec.name!r} has no format of its own to save; these have: {able}")
    with (
        writing(output),
        tempfile.TemporaryDirectory(prefix=".qdqtune-", dir=output.parent) as folder,
        Runner(spec, time_limit_s=time_limit_s, log_dir=Path(folder, "logs")) as runner,
    ):
        handle = _saved(runner, model, Path(folder, output.name))
        made = sorted(path for path in Path(folder).iterdir() if path.is_file())
        for path in made:
            check_output(output.with_name(path.name), {"model": inputs})
        nbytes = sum(path.stat().st_size for path in made)
        files = tuple(path.replace(output.with_name(path.name)) for path in made)
    return Artifact(files, nbytes, handle.build_seconds)


def _saved(runner: Runner, model: Path, target: Path) -> Handle:
    handle = runner.load(model, "build")
    if isinstance(handle, Failure):
        raise EngineFailure(handle.reason)
    if failure := runner.save(handle, target):
        raise EngineFailure(failure.reason)
    return handle


def _places(model: ModelProto) -> list[str]:
    """The files of a model's external data, as it names them."""
    return sorted({e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"})
