"""Reading and writing YAML files that carry a result from one model to another: placement.yaml, and pattern caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from qdqtune.calibration.scales import Calibration
from qdqtune.errors import BadOption, check_file, one_line, reading
from qdqtune.graph.model import Model
from qdqtune.graph.operators import is_float
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.possible import computable, format_refusal, weight_at
from qdqtune.system.writing import atomic_write
from qdqtune.types import Edge, Placement, QuantType, WeightFormat

VERSION = 1

WIDE_BITS = 16
"""The bits of an edge that is read in 16 bits; others, which have 8, do not name them."""

OF_MODELOPT = frozenset({"pattern_schemes", "baseline_latency_ms"})
"""Keys of pattern caches and state files of ModelOpt's autotuner, which files of qdqtune lack."""

QUANT_TYPES: tuple[QuantType, ...] = get_args(QuantType)


@dataclass(frozen=True)
class PlacementFile:
    """The content of placement.yaml."""

    placement: Placement
    quant_type: str
    engine: str
    fix_inputs: Mapping[str, float | int | str]
    calibration: Calibration = field(default_factory=Calibration)
    rewrites: Rewrites = field(default_factory=Rewrites)
    portable: bool = False


def write_placement(path: Path, recorded: PlacementFile, model: str) -> None:
    """Write placement.yaml: edges with a pair or a weight format, by the tensor and node names of the file `model`."""
    edges = [
        {"tensor": e.tensor}
        | ({"output": e.index} if e.is_graph_output else {"node": e.node, "input": e.index})
        | ({"bits": WIDE_BITS} if e in recorded.placement.wide else {})
        for e in recorded.placement
    ]
    weights = [
        {"tensor": e.tensor, "node": e.node, "input": e.index, "storage": weight_format.name}
        for e, weight_format in recorded.placement.weight_formats.items()
    ]
    write_yaml(
        path,
        {
            "version": VERSION,
            "model": model,
            "engine": recorded.engine,
            "quant_type": recorded.quant_type,
            "fix_inputs": dict(recorded.fix_inputs),
            "calibration": asdict(recorded.calibration),
            "rewrites": {
                name: made if isinstance(made, bool) else list(made) for name, made in asdict(recorded.rewrites).items()
            },
            "edges": edges,
            **({"weights": weights} if weights else {}),
            **({"portable": True} if recorded.portable else {}),
        },
    )


def read_placement_file(path: Path) -> PlacementFile:
    """Read placement.yaml."""
    content = read_yaml(path, "placement")
    try:
        edges = [
            Edge(e["tensor"], e.get("node", ""), e["output"] if "output" in e else e["input"]) for e in content["edges"]
        ]
        wide = [edge for edge, e in zip(edges, content["edges"], strict=True) if _is_wide(**e)]
        formats = [
            (Edge(e["tensor"], e["node"], e["input"]), WeightFormat.named(e["storage"]))
            for e in content.get("weights", [])
        ]
        recorded = PlacementFile(
            Placement.of(filter(_is_valid, edges), (p for p in formats if _is_valid(p[0])), filter(_is_valid, wide)),
            content["quant_type"],
            content["engine"],
            dict(content.get("fix_inputs") or {}),
            Calibration(**content.get("calibration", {})),
            _rewrites(**content.get("rewrites", {})),
            content.get("portable", False) is True,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadOption(f"{path} is no placement file: {wrong_part(error)}") from error
    fixed = all(isinstance(k, str) and isinstance(v, float | int | str) for k, v in recorded.fix_inputs.items())
    edges += [edge for edge, _ in formats]
    if not all(map(_is_valid, edges)) or recorded.quant_type not in QUANT_TYPES or not fixed:
        raise BadOption(f"{path} is no placement file: an edge, the quant_type or a fixed input is none")
    if not isinstance(recorded.engine, str):
        raise BadOption(f"{path} is no placement file: {recorded.engine!r} is no engine")
    return recorded


def _rewrites(folded: bool = False, names: Sequence[str] = (), merged: Sequence[str] = ()) -> Rewrites:
    return Rewrites(folded, tuple(names), tuple(merged))


def _is_wide(bits: object = 8, **_: object) -> bool:
    if bits not in (8, WIDE_BITS):
        raise ValueError(bits)
    return bits == WIDE_BITS


def _is_valid(edge: Edge) -> bool:
    is_number = isinstance(edge.index, int) and not isinstance(edge.index, bool) and edge.index >= 0
    return isinstance(edge.tensor, str) and isinstance(edge.node, str) and is_number


def existing(model: Model, placement: Placement, possible: frozenset[Edge]) -> tuple[Placement, tuple[Edge, ...]]:
    """The part of a placement that fits `model`, and the edges that the model lacks, or that cannot carry their pair or
    weight format.

    Edges are matched across casts between float types, which the model may have in one precision only.
    """
    same = {edge: _behind_casts(model, edge) for edge in (*placement, *placement.weight_formats)}
    known = {edge: same[edge] for edge in placement if same[edge] in possible}
    formats = {
        same[edge]: weight_format
        for edge, weight_format in placement.weight_formats.items()
        if (weight := weight_at(model, same[edge])) is not None and format_refusal(weight, weight_format) is None
    }
    lost = (e for e in same if e not in known and same[e] not in formats)
    wide = (fits for edge, fits in known.items() if edge in placement.wide)
    return computable(model, Placement.of(known.values(), formats.items(), wide)), tuple(lost)


def every_edge(model: Model) -> frozenset[Edge]:
    edges = {edge for node in model.nodes for edge in node.into}
    return frozenset(edges | {Edge(t, "", slot) for slot, t in enumerate(model.outputs)})


def _behind_casts(model: Model, edge: Edge) -> Edge:
    """The model's edge into the same node input, if only casts between float types come between; else `edge`."""
    index = model.index_of.get(edge.node)
    inputs = () if index is None else model.nodes[index].inputs
    if edge.index >= len(inputs) or inputs[edge.index] == edge.tensor:
        return edge
    here = inputs[edge.index]
    return Edge(here, edge.node, edge.index) if _uncast(model, here) == _uncast(model, edge.tensor) else edge


def _uncast(model: Model, tensor: str) -> str:
    """The tensor in front of casts between float types."""
    while (node := model.maker(tensor)) is not None:
        if node.op != "Cast" or node.domain or not is_float(model, node.inputs[0]):
            break
        tensor = node.inputs[0]
    return tensor


def write_yaml(path: Path, content: Mapping[str, object], kind: str = "") -> None:
    with atomic_write(path, kind) as fresh:
        text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None, width=120)
        fresh.write_text(text)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The content of a YAML file of `write_yaml`; `what` names its kind in errors."""
    content = parsed_yaml(path, what)
    if isinstance(content, dict) and content.keys() & OF_MODELOPT:
        raise BadOption(
            f"{path} is a file of ModelOpt's autotuner, which divides models otherwise: tune a model that it has "
            "made with `from_qdq` instead"
        )
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise BadOption(f"{path} is no {what} file of this version: give one that `qdqtune tune` has written")
    return content


MOST_BYTES = 32 * 2**20
"""Size of the largest file in bytes. A placement takes about 100 bytes for each pair."""

MOST_VALUES = 1_000_000
"""Most values of a file. A value counts as often as aliases repeat it, and once more for every hundred characters."""

DEEPEST = 50
"""Most levels of nested lists and mappings."""

LONGEST_NUMBER = 100
"""Most characters of a number: the time to read one grows with the square of its digits."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TAGS = "tag:yaml.org,2002:"
RESOLVER: Any = Resolver()
CONSTRUCTOR = SafeConstructor()


