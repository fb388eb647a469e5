"""`qdqtune compare`: times a user's files against the first of them, as the proof of a search does."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from qdqtune.calibration.inputs import fixed_inputs, input_specs, listed
from qdqtune.calibration.observe import Outputs
from qdqtune.calibration.options import DataOptions
from qdqtune.calibration.workloads import WorkloadsOption, workloads_option
from qdqtune.commands.gate import RUNS, Gated, GateOptions
from qdqtune.commands.inputs import execution_of
from qdqtune.commands.shown import Shown, Table
from qdqtune.commands.source import built_for, data_of, prepared_for, told_of_inputs
from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usual_threads
from qdqtune.engines.machine import is_simulated, simulated
from qdqtune.engines.options import EngineOptions, on_device, on_option
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import BadOption, EngineRefused, rewording
from qdqtune.explanation.formatting import counted, samples
from qdqtune.graph.loading import files_of, load
from qdqtune.graph.model import Model
from qdqtune.numerics.accuracy import NOT_FINITE, accuracy, closeness_cell, concern, is_finite, slice_cell
from qdqtune.numerics.metrics import ScoreOption
from qdqtune.numerics.scores import NO_SCORES, Scores, asked_outputs, equal_share, scores_of
from qdqtune.options import Int, MaybeText, ValuesByInput, assignments, in_range, option
from qdqtune.system.checks import content_digest
from qdqtune.timing.ratios import Plan, Ratio, Verdict
from qdqtune.tuning.contexts import at_each, busy, counts_of, views_of
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.tuning.options import warmup_option
from qdqtune.tuning.settings import EFFORTS
from qdqtune.tuning.shipping import Compared
from qdqtune.types import Accuracy, Mix, Sample, Workload

DEFAULT_ROUNDS = 24
"""Rounds of each pair of builds by default. Chosen, not measured."""


@dataclass(kw_only=True)
class MeasureOptions(GateOptions, ScoreOption, DataOptions):
    """How files are compared, and what they have to hold."""

    workloads: WorkloadsOption = workloads_option()
    fix_inputs: ValuesByInput = option(
        assignments("fixes nothing", numbers_only=True),
        None,
        "An input that tune made constant: files that still have it get this value. Repeatable.",
        "Model",
        flags="--fix-input",
        metavar="NAME=VALUE",
        is_repeated=True,
    )
    timing_runs: Int = option(in_range(12, make=int), DEFAULT_ROUNDS, "Rounds per pair of builds.", "Search")
    warmup_runs: Int = warmup_option()

    @property
    def plan(self) -> Plan:
        """The rounds of a comparison: one verdict, after `timing_runs` rounds."""
        return Plan((self.timing_runs,), warmup=self.warmup_runs)


@dataclass(kw_only=True)
class CompareOptions(EngineOptions, MeasureOptions):
    """The options of `compare`, besides its files."""

    takes_several_threads: ClassVar[bool] = True

    on: MaybeText = on_option()


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `compare`: a row for each file but the first, in their order, and notes for the user. Outputs were
    compared on `judged` samples, 0 if samples are random."""

    first: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    judged: int = 0
    is_held_out: bool = False
    gate: GateOptions = field(default_factory=GateOptions)

    @property
    def gated(self) -> tuple[Gated, ...]:
        """What became of each limit on each file."""
        return tuple(one for row in self.rows for one in row.gated(self.gate))

    @property
    def passes(self) -> bool:
        """Whether no limit is missed."""
        return all(one.passes for one in self.gated)

    @property
    def scores(self) -> Scores | None:
        """The scores of classes among the outputs of the first file; None where no outputs were compared."""
        return next((row.scores for row in self.rows if row.accuracy is not None), None)

    @property
    def ratio(self) -> Ratio | None:
        """Time of the second file to that of the first; None where it failed."""
        return self.rows[0].ratio

    @property
    def refusals(self) -> list[str]:
        """Why files cannot be compared, a sentence each."""
        return [f"{row.name} cannot be compared: {row.reason}" for row in self.rows if row.reason]

    def in_words(self) -> str:
        """Each file with its verdict."""
        told = [f"{row.name} {f'failed, {row.reason}' if row.reason else row.told}" for row in self.rows]
        return f"{'; '.join(told)} (against {self.first})"

    def table(self) -> Table:
        """Every file against the first; the row of a file that failed is empty. Without samples no SQNR is known."""
        cells = []
        for row in self.rows:
            share = equal_share(row.accuracy)
            sqnr = "" if row.accuracy is None else closeness_cell(row.sqnr_db, share)
            equal = "" if share is None else f"{share:.1%}"
            first, other = ("" if ms is None else f"{ms:.3f}" for ms in (row.first_ms, row.ms))
            cells.append((row.name, first, other, row.ratio.speedup if row.ratio else "", row.words, sqnr, equal))
            for part in row.workloads:
                times = f"{part.first_ms:.3f}", f"{part.ms:.3f}"
                cells.append((f"  {part.name}, {part.share:.0%} of the calls", *times, part.ratio.speedup, "", "", ""))
        columns = ("file", "first, ms", "ms", "speedup [interval]", "verdict", "SQNR, dB", "agreement")
        judged = self.judged if any(row.accuracy is not None for row in self.rows) else 0
        caption = [f"output SQNR over {samples(judged, self.is_held_out)}"] if judged else []
        worst = {row.file: slice_cell(row.accuracy) for row in self.rows}
        caption += [f"worst slice of {file}: {text}" for file, text in worst.items() if text]
        caption += [] if self.scores is None else [self.scores.told]
        for row in self.rows:
            if row.ms and row.first_ms:
                rates = f"{1e3 / row.ms:.4g}, the first file {1e3 / row.first_ms:.4g}"
                caption.append(f"inferences a second of {row.name}: {rates}")
        return Table(columns, cells, "\n".join(caption), f"first: {self.first}").filled

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
    """Time every other file against the first, in the same rounds on fresh builds of all. Where nothing else says which
    sizes inputs have, random ones have `shapes`.

    Raises:
        InputError: files, samples or options cannot be used, or not together.
        EngineFailure: the engine cannot build or run the first file.
    """
    execution, machine = on_device(options.on, execution_of(options))
    workloads = options.workloads
    usual = usual_threads() if machine is None else machine.physical_cores
    spec = built_for(options.spec(options.input_shapes, threads=usual), workloads)
    is_timed = not is_simulated(spec.name, machine)
    busy_note = busy(spec, machine)
    if options.fail_below is not None and not is_timed:
        raise BadOption(f"`fail_below` is about times: {simulated(spec.name, machine)}")
    data = data_of(options, execution, *files)
    if shapes and data.calibration_data is None and not data.workloads and not data.input_shapes:
        data = replace(data, input_shapes=shapes)
    fixed_in = [fixed_inputs(file, options.fix_inputs) for file in files]
    models = comparable(files, [{name: options.fix_inputs[name] for name in one} for one in fixed_in])
    asked_outputs(options.scores, models[0].outputs)  # refuses other names before the work begins
    prepared = prepared_for(models[0], spec, data, execution, fixed=options.fix_inputs)
    if options.needs_samples and not prepared.has_real_samples:
        raise BadOption("`min_sqnr` and `min_agreement` are about outputs on samples: give `calibration_data`")
    threads = options.threads or ()
    fixed = dict(ChainMap(*fixed_in))
    with temporary_runner(spec, prepared.execution) as runner, ExitStack() as stack:
        cpu: Runner | None = None
        if not is_timed:
            runner.describe()  # the engine may not be here, and without samples nothing else asks it
            cpu = stack.enter_context(temporary_runner(EngineSpec("onnxruntime"), prepared.execution))
        rows = compare_files(
            files,
            runner,
            [{**sample, **fixed} for sample in prepared.judging],
            options.plan,
            has_real_samples=prepared.has_real_samples,
            mix=tuple(replace(one, inputs={**one.inputs, **fixed}) for one in prepared.mix),
            counts=counts_of(spec, threads, machine=machine) if len(threads) > 1 else (None,),
            seed=options.seed,
            observer=observer,
            asked=options.scores,
            reference_from=cpu,
        )
    notes = told_of_inputs(options, prepared)
    warnings = {row.file: concern(row.accuracy) for row in rows if row.accuracy is not None}
    warnings |= {row.file: f"outputs were not compared: {row.unlike}" for row in rows if row.unlike}
    notes += [f"{file} against {files[0]}: {warning}" for file, warning in warnings.items() if warning]
    if machine is not None:
        notes.append(f"run {'and timed ' * is_timed}on {machine.where}")
    if busy_note is not None:
        notes.append(busy_note)
    if not is_timed:
        notes.append(f"{simulated(spec.name, machine)}: outputs are against {files[0]} on ONNX Runtime's CPU")
    judged = len(prepared.judging) if prepared.has_real_samples else 0
    return Comparison(str(files[0]), tuple(rows), tuple(notes), judged, prepared.is_held_out, options)


