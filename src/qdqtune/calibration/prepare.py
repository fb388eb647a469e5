"""A float model and its samples, made ready: shaped as it is measured, its samples split, its ranges when asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from qdqtune.calibration.calibrate import calibrate, calibrate_by_every_method
from qdqtune.calibration.methods import Calibration
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.calibration.scales import Ranges
from qdqtune.calibration.workloads import Sizes, WorkloadFile, common_sizes, open_workloads, samples_of
from qdqtune.errors import BadOption
from qdqtune.graph.loading import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.graph.soundness import check_outputs
from qdqtune.types import Mix, NumericFormat, Workload


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
class HoldOut:
    """Which samples calibration does not see, so that results can be judged by them: every fifth, up to `most`.

    None are held out where these would be fewer than `least`, and of random inputs only if `of_random`.
    """

    least: int = 1
    most: int | None = None
    of_random: bool = True


@dataclass(frozen=True)
class Prepared:
    """`model` as it was read, which is what ships; `shaped` is the same with the input `sizes` of the measurement,
    open where those of workloads differ.

    `judging` is what outputs are compared on: what calibration does not see if `is_held_out`, else all samples.
    """

    model: Model
    shaped: Model
    samples: Samples
    calibration: Samples
    judging: Samples
    is_held_out: bool = False
    sizes: Sizes = field(default_factory=dict)
    workloads: Mix = ()

    @property
    def mix(self) -> Mix:
        """What is timed: the workloads, or else the first sample.

        Raises:
            BadData: there is none.
        """
        return self.workloads or (Workload(self.samples.first(1)[0]),)

    def ranges(self, how: Calibration | None, numbers: NumericFormat) -> Ranges:
        """See `calibrate`; takes one pass over the samples."""
        return calibrate(self.shaped, self.calibration, how, numbers=numbers)

    def ranges_by_every_method(self, how: Calibration, numbers: NumericFormat) -> list[Ranges]:
        """See `calibrate_by_every_method`; takes one pass over the samples."""
        return calibrate_by_every_method(self.shaped, self.calibration, how, numbers=numbers)


def prepare(model: Model, data: Data, *, fixed: Collection[str] = (), hold_out: HoldOut | None = None) -> Prepared:
    """Shape a model and open its samples. Arrays of `fixed` inputs, which were made constants, are passed over.

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
    shaped = with_input_shapes(model, sizes) if sizes else model
    if mix and data.calibration_data is None:
        samples = samples_of(mix)
    else:
        own, limit = data.calibration_data, data.calibration_samples
        samples = open_samples(own, shaped, seed=data.seed, limit=limit, fixed=fixed)
    parts = None
    if hold_out is not None and (hold_out.of_random or not samples.is_random):
        parts = samples.apart(hold_out.least, hold_out.most)
    if parts is None:
        return Prepared(model, shaped, samples, samples, samples, sizes=sizes, workloads=mix)
    return Prepared(model, shaped, samples, *parts, is_held_out=True, sizes=sizes, workloads=mix)
