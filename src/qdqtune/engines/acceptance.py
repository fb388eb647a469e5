"""A written model is loaded before it gets its name: by its engine, or where that is absent by the checker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import insist, unlogged
from qdqtune.errors import BadModel, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load
from qdqtune.graph.outputs import appearing

LOADED_BY = {"fake": "onnxruntime", "onnxruntime": "onnxruntime", "openvino": "openvino"}
"""Engines that load any model in seconds, and need to be told nothing for it. TensorRT builds for minutes, and may need
shapes and plug-ins: of what is written for it the checker is asked, and `build` and `check` for the rest."""


@contextmanager
def accepted(output: Path, engine: str, *, is_run: bool = False) -> Iterator[Path]:
    """A file to write instead of `output`, as `appearing` gives it; it takes that name if its engine loads it.

    Where the block runs the file on ONNX Runtime by itself (`is_run`), only another engine is asked once more.

    Raises:
        EngineFailure: it does not.
        OutputError: the file cannot be written.
    """
    with appearing(output) as fresh:
        yield fresh
        if not (is_run and LOADED_BY.get(engine, "onnxruntime") == "onnxruntime"):
            check_loads(fresh, engine)


def check_loads(model: Path, engine: str) -> None:
    """Load a model that was written.

    Raises:
        EngineFailure: the engine refuses it; where that is absent, or slow, the checker does.
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
