"""Caches meet models: by name, by TensorRT's own names; the rest is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from models import build, conv_net, normal
from qdqtune.calibration.caches import Cache, from_file, match
from qdqtune.calibration.scales import Range
from qdqtune.errors import BadData
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model

LINE = """net (float[1,4,8] x) => (float[1,4,8] y) {
    [turn] t = Transpose <perm=[0,2,1]> (x)
    [flat] f = Reshape(t, shape)
    [first] a = MatMul(f, w)
    [soft] s = Softmax(a)
    [relu] r = Relu(s)
    [both] c = Concat <axis=0> (r, f)
    [part] p = Slice(c, from, to)
    [second] m = MatMul(p, w)
    [back] y = Reshape(m, old)
}"""


def line() -> Model:
    """Two products with copies, a Softmax, a Relu, a Concat and a Slice around them."""
    ints = {"shape": [8, 4], "old": [1, 4, 8], "from": [0, 0], "to": [8, 4]}
    return build(LINE, {"w": normal(4, 4), **{name: np.int64(value) for name, value in ints.items()}})


def cache(ranges: Mapping[str, float], **unusable: str) -> Cache:
    return Cache("a test", {name: Range(-127 * s, 127 * s) for name, s in ranges.items()}, unusable)


def test_entries_go_by_name_and_the_others_have_a_reason() -> None:
    ranges = {"x": 0.1, "f": 0.2, "w": 0.3, "(Unnamed Layer* 3) [Constant]_output": 1, "w_output": 1,
              "(Unnamed Layer* 4) [Shuffle]_output": 1, "shape": 1, "elsewhere": 1, "y": 1}  # fmt: skip
    matched = match(cache(ranges, c="nan: calibration saw no value of it"), line(), {})
    assert matched.exact == ("x", "f", "y")
    assert matched.ranges.activations["f"] == Range(-127 * 0.2, 127 * 0.2)
    assert {name: why.split(",")[0].split(":")[0] for name, why in matched.unused.items()} == {
        "c": "nan",
        "w": "a constant",
        "w_output": "a constant",
        "(Unnamed Layer* 3) [Constant]_output": "a constant",
        "(Unnamed Layer* 4) [Shuffle]_output": "a tensor of TensorRT's own",
        "shape": "a constant",
        "elsewhere": "the model has no such tensor",
    }


def test_tensors_without_an_entry_are_listed_where_a_kernel_reads_them() -> None:
    matched = match(cache({"x": 0.1, "a": 0.2, "s": 0.3}), line(), {})
    assert matched.ranges.activations.keys() == {"x", "a", "s"}
    assert matched.lacking == ("f", "r", "p")


def test_what_tensorrt_reshapes_behind_a_layer_is_found_under_the_layers_name() -> None:
    matched = match(cache({"x": 0.1, "a": 0.2, "soft_output": 0.7}), line(), {})
    assert matched.derived == {"s": "soft_output"}
    assert matched.ranges.activations["s"] == Range(-127 * 0.7, 127 * 0.7)
    assert "soft_output" not in matched.unused


def test_what_stands_before_a_bias_is_not_the_result() -> None:
    matched = match(cache({"image": 0.1, "r0": 0.2, "p0": 0.2, "head_output": 0.5}), conv_net(), {})
    assert "logits" not in matched.ranges.activations
    assert "head_output" in matched.unused


def test_the_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    others = {f"layer{i}": 0.1 for i in range(20)}
    with pytest.raises(
        BadData,
        match="0 of its 20 names are tensors of the model, of whose 10 the first is 'x': it is of",
    ):
        match(cache(others), line(), {})
    model = conv_net()
    with pytest.raises(BadData, match="1 of its 21 names are tensors of the model"):
        match(cache({"image": 0.1, **others}), model, {})
    file = tmp_path / "other.cache"
    file.write_text("TRT-8510-EntropyCalibration2\nlayer: 3f800000\n")
    onnx.save(model.to_proto(), tmp_path / "model.onnx")
    with pytest.raises(
        BadData, match=r"other\.cache: 0 of its 1 names are tensors of the model, of whose 14 the first is"
    ):
        from_file(file, model, tmp_path / "model.onnx")


def test_an_export_that_numbers_tensors_otherwise_is_refused_where_most_names_differ() -> None:
    shifted = {f"{name}_1": 0.1 for name in ("image", "c0", "r0", "c2")}
    with pytest.raises(BadData, match="2 of its 6 names are tensors of the model"):
        match(cache({"image": 0.1, "c2": 0.1, **shifted}), conv_net(), {})
    assert match(cache({"image": 0.1, "c2": 0.1, "c2_1": 0.1}), conv_net(), {}).exact == ("image", "c2")


def test_the_name_behind_an_identity_matches_the_tensor_in_front(tmp_path: Path) -> None:
    proto = conv_net().to_proto()
    first = next(node for node in proto.graph.node if node.name == "stem_relu")
    first.input[0] = "same"
    proto.graph.node.insert(1, helper.make_node("Identity", ["c0"], ["same"], "identity"))
    onnx.save(proto, tmp_path / "model.onnx")
    (tmp_path / "calib.cache").write_text("TRT-8510-EntropyCalibration2\nsame: 3f800000\nimage: 3f800000\n")
    matched = from_file(tmp_path / "calib.cache", load(tmp_path / "model.onnx"), tmp_path / "model.onnx")
    assert matched.exact == ("image", "c0")
