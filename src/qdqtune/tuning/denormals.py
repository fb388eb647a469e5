"""Decides whether a run takes denormal numbers as zero.

Denormal numbers, those below 1.2e-38 in float32, come from weights or activations that are nearly zero. Many CPUs take
a hundred times as long for them as for others. A Q/DQ pair rounds them to zero, so a quantized model may be many times
as fast as its float model for this reason alone. A setting of the engine makes the float model as fast. So the float
model is timed with and without that setting, and if the setting pays, all models of the run are measured with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf

from qdqtune.engines import DENORMALS_SETTINGS as SETTINGS
from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.devices import ANYWHERE
from qdqtune.engines.runner import Handle, Runner, temporary_runner
from qdqtune.engines.worker import coins_of
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import accuracy
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.timing.pairing import rounds_of
from qdqtune.timing.ratios import Plan, Ratio, Rounds, compare, least_rounds, ratio
from qdqtune.tuning.records import DenormalsRecord
from qdqtune.tuning.run import Ready
from qdqtune.types import Accuracy, Failure, Measurement

OPTION = "denormals_as_zero"

PLAN = Plan((2, least_rounds(Plan.error, 2)), turn_seconds=0.005, warmup=0)
"""The rounds of the comparison: most models show in two that nothing is to be gained. Turns are a fourth as long as in
a search, where differences are smaller. Chosen, not measured."""

MATTERS = 1.25
"""How many times as fast the float model has to be. Denormal numbers that matter cost far more; less may come from the
processes, which differ from each other. Chosen, not measured."""

SAME_DB = 100.0
"""The least SQNR of the outputs with denormal numbers as zero: rounding errors of float32 reach some 120 dB. Chosen,
not measured."""

SHARE, LEAST_SECONDS = 0.05, 3.0
"""The share of the time left of a time budget that the comparison may take. If that is less than `LEAST_SECONDS`, about
the time to start a process and to build a small model, none is made. Chosen, not measured."""


CUT_SHORT = DenormalsRecord(is_cut_short=True)


def with_denormals_as_zero(ready: Ready, constants: ConstantFile) -> Ready:
    """`ready` with an engine that takes denormal numbers as zero, if that makes the float model faster. This is
    measured once and kept in the state file. `ready` stays unchanged if the user has set the option, if the engine does
    not have it, for large models and on a Ray cluster.

    Raises:
        OutputError: a file cannot be written.
    """
    settings, runner = ready.settings, ready.runner
    spec = settings.engine
    has_option = spec.name in SETTINGS and threads_of(spec) is not None
    if not has_option or OPTION in spec.options or runner.memory is not None or settings.ray is not None:
        return ready
    as_zero = EngineSpec(spec.name, {**spec.options, OPTION: True})
    record, store = ready.store.get(DenormalsRecord), ready.store
    if record is None:
        record = _measured(ready, as_zero, constants)
        if (left := store.left(DenormalsRecord)) is not None and left.as_zero != record.as_zero:
            store.forget()
        store.put(record)
    if record.note:
        ready = replace(ready, notes=(*ready.notes, record.note))
    if not record.as_zero:
        return ready
    for one in (runner, *ready.others):
        one.reopen(as_zero)
    return replace(ready, settings=replace(settings, engine=as_zero))


def decided(measured: Measurement, difference: Accuracy, engine: str) -> DenormalsRecord:
    """Decide on rounds of the float model as it is (a) and with denormal numbers as zero (b), and on the difference of
    their outputs."""
    found = ratio(measured, PLAN)
    if found.verdict == "undecided" and found.median * MATTERS <= 1 and len(measured.a) < PLAN.looks[-1]:
        return CUT_SHORT
    if found.verdict != "faster" or found.median * MATTERS > 1:
        return DenormalsRecord()
    note = f"denormal numbers slow the float model: with these as zero it is {found.speedup} as fast"
    off = difference.sqnr_db
    if (off is not None and off < SAME_DB) or difference.agreement not in (None, 1.0):
        much = "" if off is None else f" ({off:.1f} dB)"
        return DenormalsRecord(note=f"{note}, but its outputs change{much}: a speedup may be due to them, not to pairs")
    note += f", so all models ran so (`engine_options` {OPTION}=true)"
    return DenormalsRecord(as_zero=True, note=f"{note}. Set {SETTINGS[engine]} to deploy: see docs/how-to/deploy.md")


def _measured(ready: Ready, as_zero: EngineSpec, constants: ConstantFile) -> DenormalsRecord:
    """Time the float model with and without denormal numbers as zero, each in a process of its own, as ONNX Runtime
    decides that once in a process; and compare the outputs. Nothing is decided where an engine fails, or time is short.
    """
    settings, subject, begun = ready.settings, ready.subject, time.monotonic()
    most = inf if ready.ends is None else SHARE * (ready.ends - begun)

    def is_done(found: Ratio) -> bool:
        return found.median * MATTERS > 1 or found.verdict != "undecided" or time.monotonic() > begun + most

    if most < LEAST_SECONDS:
        return CUT_SHORT
    ready.observer.stage("timing the float model with denormal numbers as zero")
    constants.keep(subject.model)
    file, samples = constants.write(subject.model, "float"), [workload.inputs for workload in subject.mix]
    with ExitStack() as stack:
        own = ready.runner
        if own.device != ANYWHERE:  # then its worker holds the device, and the other one has to run elsewhere
            own = stack.enter_context(temporary_runner(settings.engine, ready.execution))
        runners = own, stack.enter_context(temporary_runner(as_zero, ready.execution))
        builds = []
        for runner in runners:
            runner.feed(subject.mix)
            build = runner.load(file, "denormals")
            if isinstance(build, Failure):
                return DenormalsRecord(is_cut_short=build.is_transient)
            stack.callback(runner.unload, build)
            builds.append((runner, build))
        measured = compare(_rounds(builds, settings.seed), PLAN, decided=is_done)
        outputs = [runner.outputs(build, samples) for runner, build in builds]
    if isinstance(measured, Failure) or isinstance(outputs[0], Failure) or isinstance(outputs[1], Failure):
        results = measured, *outputs
        return DenormalsRecord(is_cut_short=any(isinstance(r, Failure) and r.is_transient for r in results))
    return decided(measured, accuracy(outputs[0], outputs[1], NO_SCORES), settings.engine.name)


def _rounds(builds: Sequence[tuple[Runner, Handle]], seed: int) -> Rounds:
    """A function that takes rounds of two builds in different processes, for `ratios.compare`."""
    sides = [rounds_of(runner, build, build, PLAN, seed) for runner, build in builds]

    def rounds(first: int, count: int) -> Measurement | Failure:
        times: tuple[list[float], list[float]] = [], []
        for number, a_is_first in enumerate(coins_of(seed, range(first, first + count)), first):
            for side in (0, 1) if a_is_first else (1, 0):
                timed = sides[side](number, 1)
                if isinstance(timed, Failure):
                    return timed
                times[side].append((timed.a[0] + timed.b[0]) / 2)
        return Measurement(tuple(times[0]), tuple(times[1]))

    return rounds
