"""A finished run read back from its folder: what was asked, what was measured, in order, and what came of it.

Everything that looks at a run without going on with it reads here: explanations, the report, and other commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from qdqtune.calibration.prepare import Data
from qdqtune.calibration.samples import digest_of
from qdqtune.errors import BadState, InputError
from qdqtune.placement.files import read_placement_file
from qdqtune.timing.limits import Limits, wins
from qdqtune.timing.ratios import MOST_PAIRS, PAIRS, Plan
from qdqtune.tuning.bench import trial_of
from qdqtune.tuning.fingerprint import Fingerprint
from qdqtune.tuning.folder import FRONT, PLACEMENT, RUN
from qdqtune.tuning.records import (
    ComparisonRecord,
    LayersRecord,
    MetricRecord,
    NoiseRecord,
    TrialRecord,
)
from qdqtune.tuning.run_files import AtThreads, RunLog, Summary, read_log, read_summary
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import Journal, read_journal
from qdqtune.types import Layer, Measurement, Placement, Trial


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its summary, its fingerprint, and the records of its state file."""

    folder: Path
    summary: Summary
    fingerprint: Fingerprint
    records: Journal

    @cached_property
    def log(self) -> RunLog | None:
        """Its run.json; None where that is gone.

        Raises:
            BadOption: it is damaged.
        """
        return read_log(self.folder)

    @property
    def limits(self) -> Limits:
        """What candidates had to hold."""
        told = self.summary
        return Limits(told["min_sqnr_db"], told["max_drop"], told["metric_before"], told["min_agreement"])

    @property
    def plan(self) -> Plan:
        """How candidates were judged."""
        return self.fingerprint.rounds

    @property
    def proof_plan(self) -> Plan:
        """How the proof was judged, as far as that is known."""
        return self.plan if self.log is None else replace(self.plan, looks=self.log.proof)

    @property
    def here(self) -> Summary | AtThreads:
        """The times and the ratio of what ships at the number of threads that the search and its layers ran with."""
        rows, threads = self.summary["by_threads"], self.summary["engine"].get("threads")
        return next((row for row in rows if str(row["threads"]) == threads), self.summary)

    @property
    def float_ms(self) -> float:
        """What the float model took that pairs were placed in, as rounds have measured it: the user's file, or what
        rewrites have made of it."""
        gave = self.summary["rewrites"].get("gave")
        if gave is None:
            return self.here["baseline_ms"]
        has_pairs = self.summary["edges"] or self.summary.get("weights")
        return gave * self.here["baseline_ms"] if has_pairs else self.here["final_ms"]

    @cached_property
    def float_layers(self) -> tuple[Layer, ...]:
        """The layers of the float build. Inferences that are profiled take longer than others: their times are shares
        of what rounds have measured, and add up to it."""
        layers = self._layers("")
        told = sum(layer.time_ms or 0.0 for layer in layers)
        if not told:
            return layers
        scale = self.float_ms / told
        return tuple(replace(x, time_ms=None if x.time_ms is None else scale * x.time_ms) for x in layers)

    @cached_property
    def history(self) -> tuple[Trial, ...]:
        """The candidates of the search in its order, and which it took: as run.json has it, or else all that were
        measured."""
        found = list(self._trials())
        if self.log is None or not self.log.trials:
            followed = {record.against for record in self.records.of(TrialRecord)} | {self.final.digest}
            taken = (t.placement.digest in followed and wins(t, self.plan) for _, t in found)
            return tuple(replace(t, accepted=is_taken) for (_, t), is_taken in zip(found, taken, strict=True))
        trials = dict(found)
        rows = [(number, row) for number, row in enumerate(self.log.trials, 1) if row.of in trials]
        return tuple(
            replace(trials[row.of], number=number, holds=row.holds, metric=row.metric, accepted=row.accepted)
            for number, row in rows
        )

    @cached_property
    def final(self) -> Placement:
        """What was tuned and ships; empty where the float model or the user's file does.

        Raises:
            BadOption: placement.yaml is missing or damaged.
        """
        is_tuned = self.summary["shipped"] == "tuned"
        return read_placement_file(self.folder / PLACEMENT).placement if is_tuned else Placement()

    @property
    def final_layers(self) -> tuple[Layer, ...]:
        """The layers of what was tuned and ships."""
        told = (trial.layers for trial in reversed(self.history) if trial.placement == self.final and trial.layers)
        return self._layers(self.final.digest) or next(told, ())

    @property
    def proof(self) -> tuple[Measurement, ...]:
        """The rounds of what ships against the float model, a pair of builds each; empty where nothing is proven."""
        if self.summary["shipped"] != "tuned":
            return ()
        kinds = ("proof", "given") if self.summary["ratio_to_given"] is not None else ("given", "proof", "front")
        for kind in kinds:
            keys = (f"{kind}:{self.final.digest}:{number}" for number in range(MOST_PAIRS))
            results = (r.result.samples for key in keys if (r := self.records.get(ComparisonRecord, key)))
            measured = tuple(filter(None, results))
            if len(measured) >= (1 if kind == "front" else PAIRS):  # where points stand together, one may do
                return measured
        return ()

    @property
    def alone(self) -> Mapping[str, float]:
        """What rounding each tensor alone does: power of the error over that of the output. Empty if it was not
        asked."""
        return next((record.alone for record in self.records.of(NoiseRecord) if record.failure is None), {})

    def _layers(self, of: str) -> tuple[Layer, ...]:
        record = self.records.get(LayersRecord, of)
        return () if record is None else record.layers

    def _trials(self) -> Iterator[tuple[str, Trial]]:
        """All candidates that were measured, in that order, with what they hold as far as it is known, behind what
        their records are of. Those whose opponent is unknown are left out."""
        metrics = {record.of.rpartition(":")[2]: record.value for record in self.records.of(MetricRecord)}
        known, limits = {Placement().digest: Placement()}, self.limits
        for record in self.records.of(TrialRecord):
            if record.against in known:
                trial = trial_of(len(known), record, known[record.against])
                known[trial.placement.digest] = trial.placement
                metric = metrics.get(trial.placement.digest)
                if not limits.is_exact_enough(trial.accuracy):
                    trial = replace(trial, holds=False)
                elif limits.max_drop is not None:
                    holds = None if metric is None else limits.is_good_enough(metric)
                    trial = replace(trial, metric=metric, holds=holds)
                yield record.of, trial


