"""A chain of products with made-up times of its builds, for tests of prices."""

from models import build, normal, ranges
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.attribution import BuildTimes
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.types import Placement

EMPTY = Placement()
CHAIN = """net (float[8,64] x) => (float[8,64] y) {
    [a] t = MatMul(x, w0)
    [b] u = MatMul(t, w1)
    [c] v = Softmax(u)
    [d] y = MatMul(v, w2)
}"""


def chain() -> Model:
    return build(CHAIN, {f"w{k}": normal(64, 64, seed=k) for k in range(3)})


def parts_of(model: Model) -> Partition:
    return partition(model, possible_edges(model, ranges(model)), ())


def times(placement: Placement = EMPTY, quantize=None, dequantize=None, **nodes: float) -> BuildTimes:
    return BuildTimes(placement, nodes, quantize or {}, dequantize or {})


FLOAT = {"a": 10.0, "b": 10.0, "c": 3.0, "d": 10.0}


def placed(parts: Partition, running: str, stored: str = "") -> Placement:
    return parts.placement(Decision.of((parts.owner[n] for n in running), stored))
