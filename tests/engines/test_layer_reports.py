"""Layer reports: which nodes of a model the layers of an engine cover, and what the engines say of known fusions."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from models import attention
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.coverage import Claim, cover, never_run, read_model
from qdqtune.engines.memory import scarce_memory
from qdqtune.engines.onnxruntime import layers as onnxruntime_layers
from qdqtune.errors import BadOption, EngineFailure
from qdqtune.types import Layer

ENGINES = [
    "onnxruntime",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO"),
    ),
]
RANDOM = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return (0.3 * RANDOM.standard_normal(shape)).astype(np.float32)


def model_of(text: str, constants: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    """A model of ONNX's text form, opset 19, with more constants."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> {text}')
    for name, value in (constants or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(model)
    return model


def layers_of(engine: str, model: onnx.ModelProto, inputs: Mapping[str, Any], folder: Path) -> tuple[Layer, ...]:
    """The report, checked: every node once, what is folded last."""
    path = folder / "m.onnx"
    onnx.save(model, path)
    layers = open_engine(EngineSpec(engine)).build(path, folder / "log").layers(inputs, 2)
    assert sorted(n for x in layers for n in x.nodes) == sorted(n.name for n in read_model(path).graph.node)
    assert all(x.kind != "folded" for x in layers[:-1])
    return layers


def home(layers: tuple[Layer, ...], node: str) -> Layer:
    return next(layer for layer in layers if node in layer.nodes)


# ---- coverage

CHAIN = """g (float[4] x) => (float[4] y) {
    [neg] a = Neg(x)
    [relu] b = Relu(a)
    [exp] c = Exp(b)
    [abs] y = Abs(c)
}"""


def covered(text: str, claims: list[Claim], constants: Mapping[str, Any] | None = None) -> list[set[str]]:
    """The nodes of each layer, and last those of none."""
    found, rest = cover(model_of(text, constants).graph, claims)
    return [*map(set, found), set(rest)]


def claim(nodes: str = "", reads: str = "", writes: str = "") -> Claim:
    return Claim(tuple(nodes.split()), frozenset(reads.split()), frozenset(writes.split()))


def test_a_node_between_two_layers_joins_the_one_that_makes_its_input() -> None:
    assert covered(CHAIN, [claim("neg"), claim("exp"), claim("abs")]) == [{"neg", "relu"}, {"exp"}, {"abs"}, set()]


def test_a_border_keeps_a_node_out_of_a_layer() -> None:
    claims = [claim("neg", writes="a"), claim("exp", reads="a"), claim("abs")]
    assert covered(CHAIN, claims) == [{"neg"}, {"relu", "exp"}, {"abs"}, set()]


def test_a_node_between_two_borders_is_not_lost() -> None:
    claims = [claim("neg", writes="a"), claim("exp", reads="b"), claim("abs")]
    assert covered(CHAIN, claims) == [{"neg", "relu"}, {"exp"}, {"abs"}, set()]


def test_of_two_claims_the_first_counts_and_strangers_do_not() -> None:
    assert covered(CHAIN, [claim("neg stranger"), claim("neg abs")]) == [{"neg", "relu", "exp"}, {"abs"}, set()]


def test_without_any_claim_every_node_is_left_over() -> None:
    assert covered(CHAIN, [claim()]) == [set(), {"neg", "relu", "exp", "abs"}]


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
PAIR = {"w": normal(4, 3), "s": np.float32(0.1), "z": np.int8(0)}


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
    model = model_of(CHAIN)
    for node, name in zip(model.graph.node, ("", "Exp_2", "", "Exp_2"), strict=True):
        node.name = name
    onnx.save(model, tmp_path / "m.onnx")
    assert [n.name for n in read_model(tmp_path / "m.onnx").graph.node] == ["Neg_0", "Exp_2", "Exp_2_2", "Exp_2_3"]


# ---- both engines

RESIDUAL = """g (float[1,16,16,16] x) => (float[1,10] y) {
    [conv1] a = Conv <pads=[1,1,1,1]> (x, w1, b1)
    [relu1] b = Relu(a)
    [conv2] c = Conv <pads=[1,1,1,1]> (b, w2, b2)
    [add] d = Add(c, b)
    [relu2] e = Relu(d)
    [same] f = Identity(e)
    [pool] g = GlobalAveragePool(f)
    [flat] h = Flatten(g)
    [head] y = Gemm <transB=1> (h, w3, b3)
}"""
RESIDUAL_WEIGHTS = {"w1": normal(16, 16, 3, 3), "b1": normal(16), "w2": normal(16, 16, 3, 3), "b2": normal(16),
                    "w3": normal(10, 16), "b3": normal(10)}  # fmt: skip
IMAGE = {"x": normal(1, 16, 16, 16)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("named", [True, False])
def test_a_residual_block(engine: str, named: bool, tmp_path: Path) -> None:
    model = model_of(RESIDUAL, RESIDUAL_WEIGHTS)
    name = {node.name: node.name if named else f"{node.op_type}_{i}" for i, node in enumerate(model.graph.node)}
    for node in model.graph.node:
        node.name = node.name if named else ""
    layers = layers_of(engine, model, IMAGE, tmp_path)
    assert set(home(layers, name["conv1"]).nodes) == {name["conv1"], name["relu1"]}
    assert home(layers, name["add"]) is home(layers, name["relu2"])
    assert engine != "onnxruntime" or home(layers, name["add"]) is home(layers, name["conv2"])
    order = [home(layers, name[given]).name for given in ("conv1", "conv2", "pool", "head")]
    assert [x.name for x in layers if x.name in order] == order
    assert all(x.precision == "FP32" for x in layers if x.kind == "compute")


@pytest.mark.parametrize("engine", ENGINES)
def test_names_with_commas_and_blanks(engine: str, tmp_path: Path) -> None:
    model = model_of(RESIDUAL, RESIDUAL_WEIGHTS)
    for node in model.graph.node:
        node.name = f"{node.name}, of a/block_2 + more"
    layers = layers_of(engine, model, IMAGE, tmp_path)
    assert home(layers, "conv1, of a/block_2 + more") is home(layers, "relu1, of a/block_2 + more")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_attention_block(engine: str, tmp_path: Path) -> None:
    layers = layers_of(engine, attention().to_proto(), {"x": normal(2, 6, 16)}, tmp_path)
    assert engine != "openvino" or home(layers, "query_bias") is home(layers, "query")
    assert len({home(layers, f"gelu_{part}").name for part in ("div", "erf", "add", "mul", "half")}) == 1
    assert {home(layers, name).kind for name in ("norm", "scores", "softmax", "down")} == {"compute"}


def quantized_mlp() -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Two products that carry pairs, a Softmax between them that does not run on integers."""
    text = """g (float[8,32] x) => (float[8,16] y) {
        [x_q] xq = QuantizeLinear(x, s, z)
        [x_dq] xd = DequantizeLinear(xq, s, z)
        [w1_dq] w1d = DequantizeLinear <axis=1> (w1, ws1, wz1)
        [product1] a = MatMul(xd, w1d)
        [softmax] b = Softmax(a)
        [b_q] bq = QuantizeLinear(b, s, z)
        [b_dq] bd = DequantizeLinear(bq, s, z)
        [w2_dq] w2d = DequantizeLinear <axis=1> (w2, ws2, wz2)
        [product2] y = MatMul(bd, w2d)
    }"""
    constants: dict[str, Any] = {"s": np.float32(0.02), "z": np.int8(0)}
    for i, (rows, columns) in enumerate([(32, 24), (24, 16)], 1):
        constants[f"w{i}"] = RANDOM.integers(-60, 60, (rows, columns), dtype=np.int8)
        constants[f"ws{i}"] = np.full(columns, 0.01, np.float32)
        constants[f"wz{i}"] = np.zeros(columns, np.int8)
    return model_of(text, constants), {"x": normal(8, 32)}


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


def test_a_large_model_is_profiled_in_the_session_that_goes_on(tmp_path: Path) -> None:
    model, inputs = quantized_mlp()
    onnx.save(model, tmp_path / "model.onnx")
    built = open_engine(EngineSpec("onnxruntime")).build(tmp_path / "model.onnx", tmp_path / "log")
    before, small = built.run(inputs), built.layers(inputs, 3)
    with scarce_memory():
        large = built.layers(inputs, 3)
    assert [(x.name, x.nodes, x.precision) for x in large] == [(x.name, x.nodes, x.precision) for x in small]
    assert all(x.time_ms for x in large if x.kind == "compute")
    after = built.run(inputs)
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_and_dead_ends_are_folded(engine: str, tmp_path: Path) -> None:
    text = """g (float[2,6] x) => (float[3,4] y) {
        [one] a = Constant <value_float=1.0> ()
        [two] b = Add(a, a)
        [shape] c = Constant <value_ints=[3, 4]> ()
        [scaled] d = Mul(x, b)
        [shaped] y = Reshape(d, c)
    }"""
    layers = layers_of(engine, model_of(text), {"x": normal(2, 6)}, tmp_path)
    assert set(layers[-1].nodes) >= {"one", "two", "shape"}
    assert (layers[-1].kind, layers[-1].time_ms) == ("folded", 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_which_nothing_is_left_to_run(engine: str, tmp_path: Path) -> None:
    text = """g (float[2] x) => (float[2] y) {
        [two] a = Constant <value_floats=[1.0, 2.0]> ()
        [neg] y = Neg(a)
    }"""
    (layer,) = layers_of(engine, model_of(text), {"x": normal(2)}, tmp_path)
    assert (layer.kind, layer.nodes) == ("folded", ("two", "neg"))


@pytest.mark.parametrize("engine", ENGINES)
def test_booleans_are_no_integers(engine: str, tmp_path: Path) -> None:
    text = """g (float[64] x) => (float[64] y) {
        [greater] a = Greater(x, zero)
        [choice] y = Where(a, x, zero)
    }"""
    layers = layers_of(engine, model_of(text, {"zero": np.float32(0)}), {"x": normal(64)}, tmp_path)
    assert {x.precision for x in layers if x.kind == "compute"} <= {"BOOL", "FP32"}


# ---- ONNX Runtime

BRANCHES = """g (float[64,64] x, bool go) => (float[64,64] y) {
    [before] a = Tanh(x)
    [choice] b = If(go) <
        then_branch = g1 () => (float[64,64] t) { [inner] t0 = MatMul(a, a) [outer] t = Sin(t0) },
        else_branch = g2 () => (float[64,64] e) { [other] e = Cos(a) }
    >
    [after] y = Erf(b)
}"""


def test_time_in_a_body_is_that_of_its_node(tmp_path: Path) -> None:
    layers = layers_of("onnxruntime", model_of(BRANCHES), {"x": normal(64, 64), "go": np.array(True)}, tmp_path)
    assert [x.nodes for x in layers] == [("before",), ("choice",), ("after",)]
    assert all(x.time_ms is not None for x in layers)


def event(name: str, op: str, ts: int, dur: int) -> dict[str, Any]:
    """A kernel event as ONNX Runtime writes it."""
    types = [{"float": [4]}]
    arguments = {"op_name": op, "input_type_shape": types, "output_type_shape": types}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": arguments}


def report(tmp_path: Path, events: list[dict[str, Any]], plain_ms: float = 1.0) -> tuple[Layer, ...]:
    onnx.save(model_of(CHAIN), tmp_path / "m.onnx")
    (tmp_path / "profile.json").write_text(json.dumps(events))
    graph, files = model_of(CHAIN).graph, (tmp_path / "m.onnx", tmp_path / "profile.json")
    return onnxruntime_layers.report(graph, *files, 1, [plain_ms / 1e3])


def test_times_are_means_without_tails_and_without_the_first_inference(tmp_path: Path) -> None:
    chain = (("neg", "Neg"), ("relu", "Relu"), ("exp", "Exp"), ("abs", "Abs"))
    durations = (100, 10, 20, 23, 60)
    events = [event(name, op, 1000 * run + 100 * i, durations[run])
              for run in range(5) for i, (name, op) in enumerate(chain)]  # fmt: skip
    session = {"cat": "Session", "name": "model_run", "ts": 0, "dur": 5000, "args": {}}
    layers = report(tmp_path, [session, *reversed(events)])
    assert [x.time_ms for x in layers] == [0.0215] * 4
    with pytest.raises(EngineFailure, match="does not show every node"):
        report(tmp_path, events[:-1])
    with pytest.raises(EngineFailure, match="does not show every node"):
        report(tmp_path, [])


def test_what_the_profile_takes_itself_is_not_the_layers(tmp_path: Path) -> None:
    chain = (("neg", "Neg", 12), ("relu", "Relu", 22), ("exp", "Exp", 32), ("abs", "Abs", 1))
    events = [
        event(name, op, 1000 * run + 100 * i, spent) for run in range(3) for i, (name, op, spent) in enumerate(chain)
    ]
    times = [x.time_ms for x in report(tmp_path, events, plain_ms=0.0601)]
    assert times == pytest.approx([0.01, 0.02, 0.03, 0.0001])
    assert [x.time_ms for x in report(tmp_path, events, plain_ms=0.1)] == [0.012, 0.022, 0.032, 0.001]
    assert sum(x.time_ms or 0.0 for x in report(tmp_path, events, plain_ms=0.001)) == pytest.approx(0.0067)


def test_what_runs_within_a_node_does_not_count_twice(tmp_path: Path) -> None:
    one = [event("neg", "Neg", 0, 5), event("relu", "Relu", 10, 50), event("exp", "Exp", 20, 9),
           event("relu", "Relu", 30, 9), event("exp", "Exp", 70, 5), event("abs", "Abs", 80, 5)]  # fmt: skip
    two = [{**e, "ts": e["ts"] + 1000} for e in one]
    assert [x.time_ms for x in report(tmp_path, one + two)] == [0.005, 0.05, 0.005, 0.005]


def test_onnxruntime_names_what_it_inserts(tmp_path: Path) -> None:
    text = """g (float[2,6,16] x) => (float[2,6,8] y) {
        [product] a = MatMul(x, w)
        [bias] y = Add(a, b)
    }"""
    layers = layers_of("onnxruntime", model_of(text, {"w": normal(16, 8), "b": normal(8)}), {"x": normal(2, 6, 16)},
                       tmp_path)  # fmt: skip
    assert [(x.kind, x.nodes) for x in layers] == [
        ("reformat", ()), ("compute", ("product", "bias")), ("reformat", ())
    ]  # fmt: skip


def test_onnxruntime_saves_a_model_that_computes_the_same(tmp_path: Path) -> None:
    onnx.save(model_of(RESIDUAL, RESIDUAL_WEIGHTS), tmp_path / "m.onnx")
    engine = open_engine(EngineSpec("onnxruntime"))
    built = engine.build(tmp_path / "m.onnx", tmp_path / "log")
    built.save(tmp_path / "s.onnx")
    saved = onnx.load(tmp_path / "s.onnx")
    assert "FusedConv" in {node.op_type for node in saved.graph.node}
    assert not {node.domain for node in saved.graph.node} & {"com.microsoft.nchwc"}
    again = engine.build(tmp_path / "s.onnx", tmp_path / "log").run(IMAGE)["y"]
    np.testing.assert_allclose(again, built.run(IMAGE)["y"], rtol=1e-4, atol=1e-5)


# ---- OpenVINO


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_openvino_does_not_take_its_own_names_for_the_models(engine: str, tmp_path: Path) -> None:
    text = """g (float[1,8,32] x) => (float[1,8,32] y) {
        [MVN_3] a = Tanh(x)
        [Multiply_7] b = LayerNormalization <axis=-1> (a, gamma, beta)
        [Constant_4] c = Sin(b)
        [Add_9] y = MatMul(c, w)
    }"""
    constants = {"gamma": normal(32), "beta": normal(32), "w": normal(32, 32)}
    layers = layers_of(engine, model_of(text, constants), {"x": normal(1, 8, 32)}, tmp_path)
    homes = [home(layers, name) for name in ("MVN_3", "Multiply_7", "Add_9")]
    assert len(set(map(id, homes))) == 3
    assert all(x.kind == "compute" for x in homes)
    assert [layers.index(x) for x in homes] == sorted(layers.index(x) for x in homes)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_openvino_takes_nodes_of_one_name(engine: str, tmp_path: Path) -> None:
    model = model_of(RESIDUAL, RESIDUAL_WEIGHTS)
    for node in model.graph.node:
        node.name = "n"
    layers = layers_of(engine, model, IMAGE, tmp_path)
    assert [set(x.nodes) for x in layers if "n" in x.nodes] == [{"n", "n_2"}]


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_openvino_saves_an_ir_with_float32_weights(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(model_of(RESIDUAL, RESIDUAL_WEIGHTS), tmp_path / "m.onnx")
    built = open_engine(EngineSpec(engine)).build(tmp_path / "m.onnx", tmp_path / "log")
    built.save(tmp_path / "s.xml")
    weights = sum(np.asarray(v).nbytes for v in RESIDUAL_WEIGHTS.values())
    assert (tmp_path / "s.bin").stat().st_size >= weights
    with pytest.raises(BadOption, match=r"give s\.xml"):
        built.save(tmp_path / "s.ir")
    monkeypatch.setattr("openvino.save_model", lambda _, path, **__: Path(path).write_text("<net/>"))
    with pytest.raises(EngineFailure):
        built.save(tmp_path / "broken.xml")
