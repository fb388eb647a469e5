"""Calibration caches of other tools: every scale comes back bit for bit, and what is no cache is refused in a line."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.quant_utils import write_calibration_table

from qdqtune.calibration.caches import read_cache
from qdqtune.calibration.scales import Range, of_range
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadData

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
        ('{"a": ' * 100_000, "nested too deeply"),
        ("[1]", "JSON of something else"),
        ('{"x": 0.1}', "no lowest and highest value of 'x'"),
        ('{"x": [1, "a"]}', "no lowest and highest value of 'x'"),
        ('{"x": [0, 1]', "no calibration cache, or damaged"),
        (b"\x00" * 4096, "it is no text"),
        (b"\xff" * 64, "it is no text .of ONNX Runtime's tables calibration.json"),
    ],
)
def test_what_is_no_cache_is_refused_in_one_line(content: str | bytes, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(BadData, match=words) as error:
        read_cache(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_cache_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot read calibration cache"):
        read_cache(tmp_path / "missing.cache")
    with pytest.raises(BadData, match="cannot read calibration cache"):
        read_cache(tmp_path)
