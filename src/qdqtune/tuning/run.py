"""A run: all that its stages work with, opened and closed in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, BaselineFailed, writing
from qdqtune.measurement.limits import Limits
from qdqtune.measurement.metric import load_evaluation
from qdqtune.measurement.simulation import Simulation
from qdqtune.placement.insertion import Inserter
from qdqtune.tuning.bench import Bench, Conditions
from qdqtune.tuning.candidates import Candidates
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import Subject, calibrated, fingerprint, open_subject
from qdqtune.types import Failure, Placement

BASELINE, FINAL = "baseline.onnx", "optimized_final.onnx"
RAW = "optimized_raw.onnx"
"""In subgraph mode: all groups that gain alone, whether or not the whole model gains by them."""

CANDIDATES = "candidates"
SUMMARY = "summary.json"

DROP = 0.01
"""How far the user's metric may fall where nothing else is said, as a share of the float model's."""


@dataclass(frozen=True)
class Run:
    """What was asked for, the model made ready, and what measures it. `limits` know the metric of the float model."""

    settings: Settings
    subject: Subject
    runner: Runner
    store: Store
    candidates: Candidates
    bench: Bench
    simulation: Simulation
    limits: Limits
    observer: Observer


@contextmanager
def open_run(settings: Settings, observer: Observer) -> Iterator[Run]:
    """Read and calibrate the model, start the engine, and measure the float model.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
    """
    folder = prepare_folder(settings)
    evaluation = None if settings.evaluate is None else load_evaluation(settings.evaluate)
    with ExitStack() as stack:
        runner = stack.enter_context(Runner(settings.engine, time_limit_s=settings.time_limit, log_dir=folder / "logs"))
        observer.stage(f"reading {settings.model.name}")
        subject = open_subject(settings, runner)
        signed = fingerprint(settings, subject, runner.describe())
        store = stack.enter_context(Store(settings.state, signed, restart=settings.restart))
        subject = calibrated(subject, settings, store, observer)
        runner.feed(subject.feed)
        inserter = Inserter(subject.model, subject.ranges, subject.numbers)
        candidates = stack.enter_context(Candidates(runner, inserter, folder / CANDIDATES))
        conditions = Conditions(
            settings.plan, subject.accuracy, settings.seed, settings.limits, evaluation, settings.checks_wins
        )
        bench = Bench(runner, candidates, store, conditions)
        simulation = stack.enter_context(Simulation(inserter, subject.accuracy))
        observer.stage("measuring the float model")
        limits = _limits(settings, bench, observer)
        yield Run(settings, subject, runner, store, candidates, bench, simulation, limits, observer)


def prepare_folder(settings: Settings) -> Path:
    """The output folder, made.

    Raises:
        BadOption: the model would be overwritten there.
        OutputError: it cannot be made.
    """
    folder = settings.output_dir
    if settings.model.resolve() in {(folder / name).resolve() for name in (BASELINE, FINAL, RAW)}:
        raise BadOption(f"{settings.model} would be overwritten: choose another --output-dir")
    with writing(f"to {folder}"):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder


def _limits(settings: Settings, bench: Bench, observer: Observer) -> Limits:
    """The limits on accuracy, with the metric of the float model."""
    holds_floats = any(a.dtype.kind == "f" for a in bench.reference()[0].values())
    if isinstance(settings.min_sqnr, float) and not holds_floats:
        raise BadOption("--min-sqnr is about float outputs, and the model has none: use --min-agreement or --evaluate")
    limits = settings.limits if holds_floats else replace(settings.limits, min_sqnr=None)
    if settings.evaluate is None:
        return limits
    observer.stage(f"evaluating the float model with {settings.evaluate}")
    before = bench.metric(Placement())
    if isinstance(before, Failure):
        raise BaselineFailed(f"--evaluate {settings.evaluate} does not get along with the float model: {before.reason}")
    max_drop = DROP * abs(before) if settings.max_drop == "auto" else limits.max_drop
    return replace(limits, before=before, max_drop=max_drop)
