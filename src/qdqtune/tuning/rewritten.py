"""Finds rewrites that make the float model faster on the engine, before pairs are placed.

Each rewrite that applies is tried on top of those kept before: the model with it is compared with the model without it,
both in float (the first time with the user's own file). If it is not faster, both are compared with pairs where the
engine's rules place them, since pairs may prevent a fusion that the engine does by itself in float. The proof compares
the result with the user's file in any case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.scales import Calibration
from qdqtune.engines.runner import Handle
from qdqtune.errors import BadModel, EngineRefused, Failure
from qdqtune.graph.float16 import HALF, load_for
from qdqtune.graph.rewrites import REWRITES
from qdqtune.numerics.accuracy import accuracy
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.race import compare_builds
from qdqtune.timing.ratios import Plan, is_cut_short, ratio
from qdqtune.tuning.contexts import at_each
from qdqtune.tuning.records import NO_REWRITES, Form, Outcome, RewriteRecord, Tried, TriedRewrites
from qdqtune.tuning.run import Ready
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import IN_A_HURRY
from qdqtune.tuning.subject import Subject, open_subject
from qdqtune.types import Measurement, Placement

FORMS: Mapping[str, tuple[Form, ...]] = {
    "hardswish": ("float", "pairs"),
    "layernorm": ("float", "pairs"),
    "rmsnorm": ("float", "pairs"),
}
"""The rewrites that a run tries by itself, in this order, each in these forms until one is faster.

Others are made only if the user names them: on ONNX Runtime and OpenVINO on the CPU they made no model faster, in float
or with pairs (benchmarks/findings.md), since these engines do the same fusions by themselves.
"""

MOST_REWRITE_BUILDS = 6
"""Builds that rewrites may take, those of the models without them included. Chosen, not measured."""

REWRITES_SHARE = 0.1
"""The share of a time budget that rewrites may take. Chosen, not measured."""

READINGS = 3.0
"""The least time for trying a rewrite (reading, builds, rounds), in units of the time to read the model. Chosen, not
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
    store, subject = ready.store, ready.subject
    finished, plan = store.get("rewrites", TriedRewrites), ready.settings.plan
    earlier = finished or store.hurried("rewrites", TriedRewrites)
    if any(_is_open(one, plan) for one in store.values("rewrite:", RewriteRecord).values()):
        finished = None
    if finished is None:
        if not (names := _applicable(ready.settings, subject)):
            return ready
        found, subject, is_cut_short = _search(names, ready)
        if earlier is not None and earlier.names != found.names:
            store.forget()  # candidates were made of another float model
        store.put(f"rewrites{IN_A_HURRY}" if is_cut_short else "rewrites", found)
    elif (found := finished).names:
        subject = open_subject(
            ready.settings, ready.runner, ready.execution, replace(subject.rewrites, names=found.names)
        )
    return replace(ready, found=found, subject=subject)


def _is_open(record: RewriteRecord, plan: Plan) -> bool:
    """Whether a comparison has more rounds to come by this plan: it lacked time, or its own plan had fewer."""
    samples = record.result.samples
    return samples is not None and is_cut_short(samples, plan)


def most_builds(settings: Settings, subject: Subject) -> int:
    """How many builds a run may spend on rewrites: in each form one of each rewrite, and one of the model without."""
    names = _applicable(settings, subject)
    forms = {form for name in names for form in FORMS[name]}
    return min(MOST_REWRITE_BUILDS, len(forms) + sum(len(FORMS[name]) for name in names))


def _applicable(settings: Settings, subject: Subject) -> list[str]:
    """The rewrites to try: those that change the model, and those that fail, about which `_tried` makes a note."""
    if settings.rewrites != "auto" or settings.from_qdq or settings.qdq_baseline or settings.graph_json:
        return []
    names, model = [], subject.model
    if any(info.dtype in HALF for info in model.tensors.values()):  # rewrites match graphs before conversion
        model = load_for(settings.model, "fp32", settings.fix_inputs, subject.numbers.opset)
    for name in FORMS:
        with suppress(BadModel):
            if REWRITES[name].apply(model) is model:
                continue
        names.append(name)
    return names


