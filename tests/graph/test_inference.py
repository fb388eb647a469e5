"""Shapes and constants that follow from input sizes, also where onnx's inference of a whole graph ends."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from models import Array, activations, build, feeds, normal
from models import model as parsed
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.inference import decided, with_input_shapes
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.rewrites import Rewrites
from qdqtune.graph.simplifying import computed
from rewrite_nets import net, same

DYNAMIC = """g (float[batch,3,size] x, float[batch,4] z, float[1] q) => (float[batch,o] y, float[1] u) {
    t = Flatten(x)
    y = Concat<axis=1>(t, z)
    u = Relu(q)
}"""
WINDOWS = """g (float[N,10,12,8] x) => (float[A,B] y) {
    s = Shape(x)
    h = Gather(s, middle)
    n = Mod(h, seven)
    e = Concat<axis=0>(zeros, n, zero)
    p = Pad(x, e)
    m = MatMul(p, w)
    d = Shape(m)
    b = Gather(d, zero)
    c = Concat<axis=0>(b, rest)
    f = Reshape(m, c)
    i = NonZero(f)
    g = Relu(f)
    y = Neg(g)
}"""
"""A Pad and a Reshape by sizes that have to be computed, and sizes that values decide."""


def dynamic() -> Model:
    proto = parsed(DYNAMIC)
    for info in (proto.graph.input[2], proto.graph.output[1]):
        info.type.tensor_type.ClearField("shape")
    return load_proto(proto)


def windows() -> Model:
    numbers = {"middle": [1, 2], "seven": [7], "zeros": [0] * 5, "zero": [0], "rest": [-1]}
    return build(WINDOWS, {"w": normal(8, 6)} | {name: np.array(values) for name, values in numbers.items()})


def test_input_shapes_flow_through_a_copy() -> None:
    loaded = dynamic()
    assert None in loaded.tensors["t"].shape
    shaped = with_input_shapes(loaded, {"x": (2, 3, 5), "q": (7,)})
    assert shaped.tensors["z"].shape == (2, 4), "a symbol has one value"
    assert shaped.tensors["t"].shape == (2, 15)
    assert (shaped.tensors["y"].shape, shaped.tensors["u"].shape) == ((2, 19), (7,))
    assert None in (loaded.tensors["x"].shape or ()), "the model that ships stays dynamic"


def test_open_sizes_get_no_invented_names() -> None:
    """With such names ONNX Runtime fuses Add and LayerNormalization, which takes longer than in the user's file."""
    graph = load_proto(parsed(DYNAMIC)).proto.graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    assert any(info.name == "t" for info in infos)
    assert {dim.dim_param for info in infos for dim in info.type.tensor_type.shape.dim} == {"", "batch", "size", "o"}


