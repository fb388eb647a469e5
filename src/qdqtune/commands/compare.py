"""`qdqtune compare`: times files against the first one, as the proof of a search does, and checks limits; for
continuous integration also as JUnit XML and Markdown.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from qdqtune.calibration.inputs import fixed_inputs, input_specs, listed
from qdqtune.calibration.observe import Outputs
from qdqtune.calibration.options import DataOptions
from qdqtune.calibration.prepare import MOST_JUDGED
from qdqtune.calibration.workloads import WORKLOADS, WorkloadsOption
from qdqtune.commands.inputs import FIXED, MetricOptions, built_for, execution_of, prepared_for
from qdqtune.commands.shown import Shown, Table, plain
from qdqtune.engines import EngineSpec
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import ON, EngineOptions, machine_of, on_device
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import BadOption, ConstraintUnmet, EngineFailure, EngineRefused, escaped, rewording
from qdqtune.explanation.formatting import counted, samples
from qdqtune.graph.loading import load
from qdqtune.numerics.accuracy import (
    NOT_FINITE,
    accuracy,
    closeness_cell,
    concern,
    count_of_other_shapes,
    decibels,
    integers_differ,
    is_finite,
    slice_cell,
)
from qdqtune.numerics.metrics import Labelled, Metric, ScoreOption, check_metric, measure, open_metric, option_of
from qdqtune.numerics.scores import (
    NO_SCORES,
    Score,
    Scores,
    can_tell,
    check_asked,
    copies_in,
    doubt,
    equal_share,
    metric_in_words,
    metric_json,
    samples_to_tell,
    scores_of,
    too_few_to_tell,
)
from qdqtune.options import COUNT, SWITCH, Options, ValuesByInput, number
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan, Ratio, Verdict
from qdqtune.tuning.contexts import at_each, busy, counts_of, views_of
from qdqtune.tuning.deploy import calibrated_on
from qdqtune.tuning.file_race import Racer, Tail
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.tuning.options import WARMUP
from qdqtune.tuning.settings import EFFORTS
from qdqtune.tuning.shipping import Compared
from qdqtune.types import Accuracy, Mix, Sample, Workload

Outcome = Literal["holds", "undecided", "missed", "failed"]
"""Outcomes of a limit, the best first: "undecided" if the interval contains it, "failed" if there is no measurement."""

RUNS = "runs"
"""The name of the limit that a file misses if the engine cannot run it."""


DEFAULT_ROUNDS = 24
"""Rounds of each pair of builds by default. Chosen, not measured."""


class GateOptions(Options):
    fail_below: float | None = number(
        "Exit code 4 if a file is less than X times as fast: if the whole interval of its speedup lies below X, so "
        "that noise fails nothing. Where X lies in the interval, it is told as undecided, and passes.",
        "Accuracy",
        "exit code 4 if it is surely less fast than so",
        least=0.01,
    )
    min_sqnr: float | None = number(
        "Exit code 4 if the output SQNR is lower, in dB; needs samples.",
        "Accuracy",
        "exit code 4 if the output SQNR is lower",
        metavar="DB",
    )
    min_agreement: float | None = number(
        "Exit code 4 if integers in outputs, or best classes, agree in a smaller share; needs samples.",
        "Accuracy",
        least=0,
        most=1,
        metavar="SHARE",
    )

    def of_speed(self, file: str, ratio: Ratio | None) -> Iterator[Gated]:
        """The outcome of `fail_below` for a file; nothing if it is not set."""
        if (least := self.fail_below) is None:
            return
        limit, told = f"at least {least:g}x as fast", "not timed" if ratio is None else ratio.speedup
        if ratio is not None and ratio.low is not None and 1 / ratio.low < least:
            yield Gated(file, limit, "missed", f"{told}, and all of the interval lies below")
        elif ratio is not None and ratio.high is not None and 1 / ratio.high >= least:
            yield Gated(file, limit, "holds", told)
        else:
            yield Gated(file, limit, "undecided", told)

    def of_outputs(self, file: str, accuracy: Accuracy | None, unlike: str) -> Iterator[Gated]:
        """The outcomes of `min_sqnr` and `min_agreement`, if set. `unlike` says why outputs cannot be compared."""
        for limits, limit in (
            (Limits(min_sqnr=self.min_sqnr), f"output SQNR of at least {self.min_sqnr or 0:g} dB"),
            (Limits(min_agreement=self.min_agreement), f"agreement of at least {self.min_agreement or 0:.4g}"),
        ):
            if not limits.are_set:
                continue
            if accuracy is None:
                yield Gated(file, limit, "failed", f"outputs were not compared{': ' if unlike else ''}{unlike}")
            elif limits.min_sqnr is not None and integers_differ(accuracy.sqnr_db, accuracy.agreement):
                yield Gated(file, limit, "undecided", "the outputs hold integers: `min_agreement` is about these")
            elif limits.min_agreement is not None and equal_share(accuracy) is None:
                yield Gated(file, limit, "undecided", "no output holds integers or scores of classes (`scores`)")
            elif (missed := limits.missed(accuracy)) is not None:
                yield Gated(file, limit, "missed", missed)
            elif limits.min_agreement is None:
                yield Gated(file, limit, "holds", decibels(accuracy.sqnr_db))
            elif (doubtful := too_few_to_tell(accuracy, limits.min_agreement)) is not None:
                yield Gated(file, limit, "undecided", doubtful)
            else:
                yield Gated(file, limit, "holds", f"{equal_share(accuracy):.1%}")


@dataclass(frozen=True)
class Gated:
    """What became of a limit on a file: `limit` names it, `told` says what was measured."""

    file: str
    limit: str
    outcome: Outcome
    told: str

    @property
    def passes(self) -> bool:
        return self.outcome in ("holds", "undecided")

    @property
    def in_words(self) -> str:
        return f"{self.outcome}: {self.file}, {self.limit}: {self.told}"


class MeasureOptions(GateOptions, ScoreOption, DataOptions):
    workloads: WorkloadsOption = WORKLOADS
    fix_inputs: ValuesByInput = FIXED
    all_samples: bool = SWITCH(
        "Compare outputs on all samples: for samples that calibrated none of the files, as a test set of their own. "
        "Without it, on those that tune holds out of calibration, if there are enough; on all where a file is of a run "
        "that used other data.",
        "Data",
    )
    timing_runs: int = COUNT("Rounds per pair of builds, 12 or more.", "Search", default=DEFAULT_ROUNDS, least=12)
    warmup_runs: int = WARMUP


class CompareOptions(MetricOptions, EngineOptions, MeasureOptions):
    on: str | None = ON
    max_drop: float | None = number(
        "Exit code 4 if your metric is more than X below that of the first file. With `labels` the upper end of the "
        "95 % interval of the loss has to be within X; where samples are too few to tell, the loss on them.",
        "Accuracy",
        "most that your metric may lose",
        least=0,
    )


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `compare`: a row for each file but the first, in order, and notes. Outputs were compared on
    `judged` samples; 0 if inputs are random."""

    first: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    judged: int = 0
    is_held_out: bool = False
    gate: CompareOptions = field(default_factory=CompareOptions)

    @property
    def gated(self) -> tuple[Gated, ...]:
        rows = ((*row.gated(self.gate), *row.gated_metric(self.gate.max_drop)) for row in self.rows)
        return tuple(chain.from_iterable(rows))

    @property
    def passes(self) -> bool:
        return all(one.passes for one in self.gated)

    @property
    def scores(self) -> Scores | None:
        return next((row.scores for row in self.rows if row.accuracy is not None), None)

    @property
    def ratio(self) -> Ratio | None:
        """The ratio of the second file, at the first number of threads."""
        return self.rows[0].ratio

    @property
    def refusals(self) -> list[str]:
        return [f"{row.name} cannot be compared: {row.reason}" for row in self.rows if row.reason]

    def in_words(self) -> str:
        told = []
        for row in self.rows:
            more = row.reason or (row.ratio.speedup if row.ratio else "")
            told.append(f"{row.name} {', '.join(filter(None, [row.words, more]))}")
        return f"{'; '.join(told)} (against {self.first})"

    def table(self) -> Table:
        cells = list[tuple[str, ...]]()
        title = next((row.metric[0].name for row in self.rows if row.metric is not None), "metric")
        for row in self.rows:
            share = equal_share(row.accuracy)
            sqnr = "" if row.accuracy is None else closeness_cell(row.sqnr_db, share)
            equal = "" if share is None else f"{share:.1%}"
            first, other = ("" if ms is None else f"{ms:.3f}" for ms in (row.first_ms, row.ms))
            metric = "" if row.metric is None else f"{row.metric[1].value:.4g}, first {row.metric[0].value:.4g}"
            speedup = row.ratio.speedup if row.ratio else ""
            cells.append((row.name, first, other, speedup, row.words, sqnr, equal, metric))
            for part in row.workloads:
                times = f"{part.first_ms:.3f}", f"{part.ms:.3f}"
                cells.append((f"  {part.name}, {part.share:.0%} of the calls", *times, part.ratio.speedup, *[""] * 4))
        columns = ("file", "first, ms", "ms", "speedup [interval]", "verdict", "SQNR, dB", "agreement", title)
        judged = self.judged if any(row.accuracy is not None for row in self.rows) else 0
        caption = [f"first: {self.first}"]
        if judged:
            how = ", as in tune; `all_samples` takes all" if self.is_held_out else ""
            caption.append(f"output SQNR over {samples(judged, self.is_held_out)}{how}")
        worst = {row.file: slice_cell(row.accuracy) for row in self.rows}
        caption += [f"worst slice of {file}: {text}" for file, text in worst.items() if text]
        caption += [] if self.scores is None else [self.scores.told]
        for row in self.rows:
            if row.ms and row.first_ms:
                rates = f"{1e3 / row.ms:.4g}, the first file {1e3 / row.first_ms:.4g}"
                caption.append(f"inferences a second of {row.name}: {rates}")
                ends = "not measured"
                if row.percentiles_ms and row.first_percentiles_ms:
                    ends = f"{row.percentiles_ms.in_words}; the first file {row.first_percentiles_ms.in_words}"
                caption.append(f"single inferences of {row.name}: {ends}")
        return Table(columns, cells, "\n".join(caption))

    @property
    def exit_code(self) -> int:
        if self.refusals:
            return EngineFailure.exit_code
        return 0 if self.passes else ConstraintUnmet.exit_code

    def parts(self) -> Iterator[str | Table]:
        yield self.table()
        yield from (one.in_words for one in self.gated if one.limit != RUNS)

    def to_dict(self) -> dict[str, Any]:
        found = self.scores or NO_SCORES
        others, notes = [row.as_json() for row in self.rows], list(self.notes)
        told = {"scores": found.as_json(), "scores_told": found.told}
        gate = {"passes": self.passes, "gate": [asdict(one) for one in self.gated]} if self.gated else {}
        return {"first": self.first, "others": others, **told, **gate, "notes": notes}


