"""Finds rewrites that make the float model faster on the engine, before pairs are placed.

The models with each of the rewrites that apply race against the user's own file, all in float; those that are not
faster race once more with pairs where the engine's rules place them, since pairs may prevent a fusion that the engine
does by itself in float. The proof compares the result with the user's file in any case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.scales import Calibration
from qdqtune.engines.runner import Handle
from qdqtune.errors import BadModel, EngineRefused, Failure
from qdqtune.graph.float16 import HALF, load_for
from qdqtune.graph.rewrites import REWRITES
from qdqtune.numerics.accuracy import accuracy
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.placement.insertion import Inserter
from qdqtune.timing.race import race_candidates, taking_rounds
from qdqtune.timing.ratios import is_cut_short, ratio
from qdqtune.tuning.bench import metric_key
from qdqtune.tuning.contexts import at_each
from qdqtune.tuning.run import Ready
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Form, Tried, TriedRewrites
from qdqtune.tuning.subject import Subject, open_subject, placement_by_rules
from qdqtune.types import Measurement

NAMES = ("hardswish", "layernorm", "rmsnorm")
"""The rewrites that a run tries by itself.

Others are made only if the user names them: on ONNX Runtime and OpenVINO on the CPU they made no model faster, in float
or with pairs (benchmarks/findings.md), since these engines do the same fusions by themselves.
"""

FORMS: tuple[Form, ...] = ("float", "pairs")

REWRITES_SHARE = 0.1
"""The share of a time budget that rewrites may take. Chosen, not measured."""

READINGS = 3.0
"""The least time for trying rewrites (reading, builds, rounds), in units of the time to read the model. Chosen, not
measured."""

SAME_DB = 40.0
"""If the SQNR of a rewritten float model's outputs to those before is lower, they differ by more than rounding. Chosen,
not measured."""


def with_rewrites(ready: Ready) -> Ready:
    """`ready` with the rewrites applied that make the model faster; unchanged if none does, or none is to be tried.

    Raises:
        OutputError: a file cannot be written.
        QdqtuneError: see `errors`.
    """
    names = _applicable(ready.settings, ready.subject)
    if not names:
        return ready
    earlier = ready.store.get("rewrites", TriedRewrites)
    with ExitStack() as loaded:
        trying = _Trying(ready, loaded)
        tried = earlier
        if tried is None or (tried.is_open and not trying.is_late(READINGS)):
            tried = trying.all(names)
        subject = trying.opened(*tried.names)
    if earlier is not None and earlier.names != tried.names:
        # Candidates were made of another float model. The metric is of the one without rewrites.
        ready.store.forget(but="" if ready.evaluation is None else metric_key(ready.evaluation))
    if earlier != tried:
        ready.store.put("rewrites", tried)
    return replace(ready, found=tried, subject=subject)


def most_builds(settings: Settings, subject: Subject) -> int:
    """How many builds a run may spend on rewrites: in each form one of each rewrite, and one of the model without."""
    names = _applicable(settings, subject)
    return len(FORMS) * (1 + len(names)) if names else 0


def _applicable(settings: Settings, subject: Subject) -> list[str]:
    """The rewrites to try: those that change the model, and those that fail, about which a note tells."""
    if settings.rewrites != "auto" or settings.from_qdq or settings.qdq_baseline or settings.graph_json:
        return []
    names, model = [], subject.model
    if any(info.dtype in HALF for info in model.tensors.values()):  # rewrites match graphs before conversion
        model, _ = load_for(settings.model, "fp32", settings.fix_inputs, subject.numbers.opset)
    for name in NAMES:
        with suppress(BadModel):
            if REWRITES[name].apply(model) is model:
                continue
        names.append(name)
    return names


@dataclass
class _Trying:
    """Races models with a rewrite more against the model without, "" below. Builds are unloaded by `loaded`."""

    ready: Ready
    loaded: ExitStack
    subjects: dict[tuple[str, ...], Subject] = field(default_factory=dict)
    builds: dict[tuple[Form, str], Handle] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.subjects[()] = self.ready.subject

    def all(self, names: Sequence[str]) -> TriedRewrites:
        """The rewrites that were tried, in float and those that are not faster so with pairs. Time, or an accident of
        the engine, may leave them open."""
        settings, notes, tried = self.ready.settings, list[str](), list[Tried]()
        left, is_open = list(names), False
        for form in FORMS if settings.has_pairs else FORMS[:1]:
            if not left:
                break
            if self.is_late(READINGS):
                notes += [f"rewrite {name} was not tried: no room for its builds" for name in left]
                is_open = True
                break
            if not self.builds:
                self.ready.observer.stage(f"trying rewrites: {', '.join(names)}")
                self.ready.runner.feed(at_each(self.ready.subject.mix, settings.thread_counts))
            for name, result in self._raced(form, left).items():
                if isinstance(result, Failure):
                    measured, is_kept = None, False
                    is_open |= result.is_transient
                    notes.append(f"rewrite {name} was passed over: {result.reason}")
                else:
                    measured = ratio(result, settings.plan)
                    is_kept = measured.verdict == "faster"
                    is_open |= is_cut_short(result, settings.plan)
                tried.append(Tried(name, form, measured, kept=is_kept))
                if is_kept or measured is None:
                    left.remove(name)
        return TriedRewrites(tuple(tried), len(self.builds), tuple(notes), is_open)

    def opened(self, *names: str) -> Subject:
        """The model with more rewrites. Raises BadModel if one of them fails."""
        ready = self.ready
        if names not in self.subjects:
            rewrites = replace(ready.subject.rewrites, names=(*ready.subject.rewrites.names, *names))
            self.subjects[names] = open_subject(ready.settings, ready.runner, ready.execution, rewrites)
        return self.subjects[names]

    def _raced(self, form: Form, names: Sequence[str]) -> dict[str, Measurement | Failure]:
        """The race in one form, by rewrite; empty where the engine refuses the model without a rewrite, or rules place
        no pair in it."""
        runner, settings = self.ready.runner, self.ready.settings
        handles: dict[str, Handle] = {}
        results: dict[str, Measurement | Failure] = {}
        for name in ("", *names):
            try:
                handle = self._built(form, name)
            except EngineRefused as refused:
                results[name] = refused.failure
                continue
            except BadModel as error:
                results[name] = Failure("build", str(error))
                continue
            if handle is not None:
                handles[name] = handle
        if "" not in handles:
            return {}
        if len(handles) == 1:
            return results
        take = taking_rounds(runner, list(handles.values()), settings.plan, settings.seed)
        try:
            times = race_candidates(take, len(handles), settings.plan, self.is_late)
            for place, name in enumerate(handles):
                if name:
                    results[name] = self._checked(name, times.pair(0, place))
        except EngineRefused as refused:
            results |= dict.fromkeys(filter(None, handles), refused.failure)
        return results

    def _checked(self, name: str, measured: Measurement) -> Measurement | Failure:
        """The rounds of a model; a failure if it is faster, but its float outputs differ by more than rounding from
        those without the rewrite."""
        if ratio(measured, self.ready.settings.plan).verdict != "faster":
            return measured
        floats = [self._built("float", one) for one in ("", name)]
        samples = [workload.inputs for workload in self.ready.subject.mix]
        before, after = (self.ready.runner.outputs(handle, samples) for handle in floats if handle is not None)
        db = accuracy(before, after, NO_SCORES).sqnr_db
        if db is None or db >= SAME_DB:
            return measured
        return Failure("output", f"the engine computes other outputs with it ({db:.1f} dB)")

    def _built(self, form: Form, name: str) -> Handle | None:
        """The build of a model, made when it is first asked for; None where rules place no pair.

        What half precision or fixed inputs gain is no gain of rewrites."""
        if (form, name) in self.builds:
            return self.builds[form, name]
        settings, constants = self.ready.settings, self.ready.constants
        subject = self.opened(name) if name else self.ready.subject
        if form == "float":
            is_other = bool(subject.changes or settings.fix_inputs)
            file = constants.write(subject.model, form) if is_other else settings.model
        else:
            one = subject.prepared.calibration.first(1)
            ranges = calibrate(subject.shaped, one, Calibration("minmax"), execution=subject.prepared.execution)
            placement = placement_by_rules(subject, settings, ranges)
            if not placement:
                return None
            file = constants.write(Inserter(subject.model, ranges, subject.numbers).insert(placement), form)
        handle = self.ready.runner.load(file, f"rewrite_{name}_{form}" if name else "kept")
        self.loaded.callback(self.ready.runner.unload, handle)
        self.builds[form, name] = handle
        return handle

    def is_late(self, readings: float = 0.0) -> bool:
        """Whether work of `readings` times the time to read the model would end after the share of the time budget."""
        budget, ends = self.ready.settings.time_budget, self.ready.execution.ends
        if budget is None or ends is None:
            return False
        reading = self.begun - (ends - budget)
        return time.monotonic() + readings * reading > self.begun + REWRITES_SHARE * budget
