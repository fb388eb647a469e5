"""Reads a finished run from its folder, without running anything: summary.json, run.json, placement.yaml, and the
records of its state file.

The float model is read from baseline.onnx, the shipped placement from placement.yaml (from the shipped file where that
is the user's own Q/DQ model); builds, ranges and noise from the state file. Times of layers and nodes add up to the
measured latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from qdqtune.calibration.prepare import Data
from qdqtune.calibration.samples import digest_of
from qdqtune.engines.execution import Execution
from qdqtune.errors import BadOption, BadState, InputError
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.numerics.scores import Score
from qdqtune.numerics.simulation import Sensitivities
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.possible import every_edge, possible_edges
from qdqtune.placement.reading import placement_in
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import BuildTimes, NodeTime, attribute, node_times, with_float_times
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.regions import discovery, patterns
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT, PLACEMENT, RUN
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.shipping import Compared, first_faster
from qdqtune.tuning.store import IN_A_HURRY, SENSITIVITY, Journal, RangesRecord, proof_key, read_journal
from qdqtune.tuning.subject import Fingerprint, edges_within, filtered
from qdqtune.tuning.summary import AtThreads, RunLog, Summary, keeps_own_pairs, read_json, read_summary
from qdqtune.types import Edge, Layer, Measurement, Placement, Trial


@dataclass(frozen=True)
class FinishedRun:
    """A finished run; `records` is the content of its state file. Times are in ms.

    Its properties read files, and raise BadOption if one is missing or damaged, BadState if the state file ends too
    early or is about another model.
    """

    folder: Path
    summary: Summary
    fingerprint: Fingerprint
    records: Journal

    @cached_property
    def log(self) -> RunLog:
        log = read_json(self.folder / RUN, RunLog)
        if log is None:
            raise BadOption(f"{self.folder} has lost {RUN}: run the same tune command again, which writes it anew")
        return log

    @cached_property
    def limits(self) -> Limits:
        summary = self.summary
        metrics = self.records.values("metric:", Score)
        before = next((metrics[key] for key in reversed(metrics) if key.endswith(Placement().digest)), None)
        if before is None and (value := summary["metric_before"]) is not None:
            before = Score(value)
        of_metric = summary["max_drop"], before
        return Limits(summary["min_sqnr_db"], *of_metric, summary["min_agreement"], summary["min_sqnr_worst_db"])

    @property
    def plan(self) -> Plan:
        """The schedule of rounds with which candidates were judged."""
        return self.log.plan

    @cached_property
    def history(self) -> tuple[Trial, ...]:
        """The trials in the order of the search, with their judgements from run.json."""
        trials = self.records.values("trial:", Trial)
        return tuple(
            replace(trials[row.of], number=number, holds=row.holds, metric=row.metric, accepted=row.accepted)
            for number, row in enumerate(self.log.trials, 1)
            if row.of in trials
        )

    @cached_property
    def model(self) -> Model:
        return with_input_shapes(load(self.folder / BASELINE), self.fingerprint.input_shapes)

    @property
    def keeps_own_pairs(self) -> bool:
        return keeps_own_pairs(self.summary)

    @cached_property
    def placement(self) -> Placement:
        """The placement of the shipped model; empty if that has no pairs."""
        if self.keeps_own_pairs:
            return placement_in(self.model, load(self.folder / FINAL))
        return read_placement_file(self.folder / PLACEMENT).placement

    @cached_property
    def trial(self) -> Trial | None:
        """The trial of the shipped placement, the last if there are several; None where the user's own file ships."""
        if self.summary["shipped"] == "given":
            return None
        return next((t for t in reversed(self.history) if t.placement == self.placement), None)

    @cached_property
    def able(self) -> frozenset[Edge]:
        """All edges that can carry a pair."""
        seen = self.placement.edges.union(*(t.placement.edges for t in self.history))
        if strange := seen - every_edge(self.model):
            pair = min(map(str, strange))
            raise BadState(f"{self.folder} records a pair at {pair}, which its {BASELINE} does not have")
        if (calibrated := self.records.get("ranges", RangesRecord)) is None:
            raise BadState(f"the state file of {self.folder} ends before the calibration: run qdqtune tune to its end")
        return possible_edges(self.model, calibrated.ranges) | seen

    @cached_property
    def possible(self) -> frozenset[Edge]:
        """The edges of `able` that the options allow: inside the nodes that the user listed, or used by trials."""
        if not self.fingerprint.node_filter:
            return self.able
        regions = discovery.find(self.model, self.fingerprint.regions)
        listed = filtered(self.model, patterns.group(self.model, regions), self.fingerprint.node_filter)
        seen = self.placement.edges.union(*(t.placement.edges for t in self.history))
        return self.able & edges_within(listed) | seen

    @property
    def here(self) -> Summary | AtThreads:
        """Latencies and ratio of the shipped model at the number of threads of the search."""
        rows, threads = self.summary["by_threads"], self.summary["engine"].get("threads")
        return next((row for row in rows if str(row["threads"]) == threads), self.summary)

    @property
    def floats(self) -> str:
        """What reports call the float model that pairs were placed in: "rewritten float" or "float"."""
        return "rewritten float" if self.summary["rewrites"]["names"] else "float"

    @property
    def float_ms(self) -> float | None:
        """Latency in ms of the float model that pairs were placed in (the user's, or rewritten); None on a
        simulator."""
        gave = self.summary["rewrites"].get("gave")
        if gave is None:
            return self.here["baseline_ms"]
        if self.summary["edges"] or self.summary.get("weights"):
            return gave * (self.here["baseline_ms"] or 0.0)
        return self.here["final_ms"] or self.here["baseline_ms"]

    @cached_property
    def shipped_ms(self) -> float | None:
        """Latency of the shipped model in ms, from the search if the proof has none; None if unknown."""
        if not self.placement or self.float_ms is None:
            return self.float_ms
        if self.here["final_ms"] is not None:
            return self.here["final_ms"]
        ratio = ratios_to_float(self.history, self.plan).get(self.placement)
        return None if ratio is None else ratio * self.float_ms

    @cached_property
    def float_layers(self) -> tuple[Layer, ...]:
        """The layers of the float build in order, with times from profiled inferences; empty if unknown."""
        return self._layers("")

    @cached_property
    def shipped_layers(self) -> tuple[Layer, ...]:
        """The layers of the shipped build, in order; empty if unknown."""
        if not self.placement:
            return self.float_layers
        found = (trial.layers for trial in reversed(self.history) if trial.placement == self.placement and trial.layers)
        return self._layers(self.placement.digest) or next(found, ())

    @property
    def float_times(self) -> BuildTimes:
        """The times that the layers of the float build show."""
        return attribute(self.model, Placement(), self.float_layers, self.float_ms or 0.0)

    @property
    def shipped_times(self) -> BuildTimes:
        """The times that the layers of the shipped build alone show."""
        return attribute(self.model, self.placement, self.shipped_layers, self.shipped_ms or 0.0)

    @cached_property
    def float_spent(self) -> Mapping[str, NodeTime]:
        """The time of each node in the float model; empty if the engine gives no times."""
        return node_times(self.model, self.float_times)

    @cached_property
    def spent(self) -> Mapping[str, NodeTime]:
        """The time of each node in the shipped model (see `with_float_times`); empty if unknown."""
        return node_times(self.model, with_float_times(self.model, self.shipped_times, self.float_times))

    @property
    def proof(self) -> tuple[Measurement, ...]:
        """The proof's rounds of float (a) against the shipped model (b), by block of builds; empty without a proof."""
        if self.summary["shipped"] != "tuned":
            return ()
        contexts = self.records.get(proof_key(self.placement), tuple[Compared, ...])
        return () if contexts is None else first_faster(contexts).measured

    @cached_property
    def alone(self) -> Mapping[str, float]:
        """For each tensor that was rounded alone, the power of the output error relative to the output's power."""
        found = list(self.records.values(f"{SENSITIVITY}:", Sensitivities).values())
        last = found[-1] if found else Sensitivities({})
        return {tensor: noise for tensor, noise in last.noise.items() if tensor in last.alone}

    @cached_property
    def noise(self) -> Noise | None:
        """The noise of tensors that were rounded alone; None if the run measured none."""
        return Noise(self.model, self.alone, self.limits.max_noise) if self.alone else None

    def _layers(self, of: str) -> tuple[Layer, ...]:
        records = self.records.values("layers:", tuple[Layer, ...])
        return records.get(of, ()) or records.get(of + IN_A_HURRY, ())


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run. Its state file is the one named in summary.json, or else the default one in the folder."""
    summary = read_summary(folder)
    state = Path(summary["state_file"] or folder / STATE)
    if not state.is_file():
        raise BadState(f"{folder} is explained by its state file, and {state} is not there: tune the model again")
    journal = read_journal(state)
    if journal is None:
        raise BadState(f"{state} is no state file: tune the model again into another folder")
    try:
        fingerprint = msgspec.convert(journal.fingerprint, Fingerprint)
    except ValueError as error:
        raise BadState(f"{state} is not of qdqtune tune: tune the model again into another folder") from error
    return FinishedRun(folder, summary, fingerprint, journal)


def data_beside(file: Path, execution: Execution) -> Data | None:
    """The calibration data of the run that wrote a model file; None if the file is not in a run's folder, or the data
    have changed.

    The folder is not trusted: code that it names is not imported.
    """
    folder = file.parent.parent if file.parent.name == FRONT else file.parent
    if not (folder / RUN).is_file():
        return None
    try:
        run = read_run(folder)
        source, folders = run.log.calibration_data, (Path(run.summary["model"]).parent, folder)
        digest = run.fingerprint.calibration_data.digest
        is_same = source is not None and digest_of(source, execution, folders) == digest
    except InputError:  # the folder holds no run, or was altered
        return None
    given = run.fingerprint.input_shapes
    shapes = {name: tuple(size for size in sizes if size is not None) for name, sizes in given.items()}
    return Data(source, input_shapes=shapes, folders=folders) if is_same and shapes == given else None
