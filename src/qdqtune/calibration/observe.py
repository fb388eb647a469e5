"""Values of any tensors of a float model on samples, for calibration, noise and reports.

ONNX Runtime runs the model, whichever engine is tuned for: nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import islice
from math import prod

import onnx
from onnx import TensorProto, helper

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usable_cores
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadData, BadModel, EngineFailure, EngineRefused, first_of
from qdqtune.graph.float16 import HALF
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Sample

BATCH_BYTES = 2**29
"""Bytes of values that one inference returns at most, unless a single tensor is larger. Chosen, not measured."""

MOST_OPTIMIZED = 4000
"""Models of more nodes are run without optimization: ONNX Runtime's time for it grows with the square of the nodes."""


MOST_AT_ONCE = 4
"""Samples that run at the same time, given as many cores: the threads of one inference wait for each other after each
operator, separate inferences do not, but each takes memory. Chosen, not measured."""

Outputs = list[dict[str, Array]]
"""The outputs by name, for each sample."""

ModelRun = Callable[[Iterable[Sample]], Outputs]
"""A built model: samples in, outputs out."""


class Session:
    """ONNX Runtime in a worker process; it can run several models, one after the other."""

    def __init__(self, runner: Runner, constants: ConstantFile, at_once: int, files: ExitStack) -> None:
        self._runner, self._constants, self._at_once, self._files = runner, constants, at_once, files

    def outputs(self, model: Model, name: str, samples: Iterable[Sample]) -> Outputs:
        """The outputs of a model on all samples; the build is deleted afterwards."""
        path = self._constants.write(model, name)
        try:
            return self._runner.outputs_of(path, samples, self._at_once)
        finally:
            path.unlink()

    def load(self, model: Model, name: str) -> ModelRun:
        """A function that runs the model, which is built at the first call and kept until the session ends."""
        return self._files.enter_context(self.loaded(model, name))

    @contextmanager
    def loaded(self, model: Model, name: str) -> Iterator[ModelRun]:
        """As `load`, but the model is kept for the block only."""
        path = self._constants.write(model, name)
        with ExitStack() as built:
            built.callback(path.unlink)
            build = cache(lambda: built.enter_context(self._runner.loaded(path)))
            yield lambda samples: self._runner.outputs(build(), samples, self._at_once)