def _search(names: Sequence[str], ready: Ready) -> tuple[TriedRewrites, Subject, bool]:
    """Try these rewrites in this order; gives their results, the model with those that are kept, and whether time or an
    accident of the engine left something open."""
    ready.observer.stage(f"trying rewrites: {', '.join(names)}")
    ready.runner.feed(at_each(ready.subject.mix, ready.settings.thread_counts))
    builder = _Builder(ready, time.monotonic())
    found, kept = NO_REWRITES, _FloatModel(ready.subject)
    try:
        for name in names:
            found, kept = _tried(name, found, kept, builder)
    finally:
        builder.close()
    return found, kept.subject, builder.is_cut_short


@dataclass(frozen=True)
class _FloatModel:
    """A model, and its builds so far by form."""

    subject: Subject
    builds: dict[Form, Handle] = field(default_factory=dict)


def _tried(name: str, found: TriedRewrites, kept: _FloatModel, builder: _Builder) -> tuple[TriedRewrites, _FloatModel]:
    """Compare the `kept` model with the model that has one more rewrite, form by form until that is faster. Gives
    `found` with the result added, and the model to keep."""
    settings, rewrites = builder.ready.settings, kept.subject.rewrites
    try:
        made = replace(rewrites, names=(*rewrites.names, name))
        rewritten = _FloatModel(open_subject(settings, builder.ready.runner, builder.ready.execution, made))
    except BadModel as error:
        return _noted(found, f"rewrite {name} was passed over: {error}"), kept
    for form in FORMS[name]:
        if form == "pairs" and not settings.has_pairs:
            continue
        wanted, of = 1 + (form not in kept.builds), f"{'+'.join(made.names)}:{form}"
        is_late = builder.recorded(of) is None and builder.is_late(READINGS)
        if is_late or found.builds + wanted > MOST_REWRITE_BUILDS:
            builder.is_cut_short |= is_late
            return _noted(found, f"rewrite {name} was not tried: no room for its builds"), kept
        outcome, spent = _compared(form, kept, rewritten, of, builder)
        found = replace(found, builds=found.builds + spent)
        if outcome is None:
            continue
        if outcome.samples is None:
            tried = Tried(name, form, None, kept=False)
            reason = outcome.failure.reason if outcome.failure else ""
            return _noted(found, f"rewrite {name} was passed over: {reason}", tried), kept
        measured_ratio = ratio(outcome.samples, settings.plan)
        tried = Tried(name, form, measured_ratio, kept=measured_ratio.verdict == "faster")
        found = replace(found, tried=(*found.tried, tried))
        if tried.kept:
            return found, rewritten
    return found, kept


def _noted(found: TriedRewrites, note: str, *tried: Tried) -> TriedRewrites:
    return replace(found, notes=(*found.notes, note), tried=(*found.tried, *tried))


def _compared(
    form: Form, kept: _FloatModel, rewritten: _FloatModel, of: str, builder: _Builder
) -> tuple[Outcome | None, int]:
    """Rounds of two models in one form, from the store if its record `of` has them, and the builds that they took; None
    if there is nothing to compare, as the engine refuses the model kept so far or rules place no pair."""
    store, before = builder.ready.store, builder.count
    record = builder.recorded(of)
    if record is None:
        try:
            measured = _measured(form, kept, rewritten, f"rewrite:{of}", builder)
        except EngineRefused as refused:
            builder.is_cut_short |= refused.is_transient
            outcome = Outcome(failure=refused.failure)
        else:
            if measured is None:
                return None, builder.count - before
            outcome = Outcome(samples=measured)
        is_lost = outcome.failure is not None and outcome.failure.is_transient
        record = RewriteRecord(result=outcome, builds=builder.count - before)
        store.put(f"rewrite:{of}", record, on_disk=not is_lost)
    return record.result, record.builds


