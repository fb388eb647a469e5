"""A run: what all its stages share (engines, limits, how many candidates at a time), and its budget of builds and time,
which is planned from the end: writing the result, the proof, the search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from qdqtune.engines.execution import Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.options import on_device
from qdqtune.engines.pool import WorkerPool, allocate_workers
from qdqtune.engines.runner import Runner, check_same_kind
from qdqtune.errors import BadOption, BaselineFailed, EngineRefused, rewording, writing
from qdqtune.graph.loading import files_of, nbytes
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.numerics.metrics import Evaluation, Labelled, Metric, load_evaluation, measure, open_metric, option_of
from qdqtune.numerics.scores import can_tell, check_asked, copies_in, doubt, samples_to_tell
from qdqtune.numerics.simulation import Simulation
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.rule_costs import RuleCosts
from qdqtune.search.costs.units import FormatShares
from qdqtune.search.front import MAX_POINTS
from qdqtune.system.checks import Stamps
from qdqtune.system.writing import Scratch
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import BLOCK_LOOKS, FEW_BUILDS, FEWEST_BUILDS, USUAL_BUILDS, Plan, clear_ratio, least_rounds
from qdqtune.tuning.bench import CANNOT_RUN, Bench, ByRule, Candidates, Conditions, TrialWorker, metric_key
from qdqtune.tuning.contexts import at_each, views_of
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.folder import LOGS, OutputFolder
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.shipping import LATE, SLOWER
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import CALIBRATION_SHARE, Subject, calibrated, fingerprint_of, open_subject
from qdqtune.tuning.weight_format_times import format_shares
from qdqtune.types import Measurement, Placement, Trial

PROOF_SHARE = 0.2
"""Share of a time budget that the first look of a proof may take. Chosen, not measured."""

FRONT_SHARE = 0.5
"""The same for the proof of a front. Chosen, not measured."""

FINISH_SHARE, MOST_FINISH_SECONDS = 0.08, 3.0
"""Share of a time budget for writing the result and its report, and its most seconds. Chosen, not measured."""

FINISH_SECONDS_A_BYTE = 6e-9
"""Further seconds per byte of the model for writing, reading and hashing its files. Measured with BERT-base."""

LEAST_ROUNDS = least_rounds(Plan.error, 1)
"""Rounds that a comparison with a single look needs to decide anything."""

GRACE_SHARE, OVER_SHARE = 0.05, 0.02
"""Shares of a time budget: by how much a proof may be expected to end late if it could not begin otherwise; and how
late it may then really end. Chosen, not measured."""

SLACK = 1.25
"""Factor on the expected seconds of candidates, so that the proof keeps its time. Chosen, not measured."""

LEARNING = 3
"""A layer report of float is only made if there is time for so many candidates. Chosen, not measured."""

SPARE = 2.0
"""Users are told if a search ends with this multiple of the proof's time left over. Chosen, not measured."""

FURTHER_SHARE = 0.25
"""Share of a time budget for the proof's further blocks of builds, if they may be needed. Chosen, not measured."""

STALE = 4
"""After so many candidates in a row without a better one, a further block in the proof is preferred to further
candidates. Chosen, not measured."""

PLANNED_BUILDS = 12
"""Builds of each file for which the proof has time. Chosen, not measured."""

TOO_SHORT = f"{LATE} is too short"
"""The beginning of notes on what a time budget left out: `tune` repeats them where nothing was proven."""

HOPED_RATIO = 0.8
"""Assumed latency of a finalist relative to float, before one is known. Chosen, not measured."""


