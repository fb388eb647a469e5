"""A float model and its samples, ready for use: input shapes fixed, samples split, doubts about both as notes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.calibration.workloads import Sizes, WorkloadFile, common_sizes, open_workloads, samples_of
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Model, bodies
from qdqtune.graph.operators import COMPUTE, CONTROL_FLOW, HEAVY, integer_operators, work
from qdqtune.graph.soundness import check_outputs
from qdqtune.types import Array, Mix, NumericFormat, Sample, Workload

LEAST_JUDGED = 8
"""Fewer held-out samples than this are no judges: scales that differ by 4e-7 have moved one sample by 10 dB."""

MOST_JUDGED = 32
"""Samples that outputs are compared on where nobody asks for fewer."""

JUDGED_WORK = 5e10
"""Multiplications of the inferences on which outputs are compared, where `LEAST_JUDGED` take less: a few seconds on a
core."""


@dataclass(frozen=True)
class Data:
    """What a model is fed: a source of samples (None: random inputs), how many of them at most, the shapes of its
    dynamic inputs, the seed of what is random, and files of workloads: calls of different shapes, which are the samples
    where there is no other source."""

    calibration_data: str | None = None
    calibration_samples: int | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    workloads: Sequence[WorkloadFile] = ()


@dataclass(frozen=True)
class Prepared:
    """`model` as it was read, which is what ships; `shaped` is the same with the input `sizes` of the measurement,
    open where those of workloads differ.

    `judging` is what outputs are compared on, in every command: the first of those that calibration does not see if
    `is_held_out`, else of all; fewer than asked for where `is_capped`.
    """

    model: Model
    shaped: Model
    samples: Samples
    calibration: Samples
    judging: tuple[Sample, ...]
    is_held_out: bool = False
    is_capped: bool = False
    sizes: Sizes = field(default_factory=dict)
    workloads: Mix = ()

    @property
    def mix(self) -> Mix:
        """What is timed: the workloads, or else the first sample.

        Raises:
            BadData: there is none.
        """
        return self.workloads or (Workload(self.samples.first(1)[0]),)

    @property
    def has_real_samples(self) -> bool:
        """Whether outputs on these samples say anything of the model's accuracy: random inputs do not."""
        return not self.samples.is_random

    @property
    def doubts(self) -> tuple[str, ...]:
        """What to say of samples that tell little, and of how few outputs are compared on."""
        first, told = self.judging[:1], []
        wide = [array for sample in self.judging for array in sample.values() if array.size > 1]
        if first and self.has_real_samples and not self.workloads:
            is_one = len(self.judging) > 1 and all(
                np.array_equal(array, other[name]) for name, array in first[0].items() for other in self.judging[1:]
            )
            is_flat = bool(wide) and all((array == array.flat[0]).all() for array in wide)
            if is_one or is_flat:
                what = "hold one value throughout" if is_flat else "are all equal"
                told.append(
                    f"the samples in {self.samples.origin} {what}: scales and accuracy that are found on them do not "
                    "hold for real inputs; give typical ones"
                )
        if self.is_capped:
            told.append(f"outputs are compared on {len(self.judging)} samples: more of so large a model take too long")
        return tuple(told)

    @property
    def hints(self) -> tuple[str, ...]:
        """What every command that places pairs says of a model and its samples: doubts, and work that no pair can
        reach."""
        return (*self.doubts, *filter(None, [hidden_work(self.model, self.samples)]))

    def ranges(self, how: Calibration | None, numbers: NumericFormat) -> Ranges:
        """See `calibrate`; takes one pass over the samples."""
        return calibrate(self.shaped, self.calibration, how, numbers=numbers)


