"""A chain of products whose weights may be stored in fewer bits, for tests of searches."""

from models import build, normal, ranges
from qdqtune.engines.machine import products_saturate
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.units import Partition, partition
from qdqtune.types import Edge, WeightFormat

DYNAMIC = WeightFormat(7 if products_saturate() else 8, dynamic=True)
"""What ONNX Runtime computes exactly on this processor."""

NET = """net (float[4,64] x) => (float[4,64] y) {
    [a] p = MatMul(x, w0)
    [b] q = Tanh(p)
    [c] r = MatMul(q, w1)
    [d] y = MatMul(r, w2)
}"""
MODEL = build(NET, {f"w{i}": normal(64, 64, seed=i) for i in range(3)})
W4, W8 = WeightFormat(4, 32), WeightFormat(8)
SHARES = {Edge(f"w{i}", node, 1): {W4: 0.4, W8: 0.6} for i, node in enumerate("acd")}


def parts() -> Partition:
    return partition(MODEL, possible_edges(MODEL, ranges(MODEL)), [], SHARES)
