"""Estimates what a run would take (`--dry-run`), from one build of the float model and two of its inferences."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.observe import bytes_of, outputs_on, passes
from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Calibration, Range, Ranges
from qdqtune.engines.execution import Execution
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import on_device
from qdqtune.engines.runner import temporary_runner
from qdqtune.errors import BadOption, BaselineFailed, rewording
from qdqtune.numerics.fitting import inferences
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning.bench import REPEATED
from qdqtune.tuning.contexts import at_each
from qdqtune.tuning.folder import OutputFolder
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.tuning.rewritten import most_builds
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import read_journal
from qdqtune.tuning.subject import PAIRED, open_subject
from qdqtune.tuning.trial_worker import profiled_runs, trial_seconds

REDUCED_BYTES, COUNTED_BYTES = 1e9, 4e8
"""Bytes of values a second whose ends ONNX Runtime finds, and that are counted in histograms. On two cores, seven
networks: 0.7 to 2 GB/s, and 0.2 to 0.9."""

FITTED_BUILDS = 3
"""Builds that fitting takes: of the model without pairs, with pairs, and with what biases lack."""


@dataclass(frozen=True)
class Estimate:
    """What a run would take, in seconds; `latency` is that of the float model. `rewrite_builds` are those of `builds`
    that rewrites may take. `notes` are for the user."""

    regions: int
    patterns: int
    builds: int
    latency: float
    seconds: float
    notes: tuple[str, ...] = ()
    rewrite_builds: int = 0


def estimate(settings: Settings, observer: Observer | None = None) -> Estimate:
    """Estimate what `tune` would take. Calibrates nothing, and leaves no state.

    Raises:
        QdqtuneError: as `tune` does before its search.
    """
    if not settings.is_timed:
        name = settings.engine.name
        raise BadOption(f"{simulated(name)}, so no time can be estimated: `builds` and `time_budget` bound a run")
    observer = observer or Silent()
    execution = Execution(settings.time_limit)
    with (
        OutputFolder(settings),
        on_device(settings.on, execution) as (execution, _),
        temporary_runner(settings.engine, execution) as runner,
    ):
        observer.stage(f"reading {settings.model.name}")
        subject = open_subject(settings, runner, execution)
        if settings.state.exists() and not settings.restart:
            read_journal(settings.state)  # as a run does at this point: it may be damaged
        runner.feed(at_each(subject.mix, settings.thread_counts))
        observer.stage("measuring the float model")
        with rewording("the engine cannot run the float model", BaselineFailed):
            handle = runner.load(settings.model, "estimate")
            rounds = runner.timed(handle, 2, warmup=1)
        launch = runner.start_seconds(handle)
        observer.stage("timing what calibration takes")
        start, each = pace(subject.prepared)
    latency = float(np.median(np.array(rounds.seconds[0]) @ rounds.shares))
    schemes = len(subject.tuned) * settings.config.schemes_per_region
    ranges = Ranges(dict.fromkeys(candidate_tensors(subject.shaped), Range(0.0, 1.0)))
    everywhere = replace(subject, possible=possible_edges(subject.shaped, ranges))
    trials = min(settings.search_builds, schemes + 5) if any(everywhere.suggestions().values()) else 0
    build, judged = handle.build_seconds, len(subject.accuracy)
    calibrating = 0.0
    if settings.calibration_cache is None:
        calibrating = calibration_seconds(subject.prepared, settings.calibration, start, each)
    plan, each_round = settings.plan, 2 * settings.plan.round_seconds(latency, launch)
    per_trial = trial_seconds(plan, build, latency, latency, judged, launch, profiled_runs(latency))
    counts = len(settings.thread_counts)
    proof = counts * 2 * (2 * build + each_round * settings.proof[0]) if trials else 0.0
    float_model = start + build + latency * (2 * judged + profiled_runs(latency))
    float_runs = judged + REPEATED * settings.limits.are_set + 2 + 1  # outputs, rounds, and a layer report
    float_model += float_runs * launch
    rewrite_builds = most_builds(settings, subject)
    rewriting = rewrite_builds * (build + each_round / 2 * plan.looks[0])
    # Some comparisons take longer to decide; in return candidates are faster, and fewer than there may be.
    seconds = calibrating + float_model + rewriting + trials * per_trial + proof
    if settings.time_budget is not None:
        seconds = min(seconds, settings.time_budget)
    return Estimate(
        regions=subject.region_count,
        patterns=len(subject.tuned),
        builds=trials + 1 + rewrite_builds,
        latency=latency,
        seconds=seconds,
        notes=subject.notes,
        rewrite_builds=rewrite_builds,
    )


def pace(prepared: Prepared) -> tuple[float, float]:
    """Seconds of the first inference of the float model in ONNX Runtime, loading included; and of the second.

    Raises:
        BadModel: ONNX Runtime cannot run the model.
    """
    begun, took = time.monotonic(), []
    for _ in outputs_on(prepared.shaped, prepared.calibration.first(2), execution=prepared.execution):
        took.append(time.monotonic() - begun)
        begun = time.monotonic()
    return took[0], took[-1]


def sample_seconds(prepared: Prepared, how: Calibration, seconds: float) -> float:
    """The time of calibrating on one sample, if an inference takes so many `seconds`: each pass runs what its tensors
    need, half of the model on average; and their values are read."""
    tensors = candidate_tensors(prepared.shaped)
    values = bytes_of(prepared.shaped, tensors, prepared.calibration, prepared.execution)
    if how.method == "minmax":
        return seconds + values / REDUCED_BYTES
    count = max(1, passes(prepared.shaped, tensors, prepared.calibration, prepared.execution))
    return seconds * (1 + count) / 2 + values / COUNTED_BYTES


def calibration_seconds(prepared: Prepared, how: Calibration, start: float, each: float) -> float:
    """Seconds that calibration takes, fitting included, if the first inference takes `start` and others `each`."""
    count = sum(1 for _ in prepared.calibration)
    steps = inferences(prepared.shaped, how, count)
    fitting = steps * PAIRED * each + (FITTED_BUILDS * start if steps else 0.0)
    return 2 * start + count * sample_seconds(prepared, how, each) + fitting
