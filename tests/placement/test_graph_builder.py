"""Graphs while they are written: names are unique, constants are shared."""

import numpy as np
import onnx

from qdqtune.placement.graph_builder import GraphBuilder, with_names


def test_names_that_are_taken_get_a_number() -> None:
    graph = GraphBuilder(names={"a"})
    assert [graph.unique("a"), graph.unique("a"), graph.unique("b")] == ["a_2", "a_3", "b"]


def test_constants_are_shared_by_content() -> None:
    graph = GraphBuilder()
    names = [graph.constant(name, np.zeros(1000)) for name in ("l", "m")]
    assert len({graph.constants[name].key for name in names}) == 1


def test_a_node_with_other_names_keeps_all_else() -> None:
    node = onnx.helper.make_node("Concat", ["a", "b"], ["c"], "join", axis=1)
    assert with_names(node, ["x"], ["y"]) == onnx.helper.make_node("Concat", ["x"], ["y"], "join", axis=1)
    assert list(node.input) == ["a", "b"]