def compare(
    files: Sequence[Path],
    options: CompareOptions,
    observer: Observer | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Comparison:
    """Time every other file against the first, in the same rounds on fresh builds of all. `shapes` are those of random
    inputs, by input name, unless options set them. A file that the engine refuses has a row with the reason.

    Raises:
        InputError: options do not go together, or the files take different inputs.
        EngineUnavailable, EngineFailure: the engine is not available, or does not run the first file.
    """
    execution, machine = on_device(options.on, execution_of(options)), machine_of(options.on)
    workloads = options.workloads
    spec = built_for(options.spec(options.input_shapes, threads=machine.usual_threads()), workloads)
    check_metric(options.evaluate, options)
    if options.max_drop is not None and not options.has_metric:
        raise BadOption("`max_drop` is about a metric: give `labels` or `evaluate`")
    untimed = simulated(spec.name, machine)
    busy_note = busy(spec, machine)
    if options.fail_below is not None and untimed:
        raise BadOption(f"`fail_below` is about times: {untimed}")
    fixed_in = [fixed_inputs(file, options.fix_inputs) for file in files]
    if len(files) < 2:
        raise BadOption("compare needs at least two files")
    kept = ({name: options.fix_inputs[name] for name in one} for one in fixed_in)
    models = [load(file, fix_inputs=own) for file, own in zip(files, kept, strict=True)]
    wanted, *others = map(input_specs, models)
    for file, specs in zip(files[1:], others, strict=True):
        known = {spec.name: spec for spec in specs}
        common = [(known[w.name], w) for w in wanted if w.name in known]
        is_alike = bool(common) and all(one.dtype == other.dtype and one.fits(other.shape) for one, other in common)
        if not is_alike or not len(common) == len(known) == len(wanted):
            hint = "compare is for versions of one model, which take the same inputs"
            if is_alike and len(common) == min(len(known), len(wanted)):
                hint = "`fix_inputs` names those that were made constant"
            raise BadOption(f"{file} takes other inputs ({listed(specs)}) than {files[0]} ({listed(wanted)}): {hint}")
    check_asked(options.scores, models[0])  # refuses others before the work begins
    fixed_names, most = options.fix_inputs, 0 if options.all_samples else MOST_JUDGED
    prepared = prepared_for(models[0], spec, options, execution, files, fixed=fixed_names, most=most, shapes=shapes)
    digests = {calibrated_on(file) for file in files} - {None}
    is_new = prepared.has_real_samples and digests and prepared.samples.digest not in digests
    if options.all_samples or is_new:
        prepared = replace(prepared, judging=tuple(prepared.samples), is_held_out=False)
    judging = prepared.judging
    on_outputs = options.min_sqnr, options.min_agreement
    if on_outputs != (None, None) and not prepared.has_real_samples:
        raise BadOption("`min_sqnr` and `min_agreement` are about outputs on samples: give `calibration_data`")
    threads = options.threads or ()
    counts = counts_of(spec, threads or None, machine)
    fixed = dict(ChainMap(*fixed_in))
    metric = open_metric(options.evaluate, options, prepared)
    if isinstance(metric, Labelled):
        unfixed = metric.samples
        metric = replace(metric, samples=replace(unfixed, produce=lambda: ({**one, **fixed} for one in unfixed)))
    with temporary_runner(spec, prepared.execution) as runner, ExitStack() as stack:
        cpu: Runner | None = None
        if untimed:
            runner.describe()  # the engine may not be here, and without samples nothing else asks it
            cpu = stack.enter_context(temporary_runner(EngineSpec("onnxruntime"), prepared.execution))
        rows = compare_files(
            files,
            runner,
            [{**sample, **fixed} for sample in judging],
            Plan((options.timing_runs,), warmup=options.warmup_runs),
            has_real_samples=prepared.has_real_samples,
            mix=tuple(replace(one, inputs={**one.inputs, **fixed}) for one in prepared.mix),
            counts=counts if len(threads) > 1 else (None,),
            seed=options.seed,
            observer=observer,
            asked=options.scores,
            copies=copies_in(models[0]),
            limits=Limits(options.min_sqnr, min_agreement=options.min_agreement),
            reference_from=cpu,
            metric=metric,
        )
    notes = list(filter(None, dict.fromkeys(doubt(row.metric[0]) for row in rows if row.metric is not None)))
    if options.calibration_data is None and not workloads:
        origin = f"the inputs are those of the run beside it, {prepared.samples.origin}"
        random = "inputs are random, which says nothing of accuracy: none is told"
        notes.append(f"no `calibration_data`: {origin if prepared.has_real_samples else random}")
    warnings = {row.file: concern(row.accuracy) for row in rows if row.accuracy is not None}
    warnings |= {row.file: f"outputs were not compared: {row.unlike}" for row in rows if row.unlike}
    notes += [f"{file} against {files[0]}: {warning}" for file, warning in warnings.items() if warning]
    if machine.where:
        notes.append(f"run {'and timed ' * (not untimed)}on {machine.where}")
    if busy_note is not None:
        notes.append(busy_note)
    if untimed:
        notes.append(f"{untimed}: outputs are against {files[0]} on ONNX Runtime's CPU")
    judged = len(judging) if prepared.has_real_samples else 0
    return Comparison(str(files[0]), tuple(rows), tuple(notes), judged, prepared.is_held_out, options)


@dataclass(frozen=True)
class Part:
    """The comparison on one of several workloads: its share of all calls, median latencies in ms, and ratio b/a."""

    name: str
    share: float
    first_ms: float
    ms: float
    ratio: Ratio


@dataclass(frozen=True)
class Row:
    """One file (b) against the first (a): median latencies in ms, ratio b/a, and output SQNR against the first in dB.

    `first_percentiles_ms` and `percentiles_ms` are those of single inferences; None if they were not timed. `reason`
    says why there is no ratio, `unlike` why outputs cannot be compared. `threads` is set if several numbers of threads
    were asked for; `workloads` has a part for each of several. `scores` are the outputs that hold class scores; None if
    inputs are random. `metric` has that of both files, if asked for.
    """

    file: str
    first_ms: float | None = None
    ms: float | None = None
    ratio: Ratio | None = None
    sqnr_db: float | None = None
    reason: str = ""
    accuracy: Accuracy | None = None
    unlike: str = ""
    threads: int | None = None
    first_percentiles_ms: Tail | None = None
    percentiles_ms: Tail | None = None
    workloads: tuple[Part, ...] = ()
    scores: Scores | None = None
    metric: tuple[Score, Score] | None = None

    @property
    def name(self) -> str:
        return self.file if self.threads is None else f"{self.file}, {counted(self.threads, 'thread')}"

    @property
    def words(self) -> str:
        """The verdict as text; if undecided, with the largest difference within the interval."""
        if self.ratio is None or self.ratio.verdict != "undecided":
            return self.verdict or ("failed" if self.reason else "not timed")
        low, high = self.ratio.low, self.ratio.high
        within = "" if low is None or high is None else f" within {100 * max(high - 1, 1 - low):.0f} %"
        return f"no difference seen{within}"

    @property
    def verdict(self) -> Verdict | None:
        return self.ratio.verdict if self.ratio else None

    def gated(self, gate: GateOptions) -> tuple[Gated, ...]:
        if self.reason:
            return (Gated(self.name, RUNS, "failed", self.reason),)
        return (*gate.of_speed(self.name, self.ratio), *gate.of_outputs(self.name, self.accuracy, self.unlike))

    def gated_metric(self, max_drop: float | None) -> Iterator[Gated]:
        if max_drop is None or self.metric is None:
            return
        before, after = self.metric
        outcome: Outcome = "holds"
        told = metric_in_words(before, after)
        if not Limits(max_drop=max_drop, before=before).is_good_enough(after):
            is_lost = before.value - after.value > max_drop
            outcome = "missed"
            told += f"; {'a' if is_lost else 'give more labels, or a'} higher `max_drop` lets it pass"
        elif before.by_sample and not can_tell(before, max_drop):
            needed = samples_to_tell(before, max_drop)
            outcome = "undecided"
            told += f"; {'no number of' if needed == inf else f'at least {needed}'} samples can show more"
        yield Gated(self.name, f"metric at most {max_drop:g} below the first file's", outcome, told)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(replace(self, scores=None, metric=None)) | {"verdict": self.verdict}
        fields["metric"] = None if self.metric is None else metric_json(*self.metric)
        hidden = {"scores"} if self.workloads else {"scores", "workloads"}
        return {name: value for name, value in fields.items() if name not in hidden}


def compare_files(
    files: Sequence[Path],
    runner: Runner,
    judging: Sequence[Sample],
    plan: Plan,
    *,
    has_real_samples: bool = True,
    mix: Mix = (),
    counts: Sequence[int | None] = (None,),
    seed: int = 0,
    observer: Observer | None = None,
    asked: Sequence[str] = (),
    copies: frozenset[str] = frozenset(),
    limits: Limits | None = None,
    reference_from: Runner | None = None,
    metric: Metric | None = None,
) -> list[Row]:
    """Compare each other file with the first, at each number of threads in `counts`, on as many fresh builds as a
    verdict needs. Times are those on `mix`, by default on the first sample of `judging`. If `has_real_samples`, outputs
    on `judging` are compared, with the best classes of the outputs that are `asked` for (see `scores_of`), and the
    `metric`. If `reference_from` is given, it runs the first file, and nothing is timed.
    """
    observer, first = observer or Silent(), files[0]
    observer.stage(f"running {first.name}")
    timed = mix or (Workload(judging[0]),)
    runner.feed(at_each(timed, counts))
    with rewording(f"{first} gives nothing to compare with"):
        reference, before = _ran(reference_from or runner, first, judging, metric, first)
    scores = scores_of(reference, asked, copies) if has_real_samples else None
    if scores is not None and limits is not None:
        limits.check({array.dtype.kind for array in reference[0].values()}, scores)
    rows = []
    for file in files[1:]:
        observer.stage(f"running {file.name}")
        row = Row(str(file), scores=scores)
        try:
            outputs, after = _ran(runner, file, judging if has_real_samples else judging[:1], metric, first)
            row = row if scores is None else _judged(row, reference, outputs, scores)
            rows.append(row if before is None or after is None else replace(row, metric=(before, after)))
        except EngineRefused as refused:
            rows.append(Row(str(file), reason=str(refused)))
    racing = [Path(row.file) for row in rows if not row.reason]
    compared, tails = dict[str, tuple[Compared, ...]](), dict[str, tuple[Tail, ...]]()
    if reference_from is None and racing:
        observer.stage(f"timing {', '.join(file.name for file in racing)} against {first.name}")
        precision = EFFORTS["default"].precision_seconds
        racer = Racer(runner, plan, seed, views_of(timed, counts), observer, precision_seconds=precision)
        raced = _raced(racer, first, racing)
        compared = {file: one for file, one in raced.items() if not isinstance(one, str)}
        rows = [Row(row.file, reason=why) if isinstance(why := raced.get(row.file), str) else row for row in rows]
        if compared:
            if not runner.starts_processes:
                observer.stage("timing single inferences")
            tails = dict(zip([str(first), *compared], racer.tails([first, *map(Path, compared)]), strict=False))
    done = []
    for at, count in enumerate(counts):
        for row in rows:
            if row.file in compared:
                one = compared[row.file][at]
                parts = [
                    Part(workload.name, workload.share, 1e3 * part.a_seconds, 1e3 * part.b_seconds, part.ratio)
                    for workload, part in zip(timed, one.by_workload, strict=False)
                ]
                first_ms, ms = 1e3 * one.a_seconds, 1e3 * one.b_seconds
                row = replace(row, first_ms=first_ms, ms=ms, ratio=one.ratio, workloads=tuple(parts))
                if row.file in tails:
                    row = replace(row, first_percentiles_ms=tails[str(first)][at], percentiles_ms=tails[row.file][at])
            done.append(replace(row, threads=count if len(counts) > 1 else None))
    return done


def _raced(racer: Racer, first: Path, others: Sequence[Path]) -> dict[str, tuple[Compared, ...] | str]:
    """How each file compares with the first, or why it does not run; if they fail together, each runs alone."""
    try:
        race = racer.race([first, *others], [(0, 1 + at) for at in range(len(others))], "compare")
    except EngineRefused as refused:
        if len(others) == 1:
            return {str(others[0]): str(refused)}
        return dict(ChainMap(*(_raced(racer, first, [other]) for other in others)))
    return {str(other): race.compared(0, 1 + at) for at, other in enumerate(others)}


def _ran(
    runner: Runner, file: Path, samples: Sequence[Sample], metric: Metric | None, first: Path
) -> tuple[Outputs, Score | None]:
    """The outputs and the metric of one build of a file. Without labels, outputs of `first` serve as labels."""
    with ExitStack() as stack:
        handle = stack.enter_context(runner.loaded(file))
        outputs = runner.outputs(handle, samples)
        if metric is None:
            return outputs, None
        with rewording(f"{option_of(metric)} fails on {first}", BadOption) if file == first else nullcontext():
            return outputs, measure(metric, runner, handle, lambda: stack.enter_context(runner.loaded(first)))


def _judged(row: Row, reference: Outputs, outputs: Outputs, scores: Scores) -> Row:
    """The row with how close a file's outputs are to those of the first one, or why they cannot be compared."""
    if outputs[0].keys() != reference[0].keys():
        return replace(row, unlike="they have other names")
    if count_of_other_shapes(reference, outputs) == len(reference):
        return replace(row, unlike="on all samples they have other shapes")
    if not is_finite([*reference, *outputs]):
        return replace(row, unlike=NOT_FINITE.reason)
    exact = accuracy(reference, outputs, scores)
    return replace(row, sqnr_db=exact.sqnr_db, accuracy=exact)


TAGS: Mapping[Outcome, str] = {"undecided": "skipped", "missed": "failure", "failed": "error"}
"""JUnit's elements for outcomes."""


BEGINNING = "<!-- made by qdqtune -->"
"""First line of Markdown, by which the action finds its comment on a pull request."""


def junit(gated: Sequence[Gated]) -> str:
    """The outcomes as JUnit XML: a test case for each limit of each file; undecided ones count as skipped."""
    found = Counter(one.outcome for one in gated)
    told = {"tests": len(gated), "skipped": found["undecided"], "failures": found["missed"], "errors": found["failed"]}
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "qdqtune", **{n: str(k) for n, k in told.items()}})
    for one in gated:
        case = ElementTree.SubElement(suite, "testcase", classname=escaped(one.file), name=one.limit)
        if one.outcome in TAGS:
            ElementTree.SubElement(case, TAGS[one.outcome], message=escaped(one.told))
        else:
            ElementTree.SubElement(case, "system-out").text = escaped(one.told)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "unicode", xml_declaration=True) + "\n"


def markdown(told: str, table: Table | None, gated: Sequence[Gated], notes: Sequence[str] = ()) -> str:
    lines = [BEGINNING, f"**qdqtune:** {plain(told)}", "", *([] if table is None else table.markdown())]
    lines += [f"- {plain(text)}" for text in (*(one.in_words for one in gated), *(f"note: {n}" for n in notes))]
    return "\n".join(lines).rstrip() + "\n"
