"""`--calibration-cache`: a file of scales stands for data, in every command that calibrates."""

import json
from pathlib import Path

import numpy as np
import pytest

from command_lines import is_refused
from conftest import Call
from models import conv_net, scales_of
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from runs import mixed
from sample_files import cache_of_scales

SCALES = {"image": 0.031, "r0": 0.02, "p0": 0.017, "k1": 0.05, "c2": 0.013, "r1": 0.011, "c3": 0.007, "cat": 0.019,
          "g": 0.023, "f": 0.023}  # fmt: skip
"""Other scales on both sides of MaxPool and Concat, which must not become one."""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    save(conv_net(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_pair_has_the_scale_of_the_file(call: Call, net: Path, precision: str) -> None:
    cache, output = cache_of_scales(net.with_name("calib.cache"), SCALES), net.with_name("q.onnx")
    options = ["--engine", "tensorrt", "--precision", precision, "-o", output]
    code, out, err = call("quantize", net, "--calibration-cache", cache, *options)
    assert code == 0, err
    assert "not compared with the float model" in out
    assert "TRT-8510-EntropyCalibration2: 10 tensors have an entry" in err
    found = scales_of(output)
    assert len(found) >= 5
    for tensor, scale in found.items():
        wanted = np.float32(SCALES[tensor.replace("graph_input_cast_0", "image")])
        assert scale.dtype == (np.float16 if precision == "fp16" else np.float32)
        assert scale.tobytes() == wanted.astype(scale.dtype).tobytes()


def test_json_has_all_that_became_of_the_file(call: Call, net: Path) -> None:
    scales = {name: scale for name, scale in SCALES.items() if name not in ("f", "k1")}
    cache = cache_of_scales(net.with_name("calib.cache"), scales, "k1: 7fc00000", "nobody: 3f800000")
    output = net.with_name("q.onnx")
    command = ["quantize", net, "--calibration-cache", cache, "--engine", "tensorrt", "-o", output, "--json"]
    code, out, err = call(*command)
    assert code == 0, err
    told = json.loads(out)["cache"]
    assert told["lacking"] == ["k1", "f"]
    assert told["unused"] == ["k1", "nobody"]
    assert not {n.name for n in load(output).nodes if n.op == "QuantizeLinear"} & {"k1_QuantizeLinear"}
    assert "tensors without a scale, which stay in float, 2: k1; f" in err


def test_a_search_and_apply_take_it_as_well(call: Call, model: Path, tmp_path: Path) -> None:
    scales = dict.fromkeys(candidate_tensors(mixed()), 0.05)
    cache, out_dir, output = (
        cache_of_scales(tmp_path / "calib.cache", scales),
        tmp_path / "out",
        tmp_path / "applied.onnx",
    )
    data = ["--calibration-cache", cache, "--calibration-data", model.with_suffix(".npz")]
    search = ["tune", model, "--engine", "fake", *data, "--builds", "4", "-q", "-o", out_dir, "--min-sqnr", "none"]
    apply = ["apply", model, "--placement", out_dir / "placement.yaml", *data, "-o", output]
    for command in (search, search, apply):  # the second goes on from its state
        code, _, err = call(*command)
        assert code == 0, err
    found = scales_of(out_dir / "optimized_final.onnx")
    assert {float(s) for s in found.values()} == {float(np.float32(0.05))}
    assert scales_of(output) == found
    code, out, _ = call("quantize", model, *data, "--engine", "fake", "-o", output)
    assert "on 3 samples" in out  # data beside the file only judge
    assert {float(s) for s in scales_of(output).values()} == {float(np.float32(0.05))}
    cache_of_scales(tmp_path / "calib.cache", dict.fromkeys(scales, 0.06))
    is_refused(call, tmp_path, "--calibration-cache", *search)
