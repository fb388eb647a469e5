"""The loop: propose, measure, accept, and at the end prove. Every mode runs through here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, BaselineFailed, writing
from qdqtune.measurement.limits import Limits, verdict, wins
from qdqtune.measurement.metric import load_evaluation
from qdqtune.measurement.timing import Plan, Ratio, judge
from qdqtune.placement.insertion import Inserter
from qdqtune.search import Seeded, Strategy, best_of
from qdqtune.search.costs.explanation import UnitPrice, explain, record
from qdqtune.search.costs.guess import guesses
from qdqtune.search.costs.noise import Noise
from qdqtune.search.cut import CutSearch
from qdqtune.search.latency import GroupedSearch
from qdqtune.search.region import QUIETER, RegionSearch
from qdqtune.search.regions import cache
from qdqtune.search.subgraph import narrowed
from qdqtune.tuning import records
from qdqtune.tuning.bench import Bench
from qdqtune.tuning.noise import foresee
from qdqtune.tuning.observer import Observer, Silent, State
from qdqtune.tuning.proof import BASELINE, CANDIDATES, FINAL, prove
from qdqtune.tuning.records import RAW, REGION_MODELS, UNITS, summary_of, write_records, write_region_models
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subgraphs import prepare, verdicts
from qdqtune.tuning.subgraphs.verdicts import GroupVerdict
from qdqtune.tuning.subject import Subject, calibrated, fingerprint, open_subject
from qdqtune.types import Failure, Placement, Trial


@dataclass(frozen=True)
class Result:
    """What came out: the placement that ships (empty without an improvement), the summary, and every trial.

    `ratio` is final to baseline on the shipped files; None where nothing better was found. `shipped` says what
    optimized_final.onnx is: the tuned model, the baseline, or a copy of the user's file.
    """

    shipped: str
    placement: Placement
    ratio: Ratio | None
    summary: Mapping[str, Any]
    history: tuple[Trial, ...]
    notes: tuple[str, ...]
    units: tuple[UnitPrice, ...] = ()
    """What cut mode knows about each unit, the largest first; empty in other modes."""
    groups: tuple[GroupVerdict, ...] = ()
    """What became of each group in subgraph mode, the largest first; empty in other modes."""

    @property
    def improved(self) -> bool:
        """Whether the shipped model is faster than the baseline, beyond noise."""
        return self.shipped == "tuned"

    @property
    def unmet(self) -> bool:
        """Whether candidates were faster, but none of them holds the limits on accuracy."""
        return self.summary["constraint_met"] is False


@dataclass(frozen=True)
class Estimate:
    """What a run would do (`--dry-run`). Times in seconds; latency of the float model."""

    regions: int
    patterns: int
    builds: int
    latency: float
    seconds: float


def tune(settings: Settings, observer: Observer | None = None) -> Result:
    """Find the fastest placement for a model on an engine, and write it to the output folder.

    Stop it at any time: the same call goes on where it was.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
        KeyboardInterrupt: everything measured so far is in the state file.
    """
    observer = observer or Silent()
    started = time.monotonic()
    folder = _folder(settings)
    evaluation = None if settings.evaluate is None else load_evaluation(settings.evaluate)
    with Runner(settings.engine, time_limit_s=settings.time_limit, log_dir=folder / "logs") as runner:
        observer.stage(f"reading {settings.model.name}")
        subject = open_subject(settings, runner)
        with Store(
            settings.state, fingerprint(settings, subject, runner.describe()), restart=settings.restart
        ) as store:
            subject = calibrated(subject, settings, store, observer)
            runner.feed(subject.feed)
            inserter = Inserter(subject.model, subject.ranges, subject.numbers)
            with Bench(
                runner, inserter, store, folder / CANDIDATES, settings.plan, subject.accuracy, settings.seed,
                limits=settings.limits, evaluation=evaluation,
                check_wins=settings.checks_wins,
            ) as bench:  # fmt: skip
                observer.stage("measuring the float model")
                limits = _limits(settings, bench, observer)
                profiled, begun = None, time.monotonic()
                if settings.mode == "subgraph":
                    profiled = prepare.profile(settings, subject, bench, store, observer)
                    observer = profiled.observer
                    bench.write_whole(profiled.search.raw, folder / RAW)
                noise = foresee(subject, limits, store, observer) if limits.are_set else None
                observer.stage("searching")
                strategy = narrowed(profiled.search, noise) if profiled else _strategy(settings, subject, bench, noise)
                history = _search(strategy, bench, settings, limits, observer, time.monotonic() - begun)
                write_region_models(history, subject, bench, folder / REGION_MODELS)
                observer.stage("proving the result on fresh builds")
                proof = prove(history, bench, settings, folder)
                final = proof.placement
                write_records(settings, subject, final, proof, history, folder)
                summary = summary_of(settings, subject, runner, bench, history, proof, final)
                after = bench.metric(final) if evaluation and final.edges else limits.before
                summary |= limits.outcome(history, settings.plan, after)
                units = explain(strategy.costs(history), final) if isinstance(strategy, CutSearch) else ()
                groups = verdicts.verdicts(profiled, history, final) if profiled else ()
                if profiled:
                    summary |= profiled.summary() | {"groups": verdicts.record(groups)}
                summary["seconds"] = round(time.monotonic() - started, 3)
    records.write_json(folder / "summary.json", summary)
    if units:
        records.write_json(folder / UNITS, {"units": record(units)})
    return Result(proof.shipped, final, proof.ratio if final.edges else None, summary, tuple(history),
                  (*subject.notes, *(profiled.notes if profiled else ()), *proof.notes), units, groups)  # fmt: skip


def estimate(settings: Settings, observer: Observer | None = None) -> Estimate:
    """What `tune` would do, from one build of the float model. Calibrates nothing and leaves no state."""
    observer = observer or Silent()
    folder = _folder(settings)
    with Runner(settings.engine, time_limit_s=settings.time_limit, log_dir=folder / "logs") as runner:
        observer.stage(f"reading {settings.model.name}")
        subject = open_subject(settings, runner)
        runner.feed(subject.feed)
        observer.stage("measuring the float model")
        handle = runner.load(settings.model, "estimate")
        if isinstance(handle, Failure):
            raise BaselineFailed(f"the engine cannot run the float model: {handle.reason}")
        measured = runner.rounds(handle, handle, 2, seed=0, first_round=0, slot_seconds=0.0, warmup=1)
        if isinstance(measured, Failure):
            raise BaselineFailed(f"the engine cannot run the float model: {measured.reason}")
    latency = float(np.median(measured.a))
    slot = max(latency, settings.plan.slot_seconds)
    schemes = len(subject.patterns) * settings.config.schemes_per_region
    trials = min(settings.search_builds, schemes + 5)
    per_trial = handle.build_seconds + 4 * slot * (settings.plan.looks[0] + settings.plan.warmup)
    proof = 4 * (2 * handle.build_seconds + 4 * slot * settings.proof[0])
    seconds = trials * per_trial * 1.3 + proof  # a third of the candidates takes longer to decide, or is checked again
    return Estimate(subject.region_count, len(subject.patterns), trials + 1, latency, seconds)


def _limits(settings: Settings, bench: Bench, observer: Observer) -> Limits:
    """The limits on accuracy, with the metric of the float model."""
    outputs = bench.reference()[0].values()
    if settings.min_sqnr is not None and not any(a.dtype.kind == "f" for a in outputs):
        raise BadOption("--min-sqnr is about float outputs, and the model has none: use --evaluate and --max-drop")
    if settings.evaluate is None:
        return settings.limits
    observer.stage(f"evaluating the float model with {settings.evaluate}")
    before = bench.metric(Placement())
    if isinstance(before, Failure):
        raise BaselineFailed(f"--evaluate {settings.evaluate} does not get along with the float model: {before.reason}")
    return replace(settings.limits, before=before)


def _strategy(settings: Settings, subject: Subject, bench: Bench, noise: Noise | None) -> Strategy:
    within = guesses(subject.shaped, subject.possible, noise)
    suggestions, first = subject.suggestions(), subject.foremost()
    layers = bench.float_layers() if settings.mode == "cut" or settings.seed_builds > 0 else ()
    is_priced = any(layer.time_ms for layer in layers)
    spares = {name: p for name, p in suggestions.items() if name not in first}
    by_cut = CutSearch(subject.shaped, subject.possible, layers, first, settings.plan, noise, spares)
    if settings.mode == "cut":
        guessed = {} if noise is None else {QUIETER: within(noise.levels(())[0])}
        return by_cut if is_priced else GroupedSearch(subject.shaped, subject.possible, suggestions | guessed)
    by_region = RegionSearch(
        model=subject.shaped,
        patterns=subject.patterns,
        possible=subject.possible,
        seeds=suggestions,
        cached=cache.read_cache(settings.pattern_cache) if settings.pattern_cache else {},
        config=settings.config,
        plan=settings.plan,
        seed=settings.seed,
        noise=noise,
        within=within,
    )
    return Seeded(by_cut, by_region, settings.seed_builds) if is_priced else by_region


def _search(
    strategy: Strategy, bench: Bench, settings: Settings, limits: Limits, observer: Observer, used: float = 0.0
) -> list[Trial]:
    """Trials until the strategy has no more ideas, or a budget is spent, `used` seconds of it before."""
    history: list[Trial] = []
    started = time.monotonic()

    def left() -> float | None:
        return None if settings.time_budget is None else settings.time_budget - used - (time.monotonic() - started)

    def spent(*more: Trial) -> bool:
        remaining = left()
        builds = sum(t.builds for t in (*history, *more))
        return builds + settings.trial_builds > settings.search_builds or (remaining is not None and remaining <= 0)

    while not spent():
        batch = strategy.propose(history)
        if not batch:
            break
        against = best_of(history)
        trials: list[Trial] = []
        for proposal in batch:
            if spent(*trials):
                break
            trial, replayed = bench.measure(len(history) + len(trials) + 1, proposal, against)
            trials.append(limits.judged(trial, trials, settings.plan, bench.metric))
            state = _state(history, trials, settings, time.monotonic() - started, left(), replayed)
            observer.trial(trials[-1], verdict(trials[-1], settings.plan), state)
        judged = _accepted(trials, settings.plan)
        history += judged
        bench.keep_only(best_of(history))
    return history


def _accepted(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """The trials of one batch, the fastest of those that won marked as accepted."""
    won = [(found.median, -t.number) for t in trials if wins(t, plan) and (found := judge(t, plan))]
    chosen = -min(won)[1] if won else None
    return [replace(t, accepted=t.number == chosen) for t in trials]


def _state(
    history: Sequence[Trial],
    trials: Sequence[Trial],
    settings: Settings,
    seconds: float,
    left: float | None,
    replayed: bool,
) -> State:
    done = [*history, *_accepted(trials, settings.plan)]
    ratios = [found.median for t in done if t.accepted and (found := judge(t, settings.plan))]
    builds = sum(t.builds for t in done)
    pace = seconds / builds * (settings.search_builds - builds)
    return State(builds, settings.search_builds, float(np.prod(ratios)), best_of(done), seconds,
                 pace if left is None else min(pace, left), replayed)  # fmt: skip


def _folder(settings: Settings) -> Path:
    folder = settings.output_dir
    if settings.model.resolve() in {(folder / name).resolve() for name in (BASELINE, FINAL, RAW)}:
        raise BadOption(f"{settings.model} would be overwritten: choose another --output-dir")
    with writing(f"to {folder}"):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder
