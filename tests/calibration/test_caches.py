"""Calibration caches of other tools: every scale comes back bit for bit and meets its tensor; the rest is told."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.quant_utils import write_calibration_table

from models import build, conv_net, normal
from qdqtune.calibration.caches import Cache, from_file, match, read_cache
from qdqtune.calibration.options import CacheOption, RangeOptions, check_cache
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration, Range, of_range
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadData, BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model

NUMBERS = numeric_format("tensorrt", "int8")
REAL = """TRT-8510-EntropyCalibration2
x: 4000890a
/conv1/Conv_output_0: 3f9db09c
a name: with colons/Relu:0: 3fb6163c
(Unnamed Layer* 8) [Constant]_output: 39137939
(Unnamed Layer* 64) [Shuffle]_output: 0
unseen: 7fc00000
endless: 7f800000
below: bf800000
short: 3c60dd3
"""


def written(folder: Path, content: str | bytes, name: str = "calib.cache") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def scale(found: Range) -> float:
    return float(of_range(found, NUMBERS).scale)


def test_a_cache_of_tensorrt_keeps_every_bit_and_tells_what_it_cannot_use(tmp_path: Path) -> None:
    cache = read_cache(written(tmp_path, REAL))
    assert cache.source == "TRT-8510-EntropyCalibration2"
    digits = {name: f"{struct.unpack('>I', struct.pack('>f', scale(r)))[0]:08x}" for name, r in cache.ranges.items()}
    assert digits == {"x": "4000890a", "/conv1/Conv_output_0": "3f9db09c", "a name: with colons/Relu:0": "3fb6163c",
                      "(Unnamed Layer* 8) [Constant]_output": "39137939"}  # fmt: skip
    reasons = {name: why.split(":")[0] for name, why in cache.unusable.items()}
    assert reasons == {"(Unnamed Layer* 64) [Shuffle]_output": "0", "unseen": "not finite", "endless": "not finite",
                       "below": "negative", "short": "1.2e-36"}  # fmt: skip


@given(st.integers(0x20000000, 0x7F000000))
def test_every_scale_comes_back_exactly(digits: int) -> None:
    (wanted,) = struct.unpack(">f", struct.pack(">I", digits))
    got = of_range(Range(-127 * wanted, 127 * wanted), NUMBERS).scale
    assert got.tobytes() == np.float32(wanted).tobytes()


@pytest.mark.parametrize("head", ["TRT-7202-MinMaxCalibration", "TRT-8XXX-EntropyCalibration"])
def test_caches_of_every_algorithm_and_version(head: str, tmp_path: Path) -> None:
    cache = read_cache(written(tmp_path, f"\ufeff{head}\r\nx: 0x3F800000\r\n\r\n"))
    assert (cache.source, dict(cache.ranges)) == (head, {"x": Range(-127.0, 127.0)})


def test_a_table_of_onnxruntime(tmp_path: Path) -> None:
    tensors = {"x": (-1.5, 2.25), "z 0:0": (0.0, 0.1), "low": (-3.0, -1.0), "none": (0.0, 0.0)}
    data = {n: TensorData(lowest=np.array(a, "f"), highest=np.array(b, "f")) for n, (a, b) in tensors.items()}
    write_calibration_table(data, str(tmp_path))
    ends = read_cache(tmp_path / "calibration.json")
    tenth = float(np.float32(0.1))
    assert ends.ranges == {"x": Range(-1.5, 2.25), "z 0:0": Range(0.0, tenth), "low": Range(-3.0, -1.0)}
    assert {n: w.split(":")[0] for n, w in ends.unusable.items()} == {"none": "0"}
    with pytest.raises(BadData, match=r"calibration\.json"):
        read_cache(tmp_path / "calibration.flatbuffers")
    assert read_cache(written(tmp_path, '{"x": [-1, 2]}')).ranges == {"x": Range(-1.0, 2.0)}
    whole = {"CLS": "TensorsData", "data": {"x": {"lowest": {"data": [-1.0]}, "highest": 2, "CLS": "TensorData"}}}
    assert read_cache(written(tmp_path, json.dumps(whole))).ranges == {"x": Range(-1.0, 2.0)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "neither TensorRT's header"),
        ("TRT-8510-EntropyCalibration2\n", "names no tensor"),
        ("TRT-8510-EntropyCalibration2\nconv1 3c60dd38\n", "line 2 is 'conv1 3c60dd38'"),
        ("TRT-8510-EntropyCalibration2\nconv1: 3c60dd38ff\n", "line 2"),
        ("some text\nof somebody\n", "neither TensorRT's header TRT-VERSION-ALGORITHM nor a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "JSON of something else"),
        ('{"x": 0.1}', "no lowest and highest value of 'x'"),
        ('{"x": [1, "a"]}', "no lowest and highest value of 'x'"),
        ('{"x": [0, 1]', "no calibration cache, or damaged"),
        (b"\x00" * 4096, "it is no text"),
        (b"\xff" * 64, "it is no text .of ONNX Runtime's tables calibration.json"),
    ],
)
def test_what_is_no_cache_is_refused_in_one_line(content: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=rf"^[^\n]*calib\.cache[^\n]*{words}[^\n]*$"):
        read_cache(written(tmp_path, content))


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


def test_the_cache_of_another_model_is_refused() -> None:
    others = {f"layer{number}": 0.1 for number in range(20)}
    with pytest.raises(
        BadData, match="0 of its 20 names are tensors of the model, of whose 10 the first is 'x': it is of"
    ):
        match(cache(others), line(), {})
    with pytest.raises(BadData, match="1 of its 21 names are tensors of the model"):
        match(cache({"image": 0.1, **others}), conv_net(), {})


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


def test_what_is_given_counts_and_defaults_stand_for_the_rest() -> None:
    assert RangeOptions().calibration == DEFAULT_CALIBRATION
    given = RangeOptions(calibration_method="percentile:99")
    assert given.calibration == Calibration("percentile", 99.0, DEFAULT_CALIBRATION.bias_correction)
    assert RangeOptions(calibration_method="percentile:99.99999").calibration.percentile == 99.99999
    for share in ("50", "100.1", "0"):
        with pytest.raises(BadOption, match="no finite number above 50 up to 100"):
            RangeOptions(calibration_method=f"percentile:{share}")


@pytest.mark.parametrize(
    "given", [{"calibration_method": "percentile:99"}, {"bias_correction": False}, {"calibration_method": "mse"}]
)
def test_a_cache_of_scales_excludes_how_ranges_are_found(given: dict[str, object]) -> None:
    cache = CacheOption(calibration_cache=Path("c.cache"))
    check_cache(RangeOptions(), cache)
    check_cache(RangeOptions(**given), CacheOption())
    with pytest.raises(BadOption, match="brings the scales: leave `calibration_method`"):
        check_cache(RangeOptions(**given), cache)
