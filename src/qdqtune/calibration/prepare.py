"""A float model and its samples, made ready: shaped as it is measured, its samples split, its ranges when asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from qdqtune.calibration.calibrate import calibrate, calibrate_by_every_method
from qdqtune.calibration.methods import Calibration
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.loading import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.graph.soundness import check_outputs
from qdqtune.types import NumericFormat


@dataclass(frozen=True)
class Data:
    """What a model is fed: a source of samples (None: random inputs), how many of them at most, the shapes of its
    dynamic inputs, and the seed of what is random."""

    calibration_data: str | None = None
    calibration_samples: int | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0


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
    """`model` as it was read, which is what ships; `shaped` is the same with the input shapes of the measurement.

    `judging` is what outputs are compared on: what calibration does not see if `is_held_out`, else all samples.
    """

    model: Model
    shaped: Model
    samples: Samples
    calibration: Samples
    judging: Samples
    is_held_out: bool = False

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
    shaped = with_input_shapes(model, data.input_shapes) if data.input_shapes else model
    samples = open_samples(data.calibration_data, shaped, seed=data.seed, limit=data.calibration_samples, fixed=fixed)
    parts = None
    if hold_out is not None and (hold_out.of_random or not samples.is_random):
        parts = samples.apart(hold_out.least, hold_out.most)
    if parts is None:
        return Prepared(model, shaped, samples, samples, samples)
    return Prepared(model, shaped, samples, *parts, is_held_out=True)