HIDDEN = frozenset({"is_same", "scores"})
"""Fields of a row that JSON leaves out."""


@dataclass(frozen=True)
class Part:
    """The comparison on one of several workloads: its share of all calls, median latencies in ms, ratio b/a."""

    name: str
    share: float
    first_ms: float
    ms: float
    ratio: Ratio


@dataclass(frozen=True)
class Row:
    """One file against the first: median latencies in ms, ratio b/a, and output SQNR against the first in dB.

    `reason` says why there is no ratio, `unlike` why outputs cannot be compared. `is_same`: both hold the same bytes,
    in their external data as well. `threads` is set if several numbers of threads were asked for; `workloads` has a
    part for each of several. `scores` are those in the outputs, None if inputs are random.
    """

    file: str
    first_ms: float | None = None
    ms: float | None = None
    ratio: Ratio | None = None
    sqnr_db: float | None = None
    reason: str = ""
    accuracy: Accuracy | None = None
    unlike: str = ""
    is_same: bool = False
    threads: int | None = None
    workloads: tuple[Part, ...] = ()
    scores: Scores | None = None

    @property
    def name(self) -> str:
        """The file, with the number of threads if several were compared."""
        return self.file if self.threads is None else f"{self.file}, {counted(self.threads, 'thread')}"

    @property
    def words(self) -> str:
        """The verdict in words; an undecided one with the largest difference that the interval allows."""
        if self.ratio is None or self.ratio.verdict != "undecided":
            return self.verdict or ("failed" if self.reason else "not timed")
        low, high = self.ratio.low, self.ratio.high
        within = "" if low is None or high is None else f" within {100 * max(high - 1, 1 - low):.0f} %"
        return "equal files" if self.is_same else f"no difference seen{within}"

    @property
    def told(self) -> str:
        """The words, and the speedup if there is one."""
        return f"{self.words}, {self.ratio.speedup}" if self.ratio else self.words

    @property
    def verdict(self) -> Verdict | None:
        """Faster or slower than the first file, if the interval says so."""
        return self.ratio.verdict if self.ratio else None

    def gated(self, gate: GateOptions) -> tuple[Gated, ...]:
        """What became of each limit."""
        if self.reason:
            return (Gated(self.name, RUNS, "failed", self.reason),)
        return (*gate.of_speed(self.name, self.ratio), *gate.of_outputs(self.name, self.accuracy, self.unlike))

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        fields = asdict(replace(self, scores=None)) | {"verdict": self.verdict}
        hidden = HIDDEN if self.workloads else HIDDEN | {"workloads"}
        return {name: value for name, value in fields.items() if name not in hidden}


