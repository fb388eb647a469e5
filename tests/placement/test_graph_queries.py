"""What placement rules ask of a graph."""

from collections.abc import Iterator

from models import build, known, normal
from qdqtune.graph.operators import COPIES
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Edge


def test_a_constant_that_many_nodes_read_is_not_followed_to_all_of_them_from_each() -> None:
    count = 8
    nodes = " ".join(f"[m{k}] t{k + 1} = MatMul(t{k}, w)" for k in range(count))
    model = build(f"net (float[4,8] t0) => (float[4,8] t{count}) {{{nodes}}}", {"w": normal(8, 8)})
    asked: list[str] = []

    class Recording(GraphQueries):
        def readers(self, tensor: str, copies: frozenset[str] = COPIES) -> Iterator[Edge]:
            asked.append(tensor)
            return super().readers(tensor, copies)

    queries = Recording(model, possible_edges(model, known(model)))
    assert not any(queries.is_inside(edge) for edge in queries.possible if edge.tensor == "w")
    assert asked == []
