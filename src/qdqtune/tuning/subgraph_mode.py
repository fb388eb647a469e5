"""Subgraph mode: times each distinct fusion group alone, before the search on the whole model."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from onnx import helper

from qdqtune.calibration.observe import observe
from qdqtune.engines.runner import Handle
from qdqtune.engines.tensorrt.options import spans, with_spans
from qdqtune.errors import BadOption, EngineRefused, Failure, InputError, writing
from qdqtune.graph.model import Model
from qdqtune.graph.operators import work
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.attribution import attribute
from qdqtune.search.costs.profiles import (
    Profile,
    SchemeResult,
    passthrough_profile,
    profile_of,
    schemes,
    select,
    signature,
)
from qdqtune.search.costs.units import Partition, Unit, partition, weights_by_family
from qdqtune.search.subgraph import SubgraphSearch
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.timing.race import compare_builds
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import subgraph_groups as groups
from qdqtune.tuning.folder import GROUP_MODELS, LOGS, PROGRESS
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.shipping import LATE
from qdqtune.tuning.subgraph_groups import Grouping, Resolved, borders, extract, is_shape, resolve
from qdqtune.tuning.subject import Subject
from qdqtune.types import Array, Edge, Layer, Placement, Trial

GROUP_ROUNDS = Plan(looks=(5, 9), turn_seconds=0.001, warmup=1)
"""Rounds of a group with pairs against the same group in float: few, as the whole model decides what ships."""

DECISIVE = 0.1
"""A group's comparison ends when the median ratio is further than this from 1. Chosen, not measured."""

PROFILED_RUNS = 6
"""Inferences profiled for a group's layer report. Chosen, not measured."""

HOPELESS_SHARE = 0.98
"""A scheme whose layers take more than this share of the float layers' time is not timed. Chosen, not measured."""

AT_ONCE = 2**28
"""Bytes of groups' inputs held in memory at a time. Chosen, not measured."""

NO_TIME = "no time was left"
"""The reason why some or all schemes of a group were not timed."""


Layers = tuple[Layer, ...]


@dataclass(frozen=True)
class GroupKind:
    """Groups of equal structure. `number` is the rank by time, from 1; `ms` is their float time together."""

    number: int
    units: tuple[Unit, ...]
    ms: float

    @property
    def first(self) -> Unit:
        return self.units[0]

    def untimed(self, why: str) -> Profile:
        return Profile(self.ms / len(self.units), (), {"": why})


@dataclass(frozen=True)
class _Part:
    """The first group of a kind as a model, to be written to `path`, and the schemes to try on it. Keys of its records
    in the state file begin with `key`."""

    kind: GroupKind
    model: Model
    path: Path
    key: str
    schemes: Mapping[str, Placement]