def comparable(files: Sequence[Path], fixed: Sequence[Mapping[str, float | int | str]]) -> list[Model]:
    """The models in the files, with the inputs made constant that are `fixed` in each.

    Raises:
        BadModel: one of them cannot be read.
        BadOption: fewer than two files, or one that takes other inputs than the first.
    """
    if len(files) < 2:
        raise BadOption("compare needs at least two files")
    models = [load(file, fix_inputs=own) for file, own in zip(files, fixed, strict=True)]
    wanted, *others = map(input_specs, models)
    for file, specs in zip(files[1:], others, strict=True):
        known = {spec.name: spec for spec in specs}
        fits = known.keys() == {spec.name for spec in wanted}
        if not fits or any(known[w.name].dtype != w.dtype or not known[w.name].fits(w.shape) for w in wanted):
            told = f"{file} takes other inputs ({listed(specs)}) than {files[0]} ({listed(wanted)})"
            raise BadOption(f"{told}: `fix_inputs` names those that were made constant")
    return models


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
    reference_from: Runner | None = None,
) -> list[Row]:
    """Compare each other file with the first, at each number of threads in `counts`: all race on as many fresh builds
    as a verdict needs. They are timed on `mix`, by default on the first sample of `judging`. Outputs are compared on
    `judging` if `has_real_samples`, and best classes in those that are `asked` for, see `scores_of`. With
    `reference_from` the outputs of the first file come from there, and nothing is timed.

    Raises:
        BadOption: an output that is asked for holds no scores.
        EngineFailure: the engine cannot build or run the first file.
    """
    observer, first = observer or Silent(), files[0]
    observer.stage(f"running {first.name}")
    timed = mix or (Workload(judging[0]),)
    runner.feed(at_each(timed, counts))
    with rewording(f"{first} does not run, so there is nothing to compare with"):
        reference = (reference_from or runner).outputs_of(first, judging)
    scores = scores_of(reference, asked) if has_real_samples else None
    rows = []
    digest = content_digest(files_of(first))
    for file in files[1:]:
        observer.stage(f"running {file.name}")
        row = Row(str(file), is_same=digest == content_digest(files_of(file)), scores=scores)
        try:
            outputs = runner.outputs_of(file, judging if has_real_samples else judging[:1])
            rows.append(row if scores is None else _judged(row, reference, outputs, scores))
        except EngineRefused as refused:
            rows.append(Row(str(file), reason=str(refused)))
    racing = [Path(row.file) for row in rows if not row.reason]
    compared: dict[str, tuple[Compared, ...] | str] = {}
    if reference_from is None and racing:
        observer.stage(f"timing {', '.join(file.name for file in racing)} against {first.name}")
        precision = EFFORTS["default"].precision_seconds
        racer = Racer(runner, plan, seed, views_of(timed, counts), observer, precision_seconds=precision)
        compared = _raced(racer, first, racing)
    return [
        replace(_with_times(row, compared.get(row.file), at, timed), threads=count if len(counts) > 1 else None)
        for at, count in enumerate(counts)
        for row in rows
    ]


