"""What is wrong with a model, data, YAML or user code is one line and a promised exit code; results stay results."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from command_lines import errors, is_refused
from conftest import Call
from models import build, feeds, normal
from qdqtune.calibration import calibrate, observe
from qdqtune.errors import parsed_json
from qdqtune.graph.loading import load
from runs import environment, mixed, write

QUICK = ("--engine", "fake", "--engine-option", "asymmetric=true", "--builds", "4", "-q")
PLAIN = ("--calibration-method", "minmax", "--no-bias-correction")


def test_a_negative_size_is_an_open_one(call: Call, model: Path, tmp_path: Path) -> None:
    proto = onnx.load(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(proto, model)
    assert load(model).tensors["x"].shape == (None, 8, 64)
    data = ["--calibration-data", model.with_suffix(".npz"), *PLAIN]
    assert call("tune", model, *QUICK, *data, "--mode", "subgraph", "-o", tmp_path / "out")[0] in (0, 3, 4)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_no_tensor_has_is_named(call: Call, model: Path, tmp_path: Path, scale: float) -> None:
    data, broken = ["--calibration-data", model.with_suffix(".npz")], tmp_path / "q.onnx"
    assert call("quantize", model, *data, *PLAIN, "-o", broken)[0] == 0
    proto = onnx.load(broken)
    tensor = next(t for t in proto.graph.initializer if t.name == "x_scale")
    tensor.CopyFrom(numpy_helper.from_array(np.full((), scale, np.float32), tensor.name))
    onnx.save(proto, broken)
    told = "the pair on x has a scale that no tensor has: see qdqtune debug"
    code, error = errors(call("tune", broken, "--from-qdq", *QUICK, *data, "-o", tmp_path / "out"))
    assert (code, told in error) == (2, True)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_a_constant_product_of_any_rank_runs_on_its_engine(call: Call, tmp_path: Path, batch: tuple[int, ...]) -> None:
    sizes = "".join(f"{size}," for size in batch)
    text = f"net (float[{sizes}8,16] x) => (float[{sizes}8,32] y) {{ [product] y = MatMul(x, w) }}"
    model = write(build(text, {"w": normal(*batch, 16, 32)}), tmp_path)
    code, _, err = call("quantize", model, "-o", tmp_path / "q.onnx")
    assert code == 0, err
    scales = [t for t in onnx.load(tmp_path / "q.onnx").graph.initializer if t.dims[:] == [32]]
    assert bool(scales) == (not batch)  # engines have kernels for channels of a matrix, not of a batch of them


def test_external_data_behind_a_link_that_leaves_the_folder_is_refused(call, tmp_path):
    (tmp_path / "m").mkdir()
    model = write(mixed(), tmp_path / "m")
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "m" / "w.bin").rename(tmp_path / "secret")
    (tmp_path / "m" / "w.bin").symlink_to(tmp_path / "secret")
    is_refused(call, tmp_path, "is a link that leaves the model's folder", "quantize", model, "-o", tmp_path / "q.onnx")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_arrays_whose_headers_lie_are_refused(call: Call, model: Path, tmp_path: Path, suffix: str) -> None:
    data = tmp_path / f"bad{suffix}"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2000000000000, 8, 64), }"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    data.write_bytes(content)
    if suffix == ".npz":
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("x.npy", content)
    is_refused(call, tmp_path, "cannot read", "quantize", model, "--calibration-data", data, "-o", tmp_path / "q.onnx")


@pytest.mark.usefixtures("workers")
def test_a_large_graph_is_calibrated_without_optimizing_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's optimizations take a time that grows with the square of the nodes."""
    session = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(observe, "onnxruntime_session", session)
    for most, fuse in ((4000, True), (0, False)):
        monkeypatch.setattr(observe, "MOST_OPTIMIZED", most)
        with pytest.raises(InterruptedError):
            calibrate.calibrate(load(model), feeds(mixed(), 1))
        assert session.call_args.kwargs["fuse"] is fuse


@pytest.mark.parametrize("front", ["5", "[5]", '[{"name": "24db"}]'])
def test_a_summary_that_somebody_has_changed(call: Call, model: Path, tmp_path: Path, front: str) -> None:
    (tmp_path / "summary.json").write_text(f'{{"front": {front}, "engine": {{"engine": "fake"}}}}')
    is_refused(call, tmp_path, "is not what a run has written", "report", tmp_path)


METRICS = "def nan(predict):\n    return float('nan')\ndef other(predict):\n    return predict({'picture': [0.0]})\n"


@pytest.mark.parametrize(("words", "name", "code", "told"), [
    ("quantize {model} -o {folder}/q.onnx", "nan", 2, "cannot be used: the metric of {metric} is nan"),
    ("quantize {model} -o {folder}/q.onnx", "other", 2, "calls predict without x: the model has the inputs x"),
    ("compare {model} {model} --engine fake", "nan", 2, "fails on {model}: the metric of {metric} is nan"),
    ("tune {model} --engine fake --dry-run", "nan", 5, "fails on the float model: the metric of {metric} is nan"),
])  # fmt: skip
def test_a_metric_that_cannot_be_used_is_named(words, name, code, told, call, tuned, tmp_path):
    (tmp_path / "metric.py").write_text(METRICS)
    metric = f"{tmp_path}/metric.py:{name}"
    places = {"model": tuned, "folder": tmp_path, "metric": metric}
    data = ("--calibration-data", tuned.with_suffix(".npz"), "--evaluate", metric)
    found, error = errors(call(*words.format(**places).split(), *data))
    assert (found, error) == (code, f"--evaluate {metric} {told.format(**places)}")
    assert not list(tmp_path.glob("*.onnx"))


WRITERS = {
    "python": "os.write(1, b'python')",
    "C": "ctypes.CDLL(None).puts(b'library')",
    "a process": "subprocess.run(['echo', 'process'], check=True)",
    "the stream it began with": "sys.__stdout__.write('stream')",
}


def test_json_is_alone_on_standard_output_whatever_writes_to_its_number(model: Path, tmp_path: Path) -> None:
    write_it = "; ".join(WRITERS.values())
    (tmp_path / "talk.py").write_text(
        f"import ctypes, os, subprocess, sys\nimport numpy as np\n{write_it}\n"
        f"def samples():\n    {write_it}\n    for i in range(3):\n        {write_it}\n"
        "        yield {'x': np.full((8, 8, 64), i / 6, np.float32)}\n"
        f"def score(predict):\n    {write_it}\n    return 1.0\n"
    )
    given = f"{tmp_path / 'talk.py'}:"
    arguments = ["tune", model, *QUICK, "--calibration-data", f"{given}samples", "--evaluate", f"{given}score"]
    line = [sys.executable, "-m", "qdqtune", *map(str, arguments), "--json", "-o", str(tmp_path / "out.onnx")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode in (0, 3, 4), done.stderr
    assert json.loads(done.stdout)
    assert all(word in done.stderr for word in ("python", "library", "process", "stream"))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400 + ".0", "NaN", "-Infinity", "9" * 5000, "[" * 100_000])
def test_numbers_that_no_float_holds_are_no_json(number: str) -> None:
    with pytest.raises(ValueError, match=r"number|digits|beyond|limit|Expecting|nested"):
        parsed_json(f'{{"pairs": {number}}}')
