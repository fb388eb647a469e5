"""Prepares the float model and the samples of a command: precision, input shapes, ranges of a calibration cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.calibration.caches import Matched, from_file
from qdqtune.calibration.options import CacheOption, DataOptions, RangeOptions, RewriteOption
from qdqtune.calibration.prepare import MOST_JUDGED, Data, Prepared, prepare
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.calibration.workloads import WorkloadFile, spans_of
from qdqtune.commands.inputs import ModelOption
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.formats import usual_precision
from qdqtune.engines.options import time_limit_option
from qdqtune.engines.tensorrt.options import check_inputs, spans, usual_shapes, with_spans
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.float16 import Precision, load_for
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.graph.model_folder import model_in
from qdqtune.graph.operators import integer_operators
from qdqtune.graph.rewrites import Rewrites
from qdqtune.graph.saving import model_outputs
from qdqtune.numerics.fitting import fitted
from qdqtune.numerics.half_precision import by_ranges, in_half_precision
from qdqtune.numerics.metrics import ScoreOption
from qdqtune.numerics.scores import asked_outputs
from qdqtune.options import Duration, MaybeFile, Option, Values, option, writes
from qdqtune.placement.reading import is_quantized
from qdqtune.tuning.finished import data_beside
from qdqtune.tuning.options import precision_option
from qdqtune.types import Listener, NumericFormat, Placement


@dataclass(frozen=True)
class PreparedModel:
    """A float model that pairs can be put into: `graph`, and `shaped`, the same model with fixed input shapes.

    `prepared` holds its samples, None where the model is not run. `matched` holds the ranges of a calibration cache,
    None where none was given. `notes` are for the user.
    """

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
        """The ranges of the cache, or else calibrated ones of tensors with pairs. `placed` maps ranges to the
        placement."""
        if self.matched is not None:
            return self.matched.ranges
        if self.prepared is None:
            return Ranges({})
        return fitted(self.prepared, how, numbers, placed, listener=listener, only_placed=True)


def _beside(given: Values) -> Path | None:
    """The default path of the Q/DQ model: beside the float model."""
    if not isinstance(given["model"], str | Path):
        raise BadOption("the model lies in memory: give `output`, the file to write")
    path = model_in(Path(given["model"]))
    return path.with_suffix(".qdq.onnx") if path.name else None


@dataclass(kw_only=True)
class SourceOptions(ScoreOption, DataOptions, CacheOption, RewriteOption, RangeOptions, ModelOption):
    """The options of a command that puts pairs into a float model."""

    output: MaybeFile = option(
        writes(lambda path, name, _: model_outputs(path, name), _beside),
        None,
        "File to write.",
        "Output",
        short="file to write",
        flags="-o --output",
        default_in_words="MODEL with .qdq.onnx",
    )
    precision: Option[Precision | None, Precision | None] = precision_option()
    time_limit: Duration = time_limit_option()

    @property
    def target(self) -> Path:
        """The file to write: the named one, or else one beside the model."""
        return self.output or Path(str(self.model)).with_suffix(".qdq.onnx")

    def precision_on(self, engine: str) -> Precision:
        """The precision that was asked for, or the usual one of the engine."""
        return self.precision or usual_precision(engine)

    def float_model(self, engine: str, fixed: Mapping[str, Any], opset: int, rewrites: Rewrites) -> Model:
        """The model for an engine, with inputs made constant that are `fixed`.

        Raises:
            BadModel: it cannot be read, or something is quantized in it.
        """
        path = Path(str(self.model))
        graph, _ = load_for(path, self.precision_on(engine), fixed, opset, rewrites)
        operators = integer_operators(graph)
        if is_quantized(graph) or operators:
            parts = "Q/DQ pairs" if is_quantized(graph) else f"8-bit operators ({', '.join(operators)})"
            raise BadModel(f"{path} already has {parts}: give the float model")
        return graph

    def prepared(
        self, graph: Model, engine: str, fixed: Collection[str], execution: Execution, *, is_run: bool
    ) -> PreparedModel:
        """Bring a `float_model` into its precision, with samples or with the ranges of `calibration_cache`.

        `fixed` are its inputs that were made constant. With a cache, samples are drawn only if `is_run`. Without a
        `precision` the model gets the usual one of the engine, where its values allow it.

        Raises:
            InputError: model, cache and samples cannot be used, or not together.
        """
        prepared, cache, path = None, self.calibration_cache, Path(str(self.model))
        if cache is None or is_run:
            source = None if self.calibration_data is None else str(self.calibration_data)
            data = Data(source, self.calibration_samples, self.input_shapes, self.seed, folders=(path.parent,))
            drawn = prepare(graph, data, execution, fixed=fixed)
            lowered, _, notes = in_half_precision(drawn, self.precision, usual_precision(engine))
            prepared, more = lowered.sized_for(engine)
            graph, shaped, notes = prepared.model, prepared.shaped, (*notes, *lowered.hints, *more)
        else:
            graph, notes = by_ranges(graph, self.precision_on(engine), cache, path)
            shaped = with_input_shapes(graph, self.input_shapes)
        asked_outputs(self.scores, shaped.outputs)  # refuses other names before the work begins
        matched = None if cache is None else from_file(cache, graph, path)
        return PreparedModel(graph, shaped, prepared, matched, (*notes, *(matched.notes() if matched else ())))


def data_of(options: DataOptions, execution: Execution, *files: Path | None) -> Data:
    """The samples that options name, in files (see `on_disk`). If they name none, and one of the model `files` lies in
    the folder of a run, the samples of that run."""
    source = options.calibration_data
    workloads: Sequence[WorkloadFile] = getattr(options, "workloads", None) or ()
    if source is None and not options.input_shapes and not workloads:
        beside = next((fed for file in files if file is not None and (fed := data_beside(file, execution))), None)
        if beside is not None:
            return replace(beside, calibration_samples=options.calibration_samples, seed=options.seed, workloads=())
    return Data(
        None if source is None else str(source),
        options.calibration_samples,
        options.input_shapes,
        options.seed,
        tuple(workloads),
        tuple(dict.fromkeys(file.parent for file in files if file is not None)),
    )


def told_of_inputs(options: DataOptions, prepared: Prepared) -> list[str]:
    """A note about the inputs if the user has named none."""
    if options.calibration_data is not None or getattr(options, "workloads", None):
        return []
    if prepared.has_real_samples:
        return [f"no `calibration_data`: the inputs are those of the run beside it, {prepared.samples.origin}"]
    return ["no `calibration_data`: inputs are random, which says nothing of accuracy: none is told"]


def prepared_for(
    model: Model,
    spec: EngineSpec,
    data: Data,
    execution: Execution,
    most: int = MOST_JUDGED,
    *,
    fixed: Collection[str] = (),
) -> Prepared:
    """A model for an engine, and its samples: see `prepare`. Random samples have the sizes that the engine tunes for,
    unless the user names others.

    Raises:
        BadOption: the engine or the user names shapes that the inputs cannot have.
        BadData: the samples do not fit the model.
    """
    check_inputs(spec, model)
    if not data.input_shapes and not data.workloads:
        data = replace(data, input_shapes=usual_shapes(spec, data.calibration_data))
    return prepare(model, data, execution, fixed=fixed, most=most)


def built_for(spec: EngineSpec, workloads: Sequence[WorkloadFile], fixed: Collection[str] = ()) -> EngineSpec:
    """`spec` with the range of input sizes over all workloads, if the engine takes such ranges and none are set.

    Raises:
        BadData: a workload cannot be read.
    """
    if spec.name not in TENSORRT_FAMILY or not workloads or spans(spec):
        return spec
    return with_spans(spec, spans_of(workloads, fixed))
