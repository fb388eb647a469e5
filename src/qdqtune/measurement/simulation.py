"""What a placement does to the outputs, foretold without the engine: ONNX Runtime runs the Q/DQ model as it stands in
the file, no pair fused away.

Engines round where the file says so, and what they fuse they compute at least as exactly, so their outputs differ from
these far less than from the float model's. A search asks here before it spends a build.

ONNX Runtime itself does more: where a pair stands in front of a convolution (or of a MaxPool and the like there) and
one behind it, it rounds its weights as well, per tensor. What is meant for it runs after these rewrites of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.runner import Runner
from qdqtune.graph.files import ConstantFile
from qdqtune.graph.outputs import temporary_folder
from qdqtune.measurement.accuracy import accuracy, is_finite
from qdqtune.placement.insertion import Inserter
from qdqtune.types import Accuracy, Array, Failure, Placement, Sample


class _Opened(NamedTuple):
    """ONNX Runtime, the folder that its models are written to, and their large constants there."""

    runner: Runner
    constants: ConstantFile
    folder: Path


class Simulation:
    """Placements of one model on some samples, for one `engine`. A context manager; ONNX Runtime starts when somebody
    asks."""

    def __init__(self, inserter: Inserter, samples: Sequence[Sample], engine: str = "") -> None:
        self._inserter, self._samples, self._engine = inserter, samples, engine
        self._stack = ExitStack()
        self._opened: _Opened | None = None
        self._reference: list[dict[str, Array]] | Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def accuracy(self, placement: Placement, inserter: Inserter | None = None) -> Accuracy | Failure:
        """How far the outputs of a placement are from the float model's; a failure if ONNX Runtime does not run it.

        `inserter` has other numbers for the same model.
        """
        if self._reference is None:
            self._reference = self._outputs(Placement())
        if isinstance(self._reference, Failure):
            return self._reference
        outputs = self._outputs(placement, inserter)
        return outputs if isinstance(outputs, Failure) else accuracy(self._reference, outputs)

    def _outputs(self, placement: Placement, inserter: Inserter | None = None) -> list[dict[str, Array]] | Failure:
        runner, constants, folder = self._open()
        path = folder / f"{placement.digest}.onnx"
        constants.save((inserter or self._inserter).insert(placement), path)
        handle = runner.load(path)
        if isinstance(handle, Failure):
            return handle
        outputs = runner.outputs(handle, self._samples)
        runner.unload(handle)
        path.unlink()
        if not isinstance(outputs, Failure) and not is_finite(outputs):
            return Failure("output", "the outputs hold NaN or infinite values")
        return outputs

    def _open(self) -> _Opened:
        if self._opened is None:
            folder = self._stack.enter_context(temporary_folder())
            constants = self._stack.enter_context(ConstantFile(folder / "constants.bin"))
            spec = EngineSpec(
                "onnxruntime", {"threads": cores(), "fuse": False, "rewrite": self._engine == "onnxruntime"}
            )
            runner = self._stack.enter_context(Runner(spec, log_dir=folder))
            self._opened = _Opened(runner, constants, folder)
        return self._opened
