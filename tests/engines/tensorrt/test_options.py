"""Ranges of input shapes for engines that build for them: read from options, and checked against the model."""

from __future__ import annotations

import re
from contextlib import nullcontext

import onnx
import pytest

from models import build
from qdqtune.engines import EngineSpec
from qdqtune.engines.tensorrt.options import SHAPE_OPTIONS, Span, check_inputs, spans, with_spans
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model


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
    assert not set(with_spans(spec, {}).options) & set(SHAPE_OPTIONS)


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
def test_input_names_that_trtexec_cannot_take_are_refused(engine: str, taken: bool) -> None:
    model = build("net (float[2,8] x) => (float[2,8] y) { y = Relu(x) }", {})
    renamed = onnx.compose.add_prefix(model.to_proto(), "a,'")
    if taken:
        check_inputs(EngineSpec(engine), Model(renamed))
    else:
        with pytest.raises(BadOption, match="rename the input"):
            check_inputs(EngineSpec(engine), Model(renamed))
