"""Subgraph mode: times each distinct fusion group alone before the search, and reports on all groups after it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdqtune.engines.tensorrt.options import spans
from qdqtune.errors import writing
from qdqtune.graph.operators import work
from qdqtune.search.costs.attribution import attribute
from qdqtune.search.costs.decisions import nearest
from qdqtune.search.costs.profiles import Profile, passthrough_profile, select, signature
from qdqtune.search.costs.units import Partition, Unit, format_in, partition, weights_by_family
from qdqtune.search.subgraph import SubgraphSearch
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.tuning.folder import LOGS, PROGRESS
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.records import GroupOutcome
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subgraphs import groups
from qdqtune.tuning.subgraphs.groups import Grouping, Resolved, resolve
from qdqtune.tuning.subgraphs.profiler import NO_TIME, GroupKind, Profiler
from qdqtune.tuning.subject import Subject
from qdqtune.types import Layer, Placement, Trial

GROUP_LOG = "subgraphs.log"

SMALL = 0.002
"""Equal groups that together take less than this share of the model's time are not measured. Chosen, not measured."""

PATIENCE = 0.5
"""Share of the search's time after which no further group is timed alone, so that time is left to try on the whole
model what gained alone. Chosen, not measured."""


class ProgressFile(Silent):
    """An observer that writes the progress of a run to a file for people and scripts, anew after each result.

    The file also holds the lines of the state file, so that `restored_state` can restore it. Every method raises
    OutputError if the file cannot be written.
    """

    def __init__(self, folder: Path, parts: Partition, kinds: Sequence[GroupKind], store: Store) -> None:
        self._path, self._store = folder / PROGRESS, store
        self._left = len(kinds)
        names = {u.number: [parts.model.nodes[n].name for n in u.nodes] for kind in kinds for u in kind.units}
        self._groups: dict[int, dict[str, Any]] = {
            k.number: {"groups": [names[u.number] for u in k.units]} for k in kinds
        }
        self._validation: list[dict[str, Any]] = []

    def timed(self, kind: GroupKind, profile: Profile) -> None:
        """Add a kind of group that was timed alone, now or in an earlier session."""
        self._groups[kind.number] |= {
            "float_ms": profile.float_ms,
            "schemes_ms": {option.scheme: option.ms for option in profile.options},
            "failures": dict(profile.failures),
        }
        self._left -= 1
        self._write()

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """Add a trial on the whole model."""
        row = {"number": trial.number, "origin": trial.proposal.origin, "edges": len(trial.placement)}
        self._validation.append(row | {"verdict": outcome, "best_ratio": state.best_ratio})
        self._write()

    def _write(self) -> None:
        phase = "timing groups alone" if self._left else "validating on the whole model"
        content = {"phase": phase, "profiling": list(self._groups.values()), "validation": self._validation}
        write_json(self._path, content | {"state": self._store.lines()})


@dataclass(frozen=True)
class Profiled:
    """The groups timed alone, and the `search` that starts from them. `progress` is an observer of that search; `why`
    says by number of a group why it was not timed."""

    search: SubgraphSearch
    progress: ProgressFile
    kinds: tuple[GroupKind, ...]
    why: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def shortfall(self) -> str | None:
        """What to tell the user if there was no time for all groups."""
        profiles = self.search.selection.profiles.values()
        if not (late := sum(one.failures.get("") == NO_TIME for one in profiles)):
            return None
        untimed = f"{late} of {len(profiles)} groups were fully timed"
        return f"`time_budget` ended before {untimed}: with more time the same command goes on from there"


def profile(run: Run) -> Profiled:
    """Group the nodes of a model, time the distinct groups alone, and select those that gain.

    Raises:
        QdqtuneError: `graph_json` cannot be used, a file cannot be written, or the engine cannot run the float model.
    """
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
    times = _float_times(parts, layers)
    varying, memory = spans(settings.engine), run.runner.memory
    resolved = resolve(subject.model, subject.shaped, subject.feed, varying, memory, run.execution)
    kinds, why = _kinds(parts, grouped, resolved, times)
    progress = ProgressFile(settings.output_dir, parts, kinds, run.store)
    with Profiler(run, parts, resolved, timed=is_timed) as profiler:
        by_kind = profiler.all(kinds, progress.timed, deadline)
    profiles = {u.number: passthrough_profile(parts, u, times[u.number]) for u in parts.units}
    profiles |= {unit.number: by_kind[kind.number] for kind in kinds for unit in kind.units}
    # Some kernels are slow alone and fast between others: only a placement of the whole model shows that.
    search = SubgraphSearch(
        select(parts, profiles),
        subject.foremost() | weights_by_family(run.format_shares),
        layers if is_timed else (),
        settings.plan,
        settings.incremental_validation,
    )
    notes = _notes(grouped, layers, is_timed)
    with writing(log := settings.output_dir / LOGS / GROUP_LOG):
        log.write_text("\n".join([*grouped.lines(), *notes, ""]), encoding="utf-8")
    return Profiled(search, progress, kinds, why, notes)


