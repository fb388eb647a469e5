"""`qdqtune tune`: its options, its result, and the settings of a search that follow from options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from qdqtune.calibration.options import RangeOptions
from qdqtune.calibration.prepare import USUAL_JUDGED
from qdqtune.calibration.workloads import WORKLOADS, WorkloadsOption
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.commands.inputs import MetricOptions, ModelOption, built_for
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import EngineOptions, machine_of, with_timing_cache
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.errors import ConstraintUnmet
from qdqtune.explanation.formatting import built, counted, duration
from qdqtune.explanation.result_rows import NOT_MEASURED, is_judged, remarks, result_rows, verdict
from qdqtune.numerics.accuracy import closeness, closeness_cell
from qdqtune.numerics.scores import equal_share
from qdqtune.options import COUNT, SWITCH, choice
from qdqtune.search.region import Config
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import Plan, Ratio, least_rounds
from qdqtune.tuning import loop, result
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT, REPORT
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import SearchOptions
from qdqtune.tuning.run import TOO_SHORT
from qdqtune.tuning.settings import BY_RULE_BUILDS, EFFORTS, FRONT_BUILDS, Settings, looks_until, usual_builds
from qdqtune.types import Accuracy

Preset = Literal["quick", "default", "extensive"]


FEW_LOOKS, FEW_LOOKS_ERROR = (7, 20), 0.02
"""Numbers of rounds after which a candidate is judged, and the error probability of that, where rounds are expensive:
on engines that start a process for each turn, and with a short time budget. A false win only costs a failed proof,
which is as strict as ever."""

SHORT_BUDGET = 120.0
"""A time budget of at most so many seconds is short. Chosen, not measured."""


NO_IMPROVEMENT = 3
"""The exit code where nothing faster was found."""


class TuneOptions(MetricOptions, ModelOption, SearchOptions, EngineOptions, RangeOptions):
    effort: Preset = choice(
        EFFORTS,
        "How many builds and rounds of measurements a search may spend; `builds` wins.",
        "Search",
        default="default",
    )
    builds: int | None = COUNT(
        "Engine builds that the search may spend.",
        "Search",
        default_in_words=f"by `effort`: {usual_builds()}; with `time_budget` as in extensive",
    )
    workloads: WorkloadsOption = WORKLOADS
    report: bool = SWITCH("Write report.html, which shows the result in a browser.", "Output", default=True)

    def plan(self, *, has_few: bool, last: int | None = None) -> Plan:
        """How candidates are compared: at which numbers of rounds a verdict is tried, by the effort, or `FEW_LOOKS` if
        `has_few`; `last` replaces the last of them."""
        looks = FEW_LOOKS if has_few else EFFORTS[self.effort].looks
        looks = looks_until(last or looks[-1], looks)
        if not has_few:
            return Plan(looks)
        first = least_rounds(FEW_LOOKS_ERROR, len(looks))
        return Plan(tuple(sorted({max(first, n) for n in looks})), FEW_LOOKS_ERROR)

    def settings(self, command: tuple[str, ...] = (), **more: Any) -> Settings:
        """The settings of the search. Samples, workloads and metric must be in files (see `on_disk`). `command` is the
        command line, for the log; `more` are fields of `Settings` that take precedence over options."""
        machine = machine_of(self.on)
        effort = EFFORTS[self.effort]
        # With a time budget it is time that ends the search, while there is something left to try.
        bound = effort if self.time_budget is None else EFFORTS["extensive"]
        builds = FRONT_BUILDS if self.front else bound.builds[self.mode]
        builds = BY_RULE_BUILDS[self.effort] if simulated(self.engine_name, machine) else builds
        files = self.workloads
        own = machine.usual_threads(self.cores_per_worker or max(1, machine.cores // (self.workers or 1)))
        usual = 1 if self.ray else own
        spec = built_for(self.spec(self.input_shapes, threads=usual), files, self.fix_inputs)
        is_short = self.time_budget is not None and self.time_budget <= SHORT_BUDGET
        # Among the hundreds of candidates of region mode, one in fifty would win by luck.
        has_few = spec.facts.is_launched or (is_short and self.mode != "region")
        # The user names numbers of threads in one of three places.
        count, is_named = threads_of(spec), isinstance(self.engine, EngineSpec) or "threads" in self.engine_options
        told = {f.name: getattr(self, f.name) for f in fields(Settings) if hasattr(self, f.name)}
        told |= {
            "engine": spec if self.ray or self.on else with_timing_cache(spec, self.output_dir),
            "input_shapes": self.input_shapes or ({} if files else usual_shapes(spec, self.calibration_data)),
            "config": Config(schemes_per_region=effort.schemes_per_region),
            "plan": (plan := self.plan(has_few=has_few)),
            "proof": effort.proof,
            "precision_seconds": 0.0 if spec.facts.is_launched else effort.precision_seconds,  # a start for each turn
            "builds": builds if self.builds is None else self.builds,
            "threads": (count,) if self.threads is None and is_named and count is not None else self.threads,
            "command": command,
            "machine": machine,
        }
        if spec.facts.is_launched:
            told["accuracy_samples"] = plan.looks[0]  # more would start more processes than a comparison needs
        if simulated(spec.name, machine):
            told["accuracy_samples"] = USUAL_JUDGED
        return Settings(**(told | more))


@dataclass(frozen=True, repr=False)
class Result(Shown, result.Result):
    """The result of a search. `folder` holds its files."""

    folder: Path = field(default_factory=Path)

    @property
    def speedup(self) -> float | None:
        """Float latency divided by that of the file that ships, as proven; None if nothing was proven faster."""
        return None if self.ratio is None else 1 / self.ratio.median

    @property
    def file(self) -> Path:
        """The model that ships: the tuned one if `improved`, else a copy of the baseline or of the user's file."""
        return self.folder / FINAL

    @property
    def baseline(self) -> Path:
        """The file of the float model that candidates were compared with."""
        return self.folder / BASELINE

    @property
    def placement_file(self) -> Path:
        """The file of the placement, for `apply`."""
        return self.folder / PLACEMENT

    @property
    def report(self) -> Path:
        """The HTML report; missing if `report` is False."""
        return self.folder / REPORT

    def explain(self, pattern: str | None = None) -> Explained:
        """Why each node, or each whose name matches the wildcard, runs as it does: see `qdqtune.explain`."""
        return explain_run(self.folder, pattern)

    def in_words(self) -> str:
        if not self.improved:
            result = verdict(self.summary)
            ended = next((note for note in self.notes if note.startswith(TOO_SHORT)), "")
            return f"{result.headline}. {result.meaning}{ended and f' {ended}.'}"
        accuracy = Accuracy(**(self.summary["output_accuracy"] or {}))
        near = closeness(accuracy.sqnr_db, equal_share(accuracy))
        near = "exact outputs" if near == "exact" else near
        near = near if is_judged(self.summary) else "accuracy not measured"
        return f"{'not timed' if self.ratio is None else self.ratio.speedup}, {near}, {self.file}"

    @property
    def exit_code(self) -> int:
        if self.improved:
            return 0
        return ConstraintUnmet.exit_code if self.unmet else NO_IMPROVEMENT

    def parts(self) -> Iterator[str | Table]:
        if self.summary.get("front"):
            yield front_table(self.summary)
        yield self.table()
        if not self.improved:
            yield self.in_words()
            return
        what = "the tuned model" if self.placement else "the float model with the changes told above"
        if not self.summary["timed"]:
            what = "the cheapest by rule that holds the limits on accuracy; it was not timed"
        unchecked = "; nobody has checked its accuracy" if self.summary["unchecked"] else ""
        yield f"{self.file} is {what}{unchecked}"

    def table(self) -> Table:
        return result_table(self)

    def to_dict(self) -> Mapping[str, Any]:
        return {**self.summary, "notes": list(self.notes), "folder": str(self.folder)}