def parsed_yaml(path: Path, what: str) -> Any:
    """The content of a YAML file: None, bools, numbers, texts, and lists and dicts of these. `what` names its kind in
    errors."""
    with reading(f"{what} {path}"):
        check_file(path)
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        return _Document(yaml.parse(text.decode("utf-8"), Loader=LOADER)).content()
    except (ValueError, yaml.YAMLError) as error:
        raise BadOption(f"{path} is no {what} file, or damaged: {one_line(error)}") from error


def wrong_part(error: Exception) -> str:
    """What is wrong with values that a file holds, from what Python raised when it read them."""
    return f"it lacks {error}" if isinstance(error, KeyError) else f"a part has another form ({one_line(error)})"


class _Document:
    """Turns the events of a YAML parser into Python values. Raises ValueError for what `parsed_yaml` forbids."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._left = MOST_VALUES
        self._repeated: dict[str, tuple[Any, int]] = {}

    def content(self) -> Any:
        """The only document; None where there is none."""
        next(self._events)  # the beginning of the stream
        content = None
        if isinstance(next(self._events), yaml.DocumentStartEvent):
            content = self._value(next(self._events), 0)
            next(self._events)  # the end of the document
            if not isinstance(next(self._events), yaml.StreamEndEvent):
                raise ValueError("it holds more than one document")
        return content

    def _value(self, event: Any, depth: int) -> Any:
        before, anchor = self._left, event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor not in self._repeated:
                raise ValueError(f"{_line(event)}: nothing is called &{anchor}")
            value, size = self._repeated[anchor]
            self._spend(size)
            return value
        if event.tag is not None:
            raise ValueError(f"{_line(event)}: tags such as {event.tag} are not read")
        if depth > DEEPEST:
            raise ValueError(f"{_line(event)}: more than {DEEPEST} lists and mappings within each other")
        if isinstance(event, yaml.ScalarEvent):
            self._spend(1 + len(event.value) // 100)
            value = _scalar(event)
        else:
            self._spend(1)
            value = self._list(depth) if isinstance(event, yaml.SequenceStartEvent) else self._dict(depth)
        if anchor is not None:
            self._repeated[anchor] = value, before - self._left
        return value

    def _list(self, depth: int) -> list[Any]:
        made = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            made.append(self._value(event, depth + 1))
        return made

    def _dict(self, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if isinstance(key, list | dict):
                raise ValueError(f"{_line(event)}: a key is a list or a mapping")
            if key in made:
                raise ValueError(f"{_line(event)}: the key {key!r} comes twice")
            made[key] = self._value(next(self._events), depth + 1)
        return made

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")


def _scalar(event: Any) -> Any:
    """The Python value of a YAML scalar: in quotes a string; without quotes a string, number, bool or None."""
    if not event.implicit[0]:
        return event.value
    tag = RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
    kind = tag.removeprefix(TAGS)
    if kind == "str":
        return event.value
    if kind not in ("null", "bool", "int", "float"):
        raise ValueError(f"{_line(event)}: {event.value:.40} is read as a {kind}: put text in quotes")
    if len(event.value) > LONGEST_NUMBER:
        raise ValueError(f"{_line(event)}: a number of {len(event.value)} characters")
    try:
        return getattr(CONSTRUCTOR, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, event.value))
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{_line(event)}: {event.value!r} is no number") from error


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
