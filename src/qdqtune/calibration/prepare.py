"""A float model and its samples, ready for use: input shapes fixed, samples split, hints on both."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
from onnx import TensorProto

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.calibration.workloads import WorkloadFile, open_workloads, workload_digest
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.facts import facts_of
from qdqtune.errors import BadOption
from qdqtune.graph.inference import sized_by_values, with_input_shapes
from qdqtune.graph.loading import check_outputs
from qdqtune.graph.model import Model, graphs
from qdqtune.graph.operators import COMPUTE, CONTROL_FLOW, HEAVY, elements, integer_operators, work
from qdqtune.types import Mix, NumericFormat, Sample, Workload

LEAST_JUDGED = 8
"""The least number of held-out samples to compare outputs on: scales that differ by 4e-7 moved one sample by 10 dB."""

MOST_JUDGED = 256
"""Samples to compare outputs on by default, if the model is small. Of files with a true agreement of 95 %, a limit of
98 % passes 79 % if judged by 32 best classes, 17 % if by 256."""

USUAL_JUDGED = 32
"""Samples to compare outputs on for larger models, within `JUDGED_WORK`. Chosen, not measured."""

JUDGED_WORK, MORE_WORK = 5e10, 2e10
"""Multiplications that comparing outputs may take (a few seconds on a core), beyond `LEAST_JUDGED` samples; and beyond
`USUAL_JUDGED` samples. Chosen, not measured."""

JUDGED_BYTES = 2.0**27
"""Most bytes of outputs to compare, beyond `USUAL_JUDGED` samples. Chosen, not measured."""


@dataclass(frozen=True)
class Data:
    """Where samples come from: a source (None for random inputs) and the largest number of samples, the shapes of
    dynamic inputs, the random seed, and workloads, which serve as samples if there is no source. `folders` are those of
    the model, where the settings for raw data may lie."""

    calibration_data: str | None = None
    calibration_samples: int | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    workloads: Sequence[WorkloadFile] = ()
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Prepared:
    """A model with its samples. `model` has the dynamic sizes of the file and is what ships; `shaped` has the `sizes`
    at which it is measured, except those that differ between workloads.

    `samples` are all samples, `calibration` those for ranges. Outputs are compared on the samples `judging`, which
    `calibration` lacks if `is_held_out`. `execution` has time limits for runs. `data` says where samples came from;
    `fixed` are inputs that were made constants.
    """

    model: Model
    shaped: Model
    samples: Samples
    calibration: Samples
    judging: tuple[Sample, ...]
    is_held_out: bool = False
    sizes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    workloads: Mix = ()
    execution: Execution = EXECUTION
    data: Data = field(default_factory=Data)
    fixed: Collection[str] = ()

    @property
    def mix(self) -> Mix:
        """The workloads to time: those of the user, or else the first sample."""
        return self.workloads or (Workload(self.samples.first(1)[0]),)

    @property
    def has_real_samples(self) -> bool:
        """Whether samples are the user's: outputs on random inputs say nothing about accuracy."""
        return not self.samples.is_random

    @property
    def real(self) -> tuple[Sample, ...]:
        """The samples on which outputs are compared; none if inputs are random."""
        return self.judging if self.has_real_samples else ()

    @property
    def hints(self) -> tuple[str, ...]:
        """Warnings about samples that are all alike, and about compute operators that no pair can reach."""
        notes = []
        if self.judging and self.has_real_samples and not self.workloads:
            first, *others = self.judging
            wide = [array for sample in self.judging for array in sample.values() if array.size > 1]
            is_flat = bool(wide) and all((array == array.flat[0]).all() for array in wide)
            is_one = all(np.array_equal(array, other[name]) for other in others for name, array in first.items())
            if is_flat or (others and is_one):
                notes.append(
                    f"the samples in {self.samples.origin} are all equal, or hold one value throughout: scales and "
                    "accuracy from them do not hold for real inputs; give typical ones"
                )
        if (hidden := hidden_work(self.model, self.real)) is not None:
            notes.append(hidden)
        return tuple(notes)

    def sized_for(self, engine: str) -> tuple[Self, tuple[str, ...]]:
        """For an engine that takes fixed sizes only: this with dynamic sizes fixed to those of the first workload or
        sample, also in the model that ships, and a note about it. For other engines: this, and no note."""
        facts, known = facts_of(engine), self.model.tensors
        is_open = any(None in (known[name].shape or (None,)) for name in self.model.inputs)
        if not facts.has_fixed_sizes or not is_open:
            return self, ()
        sizes = {name: array.shape for name, array in self.mix[0].inputs.items() if name in self.model.inputs}
        shaped = with_input_shapes(self.model, sizes)
        note = f"{facts.ep} takes fixed sizes only: what ships has those of the samples"
        return replace(self, model=shaped, shaped=shaped), (note,)

    def ranges(self, how: Calibration | None, numbers: NumericFormat, tensors: Sequence[str] | None = None) -> Ranges:
        return calibrate(self.shaped, self.calibration, how, numbers=numbers, tensors=tensors, execution=self.execution)