class Profiler:
    """Builds groups as models of their own and times their schemes, with its own engine process on the run's first
    device. Nothing starts after `deadline` (by `time.monotonic`).

    A context manager. The models stay in the folder `subgraphs`, with one file for all weights.
    """

    def __init__(self, run: Run, parts: Partition, resolved: Resolved, deadline: float | None, *, timed: bool) -> None:
        self._run, self._subject, self._store = run, run.subject, run.store
        self._parts, self._resolved, self._deadline, self._timed = parts, resolved, deadline, timed
        self._folder = run.output.clear(GROUP_MODELS)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._constants = ConstantFile(run.output.claim(self._folder / CONSTANTS))
        spec = with_spans(run.settings.engine, resolved.spans)
        self._runner = run.runner.on_same_device(spec, run.output.path / LOGS / GROUP_MODELS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._constants.__exit__()
        self._runner.close()

    def all(self, kinds: Sequence[GroupKind], done: Callable[[GroupKind, Profile], None]) -> dict[int, Profile]:
        """Time the kinds of groups; returns their profiles by number, and calls `done` with each at once. A profile is
        empty if the kind cannot be built or no time is left."""
        profiles: dict[int, Profile] = {}
        parts: list[_Part] = []
        model = self._subject.shaped
        reads = chain.from_iterable(borders(model, kind.first.nodes)[0] for kind in kinds)
        shapes = self._values([t for t in dict.fromkeys(reads) if is_shape(model, t, self._resolved.sizes)])
        for kind in kinds:
            try:
                parts.append(self._extracted(kind, shapes))
            except BadOption as error:
                profiles[kind.number] = kind.untimed(str(error))
                done(kind, profiles[kind.number])
        batches, used = list[list[_Part]](), AT_ONCE + 1
        for part in parts:  # the inputs of a batch fit in memory together; a larger part is a batch of its own
            dtypes = {t: helper.tensor_dtype_to_np_dtype(model.tensors[t].dtype) for t in part.model.inputs}
            needed = sum(d.itemsize * int(np.prod(self._resolved.sizes.get(t, ()))) for t, d in dtypes.items())
            if used + needed > AT_ONCE:
                batches.append([])
                used = 0
            batches[-1].append(part)
            used += needed
        for batch in batches:
            values = cache(partial(self._values, [*chain.from_iterable(part.model.inputs for part in batch)]))
            for part in batch:
                profiles[part.kind.number] = self._profile(part, values, len(kinds))
                done(part.kind, profiles[part.kind.number])
        return profiles

    def _extracted(self, kind: GroupKind, shapes: Mapping[str, Array]) -> _Part:
        """The first group of a kind as a model in which inputs that hold `shapes` are constants."""
        parts, unit = self._parts, kind.first
        model = extract(self._subject.shaped, unit.nodes, self._resolved, shapes)
        own = {e for e in parts.possible if e.node in model.index_of}
        own |= {Edge(t, "", k) for k, t in enumerate(unit.outputs) if parts.edges.get(t)}
        text = signature(parts, unit, self._resolved.sizes) + "\n" + "\n".join(model.index_of)
        if not self._timed:  # another run may know times of layers, where the report of this one was lost
            text += "\nuntimed layers"
        ways = {e: ways for e, ways in parts.format_shares.items() if e.node in model.index_of}
        return _Part(
            kind,
            model,
            self._run.output.claim(self._folder / f"group_{kind.number:03}.onnx"),
            hashlib.sha256(text.encode()).hexdigest()[:16],
            schemes(model, frozenset(own), ways),
        )

    def _profile(self, part: _Part, values: Callable[[], Mapping[str, Array]], count: int) -> Profile:
        """The profile of a group from the state file, completed by measuring until time is over. Its model is always
        written, since an earlier session's may be gone."""
        kind, key = part.kind, f"part:{part.key}"
        if self._is_late() and not self._store.has(key):
            return kind.untimed(NO_TIME)
        with atomic_write(part.path) as fresh:
            self._constants.save(part.model, fresh)
        name = self._parts.model.nodes[kind.first.nodes[0]].name
        with ExitStack() as loaded:

            @cache
            def float_form() -> Handle:
                self._run.observer.stage(f"timing group {kind.number} of {count} alone, that of {name}")
                self._runner.feed({name: values()[name] for name in part.model.inputs})
                handle = self._loaded(part.path)
                loaded.callback(self._runner.unload, handle)
                return handle

            try:
                floats = self._store.memo(key, Layers, lambda: self._layers(float_form()))
            except EngineRefused as refused:
                return kind.untimed(str(refused))
            answers = list[SchemeResult]()
            for scheme, placement in part.schemes.items():
                key = f"scheme:{part.key}:{placement.digest}"
                if self._is_late() and not self._store.has(key):
                    continue
                measure = partial(self._scheme, part, scheme, float_form, floats)
                try:
                    answers.append(self._store.memo(key, SchemeResult, measure))
                except EngineRefused as refused:
                    answers.append(SchemeResult(scheme, placement, refused.failure))
        profile = profile_of(part.model, floats, answers)
        if len(answers) < len(part.schemes):
            profile = replace(profile, failures={**profile.failures, "": NO_TIME})
        return profile

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _values(self, tensors: Sequence[str]) -> dict[str, Array]:
        feed = self._subject.feed
        given = {t: np.asarray(feed[t]) for t in tensors if t in feed}
        computed = list(dict.fromkeys(t for t in tensors if t not in given))
        if not computed:
            return given
        return given | dict(observe(self._subject.shaped, computed, [feed], self._run.execution, widen=False))

    def _scheme(
        self, part: _Part, scheme: str, float_form: Callable[[], Handle], floats: Sequence[Layer]
    ) -> SchemeResult:
        """Measure one scheme: its layers and, unless these show that it is slower, rounds against float."""
        path = self._run.output.claim(part.path.with_suffix(f".{re.sub(r'[^a-z0-9]+', '_', scheme)}.onnx"))
        inserter = Inserter(part.model, self._subject.ranges, self._subject.numbers)
        opponent = float_form()
        self._constants.save(inserter.insert(part.schemes[scheme]), path)
        handle = None
        try:
            handle = self._loaded(path)
            layers = self._layers(handle)
            untimed = SchemeResult(scheme, part.schemes[scheme], None, layers)
            known = profile_of(part.model, floats, [untimed])
            if self._timed and all(option.ms >= HOPELESS_SHARE * known.float_ms for option in known.options):
                return untimed
            seed = self._run.settings.seed
            rounds = compare_builds(
                self._runner, opponent, handle, GROUP_ROUNDS, seed, lambda r: abs(r.median - 1) > DECISIVE
            )
            return replace(untimed, result=rounds)
        finally:
            if handle is not None:
                self._runner.unload(handle)
            path.unlink()

    def _layers(self, handle: Handle) -> tuple[Layer, ...]:
        return self._runner.layers(handle, PROFILED_RUNS) if self._timed else ()

    def _loaded(self, path: Path) -> Handle:
        try:
            return self._runner.load(path, path.name.removesuffix(".onnx"))
        except InputError as error:  # an option of the engine that fits the whole model, but not this part
            raise EngineRefused(Failure("build", str(error))) from error


SMALL = 0.002
"""Kinds of groups that take less than this share of the model's time are not measured. Chosen, not measured."""

PATIENCE = 0.5
"""Share of the search's time after which no more groups are timed alone, so that the rest is left for the whole model.
Chosen, not measured."""


class ProgressFile(Silent):
    """Writes the progress of a run to a file, anew after each result."""

    def __init__(self, folder: Path, parts: Partition, kinds: Sequence[GroupKind]) -> None:
        self._path, self._left = folder / PROGRESS, len(kinds)
        self._groups: dict[int, dict[str, Any]] = {}
        for kind in kinds:
            groups = [[parts.model.nodes[n].name for n in unit.nodes] for unit in kind.units]
            self._groups[kind.number] = {"groups": groups}
        self._validation: list[dict[str, Any]] = []

    def timed(self, kind: GroupKind, profile: Profile) -> None:
        self._groups[kind.number] |= {
            "float_ms": profile.float_ms,
            "schemes_ms": {option.scheme: option.ms for option in profile.options},
            "failures": dict(profile.failures),
        }
        self._left -= 1
        self._write()

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        row = {"number": trial.number, "origin": trial.proposal.origin, "edges": len(trial.placement)}
        self._validation.append(row | {"verdict": outcome, "best_ratio": state.best_ratio})
        self._write()

    def _write(self) -> None:
        phase = "timing groups alone" if self._left else "validating on the whole model"
        groups = list(self._groups.values())
        write_json(self._path, {"phase": phase, "profiling": groups, "validation": self._validation})


def profile(run: Run) -> tuple[SubgraphSearch, ProgressFile, tuple[str, ...], str | None]:
    """Group the nodes of a model, time the distinct groups alone, and select those that gain. Returns the search that
    starts from these, an observer for it, notes, and a message if time was short."""
    settings, subject, observer = run.settings, run.subject, run.observer
    deadline = run.budget.deadline
    if deadline is not None:
        now = time.monotonic()
        deadline = now + PATIENCE * (deadline - now)
    observer.stage("grouping as the engine fuses")
    layers = run.bench.layers()
    is_timed = any(layer.time_ms for layer in layers)
    grouped = _grouped(settings, subject, layers)
    parts = partition(subject.shaped, subject.possible, grouped.groups, run.format_shares)
    model, total = parts.model, sum(layer.time_ms or 0.0 for layer in layers)
    times = [sum(work(model, model.nodes[n]) for n in unit.nodes) for unit in parts.units]
    if total:
        times = parts.spent(attribute(model, Placement(), layers, total).nodes)
    resolved = resolve(subject.model, subject.shaped, subject.feed, spans(settings.engine), run.execution)
    kinds = _kinds(parts, grouped, resolved, times)
    progress = ProgressFile(settings.output_dir, parts, kinds)
    with Profiler(run, parts, resolved, deadline, timed=is_timed) as profiler:
        by_kind = profiler.all(kinds, progress.timed)
    profiles = {unit.number: passthrough_profile(parts, unit, times[unit.number]) for unit in parts.units}
    for kind in kinds:
        profiles |= dict.fromkeys((unit.number for unit in kind.units), by_kind[kind.number])
    # Some kernels are slow alone and fast between others: only a placement of the whole model shows that.
    search = SubgraphSearch(
        select(parts, profiles),
        subject.foremost() | weights_by_family(run.format_shares),
        incremental=settings.incremental_validation,
    )
    notes = list[str]()
    if grouped.nameless:
        count, first = len(grouped.nameless), grouped.nameless[0]
        notes.append(f"{count} layers of the report name no node of the model, the first is {first!r}")
    if not is_timed:
        what = "no layer times" if layers else "no layers"
        notes.append(f"the engine reports {what}: groups were compared by their total latency, reformats included")
    late = sum(one.failures.get("") == NO_TIME for one in profiles.values())
    shortfall = f"{LATE} ended before {late} of {len(profiles)} groups were fully timed"
    return search, progress, tuple(notes), shortfall if late else None


def _grouped(settings: Settings, subject: Subject, layers: Sequence[Layer]) -> Grouping:
    """The groups of the option `graph_json`, of the engine's layer report, or by rules. A report from trtexec is copied
    to the output folder."""
    if settings.graph_json is not None:
        return groups.from_file(subject.shaped, settings.graph_json)
    exported = settings.output_dir / LOGS / "baseline.graph.json"
    if exported.exists():
        stem = settings.output_dir / f"{settings.model.stem}.fp16"
        copies = {".graph.json": exported, ".build.log": exported.with_name("baseline.log")}
        for ending, source in copies.items():
            with atomic_write(stem.with_name(stem.name + ending)) as fresh:
                shutil.copyfile(source, fresh)
    if layers:
        return groups.from_layers(subject.shaped, layers)
    return groups.by_rules(subject.shaped, subject.possible)


def _kinds(parts: Partition, grouped: Grouping, resolved: Resolved, times: Sequence[float]) -> tuple[GroupKind, ...]:
    """Kinds of equal groups by falling time. Left out are those that are computed in advance, cannot have pairs, or
    take too little time."""
    alike: dict[str, list[Unit]] = {}
    for unit in parts.units:
        names = {parts.model.nodes[n].name for n in unit.nodes}
        if not names <= set(grouped.folded) and unit.outputs and (unit.inputs or unit.inner):
            alike.setdefault(signature(parts, unit, resolved.sizes), []).append(unit)
    least = SMALL * sum(times)
    timed = [(sum(times[u.number] for u in units), units) for units in alike.values()]
    kinds = list[GroupKind]()
    for ms, units in sorted(timed, key=lambda item: (-item[0], item[1][0].number)):
        if ms >= least:
            kinds.append(GroupKind(len(kinds) + 1, tuple(units), ms))
    return tuple(kinds)
