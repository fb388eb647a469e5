"""The pattern cache: a file with the fastest schemes of each pattern, for runs on other models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from qdqtune.errors import BadOption, one_line
from qdqtune.placement.files import VERSION, read_yaml
from qdqtune.search.regions.discovery import Point, Scheme
from qdqtune.search.regions.patterns import Pattern, scheme_of
from qdqtune.timing.ratios import Plan, with_ratios
from qdqtune.types import Placement, Trial


class _Row(msgspec.Struct):
    points: list[Point]


class _Entry(msgspec.Struct):
    pattern: str
    schemes: list[_Row]


class _Content(msgspec.Struct):
    patterns: list[_Entry]


def content_of(caches: Mapping[str, Sequence[tuple[Scheme, float]]]) -> dict[str, Any]:
    """A pattern cache as file content: for each pattern's digest its schemes, best first, with their latency relative
    to what they replaced."""
    entries = []
    for digest, schemes in caches.items():
        rows = [{"ratio": round(ratio, 4), "points": sorted(scheme)} for scheme, ratio in schemes]
        if rows:
            entries.append({"pattern": digest, "schemes": rows})
    return {"version": VERSION, "patterns": msgspec.to_builtins(entries)}


def read_cache(path: Path) -> dict[str, tuple[Scheme, ...]]:
    """The schemes in a pattern cache, by pattern digest, best first."""
    try:
        content = msgspec.convert(read_yaml(path, "pattern cache"), _Content)
    except ValueError as error:
        raise BadOption(f"{path} is no pattern cache: {one_line(error)}") from error
    return {entry.pattern: tuple(frozenset(row.points) for row in entry.schemes) for entry in content.patterns}


def cache_of(
    patterns: Iterable[Pattern],
    final: tuple[Placement, float],
    history: Sequence[Trial],
    plan: Plan,
    *,
    minimum_distance: int,
    maximum_entries: int,
) -> dict[str, list[tuple[Scheme, float]]]:
    """Choose at most `maximum_entries` schemes per pattern for later runs: that of the `final` placement (given with
    its ratio), then measured winners, fastest first, that differ from those before in `minimum_distance` points."""
    schemes: dict[str, list[tuple[Scheme, float]]] = {}
    for pattern in patterns:
        region = pattern.instances[0]
        entries = [(scheme_of(pattern, region, final[0].edges), final[1])]
        own = with_ratios([t for t in history if t.proposal.pattern == pattern.digest], plan)
        for trial, measured in sorted(own, key=lambda item: item[1].median):
            scheme = scheme_of(pattern, region, trial.placement.edges)
            if measured.verdict == "faster" and all(len(scheme ^ other) >= minimum_distance for other, _ in entries):
                entries.append((scheme, measured.median))
        schemes[pattern.digest] = entries[:maximum_entries]
    return schemes
