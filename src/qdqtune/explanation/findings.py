"""Findings about what an engine did not fuse: pairs that run as kernels, operators left in float, reformats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from qdqtune.calibration.observe import running
from qdqtune.engines.execution import Execution
from qdqtune.errors import EngineRefused, InputError, parsed_json
from qdqtune.explanation.reasons_by_graph import UNKNOWN, Reason, Reasons, is_conversion, is_float, is_low
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import COMPUTE, FUSED_BEHIND
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.reading import placement_in, tables_of, weight_only_formats
from qdqtune.placement.stripping import strip_pairs
from qdqtune.tuning.folder import BASELINE
from qdqtune.types import Accuracy, Layer, NumericFormat, Sample

Symptom = Literal["standalone pair", "float compute", "reformat", "elsewhere", "boundary"]


@dataclass(frozen=True)
class Finding:
    """A layer that a better placement might avoid, if it `fails`; otherwise a note.

    Kinds: "standalone pair", a Q or a DQ that runs as a kernel of its own; "float compute", an operator that runs in
    float although its inputs carry pairs; "reformat", a layer beside a quantized one that only moves values (it fails
    if the other side is float); "elsewhere", nodes that an execution provider leaves to another (it fails if they carry
    pairs); "boundary", a conversion that is needed because the model's inputs and outputs are float, or that the user
    allows. `nodes` are the ONNX nodes of the layer; `cause` is the node that `reason` is about: findings with one cause
    belong together.
    """

    kind: Symptom
    layer: str
    nodes: tuple[str, ...]
    time_ms: float | None
    reason: str
    cause: str = ""
    fails: bool = True


def check(model: Model, layers: Sequence[Layer], numbers: NumericFormat | None = None) -> tuple[Finding, ...]:
    """The findings about a Q/DQ model, in the order of the engine's layers.

    `layers` name nodes of `model`; other names are ignored. `numbers` is the numeric format of the engine: with it,
    pairs in another format are given as a reason.
    """
    checker = _Checker(model, layers, Reasons(model, layers, numbers))
    return tuple(f for number in range(len(layers)) if (f := checker.finding(number)) is not None)


def allow(findings: Iterable[Finding], wildcards: Sequence[str]) -> tuple[Finding, ...]:
    """The findings, where those with a node or cause that matches a wildcard become boundaries."""

    def is_meant(finding: Finding) -> bool:
        names = (*finding.nodes, finding.cause)
        return finding.fails and any(fnmatchcase(name, wildcard) for name in names for wildcard in wildcards)

    return tuple(
        replace(f, kind="boundary", reason=f"allowed: {f.reason}", fails=False) if is_meant(f) else f for f in findings
    )


def excuse(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings of a placement that was measured to be faster: none of them fails."""
    return tuple(replace(finding, fails=False) for finding in findings)


