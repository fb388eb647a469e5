"""Groups as models of their own: they compute what the whole model computes there, on the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import onnx
import pytest

from models import attention, build, conv_net, feeds, normal, ranges, run, tapped
from qdqtune.calibration.observe import values_on
from qdqtune.engines import EngineSpec, shapes
from qdqtune.engines.shapes import Span, check_inputs, spans, with_spans
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning.subgraphs.extraction import Resolved, borders, extract, is_shape, resolve
from qdqtune.tuning.subgraphs.groups import by_rules

RESHAPED = """net (float[N,4,6] x, float[2,3] z) => (float[N,M,2] y) {
    [rows] s = Shape <start=0, end=1> (x)
    [wanted] t = Concat <axis=0> (s, minus, six)
    [reshape] a = Reshape(x, t)
    [product] b = MatMul(a, w)
    [relu] y = Relu(b)
    }"""


def reshaped() -> Model:
    text = RESHAPED.replace(", float[2,3] z", "")
    return build(text, {"w": normal(6, 2), "minus": np.array([-1]), "six": np.array([6])})


@pytest.mark.parametrize("make", [conv_net, attention, tapped])
def test_a_part_computes_what_the_model_computes_there(make: Callable[[], Model]) -> None:
    model = make()
    (sample,) = feeds(model, 1)
    resolved = resolve(model, model, sample, {})
    values = values_on(model, [t for node in model.nodes for t in node.outputs if t], sample) | sample
    for group in by_rules(model, possible_edges(model, ranges(model))).groups:
        nodes = [model.index_of[name] for name in group]
        reads, writes = borders(model, nodes)
        if not writes:  # nobody reads what it makes
            continue
        part = extract(model, nodes, resolved, {})
        onnx.checker.check_model(part.to_proto(), full_check=True)
        assert (part.inputs, part.outputs) == (reads, writes)
        (found,) = run(part, [{name: values[name] for name in reads}])
        for name in writes:
            np.testing.assert_allclose(found[name], values[name], rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_model_not_copies() -> None:
    model = conv_net()
    resolved = resolve(model, model, feeds(model, 1)[0], {})
    for node in model.nodes:
        part = extract(model, [node.index], resolved, {})
        assert set(part.large) == set(model.large) & set(node.inputs)
        assert all(part.large[name] is model.large[name] for name in part.large)
        assert set(part.constants) == set(model.constants) & set(node.inputs)


def test_shapes_that_inference_cannot_find_are_looked_up_by_running_the_model() -> None:
    model = reshaped()
    sample = {"x": np.ones((3, 4, 6), np.float32)}
    shaped = with_input_shapes(model, {"x": (3, 4, 6)})
    assert resolve(model, model, sample, {}).sizes["b"] == (3, 4, 2)
    assert resolve(model, shaped, sample, {}).sizes["y"] == (3, 4, 2)


def test_shapes_that_nodes_compute_become_constants() -> None:
    model = reshaped()
    resolved = resolve(model, model, {"x": np.ones((3, 4, 6), np.float32)}, {})
    assert is_shape(model, "t", resolved.sizes)
    assert not is_shape(model, "a", resolved.sizes)
    part = extract(model, [model.index_of["reshape"]], resolved, {"t": np.array([3, -1, 6])})
    assert part.inputs == ("x",)
    assert run(part, [{"x": np.ones((3, 4, 6), np.float32)}])[0]["a"].shape == (3, 4, 6)


def test_sizes_that_vary_stay_open_in_a_part() -> None:
    model = build("net (float[N,8] x) => (float[N,8] y) {[a] t = MatMul(x, w) [b] y = Relu(t)}", {"w": normal(8, 8)})
    sample = {"x": np.ones((4, 8), np.float32)}
    shaped = with_input_shapes(model, {"x": (4, 8)})
    fixed = resolve(model, shaped, sample, {"x": Span((4, 8), (4, 8), (4, 8))})
    assert fixed.spans == {}
    assert extract(shaped, [1], fixed, {}).tensors["t"].shape == (4, 8)
    resolved = resolve(model, shaped, sample, {"x": Span((1, 8), (4, 8), (16, 8))})
    assert resolved.spans["t"] == ((1, 8), (4, 8), (16, 8))
    part = extract(shaped, [1], resolved, {})
    assert part.tensors["t"].shape == part.tensors["y"].shape == (None, 8)
    onnx.checker.check_model(part.to_proto(), full_check=True)


def test_a_border_of_unknown_type_is_refused() -> None:
    model = build("net (float[2] x) => (float[2] y) {[a] t = Relu(x) [b] y = Relu(t)}")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.value_info[:]
    with pytest.raises(BadOption, match="type of tensor 't'"):
        extract(Model(proto, model.large), [1], Resolved({}), {})


def test_shapes_in_options_and_in_trtexec_arguments() -> None:
    options = {"min_shapes": {"x": [1, 8]}, "max_shapes": {"x": [9, 8]}, "opt_shapes": {"x": [4, 8], "z": [3]}}
    found = {"x": ((1, 8), (4, 8), (9, 8)), "z": ((3,), (3,), (3,))}
    assert spans(EngineSpec("tensorrt", options)) == found
    text = "--stronglyTyped --minShapes=x:1x8 --optShapes=x:4x8,z:3 --maxShapes=x:9x8"
    spec = EngineSpec("trtexec", {"trtexec_args": text, "builder_level": 1})
    assert spans(spec) == found
    assert spans(EngineSpec("trtexec", {"trtexec_args": "--shapes=x:2x8"})) == {"x": ((2, 8),) * 3}
    assert spans(EngineSpec("onnxruntime", options)) == {}
    other = with_spans(spec, {"t": Span((1,), (2,), (3,))})
    assert other.options["trtexec_args"] == "--stronglyTyped"
    assert other.options["builder_level"] == 1
    assert spans(other) == {"t": ((1,), (2,), (3,))}
    assert not set(with_spans(spec, {}).options) & set(shapes.OPTIONS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--optShapes=x:4x8,n:3", None),
        ("--minShapes=x:1x8 --optShapes=x:4x8 --maxShapes=x:9x8", None),
        ("--optShapes=z:4", "shapes given for 'z': the model's inputs are x, n"),
        ("--optShapes=x:4", "input 'x' has 2 dimensions, and cannot have sizes 4"),
        ("--optShapes=x:4x9", "input 'x': dimension 1 is 8, and cannot have sizes 4x9"),
        ("--minShapes=x:4x8 --optShapes=x:2x8", "must rise, not 4x8, 2x8"),
    ],
)
def test_shapes_that_no_input_can_have_are_refused(text: str, words: str | None) -> None:
    model = build("net (float[N,8] x, int64[2] n) => (float[A,B] y) {y = Reshape(x, n)}")
    spec = EngineSpec("trtexec", {"trtexec_args": text})
    with nullcontext() if words is None else pytest.raises(BadOption, match=re.escape(words)):
        check_inputs(spec, model)


@pytest.mark.parametrize("text", ["--optShapes=x", "--minShapes=x:1xN", "--optShapes='x:1"])
def test_shapes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="trtexec_args"):
        spans(EngineSpec("trtexec", {"trtexec_args": text}))


@pytest.mark.parametrize(("engine", "taken"), [("trtexec", False), ("tensorrt", True)])
def test_input_names_that_trtexec_cannot_be_told_of(engine: str, taken: bool) -> None:
    model = build("net (float[2,8] x) => (float[2,8] y) { y = Relu(x) }", {})
    renamed = onnx.compose.add_prefix(model.to_proto(), "a,'")
    if taken:
        check_inputs(EngineSpec(engine), Model(renamed))
    else:
        with pytest.raises(BadOption, match="rename the input"):
            check_inputs(EngineSpec(engine), Model(renamed))
