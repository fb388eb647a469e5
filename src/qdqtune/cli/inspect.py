"""`qdqtune inspect`: the regions and patterns of a model, for people (`render`) and for machines (`as_json`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.options import flag, option
from qdqtune.cli.output import counted, print_json
from qdqtune.cli.streams import escaped
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import CONTROL_FLOW, HEAVY, INTEGER_KERNELS, may_be_float
from qdqtune.search.regions import discovery
from qdqtune.search.regions.discovery import Regions
from qdqtune.search.regions.patterns import Pattern, group
from qdqtune.search.regions.region import Region, RegionType

QUANTIZABLE = HEAVY - CONTROL_FLOW | INTEGER_KERNELS | {"AveragePool", "MaxPool"}
"""Operators that engines run on quantized values."""

MOST_FREQUENT = 10
"""Patterns that the text lists."""

BAR = 40
"""Width of the longest histogram bar."""


@command(
    "inspect",
    params=[
        options.MODEL,
        options.REGIONS,
        option("--max-sequence-size", "Largest leaf, in nodes.", click.IntRange(1), default=10),
        flag("--include-all-regions", "Show regions without quantizable operators as well."),
        options.FIX_INPUT,
        flag("-v --verbose", "Name every node and tensor."),
        options.AS_JSON,
    ],
)
def inspect_command(
    model: Path,
    regions: Literal["auto", "names", "topology"],
    max_sequence_size: int,
    include_all_regions: bool,
    fix_inputs: Mapping[str, float | int | str],
    verbose: bool,
    as_machine: bool,
) -> None:
    """Show how MODEL divides into regions, and which of them share a pattern.

    More patterns mean a longer search: every pattern is tuned once, wherever it occurs.
    """
    graph = load(model, fix_inputs=fix_inputs)
    division = discovery.find(graph, regions, max_sequence_size=max_sequence_size)
    patterns = group(graph, division)
    if as_machine:
        print_json(as_json(graph, division, patterns, include_all_regions=include_all_regions))
    else:
        print(render(graph, division, patterns, include_all_regions=include_all_regions, verbose=verbose))


def render(
    model: Model,
    regions: Regions,
    patterns: Sequence[Pattern],
    *,
    include_all_regions: bool = False,
    verbose: bool = False,
) -> str:
    """The hierarchy and its statistics as text.

    Regions without quantizable operators are counted but shown only with `include_all_regions`. `verbose` adds the
    names of nodes and tensors.
    """
    summary = _Summary.of(model, regions)
    pattern_of = {region: p for p in patterns for region in p.instances}
    shown = [r for r in regions.walk() if include_all_regions or is_quantizable(model, r)]
    lines = [*_head(summary, regions), ""]
    for region in shown:
        lines += _tree_lines(model, region, pattern_of.get(region), verbose)
    if hidden := summary.regions - len(shown):
        lines += ["", f"Hidden: {counted(hidden, 'region')} without quantizable operators (--include-all-regions)"]
    return "\n".join(map(escaped, (*lines, "", *_histogram(summary), "", *_pattern_lines(patterns))))


def as_json(
    model: Model, regions: Regions, patterns: Sequence[Pattern], *, include_all_regions: bool = False
) -> dict[str, object]:
    """The same as plain values. Regions refer to their parents and patterns by `id` and `digest`."""
    summary = _Summary.of(model, regions)
    pattern_of = {region: p.digest for p in patterns for region in p.instances}
    parent = {child: region.id for region in regions.walk() for child in region.children}
    shown = [r for r in regions.walk() if include_all_regions or is_quantizable(model, r)]
    return {
        "method": regions.method,
        "nodes": summary.nodes,
        "covered_nodes": summary.covered,
        "phase1": {"regions": regions.phase1},
        "phase2": {"refined": regions.phase2, "skipped": regions.phase1 - regions.phase2},
        "summary": {"regions": summary.regions, "leaf": len(summary.sizes), "composite": summary.composites,
                    "hidden": summary.regions - len(shown)},
        "leaf_sizes": {"min": min(summary.sizes, default=0), "max": max(summary.sizes, default=0),
                       "avg": summary.average, "histogram": {str(s): n for s, n in summary.histogram}},
        "patterns": [{"digest": p.digest, "kind": p.type.value, "instances": len(p.instances),
                      "points": len(p.points), "ops": list(p.ops), "signature": p.signature} for p in patterns],
        "regions": [{"id": r.id, "parent": parent.get(r), "level": r.level, "kind": r.type.value,
                     "type": flow_type(model, r), "pattern": pattern_of.get(r),
                     "nodes": [model.nodes[n].name for n in r.nodes], "total_nodes": len(r.all_nodes()),
                     "children": [c.id for c in r.children], "inputs": list(r.inputs), "outputs": list(r.outputs)}
                    for r in shown],
    }  # fmt: skip


def is_quantizable(model: Model, region: Region) -> bool:
    """Whether a region holds an operator that engines quantize, working on floats."""
    nodes = (model.nodes[n] for n in region.all_nodes())
    return any(node.op in QUANTIZABLE and any(may_be_float(model, t) for t in node.outputs) for node in nodes)


def flow_type(model: Model, region: Region) -> str:
    """`divergent` if a tensor has several users inside the region, else `sequence`."""
    inside = set(region.all_nodes())
    tensors = [*region.inputs, *(t for n in inside for t in model.nodes[n].outputs if t)]
    several = any(len({n for n, _ in model.uses(t) if n in inside}) > 1 for t in tensors)
    return "divergent" if several else "sequence"


@dataclass(frozen=True)
class _Summary:
    nodes: int
    covered: int
    composites: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(model: Model, regions: Regions) -> _Summary:
        leaves = regions.leaves
        covered = len({n for r in leaves for n in r.nodes})
        return _Summary(len(model.nodes), covered, len(regions.composites), tuple(len(r.nodes) for r in leaves))

    @property
    def regions(self) -> int:
        return len(self.sizes) + self.composites

    @property
    def average(self) -> float:
        return round(sum(self.sizes) / max(len(self.sizes), 1), 1)

    @property
    def histogram(self) -> list[tuple[int, int]]:
        """Leaf size and the number of leaves that have it."""
        return sorted(Counter(self.sizes).items())

    @property
    def coverage(self) -> str:
        return f"{self.covered}/{self.nodes} nodes ({100 * self.covered / max(self.nodes, 1):.1f}%)"


def _head(summary: _Summary, regions: Regions) -> Iterator[str]:
    yield f"Method: {regions.method}"
    yield f"Phase 1 complete: {regions.phase1} regions, {summary.coverage}"
    yield f"Phase 2 complete: refined {regions.phase2} regions, skipped {regions.phase1 - regions.phase2}"
    kinds = f"{len(summary.sizes)} LEAF, {summary.composites} COMPOSITE"
    yield f"Summary: {summary.regions} regions ({kinds}), {summary.coverage}"
    low, high = min(summary.sizes, default=0), max(summary.sizes, default=0)
    yield f"LEAF region sizes: min={low}, max={high}, avg={summary.average}"


def _tree_lines(model: Model, region: Region, pattern: Pattern | None, verbose: bool) -> Iterator[str]:
    outer = "│    " * region.level
    yield f"{outer}├─ Region {region.id} (Level {region.level}, Type: {region.type.value})"
    facts = [f"Direct nodes: {len(region.nodes)}", f"Total nodes (recursive): {len(region.all_nodes())}"]
    facts += [f"Children: {len(region.children)}", f"Flow: {flow_type(model, region)}"]
    if pattern is not None:
        facts.append(f"Pattern: {pattern.digest} ({counted(len(pattern.instances), 'instance')})")
    if region.type is RegionType.LEAF:
        facts.append(f"Nodes: {', '.join(model.nodes[n].op for n in region.nodes)}")
        facts += [f"  - {model.nodes[n].name}" for n in region.nodes if verbose]
    for title, tensors in (("Inputs", region.inputs), ("Outputs", region.outputs)):
        facts.append(f"{title}: {counted(len(tensors), 'tensor')}")
        facts += [f"  - {t}" for t in tensors if verbose]
    last = max(i for i, fact in enumerate(facts) if not fact.startswith(" "))
    for i, fact in enumerate(facts):
        mark = "   " if i > last else "│  " if fact.startswith(" ") else "└─ " if i == last else "├─ "
        yield f"{outer}│  {mark}{fact}"


def _histogram(summary: _Summary) -> Iterator[str]:
    yield "LEAF region size histogram:"
    most = max((n for _, n in summary.histogram), default=1)
    for size, number in summary.histogram:
        yield f"{size:5d} | {'█' * max(1, BAR * number // most)} {number}"


def _pattern_lines(patterns: Sequence[Pattern]) -> Iterator[str]:
    leaf = sum(p.type is RegionType.LEAF for p in patterns)
    yield f"Patterns: {len(patterns)} ({leaf} LEAF, {len(patterns) - leaf} COMPOSITE)"
    frequent = sorted(patterns, key=lambda p: -len(p.instances))[:MOST_FREQUENT]
    for p in frequent:
        ops = ", ".join(p.ops[:8]) + (f", ... ({len(p.ops)} nodes)" if len(p.ops) > 8 else "")
        counts = f"{counted(len(p.instances), 'instance')}, {counted(len(p.points), 'point')}"
        yield f"  {p.digest}  {p.type.value:9s}  {counts}: {ops}"
