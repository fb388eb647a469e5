"""Reading and writing YAML files that carry a result from one model to another: placement.yaml, and pattern caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from qdqtune.calibration.scales import Calibration
from qdqtune.errors import BadOption, check_file, one_line, reading
from qdqtune.graph.model import Model
from qdqtune.graph.operators import is_float
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.possible import can_have, computable, weight_at
from qdqtune.system.writing import atomic_write
from qdqtune.types import Edge, Placement, QuantType, WeightFormat

VERSION = 1

OF_MODELOPT = frozenset({"pattern_schemes", "baseline_latency_ms"})
"""Keys of pattern caches and state files of ModelOpt's autotuner, which files of qdqtune lack."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

SCALAR_ERRORS = (ArithmeticError, AttributeError, LookupError, ValueError)
"""What PyYAML raises for scalars that are not what their tag or form says, beside its own errors."""

Slot = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class PlacementFile:
    placement: Placement
    quant_type: QuantType
    engine: str
    fix_inputs: Mapping[str, float | int | str | bool] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    rewrites: Rewrites = field(default_factory=Rewrites)
    portable: bool = False


class _PairRow(msgspec.Struct, omit_defaults=True):
    tensor: str
    node: str = ""
    input: Slot | None = None
    output: Slot | None = None
    bits: Literal[8, 16] = 8

    @property
    def edge(self) -> Edge:
        slot = self.input if self.node else self.output
        if slot is None:
            raise ValueError(f"an edge of {self.tensor!r} names neither an input nor an output")
        return Edge(self.tensor, self.node, slot)


class _WeightRow(msgspec.Struct):
    tensor: str
    node: str
    input: Slot
    storage: str


class _Rows(msgspec.Struct):
    edges: list[_PairRow]
    weights: list[_WeightRow] = []


def write_placement(path: Path, recorded: PlacementFile, model: str) -> None:
    """Write placement.yaml; `model`, the name of the model file, is for human readers only."""
    placement = recorded.placement
    content = {
        "version": VERSION,
        "model": model,
        "engine": recorded.engine,
        "quant_type": recorded.quant_type,
        "fix_inputs": dict(recorded.fix_inputs),
        "calibration": recorded.calibration,
        "rewrites": recorded.rewrites,
        "edges": [
            _PairRow(
                e.tensor,
                e.node,
                input=None if e.is_graph_output else e.index,
                output=e.index if e.is_graph_output else None,
                bits=16 if e in placement.wide else 8,
            )
            for e in placement
        ],
        "weights": [_WeightRow(*e, storage=f.name) for e, f in placement.weight_formats.items()],
        "portable": recorded.portable,
    }
    kept = {key: value for key, value in content.items() if value or key not in ("weights", "portable")}
    write_yaml(path, msgspec.to_builtins(kept))


def read_placement_file(path: Path) -> PlacementFile:
    content = read_yaml(path, "placement")
    try:
        recorded = msgspec.convert({**content, "placement": {}}, PlacementFile)
        rows = msgspec.convert(content, _Rows)
        formats = [(Edge(w.tensor, w.node, w.input), WeightFormat.named(w.storage)) for w in rows.weights]
        edges, wide = (row.edge for row in rows.edges), [row.edge for row in rows.edges if row.bits == 16]
        return replace(recorded, placement=Placement.of(edges, formats, wide))
    except ValueError as error:
        raise BadOption(f"{path} is no placement file: {one_line(error)}") from error


def existing(model: Model, placement: Placement, possible: frozenset[Edge]) -> tuple[Placement, tuple[Edge, ...]]:
    """The part of a placement that fits `model`, and the edges that the model lacks or that cannot carry their pair or
    weight format. Edges also match if one of the models has casts between float types on them.
    """
    same = {edge: _behind_casts(model, edge) for edge in (*placement, *placement.weight_formats)}
    known = {edge: same[edge] for edge in placement if same[edge] in possible}
    formats = {
        same[edge]: weight_format
        for edge, weight_format in placement.weight_formats.items()
        if (weight := weight_at(model, same[edge])) is not None and can_have(weight, weight_format)
    }
    lost = (e for e in same if e not in known and same[e] not in formats)
    wide = (fits for edge, fits in known.items() if edge in placement.wide)
    return computable(model, Placement.of(known.values(), formats.items(), wide)), tuple(lost)


def _behind_casts(model: Model, edge: Edge) -> Edge:
    """The edge into the same node input in `model`, if only float casts separate it from `edge`; else `edge`."""
    index = model.index_of.get(edge.node)
    inputs = () if index is None else model.nodes[index].inputs
    if edge.index >= len(inputs) or inputs[edge.index] == edge.tensor:
        return edge
    here = inputs[edge.index]
    return Edge(here, edge.node, edge.index) if _uncast(model, here) == _uncast(model, edge.tensor) else edge


def _uncast(model: Model, tensor: str) -> str:
    node = model.maker(tensor)
    is_cast = node is not None and node.op == "Cast" and not node.domain and is_float(model, node.inputs[0])
    return _uncast(model, node.inputs[0]) if node is not None and is_cast else tensor


def write_yaml(path: Path, content: Mapping[str, object], kind: str = "") -> None:
    with atomic_write(path, kind) as fresh:
        text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None, width=120)
        fresh.write_text(text)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file that `write_yaml` wrote; `what` names its kind in errors."""
    content = parsed_yaml(path, what)
    if isinstance(content, dict) and content.keys() & OF_MODELOPT:
        raise BadOption(
            f"{path} is a file of ModelOpt's autotuner, which divides models otherwise: tune a model that it has "
            "made with `from_qdq` instead"
        )
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise BadOption(f"{path} is no {what} file of this version: give one that `qdqtune tune` has written")
    return content


def parsed_yaml(path: Path, what: str) -> Any:
    with reading(f"{what} {path}"):
        check_file(path)
        text = path.read_bytes()
    try:
        depth = 0
        for event in yaml.parse(text, Loader=LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 50:  # at some thousands the C code behind `load` overflows its stack
                raise ValueError("it has more than 50 levels")
        return yaml.load(text, Loader=LOADER)
    except (*SCALAR_ERRORS, RecursionError, yaml.YAMLError) as error:
        words = one_line(error).replace('in "<byte string>",', "at")
        raise BadOption(f"{path} is no {what} file, or damaged: as YAML, {words}") from error