def test_two_sizes_named_by_a_question_mark_need_not_be_equal() -> None:
    proto = parsed(DYNAMIC)
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_param = "?"
    shaped = with_input_shapes(load_proto(proto), {"x": (2, 3, 5), "z": (2, 4), "q": (1,)})
    assert shaped.tensors["y"].shape == (2, 19)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"nope": (1,)}, "inputs are x, z, q"),
        ({"x": (1, 3)}, "has 3 dimensions, not 2"),
        ({"x": (1, 4, 5)}, "dimension 1 cannot be 4: the model declares batchx3x"),
        ({"x": (0, 3, 5)}, "dimension 0 cannot be 0"),
        ({"x": (2, 3, 5), "z": (1, 4)}, "declares batchx.*, and another input has batch 2$"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        with_input_shapes(dynamic(), shapes)


def test_sizes_that_nodes_compute_are_inferred() -> None:
    model = windows()
    shaped = with_input_shapes(model, {"x": (2, 10, 12, 8)})
    (values,) = activations(shaped, feeds(shaped, 1))
    sizes = {name: shaped.tensors[name].shape for name in ("p", "m", "f", "g", "y")}
    assert sizes == {name: values[name].shape for name in sizes}
    assert None in (shaped.tensors["i"].shape or ()), "what values decide stays open"
    onnx.checker.check_model(shaped.to_proto(), full_check=True)


def test_texts_that_nodes_compute_are_known() -> None:
    text = """net (int64[N] x) => (string[N,1] y) {
        [column] names = Reshape(words, shape)
        [pick] y = Gather(names, x)
    }"""
    words = np.array(["cat", "dog"] * 100, object)  # more than a small constant has bytes
    for some in (words, words[:2]):
        model = build(text, {"words": some, "shape": np.int64([-1, 1])})
        assert decided(model)[0]["names"].sizes == (len(some), 1)


def test_nothing_is_inferred_with_dynamic_inputs_or_known_shapes() -> None:
    model = windows()
    assert with_input_shapes(model, {}) is model
    known = build("g (float[2,8] x) => (float[2,8] y) { a = Relu(x)\n y = Neg(a) }")
    assert with_input_shapes(known, {}) is known


def test_shapes_behind_an_unknown_operator_stay_unknown() -> None:
    proto = windows().to_proto()
    proto.graph.node[4].op_type, proto.graph.node[4].domain = "Own", "my"
    proto.opset_import.add(domain="my", version=1)
    shaped = with_input_shapes(replace(windows(), proto=proto), {"x": (2, 10, 12, 8)})
    assert "m" not in shaped.tensors or None in (shaped.tensors["m"].shape or (None,))


def test_no_large_weight_is_read_to_move_it() -> None:
    model = net("t = Transpose(w) n = MatMul(x, t)", {"w": normal(64, 8)})
    held = Constant("w", model.large["w"].dtype, (64, 8), Mock(side_effect=AssertionError("read")))
    rewritten = Rewrites().of(replace(model, large={"w": held}))
    assert rewritten.large["t"].shape == (8, 64)


@pytest.mark.parametrize("op", ["RandomUniformLike(two)", "Dropout(two, half, training)"])
def test_random_operators_are_not_computed(op: str) -> None:
    model = net(f"k = {op} n = Add(x, k)", {"training": np.array(True)})
    inputs = [model.constants[name].to_proto(name) for name in model.nodes[0].inputs]
    assert computed(model.proto, model.proto.graph.node[0], inputs) is None


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("s = Reshape(w, sizes) t = Transpose <perm=[1,0]> (s)", {"w": normal(8, 2, 32), "sizes": np.array([8, -1])}),
        ("s = Unsqueeze(w, zero) r = Squeeze(s, zero) t = Cast <to=1> (r)", {"w": np.float64(normal(64, 8))}),
        ("s = Cast <to=1> (w) t = Mul(s, scale)", {"w": np.arange(512, dtype=np.int8).reshape(64, 8) % 50}),
        ("r = ReduceL2 <keepdims=1> (w, zero) s = Div(w, r) t = Mul(s, scale)", {"w": normal(64, 8)}),
    ],
)
def test_weights_behind_constant_expressions_become_constants(body: str, constants: dict[str, Array]) -> None:
    given = {"zero": np.array([0]), "scale": normal(1, 8)} | constants
    model = build(f"g (float[2,64] x) => (float[2,8] y) {{ {body} y = MatMul(x, t) }}", given)
    made = Rewrites().of(model)
    assert [node.op for node in made.nodes] == ["MatMul"]
    assert made.constants.keys() == {"t"}
    same(model, made)
    assert Rewrites().of(made) is made


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("t = Concat <axis=1> (w, w, w, w, w)", "y"),
        ("t = Transpose(v)", "t"),
        ("t = Add(v, q) q = Neg(x)", "y"),
        ("t = Reshape(w, sizes)", "y"),  # invalid: left to the engine
    ],
)
def test_expressions_that_repeat_values_and_graph_outputs_stay(body: str, output: str) -> None:
    text = f"g (float[64,8] x) => (float[N,M] {output}) {{ {body} y = MatMul(x, t) }}"
    model = build(text, {"w": normal(64, 8), "v": normal(8, 64), "sizes": np.array([64, 8, 0])})
    assert Rewrites().of(model) is model


def test_a_weight_that_cannot_be_computed_is_an_error_of_one_line() -> None:
    model = build("g (float[2,64] x) => (float[2,64] y) { t = Reshape(w, sizes) y = MatMul(x, t) }",
                  {"w": normal(64, 64), "sizes": np.array([64, 64])})  # fmt: skip
    other = replace(model, large={"w": Constant.of(normal(64, 32))})
    with pytest.raises(BadModel, match=r"cannot compute the constant 't' \(Reshape\)"):
        Rewrites().of(other).constants["t"].array()
