"""Check that a written model loads before it gets its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.providers import PROVIDERS
from qdqtune.engines.runner import temporary_runner
from qdqtune.errors import BadModel, EngineFailure, EngineUnavailable, rewording
from qdqtune.graph.loading import load
from qdqtune.system.writing import atomic_write

LOADED_BY = dict.fromkeys(("fake", "onnxruntime", *PROVIDERS), "onnxruntime") | {"openvino": "openvino"}
"""For each engine, the engine that loads a written file to check it: one that loads any model in seconds without
options. TensorRT builds for minutes and may need shapes and plug-ins, so ONNX's checker checks its files."""


@contextlib.contextmanager
def checked_output(output: Path, engine: str, execution: Execution, *, is_run: bool = False) -> Iterator[Path]:
    """Yield a path to write a model to. At the end the file is checked and renamed to `output`.

    `is_run`: the block itself runs the file on ONNX Runtime, so it is not loaded there again.

    Raises:
        EngineFailure: the engine does not load it.
        OutputError: the file cannot be written.
    """
    with atomic_write(output, "model") as fresh:
        yield fresh
        if not (is_run and LOADED_BY.get(engine, "onnxruntime") == "onnxruntime"):
            check_loads(fresh, engine, execution)


def check_loads(model: Path, engine: str, execution: Execution = EXECUTION) -> None:
    """Load a written model in its engine; check it with ONNX where the engine is not installed or builds for minutes.

    Raises:
        EngineFailure: the engine, or the checker, refuses it.
    """
    if engine in LOADED_BY:
        spec = EngineSpec(LOADED_BY[engine])
        with contextlib.suppress(EngineUnavailable), temporary_runner(spec, execution) as runner:
            with rewording(f"{engine} does not load what was written, so nothing was kept"):
                runner.load(model)
            return
    try:
        load(model)
    except BadModel as error:
        raise EngineFailure(f"what was written is no sound model, so nothing was kept: {error}") from error
