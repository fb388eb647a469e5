"""What the tensors of a float model are on samples: the one way to run it for other outputs than its own.

ONNX Runtime runs it, whichever engine is tuned for: nothing here is timed. Calibration, noise and reports ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from itertools import islice
from math import prod

import onnx
from onnx import TensorProto, helper

from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.devices import Device
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadData, BadModel, first_of
from qdqtune.graph.model import Model
from qdqtune.graph.saving import constants_to_share
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Failure, Sample

BATCH_BYTES = 2**29
"""Bytes of values that one inference hands over, if no single tensor is larger."""

WIDENED = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

Run = Callable[[Iterable[Sample]], list[dict[str, Array]] | Failure]
"""The outputs of a model, by name, for each sample."""

MOST_OPTIMIZED = 4000
"""Nodes beyond which a model is run as it is: ONNX Runtime takes a time to optimize that grows with their square."""


def observe(
    model: Model,
    tensors: Sequence[str],
    samples: Iterable[Sample],
    *,
    widen: bool = True,
    memory: int | None = BATCH_BYTES,
) -> Iterator[tuple[str, Array]]:
    """Any tensors of the main graph with their values on each sample, in memory that does not grow with their number.

    Tensors come in their order, one batch after the other, and each batch sample by sample. A batch holds as many as
    fit into `memory` bytes (those of the first sample, where shapes are not static; None: all), and takes a pass over
    the samples, which are no iterator therefore. float16 and bfloat16 values are widened to float32 unless `widen` is
    False.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    for batch in _batches(model, tensors, samples, memory):
        shown = _showing(model, batch, widen=widen)
        for outputs in outputs_on(shown, samples):
            for tensor, name in zip(batch, shown.outputs, strict=True):
                yield tensor, outputs.pop(name)


def passes(model: Model, tensors: Sequence[str], samples: Iterable[Sample]) -> int:
    """How often `observe` goes through the samples to show all of these tensors."""
    return sum(1 for _ in _batches(model, tensors, samples, BATCH_BYTES))


def values_on(
    model: Model, tensors: Sequence[str], sample: Sample, budget: MemoryBudget | None = None
) -> dict[str, Array]:
    """The values that some tensors take on one sample, in the types that they have. For `budget` see `outputs_on`.

    Raises:
        BadModel: ONNX Runtime cannot run the model.
    """
    shown = _showing(model, tensors, widen=False)
    (outputs,) = outputs_on(shown, [sample], budget)
    return {tensor: outputs[name] for tensor, name in zip(tensors, shown.outputs, strict=True)}


def outputs_on(
    model: Model, samples: Iterable[Sample], budget: MemoryBudget | None = None
) -> Iterator[dict[str, Array]]:
    """All outputs of a model by name, sample by sample. `budget` is that of what engines hold meanwhile, if anything.

    Raises:
        BadData: no sample.
        BadModel: ONNX Runtime cannot run the model.
    """
    sample = None
    with running_in_several(model, 1, fuse=len(model.proto.graph.node) <= MOST_OPTIMIZED, budget=budget) as (run,):
        for sample in samples:
            outputs = run([sample])
            if isinstance(outputs, Failure):
                hint = ": --time-limit gives it longer" if outputs.stage == "timeout" else ""
                sizes = [f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in sample.items()]
                raise BadModel(f"calibration cannot run the model on {first_of(sizes)}: {outputs.reason}{hint}")
            yield outputs[0]
    if sample is None:
        raise BadData("the calibration data hold no sample")


@contextmanager
def running(model: Model, *, fuse: bool = True) -> Iterator[Run]:
    """A model in a process of its own. One that cannot be built gives that failure for whatever it is asked."""
    with running_in_several(model, 1, fuse=fuse) as (run,):
        yield run


