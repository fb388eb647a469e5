"""What commands print with `--json`, as they print it for a small model on the engine `fake`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

import qdqtune

NET = """<ir_version: 9, opset_import: ["" : 19]>
net (float[1, 3, 8, 8] image) => (float[1, 4] scores) {
  wide = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, first)
  kept = Relu (wide)
  deep = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (kept, second)
  pooled = GlobalAveragePool (deep)
  flat = Flatten (pooled)
  scores = MatMul (flat, third)
}"""
SHAPES = {"first": (16, 3, 3, 3), "second": (16, 16, 3, 3), "third": (16, 4)}


def results() -> dict[str, Mapping[str, Any]]:
    """The result of each command that has a function in Python, as JSON values."""
    with TemporaryDirectory() as name:
        folder, model, random = Path(name), onnx.parser.parse_model(NET), np.random.default_rng(0)
        for weight, shape in SHAPES.items():
            array = random.standard_normal(shape, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
        data = {"calibration_data": {"image": random.standard_normal((4, 3, 8, 8), np.float32)}}
        numbers = {**data, "calibration_method": "minmax"}
        run = qdqtune.tune(
            model, engine="fake", output_dir=folder / "run", builds=4, report=False,
            **numbers,
        )  # fmt: skip
        given: dict[str, Any] = {
            "quantize": qdqtune.quantize(model, output=folder / "rules.onnx", **data),
            "compare": qdqtune.compare(model, run.file, engine="fake", timing_runs=12, **data),
            "verify": qdqtune.verify(run.folder, timing_runs=12, **data),
            "apply": qdqtune.apply(
                model, placement=run.folder / "placement.yaml", output=folder / "again.onnx", **numbers
            ),
            "check": qdqtune.check(folder / "rules.onnx", engine="fake", **data),
            "check --layers": qdqtune.layers(run.file, engine="fake", **data),
            "inspect": qdqtune.inspect(model),
            "explain": qdqtune.explain(run),
        }
        return {command: result.to_dict() for command, result in given.items()}


def fields(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a JSON value with their types: those of the first element of an array stand for all."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            yield from fields(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        yield from fields(value[0], f"{path}[]")
    else:
        yield path, type_of(value)


def type_of(value: object) -> str:
    """The type of a JSON value in words."""
    if isinstance(value, list | tuple):
        return f"array of {type_of(value[0])}" if value else "array"
    named = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null, or a value"}
    return named.get(type(value), "object")