def _grouped(settings: Settings, subject: Subject, layers: Sequence[Layer]) -> Grouping:
    """The groups of `graph_json`, of the engine's layer report, or by rules. A report that trtexec wrote is copied to
    the output folder."""
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
        return groups.from_layers(subject.shaped, layers, "as the engine's layer report has them")
    return groups.by_rules(subject.shaped, subject.possible)


def _float_times(parts: Partition, layers: Sequence[Layer]) -> list[float]:
    """The float time of each group in ms; without layer times its number of operations."""
    model, total = parts.model, sum(layer.time_ms or 0.0 for layer in layers)
    if not total:
        return [sum(work(model, model.nodes[n]) for n in unit.nodes) for unit in parts.units]
    return parts.spent(attribute(model, Placement(), layers, total).nodes)


def _kinds(
    parts: Partition, grouped: Grouping, resolved: Resolved, times: Sequence[float]
) -> tuple[tuple[GroupKind, ...], dict[int, str]]:
    """Kinds of equal groups, those with the most time first; and by number of other groups, why they are not timed."""
    why: dict[int, str] = {}
    alike: dict[str, list[Unit]] = {}
    for unit in parts.units:
        names = {parts.model.nodes[n].name for n in unit.nodes}
        if names <= set(grouped.folded):
            why[unit.number] = "computed in advance"
        elif not unit.outputs or not (unit.inputs or unit.inner):
            why[unit.number] = "no pair can stand there"
        else:
            alike.setdefault(signature(parts, unit, resolved.sizes), []).append(unit)
    least = SMALL * sum(times)
    ordered = sorted(
        ((sum(times[u.number] for u in units), units) for units in alike.values()),
        key=lambda item: (-item[0], item[1][0].number),
    )
    worth = [(ms, units) for ms, units in ordered if ms >= least]
    why |= {u.number: "too small to matter" for ms, units in ordered if ms < least for u in units}
    return tuple(GroupKind(i, tuple(units), ms) for i, (ms, units) in enumerate(worth, 1)), why


def _notes(grouped: Grouping, layers: Sequence[Layer], is_timed: bool) -> tuple[str, ...]:
    notes = []
    if grouped.nameless:
        notes.append(f"{len(grouped.nameless)} layers of the report name no node of the model: see logs/{GROUP_LOG}")
    if not is_timed:
        what = "no layer times" if layers else "no layers"
        notes.append(f"the engine reports {what}: groups were compared by their total latency, reformats included")
    return tuple(notes)


# ---------------------------------------------------------------- the table at the end


def outcomes(profiled: Profiled, history: Sequence[Trial], final: Placement) -> tuple[GroupOutcome, ...]:
    """A row for every group, those that take the most time in float first."""
    search, parts = profiled.search, profiled.search.parts
    builds = search.builds(history)
    saved = (
        [a - b for a, b in zip(search.spent(builds[Placement()]), search.spent(builds[final]), strict=True)]
        if final in builds
        else None
    )
    kinds = {unit.number: kind.number for kind in profiled.kinds for unit in kind.units}
    running = nearest(parts, final).quantized
    rows = []
    for unit in parts.units:
        profile = search.selection.profiles[unit.number]
        chosen = search.selection.option(unit.number) or profile.best
        kept = unit.number in running or format_in(unit, final) is not None
        nodes = [parts.model.nodes[n] for n in unit.nodes]
        row = GroupOutcome(
            nodes=tuple(n.name for n in nodes),
            operators=tuple(n.op for n in nodes),
            kind=kinds.get(unit.number),
            scheme=chosen.scheme if chosen else None,
            float_ms=profile.float_ms,
            quantized_ms=chosen.ms if chosen else None,
            gain_in_model=saved[unit.number] if saved and final else None,
            kept=kept,
            why=_why(unit.number, profiled, profile, final, kept=kept, is_tried=bool(history)),
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda r: (-r.float_ms, r.nodes)))


def _why(number: int, profiled: Profiled, profile: Profile, final: Placement, *, kept: bool, is_tried: bool) -> str:
    """In words, why a group runs in 8 bits or in float."""
    accepted = profiled.search.selection.option(number) is not None
    if kept:
        best = profile.best
        is_slower_alone = best is None or best.ms >= profile.float_ms
        return "kept: joins neighbours" if not accepted else "kept: saves conversions" if is_slower_alone else "kept"
    if number in profiled.why and not accepted:
        return profiled.why[number]
    if not profile.options and profile.failures:
        scheme, reason = next(iter(profile.failures.items()))
        return f"scheme {scheme} fails: {reason}" if scheme else reason
    if accepted:
        return "slower in the model" if final else "model not faster" if is_tried else "not tried in the model"
    best = profile.best
    return "slower alone" if best is None or best.ms >= profile.float_ms else "conversions cost more"
