"""Subgraph mode before the search: group the nodes as the engine fuses them, and time each distinct group alone.

Every answer of the engine goes to the store at once, so that a run that goes on asks nothing twice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdqtune.engines import shapes
from qdqtune.errors import writing
from qdqtune.graph.operators import work
from qdqtune.search.costs.attribution import Priced, attribute
from qdqtune.search.costs.profiles import passing, select, signature
from qdqtune.search.costs.units import Partition, Unit, by_bits, partition
from qdqtune.search.subgraph import SubgraphSearch
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.subgraphs import groups
from qdqtune.tuning.subgraphs.extraction import Resolved, resolve
from qdqtune.tuning.subgraphs.groups import Grouping
from qdqtune.tuning.subgraphs.profiler import GroupKind, Profiler
from qdqtune.tuning.subgraphs.progress import CacheFile
from qdqtune.tuning.subject import Subject
from qdqtune.types import Layer, Placement

LOG = "subgraphs.log"

SMALL = 0.002
"""Equal groups that together take less than this share of the model are not measured."""

PATIENCE = 0.5
"""Share of the time that is left for the search after which no further group is timed alone: what gains has to meet the
whole model as well, or it was timed in vain."""


@dataclass(frozen=True)
class Profiled:
    """What the search starts from. `progress` is to hear of it, `why` says by group why it was not measured."""

    search: SubgraphSearch
    progress: CacheFile
    kinds: tuple[GroupKind, ...]
    why: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    builds: int = 0
    engine_seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """What summary.json says of the groups as a whole."""
        return {
            "group_kinds": len(self.kinds),
            "groups_accepted": len(self.search.gains),
            "group_builds": self.builds,
            "group_engine_seconds": round(self.engine_seconds, 3),
        }


def profile(run: Run) -> Profiled:
    """Group the nodes of a model, time the distinct groups alone, and select those that gain.

    Raises:
        QdqtuneError: the --graph-json is of no use, a file cannot be written, or the engine cannot run the float model.
    """
    settings, subject, observer = run.settings, run.subject, run.observer
    deadline = run.budget.deadline
    if deadline is not None:
        now = time.monotonic()
        deadline = now + PATIENCE * (deadline - now)
    observer.stage("grouping as the engine fuses")
    layers = run.bench.layers()
    timed = any(layer.time_ms for layer in layers)
    grouped = _grouped(settings, subject, layers)
    parts = partition(subject.shaped, subject.possible, grouped.groups, run.ways)
    times = _float_times(parts, layers)
    resolved = resolve(subject.model, subject.shaped, subject.feed, shapes.spans(settings.engine), run.runner.memory)
    kinds, why = _kinds(parts, grouped, resolved, times)
    progress = CacheFile(settings.output_dir, parts, kinds, run.store)
    with Profiler(run, parts, resolved, timed=timed) as profiler:
        by_kind = profiler.all(kinds, observer, progress.timed, deadline)
    profiles = {u.number: passing(parts, u, times[u.number]) for u in parts.units}
    profiles |= {unit.number: by_kind[kind.number] for kind in kinds for unit in kind.units}
    # Some kernels are slow alone and fast between others: they are found in a placement of the whole model only.
    search = SubgraphSearch(
        select(parts, profiles),
        subject.foremost() | by_bits(run.ways),
        layers if timed else (),
        settings.plan,
        settings.incremental_validation,
    )
    notes = _notes(grouped, layers, timed)
    with writing(log := settings.output_dir / "logs" / LOG):
        log.write_text("\n".join([*grouped.lines(), *notes, ""]), encoding="utf-8")
    return Profiled(search, progress, kinds, why, notes, profiler.builds, profiler.engine_seconds)


def _grouped(settings: Settings, subject: Subject, layers: Sequence[Layer]) -> Grouping:
    """The groups of the user's file, of the engine's report, or by rule; and the report as a file where trtexec wrote
    one."""
    if settings.graph_json is not None:
        return groups.from_file(subject.shaped, settings.graph_json)
    exported = settings.output_dir / "logs" / "baseline.graph.json"
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
    """The float ms of each group; without layer times its work, which orders the groups as well."""
    model, total = parts.model, sum(layer.time_ms or 0.0 for layer in layers)
    if not total:
        return [sum(work(model, model.nodes[n]) for n in unit.nodes) for unit in parts.units]
    return parts.spent(attribute(model, Priced(Placement(), tuple(layers)), total).nodes)


def _kinds(
    parts: Partition, grouped: Grouping, resolved: Resolved, times: Sequence[float]
) -> tuple[tuple[GroupKind, ...], dict[int, str]]:
    """Equal groups together, those that take the most time first; and by group why it is not worth a measurement."""
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


def _notes(grouped: Grouping, layers: Sequence[Layer], timed: bool) -> tuple[str, ...]:
    notes = []
    if grouped.nameless:
        notes.append(f"{len(grouped.nameless)} layers of the report name no node of the model: see logs/{LOG}")
    if not timed:
        what = "no layer times" if layers else "no layers"
        notes.append(f"the engine reports {what}: groups were compared by their total latency, reformats included")
    return tuple(notes)
