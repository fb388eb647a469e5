"""Reasons about attention: why an engine of the TensorRT family runs it in several kernels.

The conditions are those under which TensorRT-RTX 1.7 fuses attention for sm89 (benchmarks/findings.md),
and those of NVIDIA's guide on multi-head attention. In float16, heads have a size of at most 256. In FP8 there are also
pairs on queries, keys, values and probabilities. In INT8, heads have a size of 16, 32 or 64, there are at most 512
positions, and a pair also stands behind the second product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import COPIES, QDQ
from qdqtune.placement.graph_queries import Attention, GraphQueries
from qdqtune.placement.keep_float import INT8_HEADS, LARGEST_FP8_HEAD, LONGEST_INT8_ATTENTION
from qdqtune.placement.stripping import strip_pairs
from qdqtune.types import Layer

ROLES = ("queries", "keys", "probabilities", "values")

UNTOLD = (
    "it meets every condition known here: its mask or the order of its scale may be what this engine does not match"
)


@dataclass(frozen=True)
class Split:
    """Attention in several kernels: names of its two products and its Softmax, and the reason. `has_pairs`: any of its
    inputs has a pair."""

    scores: str
    softmax: str
    context: str
    reason: str
    has_pairs: bool

    @property
    def nodes(self) -> tuple[str, str, str]:
        """The names of its nodes."""
        return self.scores, self.softmax, self.context


def splits(model: Model, layers: Sequence[Layer]) -> Iterator[Split]:
    """The attention blocks of a model, with or without pairs, that no single layer covers."""
    home = {name: number for number, layer in enumerate(layers) for name in layer.nodes}
    plain = strip_pairs(model)
    for attention in GraphQueries(plain, frozenset()).attentions:
        names = [plain.nodes[i].name for i in (attention.scores, attention.softmax, attention.context)]
        if all(name in home for name in names) and len({home[name] for name in names}) > 1:
            asked = _Asked(model, attention, *map(model.node, names))
            yield Split(names[0], names[1], names[2], asked.reason(), any(asked.pairs()))


@dataclass(frozen=True)
class _Asked:
    model: Model
    attention: Attention
    scores: Node
    softmax: Node
    context: Node

    def pairs(self) -> list[Node | None]:
        """The DQ on each of the four inputs, in the order of `ROLES`."""
        inputs = (*self.scores.inputs[:2], *self.context.inputs[:2])
        return [self._dq(tensor) for tensor in inputs]

    def reason(self) -> str:
        pairs = self.pairs()
        head = self.attention.head_size
        if not any(pairs):
            if self._is_float32():
                return "without pairs attention is fused in float16 only, and this graph is float32: `precision` fp16"
            return self._too_wide(head) or UNTOLD
        lacking = [role for role, dq in zip(ROLES, pairs, strict=True) if dq is None]
        if lacking:
            return f"its {' and '.join(lacking)} carry no pair: all of {', '.join(ROLES)} have to"
        if self._is_quantized_between():
            return "a pair stands between the first product and the Softmax: leave it out"
        return (self._fp8(head) if self._is_fp8(pairs) else self._int8(head)) or UNTOLD

    def _int8(self, head: int | None) -> str:
        sequence = self.attention.sequence
        if head is not None and head not in INT8_HEADS:
            return (
                f"its heads have size {head}, and INT8 attention is fused for {_listed(INT8_HEADS)} only: leave both"
                " products in float, or use FP8"
            )
        if sequence is not None and sequence > LONGEST_INT8_ATTENTION:
            return (
                f"it is over {sequence} positions, and INT8 attention is fused up to {LONGEST_INT8_ATTENTION}: leave"
                " both products in float, or use FP8"
            )
        if not self._is_quantized_behind():
            return f"no pair stands behind the second product, {self.context.name}: INT8 attention has to write 8 bits"
        return (
            "INT8 attention in a float32 graph is fused in parts of the cases only: `precision` fp16"
            if self._is_float32()
            else ""
        )

    def _fp8(self, head: int | None) -> str:
        if self._is_float32():
            return "FP8 attention is fused in float16 graphs only, and this one is float32: `precision` fp16"
        return self._too_wide(head)

    def _too_wide(self, head: int | None) -> str:
        if head is None or head <= LARGEST_FP8_HEAD:
            return ""
        return f"its heads have size {head}, and attention is fused up to {LARGEST_FP8_HEAD}"

    def _is_float32(self) -> bool:
        info = self.model.tensors.get(self.softmax.inputs[0])
        return info is not None and info.dtype == TensorProto.FLOAT

    def _is_fp8(self, pairs: Sequence[Node | None]) -> bool:
        zeros = (dq.inputs[2] for dq in pairs if dq is not None and len(dq.inputs) > 2)
        types = {self.model.constants[zero].dtype for zero in zeros if zero in self.model.constants}
        return bool(types & {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2})

    def _dq(self, tensor: str) -> Node | None:
        """The DQ that makes a tensor, copies in between aside."""
        node = self.model.maker(tensor)
        while node is not None and node.op in COPIES:
            node = self.model.maker(node.inputs[0])
        return node if node is not None and node.op == "DequantizeLinear" else None

    def _is_quantized_between(self) -> bool:
        """Whether a Q stands between the first product and the Softmax."""
        pending, seen = [self.softmax.inputs[0]], set[str]()
        while pending:
            tensor = pending.pop()
            node = self.model.maker(tensor)
            if node is None or tensor in seen or node.index == self.scores.index:
                continue
            if node.op in QDQ:
                return True
            seen.add(tensor)
            pending += [t for t in node.inputs if t not in self.model.constants]
        return False

    def _is_quantized_behind(self) -> bool:
        """Whether only Qs read the result of the second product, copies in between aside."""
        readers = list(GraphQueries(self.model, frozenset()).readers(self.context.outputs[0]))
        users = [self.model.user(e) for e in readers]
        return bool(users) and all(u is not None and u.op == "QuantizeLinear" for u in users)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
