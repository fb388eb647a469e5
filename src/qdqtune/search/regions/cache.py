"""The pattern cache: the fastest schemes by pattern, as a file for runs on other models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

from qdqtune.errors import BadOption
from qdqtune.placement.files import VERSION, read_yaml, wrong_part
from qdqtune.search.regions.discovery import Point, PointKind, Scheme
from qdqtune.search.regions.patterns import Pattern, scheme_of
from qdqtune.timing.ratios import Plan, judge
from qdqtune.types import Placement, Trial


def content_of(caches: Mapping[str, Sequence[tuple[Scheme, float]]]) -> dict[str, object]:
    """The content of a pattern cache as a file: by digest of the pattern its schemes, best first, with their ratio to
    what they replaced."""
    entries = []
    for digest, schemes in caches.items():
        rows = [
            {"ratio": round(ratio, 4), "points": [list(astuple(point)) for point in sorted(scheme)]}
            for scheme, ratio in schemes
        ]
        if rows:
            entries.append({"pattern": digest, "schemes": rows})
    return {"version": VERSION, "patterns": entries}


def read_cache(path: Path) -> dict[str, tuple[Scheme, ...]]:
    """The schemes of a pattern cache by pattern digest, best first.

    Raises:
        BadOption: the file is missing, or is no pattern cache of this version.
    """
    content = read_yaml(path, "pattern cache")
    try:
        return {
            entry["pattern"]: tuple(frozenset(map(_point_of_row, row["points"])) for row in entry["schemes"])
            for entry in content["patterns"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadOption(f"{path} is no pattern cache: {wrong_part(error)}") from error


def cache_of(
    patterns: Iterable[Pattern],
    final: tuple[Placement, float],
    history: Sequence[Trial],
    plan: Plan,
    *,
    minimum_distance: int,
    maximum_entries: int,
) -> dict[str, list[tuple[Scheme, float]]]:
    """Schemes worth trying again, at most `maximum_entries` for each pattern: that of the `final` placement with its
    ratio, then measured winners, the fastest first, that differ from all before in `minimum_distance` points."""
    schemes: dict[str, list[tuple[Scheme, float]]] = {}
    for pattern in patterns:
        region = pattern.instances[0]
        entries = [(scheme_of(pattern, region, final[0].edges), final[1])]
        own = [(t, judge(t, plan)) for t in history if t.proposal.pattern == pattern.digest]
        trials = [(t, measured) for t, measured in own if measured is not None]
        for trial, measured in sorted(trials, key=lambda item: item[1].median):
            scheme = scheme_of(pattern, region, trial.placement.edges)
            if measured.verdict == "faster" and all(len(scheme ^ other) >= minimum_distance for other, _ in entries):
                entries.append((scheme, measured.median))
        schemes[pattern.digest] = entries[:maximum_entries]
    return schemes


def _point_of_row(row: Sequence[Any]) -> Point:
    kind, owner, number = row
    if kind not in get_args(PointKind) or not (isinstance(owner, int) and isinstance(number, int)):
        raise ValueError(f"{row} is not an insertion point")
    return Point(kind, owner, number)
