"""`Built.layers` of the engines that run here, for known fusions."""

from pathlib import Path

import numpy as np
import pytest

from layer_reports import (
    ENGINES,
    RESIDUAL,
    RESIDUAL_INPUT,
    RESIDUAL_WEIGHTS,
    home,
    layers_of,
    quantized_mlp,
    random_array,
    text_model,
)
from models import attention


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("suffix", ["", None, ", of a/block_2 + more"], ids=["names", "no names", "commas and blanks"])
def test_a_residual_block(engine: str, suffix: str | None, tmp_path: Path) -> None:
    model, name = text_model(RESIDUAL, RESIDUAL_WEIGHTS), dict[str, str]()
    for i, node in enumerate(model.graph.node):
        name[node.name] = f"{node.op_type}_{i}" if suffix is None else node.name + suffix
        node.name = "" if suffix is None else node.name + suffix
    layers = layers_of(engine, model, RESIDUAL_INPUT, tmp_path)
    assert set(home(layers, name["conv1"]).nodes) == {name["conv1"], name["relu1"]}
    assert home(layers, name["add"]) is home(layers, name["relu2"])
    assert engine != "onnxruntime" or home(layers, name["add"]) is home(layers, name["conv2"])
    order = [home(layers, name[given]).name for given in ("conv1", "conv2", "pool", "head")]
    assert [x.name for x in layers if x.name in order] == order
    assert all(x.precision == "FP32" for x in layers if x.kind == "compute")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_attention_block(engine: str, tmp_path: Path) -> None:
    layers = layers_of(engine, attention().to_proto(), {"x": random_array(2, 6, 16)}, tmp_path)
    assert engine != "openvino" or home(layers, "query_bias") is home(layers, "query")
    assert len({home(layers, f"gelu_{part}").name for part in ("div", "erf", "add", "mul", "half")}) == 1
    assert {home(layers, name).kind for name in ("norm", "scores", "softmax", "down")} == {"compute"}


@pytest.mark.parametrize("engine", ENGINES)
def test_pairs_are_in_the_integer_layers_that_absorbed_them(engine: str, tmp_path: Path) -> None:
    layers = layers_of(engine, *quantized_mlp(), tmp_path)
    for product, inside in (("product1", {"x_dq", "w1_dq"}), ("product2", {"b_dq", "w2_dq"})):
        assert inside <= set(home(layers, product).nodes)
        assert (home(layers, product).kind, home(layers, product).precision) == ("compute", "INT8")
    by_itself = [x.nodes for x in layers if x.kind == "quantize"]
    if home(layers, "b_q") is home(layers, "softmax"):  # OpenVINO does that with AVX-512, not with AVX2
        assert (engine, by_itself) == ("openvino", [("x_q",)])
        return
    assert by_itself == [("x_q",), ("b_q",)]
    assert {x.precision for x in layers if x.kind == "quantize"} == {"INT8"}
    assert home(layers, "softmax").precision == "FP32"


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_and_dead_ends_are_folded(engine: str, tmp_path: Path) -> None:
    text = """g (float[2,6] x) => (float[3,4] y) {
        [one] a = Constant <value_float=1.0> ()
        [two] b = Add(a, a)
        [shape] c = Constant <value_ints=[3, 4]> ()
        [scaled] d = Mul(x, b)
        [shaped] y = Reshape(d, c)
    }"""
    layers = layers_of(engine, text_model(text), {"x": random_array(2, 6)}, tmp_path)
    assert set(layers[-1].nodes) >= {"one", "two", "shape"}
    assert (layers[-1].kind, layers[-1].time_ms) == ("folded", 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_which_nothing_is_left_to_run(engine: str, tmp_path: Path) -> None:
    text = """g (float[2] x) => (float[2] y) {
        [two] a = Constant <value_floats=[1.0, 2.0]> ()
        [neg] y = Neg(a)
    }"""
    (layer,) = layers_of(engine, text_model(text), {"x": random_array(2)}, tmp_path)
    assert (layer.kind, layer.nodes) == ("folded", ("two", "neg"))


@pytest.mark.parametrize("engine", ENGINES)
def test_booleans_are_no_integers(engine: str, tmp_path: Path) -> None:
    text = """g (float[64] x) => (float[64] y) {
        [greater] a = Greater(x, zero)
        [choice] y = Where(a, x, zero)
    }"""
    layers = layers_of(engine, text_model(text, {"zero": np.float32(0)}), {"x": random_array(64)}, tmp_path)
    assert {x.precision for x in layers if x.kind == "compute"} <= {"BOOL", "FP32"}
