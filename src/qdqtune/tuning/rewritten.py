"""Rewrites of the float model that pay on the engine, found before pairs are placed.

Each that applies is measured like any candidate, on top of those that were kept before it: the float models against
each other, the first of them the user's own file; and if that gains nothing both with pairs by the engine's rules, as
pairs may keep an engine from what it does in float by itself. The latter is a stand-in for what the search will find.
Whatever ships has to prove itself against the user's file in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.scales import Calibration
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadModel
from qdqtune.graph.float16 import HALF, load_for
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import accuracy
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.pairing import rounds_of
from qdqtune.timing.ratios import compare, ratio
from qdqtune.tuning.records import NO_REWRITES, Form, Found, Outcome, RewriteRecord, RewritesRecord, Tried
from qdqtune.tuning.run import Ready
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.subject import Subject, open_subject
from qdqtune.tuning.trial_worker import settled
from qdqtune.types import Failure, Measurement, Placement

FORMS: Mapping[str, tuple[Form, ...]] = {
    "hardswish": ("float", "pairs"),
    "layernorm": ("float", "pairs"),
    "rmsnorm": ("float", "pairs"),
}
"""The rewrites that a run tries by itself, in the order in which it does, and in which forms until one pays.

The others are made where a user names them: on ONNX Runtime and OpenVINO on the CPU no model was faster by them, in
float or with pairs (benchmarks/rewrites.py), as these engines find them by themselves.
"""

MOST_BUILDS = 6
"""Builds that rewrites may take, those of what they meet included."""

SHARE = 0.1
"""Of a time budget, what they may take."""

READINGS = 3.0
"""What a rewrite takes at the least, in times that it took to read the model: that again, builds and rounds."""

SAME_DB = 40.0
"""Outputs of a rewritten float model that are further than this from those before are no rounding."""


def with_rewrites(ready: Ready, constants: ConstantFile) -> Ready:
    """`ready` with the model as the rewrites leave it that pay; as it is where none does, or none is to be tried. What
    is built on the way refers to `constants`.

    Raises:
        OutputError: a file cannot be written.
        QdqtuneError: see `errors`.
    """
    store, subject = ready.store, ready.subject
    record = store.get(RewritesRecord)
    if record is None:
        if not (names := _applicable(ready.settings, subject)):
            return ready
        found, subject = _search(names, ready, constants)
        store.put(RewritesRecord(found=found))
    elif (found := record.found).names:
        subject = open_subject(ready.settings, ready.runner, replace(subject.rewrites, names=found.names))
    return replace(ready, found=found, subject=subject)


def most_builds(settings: Settings, subject: Subject) -> int:
    """How many builds a run may spend on rewrites: of what they meet in each form, and of each of them."""
    names = _applicable(settings, subject)
    forms = {form for name in names for form in FORMS[name]}
    return min(MOST_BUILDS, len(forms) + sum(len(FORMS[name]) for name in names))


def _applicable(settings: Settings, subject: Subject) -> list[str]:
    """The rewrites that have something to do, those that fail among them: that is told when they are tried."""
    if settings.rewrites != "auto" or settings.from_qdq or settings.qdq_baseline or settings.graph_json:
        return []
    names, model = [], subject.model
    if any(info.dtype in HALF for info in model.tensors.values()):  # patterns are known before anything is converted
        model = load_for(settings.model, "fp32", settings.fix_inputs, subject.numbers.opset)
    for name in FORMS:
        with suppress(BadModel):
            if REWRITES[name].apply(model) is model:
                continue
        names.append(name)
    return names


def _search(names: Sequence[str], ready: Ready, constants: ConstantFile) -> tuple[Found, Subject]:
    """What these rewrites gave, tried in this order, and the model with those that pay."""
    ready.observer.stage(f"trying rewrites: {', '.join(names)}")
    constants.keep(ready.subject.model)
    ready.runner.feed(ready.subject.mix)
    contest = _Contest(ready, constants.write, _Champion(ready.subject), time.monotonic())
    try:
        for name in names:
            contest.enter(name)
    finally:
        contest.close()
    return contest.found, contest.champion.subject


@dataclass
class _Champion:
    """The model with the rewrites kept so far, and its builds by form."""

    subject: Subject
    builds: dict[Form, Handle] = field(default_factory=dict)


@dataclass
class _Contest:
    """The champion and who challenges it. `write` makes a file of a model."""

    ready: Ready
    write: Callable[[Model, str], Path]
    champion: _Champion
    begun: float
    found: Found = NO_REWRITES
    handles: list[Handle] = field(default_factory=list)

    def close(self) -> None:
        """Unload what was built."""
        for handle in self.handles:
            self._runner.unload(handle)

    def enter(self, name: str) -> None:
        """Measure a rewrite, and keep it where it pays."""
        settings = self.ready.settings
        rewrites = self.champion.subject.rewrites
        try:
            subject = open_subject(settings, self._runner, replace(rewrites, names=(*rewrites.names, name)))
        except BadModel as error:
            self._note(f"rewrite {name} was passed over: {error}")
            return
        challenger = _Champion(subject)
        for form in FORMS[name]:
            if form == "pairs" and not settings.has_pairs:
                continue
            wanted = 1 + (form not in self.champion.builds)
            if self._is_late(READINGS) or self.found.builds + wanted > MOST_BUILDS:
                self._note(f"rewrite {name} was not tried: no room for its builds")
                return
            tried = self._met(name, form, challenger)
            if tried is None:
                continue
            self.found = replace(self.found, tried=(*self.found.tried, tried))
            if tried.kept:
                self.champion = challenger
            if tried.kept or tried.ratio is None:
                return

    def _is_late(self, readings: float = 0.0) -> bool:
        """Whether what takes so many times as long as reading the model goes beyond the share of the time."""
        budget, ends = self.ready.settings.time_budget, self.ready.ends
        if budget is None or ends is None:
            return False
        reading = self.begun - (ends - budget)
        return time.monotonic() + readings * reading > self.begun + SHARE * budget

    def _met(self, name: str, form: Form, challenger: _Champion) -> Tried | None:
        """The champion against who challenges it, in one form; None where there is nothing to compare."""
        kept = self.champion.subject.rewrites.names
        of = f"{'+'.join((*kept, name))}:{form}"
        record, before = self.ready.store.get(RewriteRecord, of), self.found.builds
        if record is None:
            measured = self._measured(form, challenger, f"rewrite:{of}")
            if measured is None:
                return None
            spent = self.found.builds - before
            record = self.ready.store.put(RewriteRecord(of=of, result=Outcome.of(measured), builds=spent))
        result = record.result.result
        self.found = replace(self.found, builds=before + record.builds)
        if isinstance(result, Failure):
            self._note(f"rewrite {name} was passed over: {result.reason}")
            return Tried(name, form, None, kept=False)
        told = ratio(result, self.ready.settings.plan)
        return Tried(name, form, told, told.verdict == "faster")

    def _measured(self, form: Form, challenger: _Champion, key: str) -> Measurement | Failure | None:
        plan, name = self.ready.settings.plan, key.replace(":", "_").replace("+", "_")
        a = self._build(form, self.champion, "champion")
        if a is None or isinstance(a, Failure):
            return None  # what the engine does not run is nothing to compare with
        b = self._build(form, challenger, name)
        if b is None or isinstance(b, Failure):
            return b
        rounds = rounds_of(self._runner, a, b, plan, self.ready.settings.seed)
        result = compare(rounds, plan, decided=lambda ratio: settled(ratio) or self._is_late())
        if isinstance(result, Failure) or ratio(result, plan).verdict != "faster":
            return result
        return self._differing(challenger) or result

    def _differing(self, challenger: _Champion) -> Failure | None:
        """Why the float outputs of what is faster are not those of the model before."""
        a, b = self._build("float", self.champion, "champion"), self._build("float", challenger, "challenger")
        if isinstance(b, Failure):
            return b
        if b is None or a is None or isinstance(a, Failure):
            return None
        samples = [workload.inputs for workload in self.ready.subject.mix]
        before, after = (self._runner.outputs(handle, samples) for handle in (a, b))
        if isinstance(after, Failure):
            return after
        if isinstance(before, Failure):
            return before
        lost = accuracy(before, after)
        if lost.sqnr_db is not None and lost.sqnr_db < SAME_DB:
            return Failure("output", f"the engine computes other outputs with it ({lost.sqnr_db:.1f} dB)")
        return None

    def _build(self, form: Form, side: _Champion, log_name: str) -> Handle | Failure | None:
        """The build of a side, made when it is needed; None where rules place no pair."""
        if form not in side.builds:
            file = self._file(form, side)
            if file is None:
                return None
            handle = self._runner.load(file, log_name)
            self.found = replace(self.found, builds=self.found.builds + 1)
            if isinstance(handle, Failure):
                return handle
            self.handles.append(handle)
            side.builds[form] = handle
        return side.builds[form]

    def _file(self, form: Form, side: _Champion) -> Path | None:
        """The user's own file where that is what a side is, or one made of it."""
        subject = side.subject
        if form == "float":
            is_given = not subject.rewrites.names
            return self.ready.settings.model if is_given else self.write(subject.model, "float")
        settings, one = self.ready.settings, subject.prepared.calibration.first(1)
        ranges = calibrate(subject.shaped, one, Calibration("minmax"))
        possible = possible_edges(subject.shaped, ranges)
        placement = engine_rules.place(subject.shaped, possible, settings.engine.name, settings.quant_type).placement
        if placement == Placement():
            return None
        return self.write(Inserter(subject.model, ranges, subject.numbers).insert(placement), "pairs")

    def _note(self, text: str) -> None:
        self.found = replace(self.found, notes=(*self.found.notes, text))

    @property
    def _runner(self) -> Runner:
        return self.ready.runner