@dataclass(frozen=True)
class Budget:
    """What a search and its proof may spend: `builds` of candidates, and time until `ends` (by `time.monotonic`; None
    without a time budget). The proof may be expected to end `grace` seconds late if it could not begin otherwise.

    Measuring a candidate as fast as float takes `candidate` seconds at least, `brief` with few rounds and no layer
    report. `proof` are the looks of the proof, in rounds. There each file has `copies` builds in a block; `file_builds`
    and `file_rounds` are the seconds of one build, and of a file's part of the first look; `opponents` files race
    against the finalists, of which a front has up to `points`. The run may take `whole` seconds.
    """

    builds: int
    proof: tuple[int, ...]
    ends: float | None
    candidate: float
    opponents: int
    points: int
    grace: float
    brief: float = 0.0
    file_builds: float = 0.0
    file_rounds: float = 0.0
    copies: int = USUAL_BUILDS
    whole: float = 0.0

    @staticmethod
    def of(settings: Settings, bench: Bench, ends: float | None, *, has_other_float: bool) -> Budget:
        """The budget of a run whose search begins now, and which must end at `ends`. `has_other_float`: the float model
        differs from the user's file, which then takes part in the proof too."""
        total = settings.time_budget
        whole = total or 0.0
        finish = min(FINISH_SHARE * whole, MOST_FINISH_SECONDS) + FINISH_SECONDS_A_BYTE * bench.model_bytes
        budget = Budget(
            builds=settings.search_builds,
            proof=settings.proof,
            ends=None if ends is None else ends - finish,
            candidate=bench.trial_seconds,
            opponents=0,
            points=0,
            grace=min(GRACE_SHARE * whole, finish + OVER_SHARE * whole),
            whole=whole,
        )
        if not settings.is_timed:
            return budget
        floats, plan, proof = bench.floats, settings.proof_plan, settings.proof
        each_round = plan.round_seconds(floats.turn_seconds, floats.start_seconds)
        warmup = plan.warmup_seconds(floats.turn_seconds, floats.start_seconds)
        opponents, points = 1 + has_other_float, MAX_POINTS if settings.front else 1
        copies = FEW_BUILDS if floats.start_seconds else USUAL_BUILDS
        if total is not None:
            left = (FRONT_SHARE if settings.front else PROOF_SHARE) * total
            least = floats.build_seconds + LEAST_ROUNDS * each_round + warmup
            if (opponents + 1) * copies * least > left:
                copies = FEWEST_BUILDS
            if settings.front:
                points = max(2, min(MAX_POINTS, int(left / (copies * least)) - opponents))
            most = int((left / ((opponents + points) * copies) - floats.build_seconds - warmup) / each_round)
            looks = tuple(n for n in settings.proof if n <= most)
            proof = looks or (max(LEAST_ROUNDS, min(most, settings.proof[0])),)
        return replace(
            budget,
            proof=proof,
            brief=bench.brief_seconds,
            file_builds=floats.build_seconds,
            file_rounds=proof[0] * each_round + warmup,
            opponents=opponents,
            points=points,
            copies=copies,
        )

    def proof_seconds(self, finalists: int, ratio: float = HOPED_RATIO) -> float:
        """Seconds until a proof's first look with so many finalists, whose latency relative to float is `ratio`."""
        slow = self.opponents + ratio * finalists
        return self.copies * ((self.opponents + finalists) * self.file_builds + slow * self.file_rounds)

    @property
    def brief_and_proof(self) -> float:
        """Seconds of a candidate with few rounds, and of a proof with one build per file, which only a large gain
        passes."""
        one = FEWEST_BUILDS
        return self.brief + self.in_haste.proof_seconds(1, clear_ratio(one, len(BLOCK_LOOKS), Plan.error))

    def blocks(self, ratio: float) -> int:
        """How many blocks of builds prove a latency of `ratio` relative to float, even if builds vary as much as
        expected at most; the most that are planned if none do."""
        looks = self.planned_looks
        return next((n for n in looks if ratio < clear_ratio(n * self.copies, len(BLOCK_LOOKS), Plan.error)), looks[-1])

    @property
    def planned_looks(self) -> tuple[int, ...]:
        """The numbers of blocks that the budget plans for; more are hardly ever needed."""
        return tuple(n for n in BLOCK_LOOKS if n * self.copies <= PLANNED_BUILDS)

    @property
    def further(self) -> float:
        """Seconds that further blocks of the proof may take."""
        return FURTHER_SHARE * self.whole

    def reserve(self, ratio: float, stale: int = 0) -> float:
        """Seconds that the proof needs beyond those that `deadline` keeps for it. `ratio` is the latency of the best
        candidate relative to float, 1 without one; `stale` counts the candidates in a row without a better one.

        With a best candidate: a small gain takes more blocks of builds to prove, a large one fewer (then negative);
        from `STALE` on, time for one more block is kept. Without one: negative, since one that comes late gets the
        shortest proof; 0 if a rewritten float model may ship. Never negative for a front.
        """
        if self.ends is None:
            return 0.0
        if ratio >= 1:
            is_alone = self.points == self.opponents == 1
            return min(0.0, self.in_haste.proof_seconds(1) - self.proof_seconds(1)) if is_alone else 0.0
        each, needed, looks = self.proof_seconds(self.points, ratio), self.blocks(ratio), self.planned_looks
        if stale >= STALE:
            needed = next((n for n in looks if n > needed), needed)
        able = [n for n in looks if n <= needed and (n == 1 or (n - 1) * each <= self.further)]
        longer = max(able) * each - self.proof_seconds(self.points)
        return longer if self.points == 1 else max(0.0, longer)

    @property
    def deadline(self) -> float | None:
        """The time at which the search must end, so that the proof ends in time."""
        return None if self.ends is None else self.ends - self.proof_seconds(self.points)

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def can_learn(self) -> bool:
        """Whether there is time for enough candidates to make use of layer reports."""
        return self.seconds_left is None or self.seconds_left >= LEARNING * SLACK * self.candidate

    def lacks(self, seconds: float) -> bool:
        """Whether work of so many seconds would end too late for the run."""
        return self.ends is not None and time.monotonic() + seconds > self.ends

    def slowed(self, by: float) -> Budget:
        if by == 1:
            return self
        each = {name: by * getattr(self, name) for name in ("candidate", "brief", "file_builds", "file_rounds")}
        return replace(self, **each)

    @property
    def in_haste(self) -> Budget:
        """This budget with the fewest builds in the proof that can decide anything, for a search that ended late."""
        return replace(self, copies=FEWEST_BUILDS)

    def provable(self, finalists: int, ratio: float = HOPED_RATIO) -> int:
        """How many finalists, with latency `ratio` relative to float, can be proven together in time: several only if
        there is time for all blocks that one of them may need; points of a front with one block."""
        blocks = SLACK * self.blocks(ratio) if self.points == 1 else 1.0
        while finalists > 1 and self.lacks(blocks * self.proof_seconds(finalists, ratio) - self.grace):
            finalists -= 1
        return 0 if finalists and self.lacks(self.proof_seconds(finalists, ratio) - self.grace) else finalists

    def room(self, trials: Sequence[Trial], pace: float | None = None, reserve: float = 0.0) -> int:
        """How many more candidates can be measured; `pace` is the seconds of one so far, `reserve` the seconds to keep
        in addition to the usual proof."""
        left = max(0, self.builds - len(trials))
        if self.seconds_left is None:
            return left
        each = SLACK * (self.candidate if pace is None else pace)
        return max(0, min(left, int((self.seconds_left - reserve) / each))) if each else left

    def is_brief(self, trials: Sequence[Trial]) -> bool:
        """Whether there is only time for one candidate, which goes to the proof after few rounds."""
        if trials or self.room(()) or not self.builds:
            return False
        return not self.lacks(self.brief_and_proof - self.grace)

    def shortfall(self, trials: Sequence[Trial], pace: float | None = None, reserve: float = 0.0) -> str | None:
        """A message if time ended a search that had builds left, or if much time is left. Call it after the search."""
        if not trials:
            if not self.builds or self.room(()) or self.is_brief(()):
                return None
            more = self.brief_and_proof - self.grace + time.monotonic() - (self.ends or 0.0)
            # Of the further seconds ranges, biases and the result take their shares, too.
            least = ceil(self.whole + more / ((1 - CALIBRATION_SHARE) ** 2 * (1 - FINISH_SHARE)))
            return f"{TOO_SHORT} for this model: give at least {least} s"
        left, spent = self.room(trials, pace, reserve), 1 + len(trials)
        if len(trials) < self.builds and not left:
            return f"{LATE} has ended the search after {spent} of {1 + self.builds} builds"
        if self.seconds_left is None or self.seconds_left < max(SPARE * self.proof_seconds(1), self.further):
            return None
        why = "more `builds` would use it" if len(trials) >= self.builds else "nothing more is predicted to gain"
        return f"the search ended after {spent} builds with much of `time_budget` to spare: {why}"


