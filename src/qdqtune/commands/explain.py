"""`qdqtune explain`: what a finished run knows of each node, read back from its folder.

Nothing is run. The float model is baseline.onnx, what shipped placement.yaml (the file itself where the user's own Q/DQ
model did); builds, ranges and noise are in the state file, so that runs of earlier versions can be explained as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from qdqtune.commands.evidence import Alone, Evidence, headline, tallied
from qdqtune.commands.explanation import Explanation, Tally
from qdqtune.commands.reasons import Reasons, is_float
from qdqtune.engines.formats import FORMATS, numeric_format
from qdqtune.errors import BadOption, BadState
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.shaping import with_input_shapes
from qdqtune.measurement.limits import Limits
from qdqtune.placement.files import every_edge, read_placement_file
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import placement_in
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.priors import NOTHING, unpacked
from qdqtune.search.regions import discovery, patterns
from qdqtune.tuning.bench import trial_of
from qdqtune.tuning.finished import Left, read_left
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT
from qdqtune.tuning.price_cache import RECORD
from qdqtune.tuning.store import Record, unpack_ranges
from qdqtune.tuning.subject import edges_within, filtered
from qdqtune.types import Edge, Placement, Trial


@dataclass(frozen=True)
class Explained:
    """A finished run, explained: what shipped in a sentence, a row for every node, and all of them by reason, the most
    time first."""

    folder: Path
    headline: str
    rows: tuple[Explanation, ...]
    tallies: tuple[Tally, ...]

    def matching(self, pattern: str) -> tuple[Explanation, ...]:
        """The rows of the node of that name, or else of those whose names match the wildcard, in graph order.

        Raises:
            BadOption: there is none.
        """
        named = tuple(row for row in self.rows if row.node == pattern)
        rows = named or tuple(row for row in self.rows if fnmatchcase(row.node, pattern))
        if not rows:
            near = [row.node for row in self.rows if pattern.strip("*/?") in row.node][:3]
            hint = f"; near are {', '.join(near)}" if near and pattern.strip("*/?") else ""
            raise BadOption(f"no node of the model is named {pattern!r}{hint} (wildcards: '/layer1/*')")
        return rows

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "folder": str(self.folder),
            "headline": self.headline,
            "reasons": [row.to_dict() for row in self.tallies],
            "nodes": [row.to_dict() for row in self.rows],
        }


def explain_run(folder: Path, state: Path | None = None) -> Explained:
    """Explain a finished run; `state` is its state file, where that does not lie in the folder.

    Raises:
        BadOption: the folder holds no finished run.
        BadState: its state file is damaged, or missing.
    """
    evidence = evidence_of(read_left(folder, state))
    return Explained(folder, headline(evidence), *tallied(evidence))


def evidence_of(left: Left) -> Evidence:
    """What a finished run has left, without running anything.

    Raises:
        BadState: its state file ends too early.
    """
    folder, summary, fingerprint, records = left.folder, left.summary, left.fingerprint, left.records
    recorded = read_placement_file(folder / PLACEMENT)
    shapes = {name: tuple(sizes) for name, sizes in fingerprint.get("input shapes", {}).items()}
    shaped = with_input_shapes(load(folder / BASELINE), shapes)
    history = tuple(_history(records))
    shipped: Literal["tuned", "baseline", "given"] = summary["shipped"]
    needs_file = shipped == "given" and bool(fingerprint.get("from Q/DQ"))
    placement = placement_in(shaped, load(folder / FINAL)) if needs_file else recorded.placement
    seen = placement.edges.union(*(t.placement.edges for t in history))
    able = possible_edges(shaped, unpack_ranges(_only(records, "ranges", folder))) | seen
    possible = able & _chosen(shaped, fingerprint) | seen
    limits = left.limits
    noise = next((r for r in records if r["key"].startswith("noise:")), None)
    evidence = Evidence(
        model=shaped,
        able=able,
        possible=possible,
        placement=placement,
        shipped=shipped,
        quant_type=recorded.quant_type,
        float_layers=left.float_layers,
        history=tuple(_judged(history, limits, records)),
        limits=limits,
        plan=left.plan,
        noise=None if noise is None else Noise(shaped, noise["alone"], limits.max_noise),
        prior=next((unpacked(r) for r in records if r["key"] == RECORD), NOTHING),
        alone=dict(_alone(summary.get("groups", ()))),
    )
    return _with_engine(evidence, folder / FINAL, recorded.engine)


def _only(records: Sequence[Record], key: str, folder: Path) -> Record:
    record = next((r for r in records if r["key"] == key), None)
    if record is None:
        raise BadState(f"the state file of {folder} ends before the calibration: run qdqtune tune to its end")
    return record


def _history(records: Iterable[Record]) -> Iterator[Trial]:
    """The candidates, in the order in which they were measured first; those whose opponent is unknown are left out."""
    known = {Placement().digest: Placement()}
    for record in records:
        if record["key"].startswith("trial:") and record["against"] in known:
            trial = trial_of(len(known), record, known[record["against"]])
            known[trial.placement.digest] = trial.placement
            yield trial


def _judged(history: Sequence[Trial], limits: Limits, records: Sequence[Record]) -> Iterator[Trial]:
    """The candidates with what they hold, as far as it was measured."""
    metrics = {r["key"].rpartition(":")[2]: r.get("value") for r in records if r["key"].startswith("metric:")}
    for trial in history:
        metric = metrics.get(trial.placement.digest)
        if not limits.is_exact_enough(trial.accuracy):
            yield replace(trial, holds=False)
        elif limits.max_drop is None or metric is None:
            yield replace(trial, holds=True if limits.max_drop is None else None)
        else:
            yield replace(trial, metric=metric, holds=limits.is_good_enough(metric))


def _chosen(model: Model, fingerprint: Mapping[str, Any]) -> frozenset[Edge]:
    """The edges that the user's list of nodes leaves."""
    wildcards = tuple(fingerprint.get("node filter") or ())
    if not wildcards:
        return every_edge(model)
    regions = discovery.find(model, fingerprint.get("regions", "auto"))
    return edges_within(filtered(model, patterns.group(model, regions), wildcards))


def _alone(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Alone]]:
    """What subgraph mode found of each group that it has timed, by node."""
    for group in groups:
        if group.get("kind") is not None:
            for node in group["nodes"]:
                yield node, Alone(group["why"], group["float_ms"], group["quantized_ms"])


def _with_engine(evidence: Evidence, final: Path, engine: str) -> Evidence:
    """With the reasons for nodes that have pairs and ran in float all the same, read from the shipped model."""
    running = {name: x for name, x in evidence.layers.items() if x.kind == "compute" and is_float(x.precision)}
    paired = {e.node for e in evidence.placement} & running.keys()
    if not paired or engine not in FORMATS:
        return evidence
    model = load(final)
    trial = evidence.trial
    numbers = numeric_format(engine, "fp8" if evidence.quant_type == "fp8" else "int8")
    reasons = Reasons(model, (trial.layers if trial else None) or (), numbers)
    told = {name: reasons.of_float(model.node(name)) for name in paired & model.index_of.keys()}
    return replace(evidence, in_float=told)
