"""Which nodes of a model the layers of an engine cover, by what the layers claim."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from layer_reports import (
    CHAIN,
    random_array,
    text_model,
)
from qdqtune.engines.coverage import Claim, cover, never_run, read_model
from qdqtune.types import Layer


def covered(text: str, claims: list[Claim], constants: Mapping[str, Any] | None = None) -> list[set[str]]:
    """The nodes of each layer, and last those of none."""
    found, rest = cover(text_model(text, constants).graph, claims)
    return [*map(set, found), set(rest)]


def claim(nodes: str = "", reads: str = "", writes: str = "") -> Claim:
    return Claim(tuple(nodes.split()), frozenset(reads.split()), frozenset(writes.split()))


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([claim("neg"), claim("exp"), claim("abs")], [{"neg", "relu"}, {"exp"}, {"abs"}, set()]),
        # a border keeps a node out of a layer, and between two borders none is lost
        ([claim("neg", writes="a"), claim("exp", reads="a"), claim("abs")], [{"neg"}, {"relu", "exp"}, {"abs"}, set()]),
        ([claim("neg", writes="a"), claim("exp", reads="b"), claim("abs")], [{"neg", "relu"}, {"exp"}, {"abs"}, set()]),
        ([claim("neg stranger"), claim("neg abs")], [{"neg", "relu", "exp"}, {"abs"}, set()]),
        ([claim()], [set(), {"neg", "relu", "exp", "abs"}]),
    ],
)
def test_a_node_joins_the_layer_that_makes_its_input(claims: list[Claim], expected: list[set[str]]) -> None:
    assert covered(CHAIN, claims) == expected


def test_a_fusion_begins_with_its_compute_operator() -> None:
    text = """g (float[2,2] x) => (float[2,2] y) {
        [tanh] a = Tanh(x)
        [product] b = MatMul(a, a)
        [relu] y = Relu(b)
    }"""
    assert covered(text, [claim("tanh"), claim("relu")]) == [{"tanh"}, {"product", "relu"}, set()]


def test_an_add_joins_the_later_of_the_layers_in_front_of_it() -> None:
    text = """g (float[4] x) => (float[4] y) {
        [left] a = Exp(x)
        [right] b = Tanh(x)
        [add] c = Add(a, b)
        [last] y = Abs(c)
    }"""
    claims = [claim("right"), claim("left"), claim("last")]
    assert covered(text, claims) == [{"right"}, {"left", "add"}, {"last"}, set()]


WEIGHTS = """g (float[2,4] x) => (float[2,3] y) {
    [scale] two = Constant <value_float=2.0> ()
    [quantize] wq = QuantizeLinear(w, s, z)
    [dequantize] wd = DequantizeLinear(wq, s, z)
    [product] a = MatMul(x, wd)
    [double] y = Mul(a, two)
}"""


PAIR = {"w": random_array(4, 3), "s": np.float32(0.1), "z": np.int8(0)}


@pytest.mark.parametrize(
    ("reads", "inside"), [("x wq", {"dequantize"}), ("x wd", set()), ("x w", {"quantize", "dequantize"}), ("x", set())]
)
def test_constant_nodes_join_the_layer_that_reads_what_they_start_from(reads: str, inside: set[str]) -> None:
    found = covered(WEIGHTS, [claim("product", reads), claim("double")], PAIR)
    assert found == [{"product"} | inside, {"double"}, {"scale", "quantize", "dequantize"} - inside]


def test_shapes_that_were_known_in_advance_are_folded() -> None:
    text = """g (float[2,4] x) => (float[8] y) {
        [shape] a = Shape(x)
        [size] b = ReduceProd <keepdims=1> (a)
        [flat] y = Reshape(x, b)
    }"""
    assert covered(text, [claim("flat", "x")]) == [{"flat"}, {"shape", "size"}]
    assert covered(text, [claim("shape"), claim("flat")]) == [{"shape", "size"}, {"flat"}, set()]


def test_nothing_left_over_makes_no_layer() -> None:
    assert never_run(()) == ()
    assert never_run(("a", "b")) == (Layer("folded", ("a", "b"), "", 0.0, "folded"),)


def test_unnamed_nodes_have_the_names_that_loading_gives(tmp_path: Path) -> None:
    model = text_model(CHAIN)
    for node, name in zip(model.graph.node, ("", "Exp_2", "", "Exp_2"), strict=True):
        node.name = name
    onnx.save(model, tmp_path / "m.onnx")
    assert [n.name for n in read_model(tmp_path / "m.onnx").graph.node] == ["Neg_0", "Exp_2", "Exp_2_2", "Exp_2_3"]
