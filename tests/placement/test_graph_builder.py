"""Graphs while they are written: names are unique, and fragments of earlier graphs are taken over where they fit."""

import numpy as np
import onnx

from qdqtune.graph.model import Constant
from qdqtune.placement.graph_builder import Fragment, GraphBuilder, with_names


def test_names_that_are_taken_get_a_number() -> None:
    graph = GraphBuilder(names={"a"})
    assert [graph.unique("a"), graph.unique("a"), graph.unique("b")] == ["a_2", "a_3", "b"]


def test_large_constants_are_shared_by_content_and_small_ones_are_written() -> None:
    graph = GraphBuilder()
    small, large, same = (graph.constant(n, np.zeros(k)) for n, k in (("s", 2), ("l", 1000), ("m", 1000)))
    assert isinstance(graph.constants[small], bytes)
    kept = [graph.constants[name] for name in (large, same)]
    assert all(isinstance(constant, Constant) for constant in kept)
    assert len({constant.key for constant in kept if isinstance(constant, Constant)}) == 1


def test_a_fragment_is_written_again_only_if_it_is_made_of_something_else_or_its_names_are_taken() -> None:
    known: dict[object, Fragment] = {}

    def written(graph: GraphBuilder, scale: float) -> tuple[str, bool]:
        asked = []

        def write() -> str:
            asked.append(scale)
            return graph.constant("scale", np.float32(scale))

        return graph.once(known, "slot", scale, write), bool(asked)

    assert written(first := GraphBuilder(), 0.5) == ("scale", True)
    assert written(later := GraphBuilder(), 0.5) == ("scale", False)
    assert later.constants == first.constants
    assert written(GraphBuilder(names={"scale"}), 0.5) == ("scale_2", True)
    assert written(GraphBuilder(), 0.25) == ("scale", True)


def test_a_node_with_other_names_keeps_all_else() -> None:
    node = onnx.helper.make_node("Concat", ["a", "b"], ["c"], "join", axis=1)
    assert with_names(node, ["x"], ["y"]) == onnx.helper.make_node("Concat", ["x"], ["y"], "join", axis=1)
    assert list(node.input) == ["a", "b"]
