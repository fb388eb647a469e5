"""Estimates how long a run would take (`--dry-run`), by building the float model once and timing it for two rounds."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from qdqtune.calibration.calibrate import calibrate
from qdqtune.engines.execution import Execution
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import on_device
from qdqtune.engines.runner import temporary_runner
from qdqtune.errors import BadOption, BaselineFailed, EngineRefused, rewording
from qdqtune.graph.operators import COMPUTE, CONTROL_FLOW
from qdqtune.numerics.fitting import inferences
from qdqtune.numerics.metrics import evaluate, load_evaluation, open_metric
from qdqtune.numerics.scores import check_asked
from qdqtune.timing.ratios import FEW_BUILDS, USUAL_BUILDS
from qdqtune.tuning.bench import profiled_runs, trial_seconds
from qdqtune.tuning.contexts import at_each
from qdqtune.tuning.folder import check_run
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.tuning.result import spent_without_pairs
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import FloatRecord, read_journal
from qdqtune.tuning.subject import CALIBRATION_SHARE, PAIRED, open_subject


@dataclass(frozen=True)
class Estimate:
    """The estimated duration of a run, and the float model's `latency`, in seconds; `notes` for the user."""

    regions: int
    patterns: int
    builds: int
    latency: float
    seconds: float
    notes: tuple[str, ...] = ()


def estimate(settings: Settings, observer: Observer | None = None) -> Estimate:
    """Estimate how long `tune` would take. Calibrates on at most three samples, and writes no state file."""
    if not settings.is_timed:
        untimed = simulated(settings.engine.name, settings.machine)
        raise BadOption(f"{untimed}, so no time can be estimated: `builds` and `time_budget` bound a run")
    observer = observer or Silent()
    execution = on_device(settings.on, Execution(settings.time_limit))
    function = None if settings.evaluate is None else load_evaluation(settings.evaluate, execution)
    check_run(settings)
    with temporary_runner(settings.engine, execution) as runner:
        observer.stage(f"reading {settings.model.name}")
        subject = open_subject(settings, runner, execution)
        check_asked(settings.scores, subject.shaped)
        open_metric(None, settings, subject.prepared)
        if settings.state.exists() and not settings.restart:
            read_journal(settings.state)  # as a run does at this point: it may be damaged
        runner.feed(at_each(subject.mix, settings.thread_counts))
        observer.stage("measuring the float model")
        with rewording("the engine cannot run the float model", BaselineFailed):
            handle = runner.load(settings.model, "estimate")
            rounds = runner.timed(handle, 2, settings.plan.turn_seconds)
        latency = float(np.median(np.array(rounds.seconds[0]) @ rounds.shares))
        notes = list(subject.notes)
        if any(node.op in CONTROL_FLOW for node in subject.model.nodes):
            with suppress(EngineRefused):  # an engine may have no layers
                notes += spent_without_pairs(subject.model, runner.layers(handle, profiled_runs(latency)))
        launch = runner.start_seconds
        evaluating = 0.0
        if function is not None:
            observer.stage(f"evaluating the float model with {function.source}")
            begun = time.monotonic()
            with rewording(f"`evaluate` {function.source} fails on the float model", BaselineFailed):
                evaluate(function, runner, handle)
            evaluating = time.monotonic() - begun
        calibrating = 0.0
        if settings.calibration_cache is None:
            observer.stage("timing what calibration takes")
            prepared, how, taken = subject.prepared, settings.calibration, list[float]()
            for count in (1, 3):
                begun = time.monotonic()
                calibrate(prepared.shaped, prepared.calibration.first(count), how, execution=prepared.execution)
                taken.append(time.monotonic() - begun)
            count, each = sum(1 for _ in prepared.calibration), max(0.0, taken[1] - taken[0]) / 2
            biases = inferences(prepared.shaped, how, count) * PAIRED * each
            calibrating = taken[0] + (count - 1) * each + biases
    schemes = len(subject.tuned) * settings.config.schemes_per_region
    has_products = any(node.op in COMPUTE for node in subject.shaped.nodes)
    trials = min(settings.search_builds, schemes + 5) if has_products else 0
    build = handle.build_seconds
    floats = FloatRecord(seconds=latency, turn_seconds=latency, build_seconds=build, start_seconds=launch)
    plan, each_round = settings.plan, settings.plan.round_seconds(latency, launch)
    candidate = trial_seconds(plan, floats, len(subject.accuracy), profiled_runs(latency))
    copies = FEW_BUILDS if launch else USUAL_BUILDS
    proof = len(settings.thread_counts) * 2 * copies * (build + each_round * settings.proof[0])
    # Some comparisons take longer to decide; in return candidates are faster, and fewer than there may be.
    seconds = calibrating + 2 * evaluating + (1 + trials) * candidate + proof
    if settings.time_budget is not None:
        before = min(calibrating, CALIBRATION_SHARE * settings.time_budget) + seconds - calibrating - trials * candidate
        trials = max(0, min(trials, int((settings.time_budget - before) / candidate)))
        seconds = min(seconds, settings.time_budget)
    return Estimate(
        regions=sum(len(pattern.instances) for pattern in subject.tuned),
        patterns=len(subject.tuned),
        builds=trials + 1,
        latency=latency,
        seconds=seconds,
        notes=tuple(notes),
    )