def prepare(model: Model, data: Data, *, fixed: Collection[str] = (), most: int = MOST_JUDGED) -> Prepared:
    """Shape a model and open its samples. Arrays of `fixed` inputs, which were made constants, are passed over.

    Every fifth sample is held out of calibration until `most` are, unless these were fewer than `LEAST_JUDGED`, or are
    made up. All commands do alike, so that they compare the outputs of a file on the same samples. Who compares none
    asks for 0.

    Raises:
        BadModel: an input or an output is no tensor.
        BadOption: the shapes do not fit, or random inputs need some that are not given.
        BadData: the source is missing, unreadable or does not fit the model (some of it tells only when iterated).
    """
    check_outputs(model.proto)
    if data.workloads and data.input_shapes:
        raise BadOption("--workload brings the shapes of all inputs: leave --input-shape out")
    mix = open_workloads(data.workloads, model, fixed) if data.workloads else ()
    sizes: Sizes = common_sizes(mix) if mix and data.calibration_data is None else data.input_shapes
    shaped = with_input_shapes(model, sizes)
    if mix and data.calibration_data is None:
        samples = samples_of(mix)
    else:
        own, limit = data.calibration_data, data.calibration_samples
        samples = open_samples(own, shaped, seed=data.seed, limit=limit, fixed=fixed)
    parts = None if samples.is_random or not most else samples.apart(min(LEAST_JUDGED, most), most)
    seen, unseen = parts or (samples, samples)
    count = _affordable(shaped, most)
    judging = tuple(unseen.first(count + 1)) if most else ()
    is_capped = most > count < len(judging)
    return Prepared(model, shaped, samples, seen, judging[:count], parts is not None, is_capped, sizes, mix)


def _affordable(model: Model, most: int) -> int:
    """How many samples outputs are compared on: few noise powers are a matter of luck, and many take time."""
    affordable = JUDGED_WORK / max(1.0, sum(work(model, node) for node in model.nodes))
    return max(min(LEAST_JUDGED, most), min(most, int(affordable)))


LOOKED_AT = 256
"""Samples that an input must have one value in, to count as constant."""

KINDS = sorted(COMPUTE)


def hidden_work(model: Model, samples: Samples) -> str | None:
    """Why compute operators are out of reach: there are none, they are quantized already, or they stand in the bodies
    of If, Loop or Scan.

    An If that depends on inputs with the same value in all samples can be folded, and the option says how.
    """
    if operators := integer_operators(model):
        return (
            f"the model is quantized already, what is ({', '.join(operators)}) stays: tune the float model it came from"
        )
    inside = [op for node in model.proto.graph.node for body in bodies(node) for op in _heavy(body)]
    outside = sum(node.op in HEAVY - CONTROL_FLOW for node in model.nodes)
    if not inside:
        return None if outside else f"the model has none of the operators that 8 bits make faster ({', '.join(KINDS)})"
    flows = [node for node in model.nodes if node.op in CONTROL_FLOW]
    kinds = " and ".join(dict.fromkeys(node.op for node in flows))
    share = "all" if not outside else f"{len(inside)} of {len(inside) + outside}"
    what = f"{share} operators that gain from 8 bits ({', '.join(sorted(set(inside)))}) stand in bodies of {kinds}"
    return f"{what}, where no pair can: {_way_out(model, samples)}"


def _heavy(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.op_type in HEAVY - CONTROL_FLOW:
            yield node.op_type
        for body in bodies(node):
            yield from _heavy(body)


def _way_out(model: Model, samples: Samples) -> str:
    deciding = _deciding_inputs(model)
    if not deciding:
        return "unroll it where the model is exported"
    if samples.is_random:
        flags = " ".join(f"--fix-input {name}=VALUE" for name in deciding)
        return f"give the value that you deploy with, {flags}, and it is folded"
    values = _constants(deciding, samples)
    if changing := [name for name in deciding if name not in values]:
        return f"it depends on the input {changing[0]}, whose value changes: export a model for each value"
    flags = " ".join(f"--fix-input {name}={value}" for name, value in values.items())
    told = " and ".join(f"{name} is {value}" for name, value in values.items())
    return f"{told} in all samples, so give {flags} and it is folded (the result then holds for that value alone)"


def _deciding_inputs(model: Model) -> list[str]:
    """The inputs that the conditions of all If depend on."""
    waiting = [node.inputs[0] for node in model.nodes if node.op == "If"]
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor and tensor not in seen:
            seen.add(tensor)
            producer = model.maker(tensor)
            waiting += [] if producer is None else producer.inputs
    return [spec.name for spec in input_specs(model) if spec.name in seen]


def _constants(names: Sequence[str], samples: Samples) -> dict[str, float | int]:
    """Those of the inputs that hold one number, the same in all samples, with this number."""
    found: dict[str, Array] = {}
    changing: set[str] = set()
    for sample in samples.first(LOOKED_AT):
        for name in names:
            known = found.setdefault(name, sample[name])
            if np.unique(np.append(known, sample[name])).size != 1:
                changing.add(name)
    return {name: array.flat[0].item() for name, array in found.items() if name not in changing}
