"""The float model of a command that puts pairs into it, made ready: in its precision, with samples or the ranges of a
file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtune.calibration.matching import Matched, from_file
from qdqtune.calibration.options import CacheOption, DataOptions, RewriteOption
from qdqtune.calibration.prepare import MOST_JUDGED, Data, Prepared, prepare
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.calibration.workloads import WorkloadFile, spans_of
from qdqtune.commands.inputs import ModelOption
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.shapes import check_inputs, spans, with_spans
from qdqtune.graph.float16 import Precision
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.graph.saving import model_outputs
from qdqtune.numerics.fitting import fitted
from qdqtune.numerics.half_precision import by_ranges, in_half
from qdqtune.options import Given, MaybeFile, Option, Writes, option
from qdqtune.tuning.finished import data_beside
from qdqtune.tuning.options import precision_option
from qdqtune.types import Listener, NumericFormat, Placement


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
        listener: Listener,
    ) -> Ranges:
        """Those of the cache, or else calibrated for the placement that follows from them."""
        if self.matched is not None:
            return self.matched.ranges
        return Ranges({}) if self.prepared is None else fitted(self.prepared, how, numbers, placed, listener=listener)


@dataclass(kw_only=True)
class SourceOptions(DataOptions, CacheOption, RewriteOption):
    """What a command is told that puts pairs into a model."""

    precision: Option[Precision | None, Precision | None] = precision_option()


def _beside(given: Given) -> Path | None:
    """The Q/DQ model, where no file is named for it."""
    path = Path(str(given["model"]))
    return path.with_suffix(".qdq.onnx") if path.name else None


@dataclass
class OutputOption(ModelOption):
    """The Q/DQ model to write."""

    output: MaybeFile = option(
        Writes(lambda path, name, _: model_outputs(path, name), _beside),
        None,
        "File to write.",
        "Output",
        flags="-o --output",
        default_in_words="MODEL with .qdq.onnx",
    )

    @property
    def target(self) -> Path:
        """The file, where none is named beside the model."""
        return self.output or Path(str(self.model)).with_suffix(".qdq.onnx")


@dataclass(kw_only=True)
class Source(SourceOptions):
    """The model and what it is fed. What carries no pair has `precision`; None is as the engine is usually used, where
    that holds. `calibration_cache` is a file of ranges that another tool has written, in place of calibration (see
    `calibration.caches`)."""

    model: Path = field(kw_only=False)
    output: Path = field(kw_only=False)
    precision: Option[Precision | None, Precision | None] = precision_option("fp32")
    calibration_data: str | None = None

    def ready(self, graph: Model, fixed: Collection[str], usual: Precision, *, is_fed: bool) -> Ready:
        """Make what was read from the file ready.

        Raises:
            InputError: model, cache and data cannot be used, or not together.
        """
        prepared, cache = None, self.calibration_cache
        if cache is None or is_fed:
            data = Data(self.calibration_data, self.calibration_samples, self.input_shapes, self.seed)
            prepared, _, notes = in_half(prepare(graph, data, fixed=fixed), self.precision, usual)
            graph, shaped, notes = prepared.model, prepared.shaped, (*notes, *prepared.hints)
        else:
            graph, notes = by_ranges(graph, self.precision or usual, cache, self.model)
            shaped = with_input_shapes(graph, self.input_shapes)
        matched = None if cache is None else from_file(cache, graph, self.model)
        return Ready(graph, shaped, prepared, matched, (*notes, *(matched.notes() if matched else ())))


def data_of(options: DataOptions, *files: Path | None) -> Data:
    """What options say of samples, which lie in files (see `on_disk`). Where they name no inputs, those of the run
    whose folder one of the model `files` lies in."""
    source: object = getattr(options, "calibration_data", None)
    workloads: Sequence[object] = getattr(options, "workloads", None) or ()
    if source is None and not options.input_shapes and not workloads:
        beside = next((fed for file in files if file is not None and (fed := data_beside(file))), None)
        if beside is not None:
            return replace(beside, calibration_samples=options.calibration_samples, seed=options.seed, workloads=())
    return Data(
        None if source is None else str(source),
        options.calibration_samples,
        options.input_shapes,
        options.seed,
        tuple(file for file in workloads if isinstance(file, WorkloadFile)),
    )


def told_of_inputs(options: DataOptions, prepared: Prepared) -> list[str]:
    """What to say of inputs that the user has not named."""
    if getattr(options, "calibration_data", None) is not None or getattr(options, "workloads", None):
        return []
    if prepared.has_real_samples:
        return [f"no --calibration-data: the inputs are those of the run beside it, {prepared.samples.origin}"]
    return ["no --calibration-data: inputs are random, which says nothing of accuracy: none is told"]


def prepared_for(
    model: Model, spec: EngineSpec, data: Data, most: int = MOST_JUDGED, *, fixed: Collection[str] = ()
) -> Prepared:
    """A model for an engine, and its samples: see `prepare`.

    Raises:
        BadOption: the engine or the user names shapes that the inputs cannot have.
        BadData: the samples do not fit the model.
    """
    check_inputs(spec, model)
    return prepare(model, data, fixed=fixed, most=most)


def built_for(spec: EngineSpec, workloads: Sequence[WorkloadFile], fixed: Collection[str] = ()) -> EngineSpec:
    """The engine, built for the sizes of all workloads where it wants some and is told no others.

    Raises:
        BadData: a workload cannot be read.
    """
    if spec.name not in TENSORRT_FAMILY or not workloads or spans(spec):
        return spec
    return with_spans(spec, spans_of(workloads, fixed))