def _measured(form: Form, kept: _FloatModel, rewritten: _FloatModel, key: str, builder: _Builder) -> Measurement | None:
    runner, settings = builder.ready.runner, builder.ready.settings
    try:
        a = builder.build(form, kept, "kept")
    except EngineRefused as refused:
        builder.is_cut_short |= refused.is_transient
        return None
    if a is None:
        return None
    b = builder.build(form, rewritten, key.replace(":", "_").replace("+", "_"))
    if b is None:
        return None

    result = compare_builds(runner, a, b, settings.plan, settings.seed, is_late=builder.is_late)
    if ratio(result, settings.plan).verdict == "faster":
        _check_same(kept, rewritten, builder)
    return result


def _check_same(kept: _FloatModel, rewritten: _FloatModel, builder: _Builder) -> None:
    """Raise EngineRefused if the engine fails, or if float outputs differ from those of `kept` by more than
    rounding."""
    try:
        a = builder.build("float", kept, "kept")
    except EngineRefused:
        a = None
    b = builder.build("float", rewritten, "rewritten")
    if a is None or b is None:
        return
    samples = [workload.inputs for workload in builder.ready.subject.mix]
    before, after = (builder.ready.runner.outputs(handle, samples) for handle in (a, b))
    lost = accuracy(before, after, NO_SCORES)
    if lost.sqnr_db is not None and lost.sqnr_db < SAME_DB:
        reason = f"the engine computes other outputs with it ({lost.sqnr_db:.1f} dB)"
        raise EngineRefused(Failure("output", reason))


@dataclass
class _Builder:
    """Builds the models that are compared, each once in a form. `begun` is when trying began (by `time.monotonic`),
    `count` are the builds so far. It `is_cut_short` if something was left open."""

    ready: Ready
    begun: float
    handles: list[Handle] = field(default_factory=list)
    count: int = 0
    is_cut_short: bool = False

    def recorded(self, of: str) -> RewriteRecord | None:
        """The comparison of an earlier session, unless it had more rounds to come by the plan of this one."""
        record = self.ready.store.get(f"rewrite:{of}", RewriteRecord)
        return None if record is None or _is_open(record, self.ready.settings.plan) else record

    def close(self) -> None:
        for handle in self.handles:
            self.ready.runner.unload(handle)

    def is_late(self, readings: float = 0.0) -> bool:
        """Whether work of `readings` times the time to read the model would end after the share of the time budget."""
        budget, ends = self.ready.settings.time_budget, self.ready.ends
        if budget is None or ends is None:
            return False
        reading = self.begun - (ends - budget)
        return time.monotonic() + readings * reading > self.begun + REWRITES_SHARE * budget

    def build(self, form: Form, model: _FloatModel, log_name: str) -> Handle | None:
        """The build of a model, made when it is first asked for; None where rules place no pair."""
        if form not in model.builds:
            file = self._file(form, model.subject)
            if file is None:
                return None
            self.count += 1
            handle = self.ready.runner.load(file, log_name)
            self.handles.append(handle)
            model.builds[form] = handle
        return model.builds[form]

    def _file(self, form: Form, subject: Subject) -> Path | None:
        """The file to build: in float without rewrites the user's own, else one written here; None without any pair."""
        settings = self.ready.settings
        if form == "float":
            return settings.model if not subject.rewrites.names else self.ready.constants.write(subject.model, "float")
        one = subject.prepared.calibration.first(1)
        ranges = calibrate(subject.shaped, one, Calibration("minmax"), execution=subject.prepared.execution)
        possible = possible_edges(subject.shaped, ranges)
        placement = engine_rules.place(subject.shaped, possible, settings.engine.name, settings.quant_type).placement
        if placement == Placement():
            return None
        return self.ready.constants.write(Inserter(subject.model, ranges, subject.numbers).insert(placement), "pairs")
