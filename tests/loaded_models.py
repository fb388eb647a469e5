"""Models in ONNX text syntax, run by ONNX Runtime as they are and as they are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper, parser

from qdqtune.graph.loading import load

Arrays = Mapping[str, npt.NDArray[Any]]


def model(text: str, opset: int = 17, ir: int = 8, constants: Arrays | None = None) -> onnx.ModelProto:
    """A model in ONNX text syntax, with `constants` as initializers."""
    proto = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}, "my": 1]>\n{text}')
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (constants or {}).items())
    return proto


def run(proto: onnx.ModelProto | Path, feeds: Arrays) -> list[npt.NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = str(proto) if isinstance(proto, Path) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
    results: list[npt.NDArray[Any]] = session.run(None, {n: a for n, a in feeds.items() if n in names})
    return results


def same(file: Path, feeds: Arrays, **options: Any) -> None:
    """The loaded model passes the checker, and answers as the file does."""
    loaded = load(file, **options).to_proto()
    onnx.checker.check_model(loaded)
    for expected, got in zip(run(file, feeds), run(loaded, feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