def tune(settings: Settings, observer: Observer | None = None, begun: float | None = None) -> Result:
    """Find the fastest placement, prove it, and write it to the output folder. `begun`: see `tuning.loop.tune`."""
    done = loop.tune(settings, observer, begun)
    return Result(**vars(done), folder=settings.output_dir)


def result_table(found: result.Result) -> Table:
    """Latency, speedup, pairs and accuracy of float and tuned model; in the caption, what the search used."""
    summary = found.summary
    failed = sum(failure(trial) is not None for trial in found.history)
    between = sum(trial.proposal.origin == "front" for trial in found.history)  # not shown while the search runs
    besides = (f"{number} {what}" for number, what in ((failed, "failed"), (between, "made for the front")) if number)
    candidates = f"candidates: {summary['trials']}" + (f" ({told})" if (told := ", ".join(besides)) else "")
    caption = f"{candidates}, builds: {built(summary)}, time: {duration(summary['seconds'])}"
    rows = [row.cells for row in result_rows(summary)]
    return Table(("", "baseline", "final"), rows, "\n".join([caption, *remarks(summary)]))


def front_table(summary: Mapping[str, Any]) -> Table:
    cells, rows = [], summary["front"]
    counts = [at["threads"] for row in rows[:1] for at in row["by_threads"]]
    for row in rows:
        compared = row["by_threads"] if len(counts) > 1 else [row]
        ends = (Ratio(at["ratio"], at["low"], at["high"]).speedup for at in compared)
        metric = "" if row["metric"] is None else f"{row['metric']:g}"
        formats = sum(row["weights"].values())
        tensors = str(row["pairs"]) + (f" + {formats} weights" if formats else "")
        db = closeness_cell(row["sqnr_db"], row["agreement"]) if is_judged(summary) else NOT_MEASURED
        agreement = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        mark = {True: "", False: "below the limits", None: "metric not computed"}[row["holds_limits"]]
        mark = "ships" if row["shipped"] else mark
        cells.append((row["name"], *ends, metric, tensors, db, agreement, mark))
    speedups = [f"at {counted(n, 'thread')}" for n in counts] if len(counts) > 1 else ["speedup [interval]"]
    columns = ("point", *speedups, "metric", "tensors", "SQNR, dB", "agreement", "")
    return Table(columns, cells, "each point is front/NAME.onnx")