def _judged(row: Row, reference: Outputs, outputs: Outputs, scores: Scores) -> Row:
    """The row of a file with how close its outputs are to those of the first one, or why they cannot be compared."""
    if outputs[0].keys() != reference[0].keys():
        return replace(row, unlike="they have other names")
    if any(o[k].shape != r[k].shape for o, r in zip(outputs, reference, strict=True) for k in r):
        return replace(row, unlike="they have other shapes")
    if not is_finite([*reference, *outputs]):
        return replace(row, unlike=NOT_FINITE.reason)
    exact = accuracy(reference, outputs, scores)
    return replace(row, sqnr_db=exact.sqnr_db, accuracy=exact)


def _raced(racer: Racer, first: Path, others: Sequence[Path]) -> dict[str, tuple[Compared, ...] | str]:
    """What became of each file against the first, in each context, or why the engine failed on it. Where it fails in
    the race of several, each races alone: one of them is to blame."""
    try:
        race = racer.race([first, *others], [(0, 1 + at) for at in range(len(others))], "compare")
    except EngineRefused as refused:
        if len(others) == 1:
            return {str(others[0]): str(refused)}
        return dict(ChainMap(*(_raced(racer, first, [other]) for other in others)))
    return {str(other): race.compared(0, 1 + at) for at, other in enumerate(others)}


def _with_times(row: Row, compared: tuple[Compared, ...] | str | None, at: int, timed: Mix) -> Row:
    """The row with what the race has shown in context number `at`."""
    if compared is None:
        return row
    if isinstance(compared, str):
        return Row(row.file, reason=compared)
    one = compared[at]
    parts = tuple(
        Part(workload.name, workload.share, 1e3 * part.a_seconds, 1e3 * part.b_seconds, part.ratio)
        for workload, part in zip(timed, one.by_workload, strict=False)
    )
    first_ms, ms = 1e3 * one.a_seconds, 1e3 * one.b_seconds
    return replace(row, first_ms=first_ms, ms=ms, ratio=one.ratio, workloads=parts)