def read_run(folder: Path, state: Path | None = None) -> FinishedRun:
    """Read a finished run; `state` is its state file, where that does not lie in the folder.

    Raises:
        BadOption: the folder holds none.
        BadState: its state file is damaged, or missing.
    """
    summary = read_summary(folder)
    state = state or Path(summary["state_file"] or folder / STATE)
    if not state.is_file():
        raise BadState(f"{folder} is explained by its state file, and {state} is not there: name it with --state-file")
    journal = read_journal(state)
    if journal is None:
        raise BadState(f"{state} is no state file: name that of {folder} with --state-file")
    try:
        fingerprint = msgspec.convert(journal.head.fingerprint, Fingerprint)
    except ValueError as error:
        raise BadState(f"{state} is not of qdqtune tune: name the state file of {folder} with --state-file") from error
    return FinishedRun(folder, summary, fingerprint, journal)


def data_beside(file: Path) -> Data | None:
    """What the run was fed whose folder a model file lies in, while its files of samples are as they were; else None.

    Folders may come from elsewhere: code that they name is not imported.
    """
    folder = file.parent.parent if file.parent.name == FRONT else file.parent
    if not (folder / RUN).is_file():
        return None
    try:
        run = read_run(folder)
        source = None if run.log is None else run.log.settings.get("calibration_data")
        is_same = isinstance(source, str) and digest_of(source) == run.fingerprint.calibration_data.digest
    except InputError:  # no folder of ours, or one that was altered
        return None
    given = run.fingerprint.input_shapes
    shapes = {name: tuple(size for size in sizes if size is not None) for name, sizes in given.items()}
    return Data(source, input_shapes=shapes) if is_same and shapes == given else None
