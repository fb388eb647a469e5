"""Calibration caches of other tools: every scale comes back bit for bit and meets its tensor; the rest is told."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from models import build, conv_net, normal
from qdqtune.calibration.caches import CacheRanges, ranges_of, read_cache
from qdqtune.calibration.options import CacheOption, RangeOptions
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration, Range, of_range
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadData, BadOption
from qdqtune.graph.model import Model
from sample_files import cache_of_scales

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


def test_a_cache_of_tensorrt_keeps_every_bit_of_what_is_a_scale(tmp_path: Path) -> None:
    source, ranges = read_cache(written(tmp_path, REAL))
    assert source == "TRT-8510-EntropyCalibration2"
    digits = {name: r and f"{struct.unpack('>I', struct.pack('>f', scale(r)))[0]:08x}" for name, r in ranges.items()}
    assert digits == {"x": "4000890a", "/conv1/Conv_output_0": "3f9db09c", "a name: with colons/Relu:0": "3fb6163c",
                      "(Unnamed Layer* 8) [Constant]_output": "39137939", "(Unnamed Layer* 64) [Shuffle]_output": None,
                      "unseen": None, "endless": None, "below": None, "short": None}  # fmt: skip


@pytest.mark.parametrize("head", ["TRT-7202-MinMaxCalibration", "TRT-8XXX-EntropyCalibration"])
def test_caches_of_every_algorithm_and_version(head: str, tmp_path: Path) -> None:
    found = read_cache(written(tmp_path, f"\ufeff{head}\r\nx: 0x3F800000\r\n\r\n"))
    assert found == (head, {"x": Range(-127.0, 127.0)})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "whose first line is TRT-VERSION-ALGORITHM"),
        ("TRT-8510-EntropyCalibration2\n", "names no tensor"),
        ("TRT-8510-EntropyCalibration2\nconv1 3c60dd38\n", "line 2 is 'conv1 3c60dd38'"),
        ("TRT-8510-EntropyCalibration2\nconv1: 3c60dd38ff\n", "line 2"),
        (b"TRT-8510-EntropyCalibration2\nconv1\xff: 3c60dd38\n", "whose first line is"),
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


def ranges(folder: Path, model: Model, scales: Mapping[str, float]) -> CacheRanges:
    return ranges_of(cache_of_scales(folder / "calib.cache", scales), model)


def test_entries_go_by_name_and_the_others_are_told(tmp_path: Path) -> None:
    own = {"x": 0.1, "f": 0.25, "y": 1.0}
    others = {"w": 0.3, "(Unnamed Layer* 3) [Constant]_output": 1.0, "shape": 1.0, "elsewhere": 1.0, "a": float("nan")}
    found = ranges(tmp_path, line(), own | others)
    assert found.tensors == ("x", "f", "y")
    assert found.ranges.activations["f"] == Range(-127 * 0.25, 127 * 0.25)
    assert found.unused == tuple(others)
    assert found.notes()[-1].startswith("entries that are not used, 5: w; ")


def test_tensors_without_an_entry_are_listed_where_a_kernel_reads_them(tmp_path: Path) -> None:
    found = ranges(tmp_path, line(), {"x": 0.1, "a": 0.2, "s": 0.3})
    assert found.ranges.activations.keys() == {"x", "a", "s"}
    assert found.lacking == ("f", "r", "p")


def test_what_tensorrt_reshapes_behind_a_layer_is_found_under_the_layers_name(tmp_path: Path) -> None:
    found = ranges(tmp_path, line(), {"x": 0.1, "a": 0.2, "soft_output": 0.5})
    assert found.ranges.activations["s"] == Range(-63.5, 63.5)
    assert not found.unused


def test_what_stands_before_a_bias_is_not_the_result(tmp_path: Path) -> None:
    found = ranges(tmp_path, conv_net(), {"image": 0.1, "r0": 0.2, "p0": 0.2, "head_output": 0.5})
    assert "logits" not in found.ranges.activations
    assert found.unused == ("head_output",)


def test_the_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    others = {f"layer{number}": 0.1 for number in range(20)}
    with pytest.raises(BadData, match="0 of its 20 names are tensors of the model: it is of another model"):
        ranges(tmp_path, line(), others)
    with pytest.raises(BadData, match="1 of its 21 names are tensors of the model"):
        ranges(tmp_path, conv_net(), {"image": 0.1, **others})


def test_an_export_that_numbers_tensors_otherwise_is_refused_where_most_names_differ(tmp_path: Path) -> None:
    shifted = {f"{name}_1": 0.1 for name in ("image", "c0", "r0", "c2")}
    with pytest.raises(BadData, match="2 of its 6 names are tensors of the model"):
        ranges(tmp_path, conv_net(), {"image": 0.1, "c2": 0.1, **shifted})
    assert ranges(tmp_path, conv_net(), {"image": 0.1, "c2": 0.1, "c2_1": 0.1}).tensors == ("image", "c2")


def test_what_is_given_counts_and_defaults_stand_for_the_rest() -> None:
    assert RangeOptions().calibration == DEFAULT_CALIBRATION
    given = RangeOptions(calibration_method="percentile:99")
    assert given.calibration == Calibration("percentile", 99.0, DEFAULT_CALIBRATION.bias_correction)
    assert RangeOptions(calibration_method="percentile:99.99999").calibration.percentile == 99.99999
    for share in ("50", "100.1", "0"):
        with pytest.raises(BadOption, match="no number from 51 up to 100"):
            RangeOptions(calibration_method=f"percentile:{share}")


@pytest.mark.parametrize(
    "given", [{"calibration_method": "percentile:99"}, {"bias_correction": False}, {"calibration_method": "mse"}]
)
def test_a_cache_of_scales_excludes_how_ranges_are_found(given: dict[str, object]) -> None:
    class Both(CacheOption, RangeOptions):
        pass

    Both(calibration_cache="c.cache")
    Both(**given)
    with pytest.raises(BadOption, match="brings the scales: leave `calibration_method`"):
        Both(calibration_cache="c.cache", **given)
