"""Reads a finished run from its folder: summary.json, run.json, placement.yaml, and the records of its state file."""

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
from qdqtune.numerics.label_metrics import Score
from qdqtune.placement.files import read_placement_file
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.bench import trial_of
from qdqtune.tuning.fingerprint import Fingerprint
from qdqtune.tuning.folder import (
    FRONT,
    PLACEMENT,
    RUN,
)
from qdqtune.tuning.records import (
    TrialRecord,
    proof_key,
)
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import Journal, read_journal
from qdqtune.tuning.summary import AtThreads, RunLog, Summary, read_json, read_summary
from qdqtune.types import Layer, Measurement, Placement, Trial


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended; `records` are those of its state file."""

    folder: Path
    summary: Summary
    fingerprint: Fingerprint
    records: Journal

    @cached_property
    def log(self) -> RunLog:
        """The content of run.json.

        Raises:
            BadOption: it is missing or damaged.
        """
        log = read_json(self.folder / RUN, RunLog)
        if log is None:
            raise BadOption(f"{self.folder} has lost {RUN}: run the same tune command again, which writes it anew")
        return log

    @property
    def limits(self) -> Limits:
        """The limits on accuracy that candidates had to hold."""
        summary = self.summary
        digest = Placement().digest
        metrics = self.records.values("metric:", Score)
        before = next((metrics[key] for key in reversed(metrics) if key.endswith(digest)), None)
        if before is None and (value := summary["metric_before"]) is not None:
            before = Score(value)
        of_metric = summary["max_drop"], before
        return Limits(summary["min_sqnr_db"], *of_metric, summary["min_agreement"], summary.get("min_sqnr_worst_db"))

    @property
    def plan(self) -> Plan:
        """The numbers of rounds after which candidates were judged, with the error of a comparison."""
        return self.log.plan

    @property
    def proof_plan(self) -> Plan:
        """As `plan`, for the proof."""
        return replace(self.plan, looks=self.log.proof)

    @property
    def here(self) -> Summary | AtThreads:
        """Times and ratio of the shipped model at the number of threads that the search ran with."""
        rows, threads = self.summary["by_threads"], self.summary["engine"].get("threads")
        return next((row for row in rows if str(row["threads"]) == threads), self.summary)

    @property
    def float_ms(self) -> float | None:
        """Time per inference in ms, measured in rounds, of the float model in which pairs were placed: the user's file,
        or the rewritten float; None on a simulator."""
        gave = self.summary["rewrites"].get("gave")
        if gave is None:
            return self.here["baseline_ms"]
        if self.summary["edges"] or self.summary.get("weights"):
            return gave * (self.here["baseline_ms"] or 0.0)
        return self.here["final_ms"] or self.here["baseline_ms"]

    @cached_property
    def float_layers(self) -> tuple[Layer, ...]:
        """The layers of the float build. Profiled inferences take longer than others, so layer times are scaled to add
        up to `float_ms`."""
        layers = self._layers("")
        total = sum(layer.time_ms or 0.0 for layer in layers)
        if not total or self.float_ms is None:
            return layers
        scale = self.float_ms / total
        return tuple(replace(x, time_ms=None if x.time_ms is None else scale * x.time_ms) for x in layers)

    @cached_property
    def history(self) -> tuple[Trial, ...]:
        """The trials in the order of the search, with their judgements from run.json."""
        measured, trials = {Placement().digest: Placement()}, dict[str, Trial]()
        for of, record in self.records.values("trial:", TrialRecord).items():
            if record.against in measured:
                trials[of] = trial = trial_of(0, record, measured[record.against])
                measured[trial.placement.digest] = trial.placement
        return tuple(
            replace(trials[row.of], number=number, holds=row.holds, metric=row.metric, accepted=row.accepted)
            for number, row in enumerate(self.log.trials, 1)
            if row.of in trials
        )

    @cached_property
    def final(self) -> Placement:
        """The tuned placement that ships; empty if the float model or the user's file ships.

        Raises:
            BadOption: placement.yaml is missing or damaged.
        """
        is_tuned = self.summary["shipped"] == "tuned"
        return read_placement_file(self.folder / PLACEMENT).placement if is_tuned else Placement()

    @property
    def keeps_own_pairs(self) -> bool:
        """Whether what ships is the user's Q/DQ file as it is."""
        return self.summary["shipped"] == "given" and self.fingerprint.from_qdq

    def layers_of(self, placement: Placement) -> tuple[Layer, ...]:
        """The layers of the model with a placement that ships; empty if unknown."""
        found = (trial.layers for trial in reversed(self.history) if trial.placement == placement and trial.layers)
        return self._layers(placement.digest) or next(found, ())

    @property
    def proof(self) -> tuple[Measurement, ...]:
        """Rounds of the float (a) and the shipped model (b) for each block of builds; empty if nothing is proven."""
        if self.summary["shipped"] != "tuned":
            return ()
        return self.records.get(proof_key(self.final), tuple[Measurement, ...]) or ()

    @property
    def alone(self) -> Mapping[str, float]:
        """By tensor, the power of the output error that rounding it alone causes, over the power of the output; empty
        if it was not measured."""
        noises = self.records.values("noise:", dict[str, float])
        return list(noises.values())[-1] if noises else {}

    def _layers(self, of: str) -> tuple[Layer, ...]:
        return self.records.values("layers:", tuple[Layer, ...]).get(of, ())


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run. Its state file is the one that summary.json names, or else the folder's.

    Raises:
        BadOption: the folder holds none.
        BadState: its state file is damaged, or missing.
    """
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
    """The calibration data of the run that wrote a model file; None if the file lies in no folder of a run, or if the
    data have changed since.

    Folders may come from elsewhere: code that they name is not imported.
    """
    folder = file.parent.parent if file.parent.name == FRONT else file.parent
    if not (folder / RUN).is_file():
        return None
    try:
        run = read_run(folder)
        source, folders = run.log.settings.get("calibration_data"), (Path(run.summary["model"]).parent, folder)
        digest = run.fingerprint.calibration_data.digest
        is_same = isinstance(source, str) and digest_of(source, execution, folders) == digest
    except InputError:  # the folder holds no run, or was altered
        return None
    given = run.fingerprint.input_shapes
    shapes = {name: tuple(size for size in sizes if size is not None) for name, sizes in given.items()}
    return Data(source, input_shapes=shapes, folders=folders) if is_same and shapes == given else None
