"""Values of any tensors of a float model on samples, for calibration, noise and reports.

ONNX Runtime runs the model, whichever engine is tuned for: nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from itertools import islice
from math import prod
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import Device, usable_cores
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadData, BadModel, EngineFailure, EngineRefused, first_of
from qdqtune.graph.model import Model
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Sample

BATCH_BYTES = 2**29
"""Bytes of values that one inference returns, if no single tensor is larger. Chosen, not measured."""

WIDENED = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

MOST_OPTIMIZED = 4000
"""Models of more nodes are run without optimization: ONNX Runtime's time for it grows with the square of the nodes."""


class ModelRun:
    """A model file in a process. It is built at the first call."""

    def __init__(self, runner: Runner, path: Path) -> None:
        self._runner, self._build = runner, cache(partial(runner.load, path))

    def __call__(self, samples: Iterable[Sample]) -> list[dict[str, Array]]:
        return self._runner.outputs(self._build(), samples)


def observe(
    model: Model,
    tensors: Sequence[str],
    samples: Iterable[Sample],
    *,
    memory: int = BATCH_BYTES,
    execution: Execution = EXECUTION,
) -> Iterator[tuple[str, Array]]:
    """Each of the tensors with its value on each sample, in memory that does not grow with their number.

    Tensors come in batches, in order, and each batch sample by sample. A batch has as many tensors as fit into `memory`
    bytes (by the first sample, where shapes are dynamic). Each batch takes a pass over the samples, so these must not
    be an iterator. float16 and bfloat16 values are converted to float32."""
    for batch in _batches(model, tensors, samples, memory, execution):
        shown = _showing(model, batch, widen=True)
        for outputs in outputs_on(shown, samples, execution=execution):
            for tensor, name in zip(batch, shown.outputs, strict=True):
                yield tensor, outputs.pop(name)


def passes(model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution = EXECUTION) -> int:
    """How many passes over the samples `observe` takes for these tensors."""
    return sum(1 for _ in _batches(model, tensors, samples, BATCH_BYTES, execution))


def bytes_of(model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution = EXECUTION) -> int:
    return sum(_sizes(model, tensors, samples, execution).values())


def values_on(
    model: Model,
    tensors: Sequence[str],
    sample: Sample,
    budget: MemoryBudget | None = None,
    execution: Execution = EXECUTION,
) -> dict[str, Array]:
    """The values of some tensors on one sample, in their own types. For `budget` see `outputs_on`."""
    shown = _showing(model, tensors, widen=False)
    (outputs,) = outputs_on(shown, [sample], budget, execution)
    return {tensor: outputs[name] for tensor, name in zip(tensors, shown.outputs, strict=True)}


def outputs_on(
    model: Model,
    samples: Iterable[Sample],
    budget: MemoryBudget | None = None,
    execution: Execution = EXECUTION,
) -> Iterator[dict[str, Array]]:
    """All outputs of a model by name, sample by sample. `budget` is the memory budget of engines that run meanwhile.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
        EngineFailure: it crashed, took too long, or ran out of memory.
    """
    sample = None
    is_fused = len(model.proto.graph.node) <= MOST_OPTIMIZED
    with running_in_several(model, 1, execution, fuse=is_fused, budget=budget) as (run,):
        for sample in samples:
            try:
                (outputs,) = run([sample])
            except EngineRefused as refused:
                hint = ": `time_limit` gives it longer" if refused.failure.stage == "timeout" else ""
                sizes = [f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in sample.items()]
                error = EngineFailure if refused.is_transient else BadModel
                text = f"calibration cannot run the model on {first_of(sizes)}: {refused}{hint}"
                raise error(text) from refused
            yield outputs
    if sample is None:
        raise BadData("the calibration data hold no sample")


@contextmanager
def running(model: Model, execution: Execution = EXECUTION, *, fuse: bool = True) -> Iterator[ModelRun]:
    """A function that runs a model in a process. If the model cannot be built, each call raises EngineRefused."""
    with running_in_several(model, 1, execution, fuse=fuse) as (run,):
        yield run


