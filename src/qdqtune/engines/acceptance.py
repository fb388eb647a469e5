"""Check that a written model loads before it gets its name: in its engine, or where that is absent in the checker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import insist, unlogged
from qdqtune.errors import BadModel, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load
from qdqtune.graph.saving import sign
from qdqtune.system.writing import atomic_write

LOADED_BY = {"fake": "onnxruntime", "onnxruntime": "onnxruntime", "openvino": "openvino"}
"""Engines that load any model in seconds without further options, and the one that loads files for them. TensorRT
builds for minutes and may need shapes and plug-ins: files for it go through the checker alone."""


@contextmanager
def accepted(output: Path, engine: str, *, is_run: bool = False) -> Iterator[Path]:
    """A file to write instead of `output`, as `appearing` gives it; it takes that name if its engine loads it, and
    carries the mark of an output.

    If the block itself runs the file on ONNX Runtime (`is_run`), it is not loaded there once more.

    Raises:
        EngineFailure: the engine does not load it.
        OutputError: the file cannot be written.
    """
    with atomic_write(output) as fresh:
        yield fresh
        sign(fresh)
        if not (is_run and LOADED_BY.get(engine, "onnxruntime") == "onnxruntime"):
            check_loads(fresh, engine)


def check_loads(model: Path, engine: str) -> None:
    """Load a written model in its engine, or check it where the engine is absent or takes long.

    Raises:
        EngineFailure: the engine, or the checker, refuses it.
    """
    try:
        if engine in LOADED_BY:
            with unlogged(EngineSpec(LOADED_BY[engine])) as runner:
                insist(runner.load(model), f"{engine} does not load what was written, so nothing was kept")
            return
    except EngineUnavailable:
        pass
    try:
        load(model)
    except BadModel as error:
        raise EngineFailure(f"what was written is no sound model, so nothing was kept: {error}") from error
