"""What became of each group: the rows of subgraph mode's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from qdqtune.search.costs.decisions import nearest
from qdqtune.search.costs.profiles import Profile
from qdqtune.tuning.modes.mode import GroupOutcome
from qdqtune.tuning.subgraphs.prepare import Profiled
from qdqtune.types import Placement, Trial


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
        kept = unit.number in running or parts.format_in(unit, final) is not None
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
    accepted = profiled.search.selection.option(number) is not None
    if kept:
        best = profile.best
        alone = best is None or best.ms >= profile.float_ms
        return "kept: joins neighbours" if not accepted else "kept: saves conversions" if alone else "kept"
    if number in profiled.why and not accepted:
        return profiled.why[number]
    if not profile.options and profile.failures:
        scheme, reason = next(iter(profile.failures.items()))
        return f"scheme {scheme} fails: {reason}" if scheme else reason
    if accepted:
        return "slower in the model" if final else "model not faster" if is_tried else "not tried in the model"
    best = profile.best
    return "slower alone" if best is None or best.ms >= profile.float_ms else "conversions cost more"


def record(rows: Iterable[GroupOutcome]) -> list[Mapping[str, object]]:
    """The rows for a JSON file."""
    return [asdict(row) for row in rows]
