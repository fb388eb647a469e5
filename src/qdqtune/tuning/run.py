"""A run: all that its stages work with, opened and closed in one place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from qdqtune.calibration.scales import Ranges
from qdqtune.engines.allocation import allocate_workers, check_same_kind
from qdqtune.engines.build_queue import BuildQueue, Urgency
from qdqtune.engines.devices import ANYWHERE, Device
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Runner, time_limit
from qdqtune.errors import BadOption, BaselineFailed, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import ConstantFile, one_constant_file
from qdqtune.numerics.metric import Evaluation, load_evaluation
from qdqtune.numerics.simulation import Simulation
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.units import Ways
from qdqtune.system.checks import Stamps
from qdqtune.system.writing import Scratch, temporary_folder
from qdqtune.timing.limits import Limits
from qdqtune.timing.pairing import FRESH, begin_pairs
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.budget import FRONT_SHARE, PROOF_SHARE, Budget
from qdqtune.tuning.candidates import Candidates
from qdqtune.tuning.fingerprint import fingerprint_of
from qdqtune.tuning.folder import LOGS, OutputFolder, restored_state
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.obstacles import check_files
from qdqtune.tuning.records import NO_REWRITES, BatchRecord, Found, TrialRecord
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import Subject, calibrated, open_subject
from qdqtune.tuning.trial_worker import Conditions, TrialWorker
from qdqtune.tuning.weight_formats import products_of, ways
from qdqtune.types import Failure, Placement

CANDIDATES = "candidates"

FIRST, LESSONS = 3, 3
"""Builds of a first batch, which prices every unit, and how often a search that learns from layers is to learn from a
batch behind that: eight workers would else spend all builds on what it knows from the first."""

DROP = 0.01
"""How far the user's metric may fall where nothing else is said, as a share of the float model's."""


@dataclass(frozen=True)
class Ready:
    """What was asked for, before anything is measured: nothing of it has run. `given` are the user's model files as
    they were when the run began; it has to end when `time.monotonic` is at `ends`, None without a time budget. `others`
    measure beside `runner`, each on a device of its own. `found` are the rewrites that were tried."""

    settings: Settings
    output: OutputFolder
    given: Stamps
    evaluation: Evaluation | None
    subject: Subject
    runner: Runner
    store: Store
    observer: Observer
    ends: float | None
    others: tuple[Runner, ...] = ()
    found: Found = NO_REWRITES


@dataclass(frozen=True, kw_only=True)
class Run(Ready):
    """The model calibrated, and what measures it. `limits` know the metric of the float model; `width` is how many
    candidates a search proposes at a time, so that all devices are busy, `learning_width` how many one that learns from
    their layers."""

    candidates: Candidates
    bench: Bench
    simulation: Simulation
    limits: Limits
    budget: Budget
    width: int = 1
    learning_width: int = 1

    @cached_property
    def ways(self) -> Ways:
        """The weight formats that weights may have; the engine is asked of them the first time."""
        if self.budget.is_late:
            return {}
        return ways(self.subject, self.settings, self.runner, self.store, self.bench.layers)


@contextmanager
def prepared(settings: Settings, observer: Observer) -> Iterator[Ready]:
    """Take the output folder, start the engine, and read the model and what an earlier run has measured of it.

    Raises:
        QdqtuneError: see `errors`.
    """
    ends = None if settings.time_budget is None else time.monotonic() + settings.time_budget
    with ExitStack() as stack:
        stack.enter_context(time_limit(settings.time_limit, ends))
        output = stack.enter_context(OutputFolder(settings))
        evaluation = None if settings.evaluate is None else load_evaluation(settings.evaluate)
        logs = output.path / LOGS
        most = max(count or 0 for count in settings.thread_counts)
        asked = settings.workers, settings.cores_per_worker, settings.ray, most
        allocation = stack.enter_context(allocate_workers(settings.engine, *asked))
        size = sum(file.stat().st_size for file in files_of(settings.model) if file.is_file())
        engine, start = settings.engine, allocation.start
        runners = [  # each with a budget of its own: one thread must not free what another one uses
            Runner(engine, log_dir=logs, device=device, start=start, memory=MemoryBudget.for_model(size))
            for device in allocation.devices
        ]
        runner, *others = map(stack.enter_context, runners)
        count = settings.engine.options.get("builds_aside")
        if isinstance(count, int) and runner.device == ANYWHERE and runner.memory is None:
            beside = [runner.elsewhere(settings.engine, Device(f"builder-{n + 1}")) for n in range(count)]
            builders = [stack.enter_context(one).compile for one in beside]
            queue = BuildQueue(stack.enter_context(temporary_folder()), builders, observer.note)
            runner.build_queue = stack.enter_context(closing(queue))
        observer.stage(f"reading {settings.model.name}")
        if (told := restored_state(settings)) is not None:
            observer.note(told)
        given = Stamps.of([*files_of(settings.model), *(files_of(b) if (b := settings.qdq_baseline) else [])])
        subject = open_subject(settings, runner)
        check_files(settings, subject.shaped)
        signed = fingerprint_of(settings, subject, runner.describe())
        store = stack.enter_context(Store(settings.state, signed, restart=settings.restart, given=given))
        yield Ready(settings, output, given, evaluation, subject, runner, store, observer, ends, tuple(others))


def _affordable_proof(
    settings: Settings, bench: Bench, ends: float | None, observer: Observer
) -> tuple[Settings, Budget]:
    """The budget of what was asked for; where nobody has named numbers of threads, of a proof at those of the search
    alone if one at the usual number as well would leave too little for the search."""
    budget, (own, *others) = Budget.of(settings, bench, ends), settings.thread_counts
    share = FRONT_SHARE if settings.front else PROOF_SHARE
    is_too_long = settings.time_budget is not None and budget.proof_seconds > share * settings.time_budget
    if own is None or not others or settings.deploy_threads is not None or not is_too_long:
        return settings, budget
    told = f"{others[0]} threads, as many as the engine takes by itself, as well"
    insisting = f"--deploy-threads {own},{others[0]} would insist"
    observer.note(f"--time-budget has no room to prove the result at {told}: {insisting}")
    settings = replace(settings, deploy_threads=(own,))
    return settings, Budget.of(settings, bench, ends)


@contextmanager
def written_once(ready: Ready) -> Iterator[ConstantFile]:
    """The constants of all that a run writes before it ships, in a folder for its candidates.

    Raises:
        OutputError: they cannot be written.
    """
    with ExitStack() as stack:
        with writing(f"to {ready.output.path}"):
            folder = stack.enter_context(Scratch(ready.output.path)) / CANDIDATES
            folder.mkdir()
        yield stack.enter_context(one_constant_file(folder))


@contextmanager
def open_run(ready: Ready, constants: ConstantFile) -> Iterator[Run]:
    """Calibrate the model, and measure it in float. Its candidates refer to `constants`.

    Raises:
        QdqtuneError: see `errors`; BadState if another version of qdqtune has made the candidates so far;
            BaselineFailed if the engine cannot run the float model.
    """
    settings, runner, store, observer = ready.settings, ready.runner, ready.store, ready.observer
    store.check_candidates()
    with ExitStack() as stack:
        constants.keep(ready.subject.model)
        if runner.build_queue.builders:  # the float model, and what the proof meets whatever is found, take no ranges
            inserter = Inserter(ready.subject.model, Ranges({}), ready.subject.numbers)
            runner.build_queue.add(Candidates(inserter, constants).file(Placement()), urgency=Urgency.NEXT)
            begin_pairs(runner, settings.model, () if settings.front else FRESH, Urgency.PROOF)
        subject = calibrated(ready.subject, settings, store, observer, ready.ends)
        if ready.others:
            observer.stage(f"starting {1 + len(ready.others)} workers")
            check_same_kind([runner, *ready.others])
        for one in (runner, *ready.others):
            one.feed(subject.mix)
        inserter = Inserter(subject.model, subject.ranges, subject.numbers, products_of(settings, subject))
        candidates = Candidates(inserter, constants)
        conditions = Conditions(
            settings.plan, subject.accuracy, settings.seed, settings.limits, ready.evaluation, settings.checks_wins
        )
        workers = [TrialWorker(r, candidates, conditions, n) for n, r in enumerate((runner, *ready.others))]
        bench = Bench(stack.enter_context(WorkerPool(workers, observer.note)), store, conditions)
        simulation = stack.enter_context(Simulation(inserter, subject.accuracy, settings.engine.name, runner.memory))
        observer.stage("measuring the float model")
        settings, budget = _affordable_proof(settings, bench, ready.ends, observer)
        bench.deadline = budget.deadline
        limits = _limits(settings, bench, budget, observer)
        settings = replace(settings, proof=budget.proof)
        known = {**vars(ready), "settings": settings, "subject": subject, "candidates": candidates, "bench": bench}
        width, learning = _widths(ready)
        yield Run(**known, simulation=simulation, limits=limits, budget=budget, width=width, learning_width=learning)


def _widths(ready: Ready) -> tuple[int, int]:
    """How many candidates a search proposes at a time: as many as there were workers when it began, so that it goes on
    as it began whatever number there is now. One that learns from each batch proposes fewer where it could not learn
    often enough from the builds that it has."""
    store, workers, settings = ready.store, 1 + len(ready.others), ready.settings
    record = store.get(BatchRecord)
    if record is None and workers > 1 and not any(store.of(TrialRecord)):
        builds = settings.search_builds if settings.mode == "cut" else settings.seed_builds
        often = workers if settings.front else max(1, (builds - FIRST) // LESSONS)
        record = store.put(BatchRecord(width=workers, learning=min(workers, often)))
    return (1, 1) if record is None else (record.width, record.learning)


def _limits(settings: Settings, bench: Bench, budget: Budget, observer: Observer) -> Limits:
    """The limits on accuracy, with the metric of the float model."""
    holds_floats = any(a.dtype.kind == "f" for a in bench.floats.outputs[0].values())
    if isinstance(settings.min_sqnr, float) and not holds_floats:
        raise BadOption("--min-sqnr is about float outputs, and the model has none: use --min-agreement or --evaluate")
    limits = settings.limits if holds_floats else replace(settings.limits, min_sqnr=None)
    if not budget.is_late:
        _insist_on_repeatability(limits, bench)
    if settings.evaluate is None or budget.is_late:
        return limits
    observer.stage(f"evaluating the float model with {settings.evaluate}")
    before = bench.metric(Placement())
    if isinstance(before, Failure):
        raise BaselineFailed(f"--evaluate {settings.evaluate} does not get along with the float model: {before.reason}")
    max_drop = DROP * abs(before) if settings.max_drop == "auto" else limits.max_drop
    return replace(limits, before=before, max_drop=max_drop)


def _insist_on_repeatability(limits: Limits, bench: Bench) -> None:
    """Refuse limits that the float model itself misses: it draws random numbers, or the engine sums in any order."""
    if not limits.are_set or limits.is_exact_enough(itself := bench.repeatability()):
        return
    reached = f"{itself.agreement:.1%} of its integers" if itself.sqnr_db is None else f"{itself.sqnr_db:.1f} dB"
    raise BadOption(
        f"the float model differs from itself: a second run of the same build repeats only {reached}, less than the "
        "limit on accuracy asks of a candidate. Take the randomness out of the model, or lower the limit "
        "(--min-sqnr none, --min-agreement none)"
    )