@contextmanager
def running_in_several(
    model: Model, count: int, *, fuse: bool = True, budget: MemoryBudget | None = None
) -> Iterator[tuple[Run, ...]]:
    """`running` in so many processes side by side, which share the cores. Each builds the model when it is asked for
    the first time, and may be asked in another thread. A single one shares the memory `budget`, if there is one."""
    size = sum(constant.nbytes for constant in model.large.values())
    spec = EngineSpec("onnxruntime", {"threads": max(1, cores() // count), "fuse": fuse})
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        path = stack.enter_context(constants_to_share()).write(model, "observed")
        stack.callback(path.unlink)
        devices = [Device(f"observer-{number}") for number in range(count)]
        shared = budget if count == 1 else None  # a budget is for one thread
        runners = [
            Runner(spec, log_dir=folder, device=device, memory=shared or MemoryBudget.for_model(size))
            for device in devices
        ]
        for runner in runners:
            stack.enter_context(runner)
        yield tuple(partial(_outputs, cache(partial(runner.load, path)), runner) for runner in runners)


def _outputs(
    build: Callable[[], Handle | Failure], runner: Runner, samples: Iterable[Sample]
) -> list[dict[str, Array]] | Failure:
    handle = build()
    return handle if isinstance(handle, Failure) else runner.outputs(handle, samples)


def with_outputs(model: Model, nodes: Sequence[onnx.NodeProto], outputs: Iterable[str] | None = None) -> Model:
    """The model with more nodes at its end, and with `outputs` instead of its own: by default what each node makes."""
    proto = deepcopy(model.proto)
    proto.graph.node.extend(nodes)
    del proto.graph.output[:]
    for name in [node.output[0] for node in nodes] if outputs is None else outputs:
        proto.graph.output.add(name=name)  # ONNX Runtime infers the rest
    return Model(proto, model.large)


def _showing(model: Model, tensors: Sequence[str], *, widen: bool) -> Model:
    """The model with the values of `tensors` as its outputs."""

    def shown(i: int, tensor: str) -> onnx.NodeProto:  # graph inputs cannot be outputs as they are
        info, name = model.tensors.get(tensor), f"__value_{i}"
        if widen and info is not None and info.dtype in WIDENED:
            return helper.make_node("Cast", [tensor], [name], name, to=TensorProto.FLOAT)
        return helper.make_node("Identity", [tensor], [name], name)

    return with_outputs(model, [shown(i, tensor) for i, tensor in enumerate(tensors)])


def _batches(
    model: Model, tensors: Sequence[str], samples: Iterable[Sample], memory: int | None
) -> Iterator[tuple[str, ...]]:
    """The tensors in their order, as many at a time as take no more than `memory` bytes (at least one)."""
    if memory is None or len(tensors) < 2:
        yield from filter(None, [tuple(tensors)])
        return
    sizes = _sizes(model, tensors, samples)
    batch: list[str] = []
    left = memory
    for tensor in tensors:
        if batch and sizes[tensor] > left:
            yield tuple(batch)
            batch, left = [], memory
        batch.append(tensor)
        left -= sizes[tensor]
    yield tuple(batch)


def _sizes(model: Model, tensors: Sequence[str], samples: Iterable[Sample]) -> dict[str, int]:
    """Bytes of each tensor: of its static shape, or as the first sample has it. 4 an element, which most types take."""
    infos = {tensor: model.tensors.get(tensor) for tensor in tensors}
    shapes = {t: info.shape for t, info in infos.items() if info is not None and info.shape is not None}
    sizes = {t: 4 * prod(d for d in shape if d is not None) for t, shape in shapes.items() if None not in shape}
    if unknown := [tensor for tensor in tensors if tensor not in sizes]:
        nodes = [helper.make_node("Size", [t], [f"__size_{i}"], f"__size_{i}") for i, t in enumerate(unknown)]
        (counts,) = outputs_on(with_outputs(model, nodes), islice(samples, 1))
        sizes |= {t: 4 * int(counts[node.output[0]]) for t, node in zip(unknown, nodes, strict=True)}
    return sizes
