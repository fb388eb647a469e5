"""`qdqtune apply`: a recorded placement on another model, calibrated anew, without a search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qdqtune.calibration.matching import Matched
from qdqtune.calibration.options import RangeOptions, check_cache
from qdqtune.calibration.rounding import Moments, moments, no_moments
from qdqtune.calibration.scales import Calibration, Ranges
from qdqtune.commands.inputs import InputOptions, ModelOption
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.source import OutputOption, Ready, Source, SourceOptions
from qdqtune.engines.acceptance import accepted
from qdqtune.engines.formats import numeric_format, usual_precision
from qdqtune.engines.options import time_limit_option
from qdqtune.errors import BadModel
from qdqtune.explanation.words import placed
from qdqtune.graph.float16 import load_for
from qdqtune.graph.rewrites import allowed
from qdqtune.graph.saving import save
from qdqtune.numerics.half_precision import finished
from qdqtune.numerics.simulation import Simulation
from qdqtune.options import FILE, REQUIRED, TEXT, Duration, File, MaybeText, option
from qdqtune.placement.files import Recorded, every_edge, existing, read_placement_file
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import met_by_weights, possible_edges
from qdqtune.placement.reading import is_quantized
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Accuracy, Edge, Placement


@dataclass
class PlacementOption(ModelOption):
    """The placement to apply."""

    placement: File = option(FILE, REQUIRED, "placement.yaml of a tuning run.", "Model")


@dataclass(kw_only=True)
class ApplyOptions(SourceOptions, RangeOptions, InputOptions, OutputOption, PlacementOption):
    """The options of `apply`."""

    engine: MaybeText = option(
        TEXT,
        None,
        "Engine whose numeric format to use; it need not be installed here.",
        "Engine",
        default_in_words="that of the placement",
        metavar="NAME",
    )
    time_limit: Duration = time_limit_option()

    def request(self) -> Request:
        """What `apply` is told. Samples lie in files (see `on_disk`).

        Raises:
            BadOption: options exclude each other.
        """
        check_cache(self, self)
        model, told = Path(str(self.model)), {f.name: getattr(self, f.name) for f in fields(SourceOptions)}
        return Request(
            model,
            self.target,
            placement=self.placement,
            engine=self.engine,
            calibration=self.calibration if self.says_how else None,
            calibration_data=None if self.calibration_data is None else str(self.calibration_data),
            **told,
        )


@dataclass(kw_only=True)
class Request(Source):
    """All that `apply` is told. `engine` is whose numbers to use, by default that of the `placement`; it need not be
    installed. Ranges are found as the placement's file says, unless `calibration` says otherwise, and the float model
    is rewritten as it says, unless `rewrites` do."""

    placement: Path = Path("placement.yaml")
    engine: str | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True, repr=False)
class Applied(Shown):
    """What was inserted, and the edges of the placement that the model does not have, or has no scale for."""

    output: Path
    placement: Placement
    lost: tuple[Edge, ...]
    random_data: bool
    accuracy: Accuracy | None = None
    """Of outputs against the float model's on ONNX Runtime; None where it does not run them, or inputs are random."""
    matched: Matched | None = None
    """What the calibration cache had for the model, if one was given."""
    notes: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Where it lies, how many tensors have a pair, and how near its outputs are."""
        known = "" if self.accuracy is None else f", outputs {self.accuracy}"
        return f"{self.output}, {placed(self.placement)}, {len(self.lost)} edges lost{known}"

    def table(self) -> Table:
        """The edges that the model does not have."""
        return ("edge that is not in this model",), [(str(edge),) for edge in self.lost]

    def to_dict(self) -> dict[str, Any]:
        """What was written, for machines."""
        accuracy = None if self.accuracy is None else asdict(self.accuracy)
        cache = {} if self.matched is None else {"cache": self.matched.as_json()}
        lost = [str(edge) for edge in self.lost]
        return {"output": str(self.output), "edges": len(self.placement), "lost": lost, "accuracy": accuracy, **cache}


def apply(request: Request, observer: Observer | None = None) -> Applied:
    """Insert the pairs of a placement file into a model with freshly calibrated scales, and write it.

    Raises:
        InputError: model, placement or data cannot be used, or none of the placement's edges exists in the model.
        EngineFailure: the engine does not load what was made.
        OutputError: the output cannot be written.
    """
    observer = observer or Silent()
    observer.stage(f"reading {request.model.name}")
    recorded = read_placement_file(request.placement)
    engine = request.engine or recorded.engine
    numbers = numeric_format(engine, "fp8" if recorded.quant_type == "fp8" else "int8")
    made = recorded.rewrites if request.rewrites == "auto" else allowed(request.rewrites)
    usual = usual_precision(engine)
    precision = request.precision or usual
    graph = load_for(request.model, precision, recorded.fix_inputs, numbers.opset, rewrites=made)
    if is_quantized(graph):
        raise BadModel(f"{request.model} already has Q/DQ pairs: apply a placement to the float model")
    ready = request.ready(graph, recorded.fix_inputs, usual, is_fed=bool(request.calibration_data))

    def known(ranges: Ranges) -> tuple[Placement, tuple[Edge, ...]]:
        return existing(ready.shaped, recorded.placement, possible_edges(ready.shaped, ranges))

    if recorded.placement and not existing(ready.shaped, recorded.placement, every_edge(ready.shaped))[0]:
        count = len(recorded.placement) + len(recorded.placement.compressed)
        many = f"none of the {count} edges of {request.placement}"
        raise BadModel(f"{request.model} has {many}: is it the same network?")
    how = request.calibration or recorded.calibration
    ranges = ready.ranges(how, numbers, lambda found: known(found)[0], observer)
    placed, lost = known(ranges)
    if recorded.placement and not placed:
        raise BadModel(f"on none of the edges of {request.placement} can a pair stand in {request.model}")
    met, notes = _met(recorded, ready, placed)
    inserter = Inserter(ready.graph, ranges, numbers, met)
    with accepted(request.output, engine) as fresh:
        save(finished(inserter.insert(placed), precision), fresh)
    return Applied(
        request.output, placed, lost, *_judged(ready, inserter, placed, engine), ready.matched, (*ready.notes, *notes)
    )


def _met(recorded: Recorded, ready: Ready, placement: Placement) -> tuple[Moments, tuple[str, ...]]:
    """What products meet whose weights were rounded by it, and are to be so again; and what to say where no data tell
    it."""
    tensors = sorted(met_by_weights(ready.shaped, placement.weight_formats))
    if recorded.weight_rounding == "nearest" or not tensors:
        return no_moments, ()
    prepared = ready.prepared
    if prepared is None or not prepared.has_real_samples:
        told = "weights were rounded by what products meet (gptq), and are rounded to the nearest here"
        return no_moments, (f"{told}: --calibration-data would tell",)
    return lambda model: moments(model, tensors, prepared.calibration), ()


def _judged(ready: Ready, inserter: Inserter, placed: Placement, engine: str) -> tuple[bool, Accuracy | None]:
    """Whether the data were random, and what the placement does to the outputs."""
    if ready.prepared is None or not ready.prepared.has_real_samples:
        return ready.prepared is not None, None
    with Simulation(inserter, ready.prepared.judging, engine) as simulation:
        accuracy = simulation.accuracy(placed)
    return False, accuracy if isinstance(accuracy, Accuracy) else None