@contextmanager
def onnxruntime_session(
    execution: Execution,
    *,
    at_once: int = MOST_AT_ONCE,
    unpacked: int = 0,
    **options: bool,
) -> Iterator[Session]:
    """A session with these `options` of the onnxruntime engine, which runs at most `at_once` samples at the same time.
    For `unpacked` see `Runner`."""
    at_once = min(usable_cores(), at_once)
    spec = EngineSpec("onnxruntime", {"threads": usable_cores() // at_once, **options})
    with (
        temporary_folder() as folder,
        execution.constant_file() as constants,
        Runner(spec, log_dir=folder, execution=execution, unpacked=unpacked) as runner,
        ExitStack() as files,
    ):
        yield Session(runner, constants, at_once, files)


@contextmanager
def running(model: Model, execution: Execution = EXECUTION, *, fuse: bool = True) -> Iterator[ModelRun]:
    """A function that runs a model on one sample after the other; it raises EngineRefused if the build fails."""
    with _one_at_a_time(model, execution, fuse=fuse) as session:
        yield session.load(model, "observed")


def _one_at_a_time(model: Model, execution: Execution, *, fuse: bool) -> AbstractContextManager[Session]:
    """A session for the model, which runs one sample after the other."""
    return onnxruntime_session(limited(execution, model), at_once=1, fuse=fuse)


def limited(execution: Execution, model: Model) -> Execution:
    """`execution` with the memory budget for a large model, unless it has one."""
    own = MemoryBudget.for_model(sum(constant.nbytes for constant in model.large.values()))
    return replace(execution, memory=execution.memory or own)


def observe(
    model: Model,
    tensors: Sequence[str],
    samples: Iterable[Sample],
    execution: Execution = EXECUTION,
    *,
    widen: bool = True,
) -> Iterator[tuple[str, Array]]:
    """Each of `tensors` with its value on each sample, in memory that does not grow with the number of samples.

    Tensors come in batches that fit into `BATCH_BYTES`, in order, and each batch sample by sample. Each batch takes a
    pass over the samples, so these must not be an iterator. With `widen`, half precision becomes float32. Raises as
    `outputs_on`.
    """
    is_fused = len(model.nodes) + len(tensors) <= MOST_OPTIMIZED
    with _one_at_a_time(model, execution, fuse=is_fused) as session:
        for batch in _batches(model, tensors, samples, session):
            nodes = []
            for i, tensor in enumerate(batch):  # graph inputs cannot be outputs as they are
                is_half = tensor in model.tensors and model.tensors[tensor].dtype in HALF
                op, to = ("Cast", TensorProto.FLOAT) if widen and is_half else ("Identity", None)
                nodes.append(helper.make_node(op, [tensor], [f"__value_{i}"], f"__value_{i}", to=to))
            with session.loaded(with_outputs(model, nodes), "observed") as run:
                for outputs in _on_each(run, samples):
                    for tensor, node in zip(batch, nodes, strict=True):
                        yield tensor, outputs.pop(node.output[0])


def passes(model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution = EXECUTION) -> int:
    """How often `observe` would read the samples: once for each batch of tensors."""
    with _one_at_a_time(model, execution, fuse=len(model.nodes) <= MOST_OPTIMIZED) as session:
        return sum(1 for _ in _batches(model, tensors, samples, session))


def outputs_on(model: Model, samples: Iterable[Sample], execution: Execution = EXECUTION) -> Iterator[dict[str, Array]]:
    """All outputs of a model by name, sample by sample.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
        EngineFailure: it crashed, took too long, or ran out of memory.
    """
    is_fused = len(model.proto.graph.node) <= MOST_OPTIMIZED
    with running(model, execution, fuse=is_fused) as run:
        yield from _on_each(run, samples)


def _on_each(run: ModelRun, samples: Iterable[Sample]) -> Iterator[dict[str, Array]]:
    sample = None
    for sample in samples:
        try:
            (outputs,) = run([sample])
        except EngineRefused as refused:
            hint = ": `time_limit` gives it longer" if refused.failure.stage == "timeout" else ""
            sizes = [f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in sample.items()]
            is_beyond = "out of data bounds" in str(refused)  # an id that a table of the model lacks
            error = EngineFailure if refused.is_transient else BadData if is_beyond else BadModel
            text = f"calibration cannot run the model on {first_of(sizes)}: {refused}{hint}"
            raise error(text) from refused
        yield outputs
    if sample is None:
        raise BadData("the calibration data hold no sample")


def with_outputs(model: Model, nodes: Sequence[onnx.NodeProto]) -> Model:
    """The model with `nodes` appended; its outputs are their first outputs."""
    proto = deepcopy(model.proto)
    proto.graph.node.extend(nodes)
    del proto.graph.output[:]
    for node in nodes:
        proto.graph.output.add(name=node.output[0])  # ONNX Runtime infers type and shape
    return Model(proto, model.large)


def _batches(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], session: Session
) -> Iterator[tuple[str, ...]]:
    if len(tensors) < 2:
        yield from filter(None, [tuple(tensors)])
        return
    # by static shapes, or else on the first sample, at 4 bytes an element
    shapes = {tensor: model.tensors[tensor].sizes for tensor in tensors if tensor in model.tensors}
    sizes = {tensor: 4 * prod(shape) for tensor, shape in shapes.items() if shape is not None}
    if unknown := [tensor for tensor in tensors if tensor not in sizes]:
        nodes = [helper.make_node("Size", [t], [f"__size_{i}"], f"__size_{i}") for i, t in enumerate(unknown)]
        with session.loaded(with_outputs(model, nodes), "sized") as run:
            (counts,) = _on_each(run, islice(samples, 1))
        sizes |= {t: 4 * int(counts[node.output[0]]) for t, node in zip(unknown, nodes, strict=True)}
    batch: list[str] = []
    left = BATCH_BYTES
    for tensor in tensors:
        if batch and sizes[tensor] > left:
            yield tuple(batch)
            batch, left = [], BATCH_BYTES
        batch.append(tensor)
        left -= sizes[tensor]
    yield tuple(batch)
