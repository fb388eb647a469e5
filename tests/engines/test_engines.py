"""Engines are opened by name, with options that are checked."""

import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from loaded_modules import absent
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.errors import BadOption, EngineUnavailable

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EngineSpec("nosuch"), "unknown engine 'nosuch'; there are cuda, fake"),
        (EngineSpec("onnxruntime", {"speed": 1}), "no option 'speed'; it has threads, provider"),
        (EngineSpec("onnxruntime", {"threads": 0}), "`threads`"),
        (EngineSpec("onnxruntime", {"threads": 4096}), f"4096 is too many for {os.cpu_count()} cores: give at most"),
        (
            EngineSpec("onnxruntime", {"threads": "two"}),
            "option 'threads' of engine 'onnxruntime' is 'two': Expected 'int', got 'str'",
        ),
        (EngineSpec("onnxruntime", {"provider": None}), "is None: Expected 'str', got 'null'"),
        (EngineSpec("fake", {"faults": ["hang"]}), "is ['hang']: Expected 'object | null', got 'array'"),
        (EngineSpec("trtexec", {"plugin_libraries": "p.so"}), "is 'p.so': Expected 'array', got 'str'"),
        (EngineSpec("trtexec", {"opt_shapes": {"x": ["1"]}}), "is {'x': ['1']}: Expected 'int', got 'str'"),
        (EngineSpec("fake", {"faults": {"melt": "*"}}), "no fault 'melt'"),
        (EngineSpec("fake", {"noise": -1}), "negative"),
    ],
)
def test_bad_options_are_named(spec: EngineSpec, words: str) -> None:
    with pytest.raises(BadOption, match=re.escape(words)):
        open_engine(spec)


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "qdqtune.engines.onnxruntime.engine")
    with pytest.raises(EngineUnavailable, match="'onnxruntime' cannot be loaded"):
        open_engine(EngineSpec("onnxruntime"))


@pytest.mark.parametrize("name", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def test_an_output_declared_with_another_shape_is_timed(name: str, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n,4] x) => (float[1,m] y) {
       d = Shape(x) f = Cast<to = 1>(d) e = Cast<to = 7>(f) y = Reshape(x, e) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    built = open_engine(EngineSpec(name)).build(tmp_path / "m.onnx", tmp_path / "log")
    inputs = {"x": np.ones((3, 4), np.float32)}
    assert [built.time(inputs, runs) > 0 for runs in (1, 3)] == [True, True]
    assert built.run(inputs)["y"].shape == (3, 4)
