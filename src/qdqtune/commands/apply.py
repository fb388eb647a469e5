"""`qdqtune apply`: puts the pairs of a recorded placement into another model, calibrated anew, without a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.calibration.caches import Matched
from qdqtune.calibration.options import check_cache
from qdqtune.calibration.scales import Ranges
from qdqtune.commands.inputs import execution_of
from qdqtune.commands.shown import Shown
from qdqtune.commands.source import PreparedModel, SourceOptions
from qdqtune.engines import THREADED
from qdqtune.engines.acceptance import checked_output
from qdqtune.engines.formats import numeric_format, portable
from qdqtune.errors import BadModel, EngineRefused
from qdqtune.explanation.formatting import counted, placed
from qdqtune.graph.float16 import converted
from qdqtune.graph.rewrites import allowed
from qdqtune.graph.saving import save
from qdqtune.numerics.accuracy import closeness_of, concern
from qdqtune.numerics.fitting import with_wide
from qdqtune.numerics.scores import NO_SCORES, Scores
from qdqtune.numerics.simulation import Simulation
from qdqtune.options import FILE, REQUIRED, TEXT, File, MaybeText, option
from qdqtune.placement.files import every_edge, existing, read_placement_file
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import NO_WIDE, possible_edges
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Accuracy, Edge, Placement


@dataclass(kw_only=True)
class ApplyOptions(SourceOptions):
    """The options of `apply`."""

    placement: File = option(
        FILE, REQUIRED, "placement.yaml of a tuning run.", "Model", short="placement.yaml of a run"
    )
    engine: MaybeText = option(
        TEXT,
        None,
        "Engine whose numeric format to use; it need not be installed here.",
        "Engine",
        default_in_words="that of the placement",
        metavar="NAME",
    )


@dataclass(frozen=True, repr=False)
class Applied(Shown):
    """What `apply` has written. `lost` are edges of the placement that the model lacks, or has no scale for."""

    output: Path
    placement: Placement
    lost: tuple[Edge, ...]
    accuracy: Accuracy | None = None
    """The accuracy of the outputs on ONNX Runtime; None if it cannot run them, or inputs are random."""
    matched: Matched | None = None
    """The ranges of the calibration cache that the model has tensors for; None without a cache."""
    notes: tuple[str, ...] = ()
    scores: Scores | None = None
    """The scores of classes among the outputs; None where these were not compared."""

    def in_words(self) -> str:
        """The file, how many tensors have a pair, and how close its outputs are."""
        words = f"{self.output}: {placed(self.placement)}"
        if self.accuracy is None:
            return words
        what = "outputs" if self.accuracy.sqnr_db is None else "output SQNR"
        return f"{words}, {what} against float: {closeness_of(self.accuracy)}"

    def to_dict(self) -> dict[str, Any]:
        accuracy = None if self.accuracy is None else asdict(self.accuracy)
        found = self.scores or NO_SCORES
        cache = {} if self.matched is None else {"cache": self.matched.as_json()}
        lost = [str(edge) for edge in self.lost]
        return {
            "output": str(self.output),
            "edges": len(self.placement),
            "lost": lost,
            "accuracy": accuracy,
            "scores": found.as_json(),
            "scores_told": found.told,
            **cache,
        }


def apply(options: ApplyOptions, observer: Observer | None = None) -> Applied:
    """Put the pairs of a placement file into a model, with scales calibrated anew, and write it.

    Calibration and rewrites are those of the placement file, unless options say otherwise.

    Raises:
        InputError: model, placement, data or options cannot be used, or no edge of the placement is in the model.
        EngineFailure: the engine does not load the written model.
        OutputError: the output cannot be written.
    """
    check_cache(options, options)
    observer, path = observer or Silent(), Path(str(options.model))
    observer.stage(f"reading {path.name}")
    recorded = read_placement_file(options.placement)
    engine = options.engine or recorded.engine
    numbers = numeric_format(engine, "fp8" if recorded.quant_type == "fp8" else "int8")
    if recorded.portable and engine in THREADED:
        numbers = portable(engine, numbers)
    rewrites = recorded.rewrites if options.rewrites == "auto" else allowed(options.rewrites)
    graph = options.float_model(engine, recorded.fix_inputs, numbers.opset, rewrites)
    execution, is_run = execution_of(options), bool(options.calibration_data)
    ready = options.prepared(graph, engine, recorded.fix_inputs, execution, is_run=is_run)

    def known(ranges: Ranges) -> tuple[Placement, tuple[Edge, ...]]:
        return existing(ready.shaped, recorded.placement, possible_edges(ready.shaped, ranges))

    if recorded.placement and not existing(ready.shaped, recorded.placement, every_edge(ready.shaped))[0]:
        count = len(recorded.placement) + len(recorded.placement.weight_only)
        raise BadModel(f"{path} has none of the {count} edges of {options.placement}: is it the same network?")
    how = options.calibration if options.has_method else recorded.calibration
    ranges = ready.ranges(how, numbers, lambda found: replace(known(found)[0], wide=frozenset()), observer)
    placed, lost = known(ranges)
    if recorded.placement and not placed:
        raise BadModel(f"on none of the edges of {options.placement} can a pair stand in {path}")
    notes = [*ready.notes]
    if (narrow := recorded.placement.wide & placed.edges - placed.wide) and numbers.wide is not None:
        names = counted(len({edge.tensor for edge in narrow}), "weight")
        notes.append(f"{names} of 16 bits beside activations of 8 have 8, too: no engine computes with both")
    if placed.wide and numbers.wide is None:
        notes.append(NO_WIDE.format(engine))
        placed = replace(placed, wide=frozenset())
    elif placed.wide and ready.prepared is not None:
        ranges = with_wide(ready.prepared, ranges, numbers)
    inserter = Inserter(ready.graph, ranges, numbers)
    with checked_output(options.target, engine, execution) as fresh:
        quantized = inserter.insert(placed)
        save(converted(quantized, "bf16") if options.precision_on(engine) == "bf16" else quantized, fresh)
        judged, scores = None, None
        try:
            judged, scores = _judged(ready, inserter, placed, engine, options.scores)
        except EngineRefused as refused:
            notes.append(f"outputs were not compared: {refused}")
    if ready.prepared is not None and not ready.prepared.has_real_samples:
        notes.append("no `calibration_data`: the scales come from random inputs")
    if not recorded.placement:
        notes.append("this placement holds no pair: with none was the model fastest, or within the limits")
    if lost:
        scaled = "" if ready.matched is None else " or without a scale"
        notes.append(f"{counted(len(lost), 'edge')} of the placement not in this model{scaled}, the first: {lost[0]}")
    if judged is not None and (warning := concern(judged)):
        notes.append(warning)
    return Applied(options.target, placed, lost, judged, ready.matched, tuple(notes), scores)


def _judged(
    ready: PreparedModel, inserter: Inserter, placed: Placement, engine: str, asked: Sequence[str]
) -> tuple[Accuracy | None, Scores | None]:
    """The accuracy of the outputs with this placement, and the scores among them; None where samples are random."""
    if ready.prepared is None or not ready.prepared.has_real_samples:
        return None, None
    samples, execution = ready.prepared.judging, ready.prepared.execution
    with Simulation(inserter, samples, engine, execution=execution, asked=asked) as simulation:
        return simulation.accuracy(placed), simulation.scores
