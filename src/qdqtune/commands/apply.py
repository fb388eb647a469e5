"""`qdqtune apply`: a recorded placement on another model, calibrated anew, without a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qdqtune.calibration.matching import Matched, from_file
from qdqtune.calibration.methods import Calibration
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.samples import files_named
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.acceptance import accepted
from qdqtune.engines.formats import usual_precision
from qdqtune.errors import BadModel
from qdqtune.graph.files import data_of, save
from qdqtune.graph.float16 import Precision, load_for
from qdqtune.graph.loading import files_of, with_input_shapes
from qdqtune.graph.outputs import check_output
from qdqtune.graph.rewrites import allowed
from qdqtune.measurement.fitting import fitted
from qdqtune.measurement.half_precision import by_ranges, finished, in_half
from qdqtune.measurement.simulation import Simulation
from qdqtune.placement.files import existing, read_placement_file
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import is_quantized
from qdqtune.types import Accuracy, Edge, NumericFormat, Placement


@dataclass(frozen=True)
class Applied:
    """What was inserted, and the edges of the placement that the model does not have, or has no scale for."""

    placement: Placement
    lost: tuple[Edge, ...]
    random_data: bool
    accuracy: Accuracy | None = None
    """Of the outputs against the float model's on ONNX Runtime; None where it does not run them."""
    matched: Matched | None = None
    """What the calibration cache had for the model, if one was given."""
    notes: tuple[str, ...] = ()


def apply(
    model: Path,
    placement: Path,
    output: Path,
    numbers: NumericFormat,
    *,
    calibration_data: str | None = None,
    calibration: Calibration | None = None,
    calibration_cache: Path | None = None,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    samples: int | None = None,
    seed: int = 0,
    precision: Precision | None = "fp32",
    engine: str | None = None,
    rewrites: str = "auto",
) -> Applied:
    """Insert the pairs of a placement file into `model` with freshly calibrated scales, and write it to `output`.

    `engine` is whose numbers these are, by default the engine that the placement was found on. What carries no pair has
    `precision`; None stands for that with which the engine is usually used, where it holds.
    Scales are found as the file says, unless `calibration` says otherwise, or those of a `calibration_cache`. The
    float model is rewritten as the file says, unless `rewrites` say otherwise.

    Raises:
        InputError: model, placement or data cannot be used, or none of the placement's edges exists in the model.
        EngineFailure: the engine does not load what was made.
        OutputError: `output` cannot be written.
    """
    read = {"model": files_of(model), "placement": [placement], "calibration data": files_named(calibration_data)}
    read["calibration cache"] = [] if calibration_cache is None else [calibration_cache]
    for written in (output, data_of(output)):
        check_output(written, read)
    recorded = read_placement_file(placement)
    made = recorded.rewrites if rewrites == "auto" else allowed(rewrites)
    usual = usual_precision(engine or recorded.engine)
    graph = load_for(model, precision or usual, recorded.fix_inputs, numbers.opset, rewrites=made)
    if is_quantized(graph):
        raise BadModel(f"{model} already has Q/DQ pairs: apply a placement to the float model")
    data = Data(calibration_data, samples, input_shapes or {}, seed)
    prepared, notes = None, tuple[str, ...]()
    if calibration_cache is None or calibration_data:
        prepared = prepare(graph, data, fixed=recorded.fix_inputs)
        prepared, _, notes = in_half(prepared, precision, usual)
        graph, shaped = prepared.model, prepared.shaped
    else:
        graph, notes = by_ranges(graph, precision or usual, calibration_cache, model)
        shaped = with_input_shapes(graph, data.input_shapes)
    matched = None if calibration_cache is None else from_file(calibration_cache, graph, model)
    notes += () if matched is None else matched.notes()

    def known(ranges: Ranges) -> tuple[Placement, tuple[Edge, ...]]:
        return existing(shaped, recorded.placement, possible_edges(shaped, ranges))

    ranges = Ranges({}) if matched is None else matched.ranges
    if matched is None and prepared is not None:
        ranges = fitted(prepared, calibration or recorded.calibration, numbers, lambda found: known(found)[0])
    placed, lost = known(ranges)
    if recorded.placement and not placed:
        raise BadModel(
            f"{model} has none of the {len(recorded.placement)} edges of {placement}: is it the same network?"
        )
    inserter = Inserter(graph, ranges, numbers)
    with accepted(output, engine or recorded.engine) as fresh:
        save(finished(inserter.insert(placed), precision or usual), fresh)
    if prepared is None:
        return Applied(placed, lost, False, None, matched, notes)
    with Simulation(inserter, prepared.judging, engine or recorded.engine) as simulation:
        accuracy = simulation.accuracy(placed)
    known_accuracy = accuracy if isinstance(accuracy, Accuracy) else None
    return Applied(placed, lost, prepared.samples.is_random, known_accuracy, matched, notes)
