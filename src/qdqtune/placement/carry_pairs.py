"""Rules that place pairs: each adds edges to those that are placed already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qdqtune.graph.model import Node
from qdqtune.graph.operators import AVERAGE_POOLS
from qdqtune.placement import rules
from qdqtune.placement.graph_queries import Scene, nodes_into
from qdqtune.placement.keep_float import attention_results as results_of
from qdqtune.placement.keep_float import follows_convolution, result
from qdqtune.types import Edge

INTEGER = frozenset({"Add", "Concat", "LeakyRelu", "Mul", "Sigmoid"})
"""Operators with integer kernels of their own in ONNX Runtime that pay between quantized neighbours."""


def compute_inputs(scene: Scene, placed: frozenset[Edge]) -> Iterable[Edge]:
    """Activation and weight of Conv, ConvTranspose, Gemm and MatMul."""
    return rules.compute_inputs(scene.model, scene.possible)


def attention_results(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """What reads the second product of an attention, behind copies, where both products have pairs."""
    for attention in scene.attentions:
        if all(e in placed for e in nodes_into(scene, attention.products)):
            yield from results_of(scene, attention)


def residual_skip(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The skip input of an Add whose branch comes out of a quantized compute operator."""
    for node in scene.model.nodes:
        if node.op != "Add" or node.domain or (skip := scene.skip(node)) is None:
            continue
        root = scene.fusions.get(node.index)
        if root is not None and skip.tensor in scene.model.producers and _is_low(scene, root, placed):
            yield skip


def convolution_to_layernorm(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The data input of a LayerNormalization that follows a quantized convolution: see `follows_convolution`."""
    for node in scene.model.nodes:
        source = follows_convolution(scene, node)
        if source is not None and scene.runs_low(source, placed):
            yield node.into[0]


def concat(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """All inputs and uses of a Concat that only quantized operators read, if a quantized operator feeds it."""
    for node in scene.model.nodes:
        if node.op == "Concat" and _all_read_low(scene, node, placed):
            data = scene.data(node)
            if any(_made_low(scene, e.tensor, placed) for e in data):
                yield from data
                yield from scene.model.edges(node.outputs[0])


def max_pool(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The input of a MaxPool that only quantized operators read."""
    for node in scene.model.nodes:
        if node.op == "MaxPool" and _all_read_low(scene, node, placed):
            yield from scene.data(node)


def resize(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """The input of a Resize that only quantized operators read; cubic ones overshoot the range."""
    for node in scene.model.nodes:
        is_resize = node.op in ("Resize", "Upsample") and node.attributes.get("mode", "nearest") not in (
            "cubic",
            b"cubic",
        )
        if is_resize and _all_read_low(scene, node, placed):
            yield from scene.data(node)


def average_pool(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """Input and result of an average pool between quantized operators, if nothing reads its input in float."""
    for node in scene.model.nodes:
        if node.op not in AVERAGE_POOLS or not _all_read_low(scene, node, placed):
            continue
        tensor = node.inputs[0]
        others = [e for e in scene.model.edges(tensor) if e.node != node.name]
        if _made_low(scene, tensor, placed) and all(e in placed for e in others):
            yield from (*scene.data(node), *scene.model.edges(node.outputs[0]))


def compute_results(scene: Scene, placed: frozenset[Edge]) -> Iterator[Edge]:
    """All uses of what a quantized convolution makes, or a quantized MatMul in front of a bias."""
    for node in scene.computes():
        if node.op == "Gemm" or not scene.runs_low(node, placed):
            continue
        uses = scene.model.edges(result(scene, node))
        if node.op != "MatMul" or any(_adds_bias(scene, e) for e in uses):
            yield from uses


def integer_operators(scene: Scene, placed: frozenset[Edge]) -> Iterable[Edge]:
    """Inputs and results of operators whose data are all quantized, and that have an integer kernel."""
    return rules.integer_islands(scene.model, scene.possible, INTEGER)


def _adds_bias(scene: Scene, edge: Edge) -> bool:
    user = scene.model.user(edge)
    return user is not None and user.op == "Add" and any(t in scene.model.constants for t in user.inputs)


def _is_low(scene: Scene, node: int, placed: frozenset[Edge]) -> bool:
    return scene.runs_low(scene.model.nodes[node], placed)


def _made_low(scene: Scene, tensor: str, placed: frozenset[Edge]) -> bool:
    """Whether a tensor comes, through copies, out of a quantized operator's fusion, or of one that hands it on."""
    source = scene.source(tensor)
    if source is None:
        return False
    root = scene.fusions.get(source.index)
    if root is not None:
        return _is_low(scene, root, placed)
    data = scene.data(source)
    return source.op in ("Concat", "MaxPool", "Resize") and bool(data) and all(e in placed for e in data)


def _all_read_low(scene: Scene, node: Node, placed: frozenset[Edge]) -> bool:
    """Whether every reader of a node's result, behind copies, has a pair on it."""
    readers = list(scene.readers(node.outputs[0]))
    return bool(readers) and all(e in placed for e in readers)
