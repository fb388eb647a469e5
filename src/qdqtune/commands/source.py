"""The float model of a command that puts pairs into it, made ready: in its precision, with samples or the ranges of a
file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qdqtune.calibration.matching import Matched, from_file
from qdqtune.calibration.methods import Calibration
from qdqtune.calibration.prepare import Data, Prepared, prepare
from qdqtune.calibration.samples import files_named
from qdqtune.calibration.scales import Ranges
from qdqtune.graph.files import data_of
from qdqtune.graph.float16 import Precision
from qdqtune.graph.loading import files_of
from qdqtune.graph.model import Model
from qdqtune.graph.outputs import check_output
from qdqtune.graph.shaping import with_input_shapes
from qdqtune.measurement.fitting import fitted
from qdqtune.measurement.half_precision import by_ranges, in_half
from qdqtune.types import NumericFormat, Placement


@dataclass(frozen=True)
class Ready:
    """`graph` is what gets the pairs, `shaped` the same with the shapes of its inputs; `prepared` is None where nothing
    is run, `matched` where no calibration cache was given."""

    graph: Model
    shaped: Model
    prepared: Prepared | None
    matched: Matched | None
    notes: tuple[str, ...]

    def ranges(
        self,
        how: Calibration,
        numbers: NumericFormat,
        placed: Callable[[Ranges], Placement],
        stage: Callable[[str], None],
    ) -> Ranges:
        """Those of the cache, or else calibrated for the placement that follows from them."""
        if self.matched is not None:
            return self.matched.ranges
        return Ranges({}) if self.prepared is None else fitted(self.prepared, how, numbers, placed, stage=stage)


@dataclass(frozen=True)
class Source:
    """The model and what it is fed. What carries no pair has `precision`; None is as the engine is usually used, where
    that holds. `calibration_cache` is a file of ranges that another tool has written, in place of calibration (see
    `calibration.caches`)."""

    model: Path
    output: Path
    precision: Precision | None = "fp32"
    calibration_data: str | None = None
    calibration_samples: int | None = None
    calibration_cache: Path | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rewrites: str = "auto"
    seed: int = 0

    def check_output(self, **others: Iterable[Path]) -> None:
        """Refuse an output that cannot be written, or that would overwrite what is read, before any work.

        Raises:
            BadOption, OutputError: see `graph.outputs.check_output`.
        """
        read = {
            "model": files_of(self.model),
            "calibration data": files_named(self.calibration_data),
            "calibration cache": [] if self.calibration_cache is None else [self.calibration_cache],
        }
        for written in (self.output, data_of(self.output)):
            check_output(written, {**read, **others})

    def ready(self, graph: Model, fixed: Collection[str], usual: Precision, *, is_fed: bool) -> Ready:
        """Make what was read from the file ready.

        Raises:
            InputError: model, cache and data cannot be used, or not together.
        """
        prepared, cache = None, self.calibration_cache
        if cache is None or is_fed:
            data = Data(self.calibration_data, self.calibration_samples, self.input_shapes, self.seed)
            prepared, _, notes = in_half(prepare(graph, data, fixed=fixed), self.precision, usual)
            graph, shaped, notes = prepared.model, prepared.shaped, (*notes, *prepared.doubts)
        else:
            graph, notes = by_ranges(graph, self.precision or usual, cache, self.model)
            shaped = with_input_shapes(graph, self.input_shapes)
        matched = None if cache is None else from_file(cache, graph, self.model)
        return Ready(graph, shaped, prepared, matched, (*notes, *(matched.notes() if matched else ())))
