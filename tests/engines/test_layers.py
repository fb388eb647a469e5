"""`Built.layers` of the engines that run here, for known fusions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from layer_reports import (
    CHAIN,
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
from loaded_modules import absent, forgotten
from models import attention, build
from qdqtune.commands import quantize
from qdqtune.engines.coverage import Claim, cover
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.fallback import fallback
from qdqtune.engines.runner import checked_output
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.types import Layer, LayerKind
from runs import mixed
from workers import Workers


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


# Which nodes of a model the layers of an engine cover, by what the layers claim
def covered(text: str, claims: list[Claim], constants: Mapping[str, Any] | None = None) -> list[set[str]]:
    """The nodes of each layer, and last those of none."""
    found, folded = cover(Model(text_model(text, constants)), claims)
    return [*map(set, found), set[str]().union(*(layer.nodes for layer in folded))]


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


# What a provider leaves to another, counted on a small graph
def net(size: str = "1,256") -> Model:
    return build(f"net (float[{size}] x) => (float[{size}] y) {{ [a] p = Relu(x) [b] q = Abs(p) [c] y = Relu(q) }}")


def layer(*nodes: str, where: str = "", ms: float | None = None, kind: LayerKind = "compute") -> Layer:
    return Layer("+".join(nodes), nodes, "FP32", ms, kind, elsewhere=where)


def test_nodes_elsewhere_their_reasons_borders_and_time_with_copies() -> None:
    found = fallback(net(), (layer("a"), layer("b", where="on the CPU: no kernel"), layer("c")))
    assert found.nodes == 3
    assert [(left.node, left.reason) for left in found.left] == [("b", "on the CPU: no kernel")]
    assert found.borders == ("p", "q")
    assert found.in_words() == "1 of 3 nodes run elsewhere, 2 borders: b on the CPU: no kernel"
    without = fallback(net(), (layer("a", where="on the CPU: x"), layer("c")))
    assert without.borders == ("q",), "a node without layer is on the side of what it reads"
    copies = layer("copy", ms=0.25, kind="copy")
    found = fallback(net("N,4"), (layer("a", ms=1.0), copies, layer("b", "c", where="on the CPU: x", ms=0.5)))
    assert (found.nodes, found.ms) == (3, 0.75)
    assert found.in_words() == (
        "2 of 3 nodes run elsewhere, 1 border, 0.75 ms there and in copies: b and 1 more on the CPU: x"
    )


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((layer("a", "b", "c"),), "all 3 nodes run on the provider"),
        ((), "where the nodes run is not known: the engine gave no layers"),
        ([layer(f"n{i}", where=f"on the CPU: {i}") for i in range(5)],
         "5 of 5 nodes run elsewhere, 0 borders: n0 on the CPU: 0; n1 on the CPU: 1; n2 on the CPU: 2; 2 more reasons"),
    ],
)  # fmt: skip
def test_a_line_names_a_few_reasons(layers: Sequence[Layer], words: str) -> None:
    assert fallback(net(), layers).in_words() == words


# No written model keeps its name, or gets it, unless its engine loads it
def refused(model: Model, path: Path) -> None:
    """Write a model that the checker lets pass and ONNX Runtime refuses: a scale that is no float."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.to_proto())
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            node.attribute.append(onnx.helper.make_attribute("axis", 77))
    save(Model(proto), path)


@pytest.mark.parametrize("engine", ["onnxruntime", "fake", "tensorrt"])
def test_a_file_that_the_engine_refuses_does_not_appear(tmp_path: Path, workers: Workers, engine: str) -> None:
    target = tmp_path / "q.onnx"
    target.write_bytes(b"as it was")
    with pytest.raises(EngineFailure, match="so nothing was kept"), checked_output(target, engine, EXECUTION) as fresh:
        fresh.write_bytes(b"no model")
    assert target.read_bytes() == b"as it was"
    assert workers.started == (engine != "tensorrt")  # a build of which takes minutes: the checker is asked
    with checked_output(target, engine, EXECUTION) as fresh:
        save(mixed(), fresh)


def test_without_the_engine_the_checker_decides(tmp_path, workers, monkeypatch):
    absent(monkeypatch, "openvino")
    forgotten(monkeypatch, "qdqtune.engines.openvino")  # which may have it already
    with checked_output(tmp_path / "m.onnx", "openvino", EXECUTION) as fresh:
        save(mixed(), fresh)
    refused = pytest.raises(EngineFailure, match="no sound model")
    with refused, checked_output(tmp_path / "n.onnx", "openvino", EXECUTION) as fresh:
        fresh.write_bytes(b"no model")


def test_a_file_that_was_run_is_not_loaded_again(tmp_path: Path, workers: Workers) -> None:
    with checked_output(tmp_path / "m.onnx", "tensorrt", EXECUTION, is_run=True) as fresh:
        save(mixed(), fresh)
    assert workers.started == 0


@pytest.mark.parametrize("command", ["quantize", "apply"])
def test_a_command_that_writes_what_its_engine_refuses_writes_nothing(
    call, tuned, placement, tmp_path, command, monkeypatch
):
    told = [tuned, "--calibration-data", tuned.with_suffix(".npz"), "--calibration-method", "minmax"]
    if command == "apply":
        told += ["--placement", placement]
    monkeypatch.setattr(quantize, "save", refused)
    code, out, err = call(command, *told, "--no-bias-correction", "-o", tmp_path / "q.onnx")
    assert (code, out) == (5, "")
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert not list(tmp_path.iterdir())
