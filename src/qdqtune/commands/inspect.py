"""`qdqtune inspect`: the regions and patterns of a model, as text (`render`) and as JSON (`as_json`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtune.calibration.options import FixOption, RewriteOption
from qdqtune.commands.inputs import ModelOption
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines.formats import FORMATS
from qdqtune.explanation.formatting import counted
from qdqtune.graph.model import Model
from qdqtune.options import COUNT, SWITCH, Flag, Option, Text, choice, option
from qdqtune.search.regions import discovery
from qdqtune.search.regions.discovery import Region, Regions, RegionType
from qdqtune.search.regions.patterns import Pattern, group, is_quantizable, tunable
from qdqtune.tuning.options import Division
from qdqtune.tuning.subject import tuned_graph

MOST_FREQUENT = 10
"""How many patterns are listed."""

LONGEST_BAR = 40
"""Width of the longest histogram bar, in characters."""


REGIONS: Any = option(
    choice("auto", "names", "topology"),
    "auto",
    "Divide the graph by node names, by topology, or by what fits.",
    "Search",
)


@dataclass(kw_only=True)
class InspectOptions(RewriteOption, FixOption, ModelOption):
    """The options of `inspect`."""

    engine: Text = option(
        choice(*sorted(FORMATS)), "onnxruntime", "Engine of the run whose regions to show. Need not be here.", "Engine"
    )
    regions: Option[Division, Division] = REGIONS
    max_sequence_size: Option[int, int] = option(
        COUNT, 10, "Largest leaf, in nodes.", "Search", short="largest leaf, in nodes"
    )
    include_all_regions: Flag = option(SWITCH, False, "Show regions without quantizable operators as well.", "Output")
    tree: Flag = option(
        SWITCH,
        False,
        "Show every region, not only the summary; -v names nodes and tensors.",
        "Output",
        short="every region, not only a summary",
    )


@dataclass(frozen=True, repr=False)
class Inspection(Shown):
    """Regions and patterns of a model. `lines` hold the summary, or with the option `tree` the hierarchy; `named` holds
    the hierarchy with all nodes and tensors."""

    told: Mapping[str, Any]
    lines: tuple[str, ...]
    named: tuple[str, ...]

    def in_words(self) -> str:
        """How many regions and patterns."""
        summary = self.told["summary"]
        return f"{self.told['nodes']} nodes in {summary['regions']} regions of {len(self.told['patterns'])} patterns"

    def table(self) -> Table:
        """The patterns, the most frequent first."""
        ordered = sorted(self.told["patterns"], key=lambda p: -p["instances"])
        rows = [(p["digest"], p["kind"], str(p["instances"]), str(p["points"]), ", ".join(p["ops"])) for p in ordered]
        return Table(("pattern", "kind", "instances", "points", "operators"), rows)

    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON values."""
        return dict(self.told)


def inspect(options: InspectOptions) -> Inspection:
    """Divide the graph that a run tunes in a model, in a file (see `on_disk`), into regions, and find which of them
    share a pattern.

    Raises:
        QdqtuneError: the model cannot be read, or an option does not fit.
    """
    graph = tuned_graph(Path(str(options.model)), options.fix_inputs, options.rewrites, options.engine)
    whole = options.include_all_regions
    division = discovery.find(graph, options.regions, max_sequence_size=options.max_sequence_size)
    patterns = group(graph, division)
    plain, named = (
        tuple(render(graph, division, patterns, include_all_regions=whole, verbose=verbose, tree=tree))
        for verbose, tree in ((False, options.tree), (True, True))
    )
    return Inspection(as_json(graph, division, patterns, include_all_regions=whole), plain, named)


def render(
    model: Model,
    regions: Regions,
    patterns: Sequence[Pattern],
    *,
    include_all_regions: bool = False,
    verbose: bool = False,
    tree: bool = True,
) -> list[str]:
    """The hierarchy and its statistics as lines of text; without `tree` a summary that fits on a screen.

    Regions without quantizable operators are counted but shown only with `include_all_regions`; patterns that no search
    tunes are only listed with it. `verbose` adds the names of nodes and tensors to the tree.
    """
    patterns = patterns if include_all_regions else tunable(model, patterns)
    summary = _Summary.of(model, regions)
    if not tree:
        return [*_head(summary, regions), "", *_pattern_lines(patterns)]
    pattern_of = {region: p for p in patterns for region in p.instances}
    shown = [r for r in regions.walk() if include_all_regions or is_quantizable(model, r)]
    lines = [*_head(summary, regions), ""]
    for region in shown:
        lines += _tree_lines(model, region, pattern_of.get(region), verbose)
    if hidden := summary.regions - len(shown):
        lines += ["", f"Hidden: {counted(hidden, 'region')} without quantizable operators (`include_all_regions`)"]
    return [*lines, "", *_histogram(summary), "", *_pattern_lines(patterns)]


def as_json(
    model: Model, regions: Regions, patterns: Sequence[Pattern], *, include_all_regions: bool = False
) -> dict[str, object]:
    """The hierarchy and its statistics as JSON values."""
    patterns = patterns if include_all_regions else tunable(model, patterns)
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


def flow_type(model: Model, region: Region) -> str:
    """`divergent` if several nodes of the region read one tensor, else `sequence`."""
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
    most = max((number for _, number in summary.histogram), default=1)
    for size, number in summary.histogram:
        yield f"{size:>5} | {'█' * max(1, LONGEST_BAR * number // most)} {number}"


def _pattern_lines(patterns: Sequence[Pattern]) -> Iterator[str]:
    leaf = sum(p.type is RegionType.LEAF for p in patterns)
    regions = counted(sum(len(p.instances) for p in patterns), "region")
    yield f"Patterns: {len(patterns)} ({leaf} LEAF, {len(patterns) - leaf} COMPOSITE), in {regions}"
    frequent = sorted(patterns, key=lambda p: -len(p.instances))[:MOST_FREQUENT]
    for p in frequent:
        ops = ", ".join(p.ops[:8]) + (f", ... ({len(p.ops)} nodes)" if len(p.ops) > 8 else "")
        counts = f"{counted(len(p.instances), 'instance')}, {counted(len(p.points), 'point')}"
        yield f"  {p.digest}  {p.type.value:9s}  {counts}: {ops}"