def prepare(
    model: Model,
    data: Data,
    execution: Execution = EXECUTION,
    *,
    fixed: Collection[str] = (),
    most: int = MOST_JUDGED,
    slower: float = 1.0,
) -> Prepared:
    """Shape a model and open its samples. All commands call this, so that they compare outputs on the same samples.

    If the limit on calibration samples leaves out `LEAST_JUDGED` or more, outputs are compared on those. Else every
    fifth sample is held out of calibration for that. If these would be fewer than `LEAST_JUDGED`, or inputs are random,
    calibration has all samples, and outputs are compared on the first ones. At most `most` samples are compared; 0
    holds none out and compares none. An engine that is `slower` than a CPU by this factor gets fewer.
    """
    check_outputs(model.proto)
    if data.workloads and data.input_shapes:
        raise BadOption("`workloads` brings the shapes of all inputs: leave `input_shapes` out")
    mix = open_workloads(data.workloads, model, fixed, execution) if data.workloads else ()
    if mix and data.calibration_data is None:
        shapes = [{name: array.shape for name, array in workload.inputs.items()} for workload in mix]
        axes = {name: zip(*(own[name] for own in shapes), strict=True) for name in shapes[0]}
        sizes = {name: tuple(size[0] if len(set(size)) == 1 else None for size in of) for name, of in axes.items()}
        shaped = with_input_shapes(model, sizes)
        digest = hashlib.sha256("".join(map(workload_digest, mix)).encode()).hexdigest()[:16]
        samples = Samples("the workloads", digest, False, lambda: (dict(workload.inputs) for workload in mix))
    else:
        sizes = {**data.input_shapes}
        shaped = with_input_shapes(model, sizes)
        samples = open_samples(
            data.calibration_data,
            shaped,
            execution,
            seed=data.seed,
            limit=data.calibration_samples,
            fixed=fixed,
            folders=data.folders,
        )
    each = slower * max(1.0, sum(work(shaped, node) for node in shaped.nodes))
    written = 4 * sum(elements(shaped, output) for output in shaped.outputs)
    affordable = max(min(USUAL_JUDGED, JUDGED_WORK / each), min(MORE_WORK / each, JUDGED_BYTES / max(written, 1.0)))
    least, usual = min(LEAST_JUDGED, most), min(USUAL_JUDGED, most)
    count = max(least, min(most, int(affordable)))
    calibration = samples
    judging = tuple(samples.others(count)) if most and samples.others is not None else ()
    is_held_out = len(judging) >= max(1, least)
    if most and not is_held_out:
        parts = None if samples.is_random else samples.apart(least, max(count, usual))
        is_held_out = parts is not None
        calibration, unseen = parts or (samples, samples)
        judging = tuple(unseen.first(count))
    return Prepared(model, shaped, samples, calibration, judging, is_held_out, sizes, mix, execution, data, fixed)


def hidden_work(model: Model, samples: Sequence[Sample] = ()) -> str | None:
    """A message on why pairs cannot help this model, and what to do; None if they reach its compute operators."""
    if operators := integer_operators(model):
        names = ", ".join(operators)
        return f"the model is quantized already, and its integer operators ({names}) stay: tune the float model"
    weights = {node.inputs[1] for node in model.nodes if node.op in COMPUTE} & model.overridable
    if weights:
        return (
            f"{len(weights)} weights ({min(weights)}, say) are graph inputs, which callers may override: they stay in "
            "float. If nobody does, remove_initializer_from_input.py of ONNX Runtime takes them out of the inputs"
        )
    made = [model.tensors.get(node.outputs[0]) for node in model.nodes if node.op in COMPUTE]
    if made and all(info is not None and info.dtype == TensorProto.DOUBLE for info in made):
        return "the model computes in float64, which no pair takes: export it in float32"
    layers = HEAVY - CONTROL_FLOW
    inside = [n.op_type for g in islice(graphs(model.proto.graph), 1, None) for n in g.node if n.op_type in layers]
    outside = sum(node.op in layers for node in model.nodes)
    if not inside and outside:
        return None
    if not inside:
        return f"the model has none of the operators that 8 bits make faster ({', '.join(sorted(COMPUTE))})"
    kinds = " and ".join(dict.fromkeys(node.op for node in model.nodes if node.op in CONTROL_FLOW))
    what = f"operators that gain from 8 bits ({', '.join(sorted(set(inside)))}) are in bodies of {kinds}"
    deciding = deciding_inputs(model)
    if not deciding:
        stay = "they stay in float" if "Loop" in sized_by_values(model) else "unroll it where the model is exported"
        return f"{what}, where no pair can be: {stay}"
    flags = ""
    for name in deciding:
        values = {sample[name].item() for sample in samples if name in sample}
        value = str(values.pop()).lower() if len(values) == 1 else "VALUE"
        flags += f" `fix_inputs` {name}={value}"
    return f"{what}, where no pair can be: give the value that you deploy with,{flags}, and it is folded"


def unsteady_work(model: Model) -> str | None:
    """A note if the time of an inference depends on the values of inputs; else None."""
    told = f"how long an inference takes depends on the values of inputs ({', '.join(ops := sized_by_values(model))})"
    return f"{told}: tune times the first sample, or all `workloads`" if ops else None


def deciding_inputs(model: Model) -> list[str]:
    """The inputs with one integer or boolean on which conditions of If nodes depend."""
    waiting = [node.inputs[0] for node in model.nodes if node.op == "If"]
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor and tensor not in seen:
            seen.add(tensor)
            producer = model.maker(tensor)
            waiting += [] if producer is None else producer.inputs
    kinds = {TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}
    infos = {name: model.tensors[name] for name in model.inputs if name in seen and name in model.tensors}
    return [name for name, info in infos.items() if info.dtype in kinds and info.shape in ((), (1,))]
