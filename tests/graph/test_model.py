"""The model value: its index, its constants, and how it is written."""

import ml_dtypes
import numpy as np
from onnx import parser

from qdqtune.graph.model import Constant, Model, captured
from two_products import TEXT, model, weights


def test_names_of_nested_bodies_are_captured_unless_they_are_defined_there() -> None:
    outer = parser.parse_graph("""g () => (float[2] r) {
        own = Relu(free)
        r = If(own) <
            then_branch = a () => (float[2] p) { p = Add(own, deep) },
            else_branch = b () => (float[2] q) { q = Neg(own) }>
    }""")
    assert captured(outer) == {"free", "deep"}


def test_keys_name_the_content() -> None:
    zeros = np.zeros((4, 300), np.float32)
    assert Constant.of(zeros).key == Constant.of(zeros.copy()).key
    others = [zeros.T, zeros.astype(np.int32), zeros + 1, zeros.astype(ml_dtypes.bfloat16)]
    assert len({Constant.of(a).key for a in [zeros, *others]}) == 5
    assert Constant.of(zeros[:, ::2]).array().shape == (4, 150)


def test_the_fingerprint_follows_the_content_of_constants_only() -> None:
    assert model().fingerprint == model().fingerprint
    assert model(weights(2)).fingerprint != model().fingerprint
    assert model(weights(2), weights()).fingerprint != model(weights(), weights(2)).fingerprint
    renamed = parser.parse_model(TEXT.replace("[mm2]", "[other]"))
    assert Model(renamed, model().large).fingerprint != model().fingerprint
