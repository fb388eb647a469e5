"""ONNX Runtime in a worker process, for variants of one model: constants that they share are written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usable_cores
from qdqtune.engines.execution import Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Runner
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Failure, Listener, Sample

Outputs = list[dict[str, Array]]
"""The outputs by name, for each sample."""

Loaded = Callable[[Iterable[Sample]], Outputs | Failure]
"""A built model: samples in, outputs out."""


MOST_AT_ONCE = 4
"""Samples that run at the same time, where there are so many cores: the threads of one inference wait for each other
after each operator, inferences do not, but each takes memory. Chosen, not measured."""


@dataclass
class InferenceCount:
    """Reports to a listener how many inferences, or other steps, were made of at most `most`."""

    listener: Listener
    most: int
    done: int = 0

    def add(self, count: int) -> None:
        """Count so many more inferences, and report the sum."""
        self.done = min(self.done + count, self.most)
        self.listener.progress(self.done, self.most)

    def reach(self, count: int) -> None:
        """Count so many in all, as those that are left out of them will not be made."""
        self.add(max(0, count - self.done))


class Session:
    """Builds models and runs them on samples, one after the other."""

    def __init__(self, runner: Runner, constants: ConstantFile, at_once: int = 1) -> None:
        self._runner, self._constants, self._at_once = runner, constants, at_once

    def outputs(self, model: Model, name: str, samples: Iterable[Sample]) -> Outputs | Failure:
        """The outputs of a model that is built for this call only."""
        path = self._constants.write(model, name)
        outputs = self._runner.outputs_of(path, samples, self._at_once)
        path.unlink()
        return outputs

    def load(self, model: Model, name: str) -> Loaded | Failure:
        """A model that stays built until the session ends."""
        handle = self._runner.load(self._constants.write(model, name))
        return handle if isinstance(handle, Failure) else partial(self._runner.outputs, handle, at_once=self._at_once)


@contextmanager
def onnxruntime_session(
    execution: Execution, *, memory: MemoryBudget | None = None, unpacked: int = 0, **options: bool
) -> Iterator[Session]:
    """A session with these `options` of the onnxruntime engine; for `memory` and `unpacked` see `Runner`."""
    at_once = min(usable_cores(), MOST_AT_ONCE)
    spec = EngineSpec("onnxruntime", {"threads": usable_cores() // at_once, **options})
    with (
        temporary_folder() as folder,
        execution.constant_file() as constants,
        Runner(
            spec, log_dir=folder, execution=execution, start=execution.start, unpacked=unpacked, memory=memory
        ) as runner,
    ):
        yield Session(runner, constants, at_once)
