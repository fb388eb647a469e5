"""Files that carry a result from one model to another: placement.yaml, and the pattern cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from qdqtune.errors import BadOption, OutputError
from qdqtune.graph.model import Model
from qdqtune.measurement.timing import Plan, judge
from qdqtune.search.regions.patterns import Pattern, scheme_of
from qdqtune.search.regions.region import ChildInput, NodeInput, Point, RegionOutput, Scheme
from qdqtune.types import Edge, Placement, Trial

VERSION = 1


@dataclass(frozen=True)
class Recorded:
    """What placement.yaml holds."""

    placement: Placement
    quant_type: str
    engine: str
    fix_inputs: Mapping[str, float | int | str]


def write_placement(path: Path, recorded: Recorded, model: str) -> None:
    """Write placement.yaml: every edge with a pair, by the names of the ONNX file.

    Raises:
        OutputError: the file cannot be written.
    """
    edges = [{"tensor": e.tensor} | ({"output": e.index} if e.is_graph_output else {"node": e.node, "input": e.index})
             for e in recorded.placement]  # fmt: skip
    _write(path, {"version": VERSION, "model": model, "engine": recorded.engine, "quant_type": recorded.quant_type,
                  "fix_inputs": dict(recorded.fix_inputs), "edges": edges})  # fmt: skip


def read_placement_file(path: Path) -> Recorded:
    """Read placement.yaml.

    Raises:
        BadOption: the file is missing, or is no placement file of this version.
    """
    content = _read(path, "placement")
    try:
        edges = [Edge(e["tensor"], e.get("node", ""), e["output"] if "output" in e else e["input"])
                 for e in content["edges"]]  # fmt: skip
        return Recorded(
            Placement.of(edges), content["quant_type"], content["engine"], dict(content.get("fix_inputs") or {})
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BadOption(f"{path} is no placement file: {error!r} is missing or wrong") from error


def existing(model: Model, placement: Placement, possible: frozenset[Edge]) -> tuple[Placement, tuple[Edge, ...]]:
    """The edges of a placement that `model` has too, and those that it lacks or that cannot carry a pair there."""
    lost = tuple(e for e in placement if e not in possible)
    return placement - Placement.of(lost), lost


class Known(Protocol):
    """What the pattern cache says of a pattern."""

    @property
    def digest(self) -> str:
        """As in `Pattern`."""

    @property
    def ops(self) -> Sequence[str]:
        """As in `Pattern`."""


def write_cache(path: Path, caches: Mapping[str, Sequence[tuple[Scheme, float]]], patterns: Iterable[Known]) -> None:
    """Write a pattern cache: per pattern its schemes with their ratio to what they replaced, best first.

    Raises:
        OutputError: the file cannot be written.
    """
    entries = []
    for pattern in patterns:
        if schemes := caches.get(pattern.digest):
            rows = [
                {"ratio": round(r, 4), "points": [_point(p) for p in sorted(s.points, key=repr)]} for s, r in schemes
            ]
            entries.append({"pattern": pattern.digest, "ops": list(pattern.ops), "schemes": rows})
    _write(path, {"version": VERSION, "patterns": entries})


def read_cache(path: Path) -> dict[str, tuple[Scheme, ...]]:
    """The schemes of a pattern cache by pattern digest, best first.

    Raises:
        BadOption: the file is missing, or is no pattern cache of this version.
    """
    content = _read(path, "pattern cache")
    try:
        return {entry["pattern"]: tuple(Scheme(frozenset(map(_parsed, row["points"]))) for row in entry["schemes"])
                for entry in content["patterns"]}  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadOption(f"{path} is no pattern cache: {error!r} is missing or wrong") from error


def cache_of(
    model: Model,
    patterns: Iterable[Pattern],
    final: tuple[Placement, float],
    history: Sequence[Trial],
    plan: Plan,
    *,
    minimum_distance: int,
    maximum_entries: int,
) -> dict[str, list[tuple[Scheme, float]]]:
    """Schemes worth trying again: that of the `final` (placement, ratio), then measured winners that differ enough."""
    found: dict[str, list[tuple[Scheme, float]]] = {}
    for pattern in patterns:
        region = pattern.instances[0]
        entries = [(scheme_of(model, pattern, region, final[0].edges), final[1])]
        own = [(t, judge(t, plan)) for t in history if t.proposal.pattern == pattern.digest]
        trials = [(t, measured) for t, measured in own if measured is not None]
        for trial, measured in sorted(trials, key=lambda item: item[1].median):
            scheme = scheme_of(model, pattern, region, trial.placement.edges)
            if measured.verdict == "faster" and all(scheme.distance(s) >= minimum_distance for s, _ in entries):
                entries.append((scheme, measured.median))
        found[pattern.digest] = entries[:maximum_entries]
    return found


def _point(point: Point) -> list[Any]:
    match point:
        case NodeInput(node, number):
            return ["node_input", node, number]
        case ChildInput(region, number):
            return ["child_input", region, number]
        case RegionOutput(output, None, region):
            return ["child_output", region, output]
        case RegionOutput(output, node, _):
            return ["node_output", node, output]
    raise TypeError(f"not an insertion point: {point!r}")


def _parsed(values: Sequence[Any]) -> Point:
    kind, owner, number = values
    if not (isinstance(owner, int) and isinstance(number, int)):
        raise ValueError(f"{values} is not an insertion point")
    match kind:
        case "node_input":
            return NodeInput(owner, number)
        case "child_input":
            return ChildInput(owner, number)
        case "child_output":
            return RegionOutput(number, region_index=owner)
        case "node_output":
            return RegionOutput(number, node_index=owner)
    raise ValueError(f"{kind} is not a kind of insertion point")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None, width=120))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for machines.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadOption(f"cannot read {what} {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadOption(f"{path} is no {what} file, or damaged: it is no YAML") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise BadOption(f"{path} is no {what} file of this version: give one that `qdqtune tune` has written")
    return content