FIRST, LESSONS = 3, 2
"""Builds of the first batch, with which every fusion group is measured; and least number of later batches, in a search
that learns from each batch, so that many workers do not spend all builds at once. Measured by benchmarks/batches.py:
with two, models are at most 0.4 % slower than with one build at a time, with one up to 4 %."""

GLANCE_ROUNDS, GLANCE_SHARE = 3, 0.05
"""To look whether one thread is faster: rounds of at least four inferences, and the most of the remaining time budget
that they may take. Chosen, not measured."""

CLEARLY_LESS = 0.9
"""Users are told if one thread takes at most this share of the time at all threads. Chosen, not measured."""

DROP = 0.01
"""Default of `max_drop`: by which share the user's metric may fall. Chosen, not measured."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run before anything is measured: its settings, the model that was read, and an engine that was started.

    `given` are the user's model files as they were when the run began. `execution` has the time limits. Candidates'
    files share `constants`. `runner` and `others` measure, each on a device of its own.
    """

    settings: Settings
    output: OutputFolder
    given: Stamps
    evaluation: Metric | None
    subject: Subject
    runner: Runner
    store: Store
    observer: Observer
    execution: Execution
    constants: ConstantFile
    others: tuple[Runner, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run(Ready):
    """A run whose model is calibrated and whose float model is measured: `limits` has the float model's metric. A
    search proposes `width` candidates at a time, to keep all devices busy, or `learning_width` if it learns from
    each."""

    candidates: Candidates
    bench: Bench
    simulation: Simulation
    limits: Limits
    budget: Budget
    racer: Racer
    width: int
    learning_width: int

    @cached_property
    def format_shares(self) -> FormatShares:
        """The weight formats that each weight may have, with their relative time; measured at the first use."""
        if not self.budget.can_learn:
            return {}
        return format_shares(self.subject, self.settings, self.runner, self.store, self.bench.layers)

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """For each of several numbers of threads, the weights of all workloads in it; empty for a single number."""
        views = self.racer.views
        return tuple(view.shares for view in views) if len(views) > 1 else ()

    def slower(self, history: Sequence[Trial]) -> frozenset[Placement]:
        """The placements that seem slower than float, by more than `SLOWER`, at one of several numbers of threads."""
        ratios = {Placement(): np.ones(len(self.shares))}  # to float, at each number
        for trial in history if self.shares else ():
            if isinstance(trial.result, Measurement) and trial.against in ratios:
                times = [np.median(np.divide(m.b, m.a)) for m in map(trial.result.mean, self.shares)]
                ratios[trial.placement] = ratios[trial.against] * times
        return frozenset(placement for placement, own in ratios.items() if own.max(initial=0.0) > SLOWER)


@contextmanager
def prepared(settings: Settings, observer: Observer, begun: float | None = None) -> Iterator[Ready]:
    """Lock the output folder, start the engine, and read the model and the state file."""
    ends = settings.time_budget
    if ends is not None:
        ends += time.monotonic() if begun is None else begun
    execution = Execution(settings.time_limit, ends)
    with ExitStack() as stack:
        if settings.on is not None:
            observer.stage(f"connecting to {settings.on}")
        execution = on_device(settings.on, execution)
        output = stack.enter_context(OutputFolder(settings))
        with writing(f"to {output.path}"):
            folder = stack.enter_context(Scratch(output.path))
        constants = stack.enter_context(ConstantFile(folder / CONSTANTS))
        execution = replace(execution, constants=constants)
        function = None if settings.evaluate is None else load_evaluation(settings.evaluate, execution)
        engine, most_threads = settings.engine, max(count or 0 for count in settings.thread_counts)
        devices, start = stack.enter_context(
            allocate_workers(
                engine, settings.workers, settings.cores_per_worker, settings.ray, most_threads, execution.device
            )
        )
        # A memory budget for each, which no other thread frees.
        budgeted = [replace(execution, memory=MemoryBudget.for_model(nbytes(settings.model))) for _ in devices]
        runner, *others = [
            stack.enter_context(Runner(engine, log_dir=output.path / LOGS, execution=own, device=device, start=start))
            for device, own in zip(devices, budgeted, strict=True)
        ]
        observer.stage(f"reading {settings.model.name}")
        given = Stamps.of([*files_of(settings.model), *(files_of(b) if (b := settings.qdq_baseline) else [])])
        subject = open_subject(settings, runner, execution)
        check_asked(settings.scores, subject.shaped)  # refuses others before the work begins
        evaluation = function or open_metric(None, settings, subject.prepared)
        fingerprint = fingerprint_of(settings, subject, runner.describe())
        store = stack.enter_context(Store(settings.state, fingerprint, restart=settings.restart, given=given))
        yield Ready(
            settings=settings,
            output=output,
            given=given,
            evaluation=evaluation,
            subject=subject,
            runner=runner,
            store=store,
            observer=observer,
            execution=budgeted[0],
            constants=constants,
            others=tuple(others),
        )


def try_metric(ready: Ready) -> None:
    """Run the user's metric function on the float model, unless an earlier session did, so that one that fails is
    reported before the work begins. Its value is stored, as it may take long. Other metrics are not computed here."""
    metric, runner = ready.evaluation, ready.runner
    if not isinstance(metric, Evaluation) or ready.store.has(metric_key(metric)):
        return
    ready.observer.stage(f"evaluating the float model with {metric.source}")
    runner.feed(at_each(ready.subject.mix, ready.settings.thread_counts))
    file = ready.constants.write(ready.subject.model, "metric")
    with _asking(metric, ready.execution.ends):
        with rewording(*CANNOT_RUN):
            handle = runner.load(file, "metric")
        try:
            ready.store.put(metric_key(metric), measure(metric, runner, handle, lambda: handle))
        finally:
            runner.unload(handle)
            file.unlink()


@contextmanager
def _asking(metric: Metric, ends: float | None) -> Iterator[None]:
    """Turn EngineRefused, raised while the float model's metric is computed, into a user's error: about the time
    budget, if that ended at `ends`."""
    try:
        yield
    except EngineRefused as refused:
        is_cut = refused.failure.stage == "timeout" and ends is not None and time.monotonic() > ends
        with rewording(f"{option_of(metric)} fails on the float model", BadOption if is_cut else BaselineFailed):
            raise


@contextmanager
def open_run(ready: Ready) -> Iterator[Run]:
    """Calibrate the model, measure the float model, and plan the budget."""
    settings, runner, store, observer = ready.settings, ready.runner, ready.store, ready.observer
    with ExitStack() as stack:
        subject = calibrated(ready.subject, settings, store, observer, ready.execution.ends)
        if ready.others:
            observer.stage(f"starting {1 + len(ready.others)} workers")
            check_same_kind([runner, *ready.others])
        for one in (runner, *ready.others):
            one.feed(at_each(subject.mix, settings.thread_counts))
        # A search goes on with the rounds with which it began: others would leave undecided what is decided.
        settings = replace(settings, plan=store.get("plan", Plan) or store.put("plan", settings.plan))
        inserter = Inserter(subject.model, subject.ranges, subject.numbers)
        candidates = Candidates(inserter, ready.constants)
        simulation = stack.enter_context(
            Simulation(inserter, subject.accuracy, settings.engine.name, ready.execution, settings.scores)
        )
        conditions = Conditions(
            plan=settings.plan,
            samples=subject.accuracy,
            seed=settings.seed,
            limits=settings.limits,
            evaluation=ready.evaluation,
            scores=settings.scores,
            copies=copies_in(subject.model),
            model_bytes=nbytes(settings.model),
            by_rule=None if settings.is_timed else ByRule(rule_costs(settings, subject), lambda: simulation.reference),
        )
        workers = [TrialWorker(r, candidates, conditions, n) for n, r in enumerate((runner, *ready.others))]
        bench = Bench(WorkerPool(workers, observer.note), store, conditions)
        observer.stage("measuring the float model" if settings.is_timed else "running the float model on the CPU")
        has_other_float = bool(settings.from_qdq or settings.fix_inputs or subject.changes)
        budget = Budget.of(settings, bench, ready.execution.ends, has_other_float=has_other_float)
        settings = replace(settings, proof=budget.proof)
        note = _at_one_thread(ready, bench)
        if note is not None:
            subject = replace(subject, notes=(*subject.notes, note))
        bench.deadline = budget.deadline
        limits = _limits(settings, ready.evaluation, bench, budget, observer)
        # As many candidates at a time as there were workers when the search began: a resumed search proposes the same
        # with any number of workers. Fewer in a search that learns from each batch, if its builds would otherwise fill
        # fewer than `LESSONS` batches after the first.
        widths, count = store.get("batch", tuple[int, int]), len(workers)
        if widths is None and count > 1 and not store.values("trial:", Trial):
            builds = settings.search_builds if settings.mode == "cut" else settings.seed_builds
            often = count if settings.front else max(1, (builds - FIRST) // LESSONS)
            widths = store.put("batch", (count, min(count, often)))
        width, learning_width = widths or (1, 1)
        racer = Racer(
            runner,
            settings.proof_plan,
            settings.seed,
            views_of(subject.mix, settings.thread_counts),
            observer,
            store,
            lambda seconds: budget.lacks(seconds - budget.grace),
            settings.precision_seconds,
            budget.copies,
        )
        yield Run(
            **{**vars(ready), "settings": settings, "subject": subject},
            candidates=candidates,
            bench=bench,
            simulation=simulation,
            limits=limits,
            budget=budget,
            racer=racer,
            width=width,
            learning_width=learning_width,
        )


def _at_one_thread(ready: Ready, bench: Bench) -> str | None:
    """A note if the float model is faster at one thread than at the default number, by a few rounds. None if the user
    chose the threads, for large models, or if time is short."""
    settings, runner, count = ready.settings, ready.runner, ready.settings.thread_counts[0]
    is_usual = settings.threads is None and settings.engine.facts.is_threaded and settings.is_timed
    if count in (None, 1) or not is_usual or runner.memory is not None:
        return None
    floats = bench.floats
    takes = 2 * floats.build_seconds + 2 * GLANCE_ROUNDS * (1 + count) * floats.seconds
    if ready.execution.ends is not None and takes > GLANCE_SHARE * (ready.execution.ends - time.monotonic()):
        return None
    file, before, counts = ready.constants.write(ready.subject.model, "glance"), runner.mix, (count, 1)
    runner.feed(at_each(ready.subject.mix, counts))
    try:
        with runner.loaded(file, "glance") as handle:
            times = runner.timed(handle, GLANCE_ROUNDS, settings.plan.turn_seconds)
        seconds = np.array(times.seconds[0])  # [round, call]
    except EngineRefused:
        return None
    finally:
        runner.feed(before)
        file.unlink()
    usual, one = (1e3 * float(np.median(seconds @ view.shares)) for view in views_of(ready.subject.mix, counts))
    if one > CLEARLY_LESS * usual:
        return None
    return f"the float model takes {one:.3g} ms at one thread and {usual:.3g} ms at {count}: `threads` 1 tunes for one"


def rule_costs(settings: Settings, subject: Subject) -> RuleCosts:
    fullest = engine_rules.place(subject.shaped, subject.possible, "qnn", settings.quant_type)
    return RuleCosts(subject.shaped, fullest.placement, has_wide=subject.numbers.wide is not None)


def _limits(settings: Settings, evaluation: Metric | None, bench: Bench, budget: Budget, observer: Observer) -> Limits:
    """The accuracy limits, with the float model's metric. Raises BadOption if a limit cannot be met, or is about
    outputs that the model lacks."""
    floor, equal = (
        limit if isinstance(limit, float) else None for limit in (settings.min_sqnr, settings.min_agreement)
    )
    asked = Limits(floor, min_agreement=equal if settings.has_samples else None)  # random outputs show no scores
    asked.check(bench.floats.kinds, bench.floats.scores)
    limits = _about(bench, settings.limits)
    has_room = budget.room(()) or budget.is_brief(())
    if evaluation is None or not (has_room or settings.from_qdq):  # no candidate follows that may ship
        return limits
    if isinstance(evaluation, Labelled):
        observer.stage(f"evaluating the float model with {evaluation.source}")
    with _asking(evaluation, budget.ends):
        before = bench.metric(Placement())
    if doubtful := doubt(before):
        observer.note(doubtful)
    max_drop = DROP * abs(before.value) if settings.max_drop == "auto" else limits.max_drop
    if max_drop is not None and before.by_sample and not can_tell(before, max_drop):
        needed = samples_to_tell(before, max_drop)
        takes = "which no number of them can" if max_drop <= 0 else f"which takes at least {needed}"
        observer.note(
            f"{len(before.by_sample)} samples cannot show that a loss is within `max_drop` {max_drop:.2g}, {takes}: "
            "the loss on these samples decides, and a limit on the outputs as without a metric"
        )
        limits = replace(_about(bench, settings.floor), max_drop=max_drop)
    return replace(limits, before=before, max_drop=max_drop)


def _about(bench: Bench, limits: Limits) -> Limits:
    """The limits without those on kinds of outputs that the model lacks: floats, class scores, integers."""
    kinds = bench.floats.kinds
    limits = limits if "f" in kinds else replace(limits, min_sqnr=None, min_sqnr_worst=None)
    if all(kind == "f" for kind in kinds) and not bench.floats.scores.axis:
        limits = replace(limits, min_agreement=None)
    return limits