@contextmanager
def running_in_several(
    model: Model,
    count: int,
    execution: Execution = EXECUTION,
    *,
    fuse: bool = True,
    budget: MemoryBudget | None = None,
) -> Iterator[tuple[ModelRun, ...]]:
    """`running` in `count` processes that share the cores. Each builds the model at its first call, which may come from
    any thread. A single one uses the memory `budget`, if given."""
    size = sum(constant.nbytes for constant in model.large.values())
    spec = EngineSpec("onnxruntime", {"threads": max(1, usable_cores() // count), "fuse": fuse})
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        path = stack.enter_context(execution.constant_file()).write(model, "observed")
        stack.callback(path.unlink)
        devices = [Device(f"observer-{number}") for number in range(count)]
        shared = budget if count == 1 else None  # a budget is not thread-safe
        make = partial(Runner, spec, log_dir=folder, execution=execution, reuses=True)
        runners = [make(device=device, memory=shared or MemoryBudget.for_model(size)) for device in devices]
        for runner in runners:
            stack.enter_context(runner)
        yield tuple(ModelRun(runner, path) for runner in runners)


def with_outputs(model: Model, nodes: Sequence[onnx.NodeProto], outputs: Iterable[str] | None = None) -> Model:
    """The model with `nodes` at its end and other `outputs`: by default those of the new nodes."""
    proto = deepcopy(model.proto)
    proto.graph.node.extend(nodes)
    del proto.graph.output[:]
    for name in [node.output[0] for node in nodes] if outputs is None else outputs:
        proto.graph.output.add(name=name)  # ONNX Runtime infers type and shape
    return Model(proto, model.large)


def _showing(model: Model, tensors: Sequence[str], *, widen: bool) -> Model:
    """The model with the values of `tensors` as its outputs; float16 and bfloat16 as float32 if `widen`."""

    def shown(i: int, tensor: str) -> onnx.NodeProto:  # graph inputs cannot be outputs as they are
        info, name = model.tensors.get(tensor), f"__value_{i}"
        if widen and info is not None and info.dtype in WIDENED:
            return helper.make_node("Cast", [tensor], [name], name, to=TensorProto.FLOAT)
        return helper.make_node("Identity", [tensor], [name], name)

    return with_outputs(model, [shown(i, tensor) for i, tensor in enumerate(tensors)])


def _batches(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], memory: int, execution: Execution
) -> Iterator[tuple[str, ...]]:
    """The tensors in order, in batches of at most `memory` bytes (but at least one tensor)."""
    if len(tensors) < 2:
        yield from filter(None, [tuple(tensors)])
        return
    sizes = _sizes(model, tensors, samples, execution)
    batch: list[str] = []
    left = memory
    for tensor in tensors:
        if batch and sizes[tensor] > left:
            yield tuple(batch)
            batch, left = [], memory
        batch.append(tensor)
        left -= sizes[tensor]
    yield tuple(batch)


def _sizes(model: Model, tensors: Sequence[str], samples: Iterable[Sample], execution: Execution) -> dict[str, int]:
    """Bytes of each tensor by its static shape, or else on the first sample, at 4 bytes an element."""
    infos = {tensor: model.tensors.get(tensor) for tensor in tensors}
    shapes = {t: info.shape for t, info in infos.items() if info is not None and info.shape is not None}
    sizes = {t: 4 * prod(d for d in shape if d is not None) for t, shape in shapes.items() if None not in shape}
    if unknown := [tensor for tensor in tensors if tensor not in sizes]:
        nodes = [helper.make_node("Size", [t], [f"__size_{i}"], f"__size_{i}") for i, t in enumerate(unknown)]
        (counts,) = outputs_on(with_outputs(model, nodes), islice(samples, 1), execution=execution)
        sizes |= {t: 4 * int(counts[node.output[0]]) for t, node in zip(unknown, nodes, strict=True)}
    return sizes