class _Checker:
    def __init__(self, model: Model, layers: Sequence[Layer], reasons: Reasons) -> None:
        self._nodes = {node.name: node for node in model.nodes}
        self._float_types = {name for name, info in model.tensors.items() if info.is_float}
        self._maker = model.maker
        self._layers = layers
        self._reasons = reasons
        self._formats = weight_only_formats(model)
        self._tables = tuple(table.dq.name for table in tables_of(model)) or ("\0",)
        self._computing = [number for number, layer in enumerate(layers) if layer.kind == "compute"]

    def finding(self, number: int) -> Finding | None:
        layer = self._layers[number]
        if layer.name.startswith(self._tables):
            return None
        nodes = [self._nodes[name] for name in layer.nodes if name in self._nodes]
        if layer.kind == "quantize" and (alone := [n for n in nodes if n.name in self._formats]):
            return self._weights_apart(layer, alone)
        pairs = [node for node in nodes if is_conversion(node)]
        others = [node for node in nodes if not is_conversion(node)]
        if layer.kind in ("folded", "unknown"):
            return None
        if layer.elsewhere:
            return self._elsewhere(number, nodes)
        if layer.kind == "quantize" or (pairs and not others and layer.kind != "copy"):
            finding = self._conversion(number, pairs)
            # A compute kernel that names only a Q is the rest of the operator in front of it, and no conversion.
            return None if layer.kind == "compute" and finding.fails else finding
        if others:
            return self._in_float(layer, others)
        return self._inserted(number)

    def _weights_apart(self, layer: Layer, alone: Sequence[Node]) -> Finding:
        """A finding about weights in a weight format that become floats in a kernel of their own."""
        reason = f"the engine does not draw weights of {self._formats[alone[0].name].name} into the product behind"
        apart = {name for other in self._layers if other.kind == "quantize" for name in other.nodes}
        if taken := len(self._formats.keys() - apart):
            reason += f", as it does with {taken} of {len(self._formats)}: `nodes_to_exclude` leaves them in float"
        return Finding("standalone pair", layer.name, _names(alone), layer.time_ms, reason)

    def _elsewhere(self, number: int, nodes: Sequence[Node]) -> Finding:
        """A finding about nodes that a provider leaves to another. The conversions at the model's float inputs and
        outputs may run anywhere."""
        layer, pairs = self._layers[number], [node for node in nodes if is_conversion(node)]
        is_border = bool(pairs) and len(pairs) == len(nodes) and not self._conversion(number, pairs).fails
        fails = not is_border and (bool(pairs) or any(self._is_meant_for_8_bits(node) for node in nodes))
        kind: Symptom = "boundary" if is_border else "elsewhere"
        return Finding(kind, layer.name, _names(nodes), layer.time_ms, f"runs {layer.elsewhere}", fails=fails)

    def _conversion(self, number: int, pairs: Sequence[Node]) -> Finding:
        layer = self._layers[number]
        reasons = [
            self._reasons.of_quantize(n) if n.op == "QuantizeLinear" else self._reasons.of_dequantize(n) for n in pairs
        ]
        known = [r for r in reasons if r.text != UNKNOWN and not r.is_boundary]
        if not known and (border := next((r for r in reasons if r.is_boundary), None)):
            return Finding("boundary", layer.name, _names(pairs), layer.time_ms, border.text, fails=False)
        if not pairs:
            reason = f"the engine names no node for it, and may have added it: it runs {self._place(number)}"
            return Finding("standalone pair", layer.name, (), layer.time_ms, reason)
        first = known[0] if known else self._untold(pairs[0])
        return Finding("standalone pair", layer.name, _names(pairs), layer.time_ms, first.text, first.cause)

    def _untold(self, pair: Node) -> Reason:
        """A reason that the nodes around a Q do not show: no kernel of the operator in front of it writes 8 bits."""
        front = self._maker(pair.inputs[0])
        while front is not None and front.op in FUSED_BEHIND:
            front = self._maker(front.inputs[0])
        if front is not None and front.op in COMPUTE and self._reasons.runs_in_8_bits(front):
            inside = [{self._nodes[n].op for n in x.nodes if n in self._nodes} for x in self._layers]
            if not any({front.op, "QuantizeLinear"} <= ops for ops in inside):
                return Reason(f"this engine seems to have no {front.op} that writes 8 bits", front.name)
        return Reason(f"runs as a kernel of its own {UNKNOWN}")

    def _in_float(self, layer: Layer, others: Sequence[Node]) -> Finding | None:
        """A finding about a layer that runs in float although nodes in it were meant to run in 8 bits; else None."""
        if not is_float(layer.precision):
            return None
        meant = [n for n in others if self._is_meant_for_8_bits(n)]
        if not meant:
            return None
        first = next((n for n in meant if n.op in COMPUTE), meant[0])
        kind: Symptom = "float compute" if layer.kind == "compute" else "reformat"
        reason = self._reasons.in_float(first)
        return Finding(kind, layer.name, _names(meant), layer.time_ms, reason.text, reason.cause)

    def _is_meant_for_8_bits(self, node: Node) -> bool:
        """Whether a convolution or product has a pair; or another operator has pairs on all inputs, and
        `has_running_pair`: else it is float arithmetic in a kernel that reads and writes 8 bits, which costs nothing.
        """
        operands = self._reasons.operands(node)
        if any(o.dq is not None and o.dq.name in self._formats for o in operands):
            return False  # only its weights are quantized
        paired = [operand.dq for operand in operands if operand.dq is not None]
        if not paired or not any(output in self._float_types for output in node.outputs):
            return False
        if node.op in COMPUTE:
            return True
        return len(paired) == len(operands) and self._reasons.has_running_pair(node)

    def _inserted(self, number: int) -> Finding | None:
        """A finding about a layer that the engine has added beside one in 8 bits to move values."""
        layer = self._layers[number]
        if layer.kind == "compute" or (layer.kind == "copy" and not layer.time_ms):
            return None  # a copy that takes no time is not run
        around = self._neighbours(number)
        beside = [neighbour for neighbour in around if neighbour is not None]
        if not any(is_low(neighbour.precision) for neighbour in beside):
            return None
        reason = f"the engine changes layout or type {self._place(number)}"
        if None in around:
            return Finding("boundary", layer.name, (), layer.time_ms, reason, fails=False)
        in_float = [neighbour for neighbour in beside if is_float(neighbour.precision)]
        around_it = [self._nodes[name] for neighbour in in_float for name in neighbour.nodes if name in self._nodes]
        cause = next((node.name for node in around_it if not is_conversion(node)), "")
        return Finding("reformat", layer.name, (), layer.time_ms, reason, cause, bool(in_float))

    def _neighbours(self, number: int) -> tuple[Layer | None, Layer | None]:
        """The nearest computing layers before and after one, in the order of the engine."""
        before = next((self._layers[i] for i in reversed(self._computing) if i < number), None)
        return before, next((self._layers[i] for i in self._computing if i > number), None)

    def _place(self, number: int) -> str:
        before, behind = (None if n is None else f"{n.name} ({n.precision})" for n in self._neighbours(number))
        if before and behind:
            return f"between {before} and {behind}"
        return f"behind {before}" if before else f"in front of {behind}"


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def is_measured(file: Path, model: Model, engine: Mapping[str, str]) -> bool:
    """Whether `file` lies in the folder of a run that has proven the pairs of its `model` faster on this engine.

    `engine` is the description of the engine: another version, device or setting may fuse otherwise.
    """
    folder = file.parent
    try:
        summary = parsed_json((folder / "summary.json").read_text(encoding="utf-8"))
        fuses_as = [{k: v for k, v in e.items() if k != "machine"} for e in (summary["engine"], engine)]
        if summary["shipped"] != "tuned" or fuses_as[0] != fuses_as[1]:
            return False
        recorded = read_placement_file(folder / "placement.yaml").placement
        return recorded == placement_in(load(folder / BASELINE), model)  # fails in folders that tune has not written
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, InputError):
        return False


def lost_by_pairs(model: Model, samples: Sequence[Sample], execution: Execution) -> Accuracy | None:
    """The accuracy of a Q/DQ model against itself without pairs, on ONNX Runtime without fusion; None if that cannot
    run it. Weights that are stored in 8 bits count as exact.
    """
    plain = strip_pairs(model)
    with running(plain, execution) as as_float, running(model, execution, fuse=False) as as_quantized:
        try:
            reference, outputs = as_float(samples), as_quantized(samples)
        except EngineRefused:
            return None
    return accuracy(reference, outputs) if is_finite([*reference, *outputs]) else None
