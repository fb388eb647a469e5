"""`qdqtune inspect`: a model's inputs, operators, regions and patterns, as JSON values and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import onnx

from qdqtune.calibration.inputs import InputSpec, size_hints
from qdqtune.calibration.options import FixOption, RewriteOption
from qdqtune.calibration.prepare import deciding_inputs, unsteady_work
from qdqtune.commands.inputs import ModelOption
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines.facts import ENGINES
from qdqtune.explanation.formatting import counted
from qdqtune.graph.inference import FIXING, known_sizes_computed, waiting_for_sizes
from qdqtune.graph.loading import load, read
from qdqtune.graph.model import Model, graphs, opset_of
from qdqtune.graph.operators import COMPUTE, CONTROL_FLOW
from qdqtune.options import COUNT, SWITCH, choice
from qdqtune.placement.possible import refusal
from qdqtune.placement.reading import quantized_how
from qdqtune.search.regions import discovery
from qdqtune.search.regions.discovery import Regions, RegionType
from qdqtune.search.regions.patterns import Pattern, group, is_quantizable, tunable
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.options import Division
from qdqtune.tuning.subject import tuned_graph

MOST_FREQUENT = 10
"""How many patterns, and how many kinds of operators, are listed."""


class InspectOptions(RewriteOption, FixOption, ModelOption):
    engine: str = choice(
        sorted(ENGINES), "Engine of the run whose regions to show. Need not be here.", "Engine", default="onnxruntime"
    )
    regions: Division | None = choice(
        Division,
        "Show regions and patterns, divided by node names, by topology, or by what fits (auto).",
        "Output",
        "regions and patterns as well",
    )
    max_sequence_size: int = COUNT("Largest leaf, in nodes.", "Search", "largest leaf, in nodes", default=10)
    include_all_regions: bool = SWITCH("Show regions without quantizable operators as well.", "Output")
    tree: bool = SWITCH(
        "Show every region, not only the summary; -v names nodes and tensors.",
        "Output",
        "every region, not only a summary",
    )


@dataclass(frozen=True, repr=False)
class Inspection(Shown):
    values: Mapping[str, Any]

    def in_words(self) -> str:
        summary = self.values["summary"]
        patterns = len(self.values["patterns"])
        return f"{self.values['nodes']} nodes in {summary['regions']} regions of {patterns} patterns"

    def table(self) -> Table:
        ordered = sorted(self.values["patterns"], key=lambda p: -p["instances"])
        rows = [(p["digest"], p["kind"], str(p["instances"]), str(p["points"]), ", ".join(p["ops"])) for p in ordered]
        return Table(("pattern", "kind", "instances", "points", "operators"), rows)

    def to_dict(self) -> Mapping[str, Any]:
        return self.values

    def overview(self) -> list[str]:
        model, width = self.values["model"], 8
        lines = [f"{'file':{width}} {model['nodes']} nodes, {model['parameters']:,} parameters, opset {model['opset']}"]
        for title in ("inputs", "outputs"):
            for number, tensor in enumerate(model[title]):
                lines.append(f"{'' if number else title:{width}} {tensor}")
        operators = [f"{count} {op}" for op, count in model["operators"].items()]
        more = [f"{len(operators) - MOST_FREQUENT} other kinds"] if len(operators) > MOST_FREQUENT else []
        lines.append(f"{'nodes':{width}} {', '.join([*operators[:MOST_FREQUENT], *more])}")
        kinds = "Conv, ConvTranspose, Gemm and MatMul"
        lines.append(f"{'8 bits':{width}} {model['products']} of {model['all_products']} {kinds} can have pairs")
        return lines + [f"{'':{width}} {note}" for note in model["notes"]]

    def lines(self, *, tree: bool = False, verbose: bool = False) -> list[str]:
        """A summary that fits on a screen; with `tree` also every region, with `verbose` its nodes and tensors."""
        lines = list(_head(self.values))
        if tree or verbose:
            lines.append("")
            instances = {pattern["digest"]: pattern["instances"] for pattern in self.values["patterns"]}
            for region in self.values["regions"]:
                lines += _tree_lines(region, instances, verbose=verbose)
            if hidden := self.values["summary"]["hidden"]:
                text = f"Hidden: {counted(hidden, 'region')} without quantizable operators (`include_all_regions`)"
                lines += ["", text]
        return [*lines, "", *_pattern_lines(self.values["patterns"])]


def inspect(options: InspectOptions, observer: Observer | None = None) -> Inspection:
    """Describe a model; with regions, divide the graph that a run tunes, and find which regions share a pattern.

    Raises:
        QdqtuneError: the model cannot be read, or an option does not fit.
    """
    file = options.model
    model = load(file, fix_inputs=options.fix_inputs)
    graph = tuned_graph(model, options.rewrites, options.engine)
    division = discovery.find(graph, options.regions or "auto", max_sequence_size=options.max_sequence_size)
    inspection = inspected(graph, division, group(graph, division), include_all_regions=options.include_all_regions)
    opset = opset_of(read(file))  # reading a model may raise it
    return Inspection({"model": {"opset": opset, **overview_of(model)}, **inspection.values})


def overview_of(model: Model) -> dict[str, Any]:
    """A model's inputs, outputs and operators, as JSON values. `all_products` counts `COMPUTE` nodes, also in bodies,
    `products` those that can have pairs on both inputs."""
    products = [node for node in model.nodes if node.op in COMPUTE and not node.domain]
    refusals = []
    for node in products:
        reasons = (refusal(model, tensor, node.index, slot) for slot, tensor in enumerate(node.inputs[:2]))
        refusals.append(next(filter(None, reasons), None))
    notes = []
    if how := quantized_how(model):
        notes.append(f"the file {how}: `from_qdq` starts from that")
    inputs, outputs = [_tensors(model, names) for names in (model.inputs, model.outputs)]
    if hints := size_hints(model, inputs):
        notes.append(f"open sizes: give `calibration_data`, or sizes like {' '.join(hints)}")
    inside = Counter(node.op_type for graph in islice(graphs(model.proto.graph), 1, None) for node in graph.node)
    hidden_products = sum(inside[op] for op in COMPUTE)
    if inside:
        kinds = ", ".join(sorted({node.op for node in model.nodes} & CONTROL_FLOW))
        deciding = deciding_inputs(model)
        advice = f"; if {deciding[0]} decides, `fix_inputs` {deciding[0]}=VALUE may bring them out" if deciding else ""
        found = counted(inside.total(), "node")
        found = f"{found}, {hidden_products} of these products," if hidden_products else found
        notes.insert(0, f"{found} in the bodies of {kinds} stay in float{advice}")
    if waiting := waiting_for_sizes(known_sizes_computed(model)):
        ops = ", ".join(sorted({node.op for node in waiting}))
        notes.append(f"each inference computes {counted(len(waiting), 'node')} ({ops}) from sizes alone: {FIXING}")
    notes += filter(None, [unsteady_work(model)])
    for reason, count in Counter(filter(None, refusals)).items():
        notes.append(f"{counted(count, 'product')} cannot: {reason}")
    return {
        "nodes": len(model.nodes),
        "parameters": sum(math.prod(constant.shape) for constant in model.constants.values()),
        "inputs": [str(spec) for spec in inputs],
        "outputs": [str(spec) for spec in outputs],
        "operators": dict(Counter(node.op for node in model.nodes).most_common()),
        "products": refusals.count(None),
        "all_products": len(products) + hidden_products,
        "notes": notes,
    }


def _tensors(model: Model, names: Sequence[str]) -> list[InputSpec]:
    infos = [(name, model.tensors.get(name)) for name in names]
    return [
        InputSpec(name, onnx.helper.tensor_dtype_to_np_dtype(info.dtype), info.shape)
        for name, info in infos
        if info is not None and info.shape is not None and info.dtype != onnx.TensorProto.UNDEFINED
    ]


def inspected(
    model: Model, regions: Regions, patterns: Sequence[Pattern], *, include_all_regions: bool = False
) -> Inspection:
    """The regions and their statistics. Regions without quantizable operators are counted, but listed only with
    `include_all_regions`, as are patterns that no search tunes."""
    patterns = patterns if include_all_regions else tunable(model, patterns)
    pattern_of = {region: p.digest for p in patterns for region in p.instances}
    parent = {child: region.id for region in regions.listings for child in region.children}
    shown = [r for r in regions.listings if include_all_regions or is_quantizable(model, r)]
    sizes, tops = [len(r.nodes) for r in regions.leaves], regions.tops
    composites, refined = (sum(r.type is RegionType.COMPOSITE for r in found) for found in (regions.listings, tops))
    return Inspection({
        "method": regions.method,
        "nodes": len(model.nodes),
        "covered_nodes": len({n for r in regions.leaves for n in r.nodes}),
        "phase1": {"regions": len(tops)},
        "phase2": {"refined": refined, "skipped": len(tops) - refined},
        "summary": {"regions": len(sizes) + composites, "leaf": len(sizes), "composite": composites,
                    "hidden": len(sizes) + composites - len(shown)},
        "leaf_sizes": {"min": min(sizes, default=0), "max": max(sizes, default=0),
                       "avg": round(sum(sizes) / max(len(sizes), 1), 1)},
        "patterns": [{"digest": p.digest, "kind": p.type.value, "instances": len(p.instances),
                      "points": len(p.points), "ops": list(p.ops), "signature": p.signature} for p in patterns],
        "regions": [{"id": r.id, "parent": parent.get(r), "level": r.level, "kind": r.type.value,
                     "pattern": pattern_of.get(r),
                     "nodes": [model.nodes[n].name for n in r.nodes], "ops": [model.nodes[n].op for n in r.nodes],
                     "total_nodes": len(r.all_nodes()), "children": [c.id for c in r.children],
                     "inputs": list(r.inputs), "outputs": list(r.outputs)}
                    for r in shown],
    })  # fmt: skip


def _head(values: Mapping[str, Any]) -> Iterator[str]:
    summary, sizes, nodes = values["summary"], values["leaf_sizes"], values["nodes"]
    coverage = f"{values['covered_nodes']}/{nodes} nodes ({100 * values['covered_nodes'] / max(nodes, 1):.1f}%)"
    yield f"Method: {values['method']}"
    yield f"Phase 1 complete: {values['phase1']['regions']} regions, {coverage}"
    yield f"Phase 2 complete: refined {values['phase2']['refined']} regions, skipped {values['phase2']['skipped']}"
    kinds = f"{summary['leaf']} LEAF, {summary['composite']} COMPOSITE"
    yield f"Summary: {summary['regions']} regions ({kinds}), {coverage}"
    yield f"LEAF region sizes: min={sizes['min']}, max={sizes['max']}, avg={sizes['avg']}"


def _tree_lines(region: Mapping[str, Any], instances: Mapping[str, int], *, verbose: bool) -> Iterator[str]:
    outer = "│    " * region["level"]
    yield f"{outer}├─ Region {region['id']} (Level {region['level']}, Type: {region['kind']})"
    facts = [
        f"Direct nodes: {len(region['nodes'])}",
        f"Total nodes (recursive): {region['total_nodes']}",
        f"Children: {len(region['children'])}",
    ]
    if region["pattern"] is not None:
        facts.append(f"Pattern: {region['pattern']} ({counted(instances[region['pattern']], 'instance')})")
    if region["kind"] == RegionType.LEAF.value:
        facts.append(f"Nodes: {', '.join(region['ops'])}")
        facts += [f"  - {name}" for name in region["nodes"] if verbose]
    for title, key in (("Inputs", "inputs"), ("Outputs", "outputs")):
        facts.append(f"{title}: {counted(len(region[key]), 'tensor')}")
        facts += [f"  - {tensor}" for tensor in region[key] if verbose]
    last = max(i for i, fact in enumerate(facts) if not fact.startswith(" "))
    for i, fact in enumerate(facts):
        mark = "   " if i > last else "│  " if fact.startswith(" ") else "└─ " if i == last else "├─ "
        yield f"{outer}│  {mark}{fact}"


def _pattern_lines(patterns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    leaf = sum(p["kind"] == RegionType.LEAF.value for p in patterns)
    regions = counted(sum(p["instances"] for p in patterns), "region")
    yield f"Patterns: {len(patterns)} ({leaf} LEAF, {len(patterns) - leaf} COMPOSITE), in {regions}"
    for p in sorted(patterns, key=lambda p: -p["instances"])[:MOST_FREQUENT]:
        ops = ", ".join(p["ops"][:8]) + (f", ... ({len(p['ops'])} nodes)" if len(p["ops"]) > 8 else "")
        counts = f"{counted(p['instances'], 'instance')}, {counted(p['points'], 'point')}"
        yield f"  {p['digest']}  {p['kind']:9s}  {counts}: {ops}"
