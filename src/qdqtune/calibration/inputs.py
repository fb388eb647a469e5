"""What a model wants to be fed: name, type and shape of each input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune.errors import BadModel
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.types import Sample


@dataclass(frozen=True)
class InputSpec:
    """What the model wants for one input; an unknown dimension is None."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {'string' if self.is_string else self.dtype}[{sizes}]"

    @property
    def is_string(self) -> bool:
        """Whether it takes strings, which numpy holds as objects."""
        return self.dtype.kind == "O"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be fed."""
        return len(shape) == len(self.shape) and all(w in (None, d) for w, d in zip(self.shape, shape, strict=True))


def input_specs(model: Model) -> tuple[InputSpec, ...]:
    """Name, dtype and shape of every input that must be fed.

    Raises:
        BadModel: an input is not a tensor, or has no shape or type.
    """
    specs = []
    for name in model.inputs:
        info = model.tensors.get(name)
        if info is None or info.shape is None:
            raise BadModel(f"input '{name}' is not a tensor of known rank; such inputs are not supported")
        if info.dtype == onnx.TensorProto.UNDEFINED:
            raise BadModel(f"input '{name}' has no element type")
        specs.append(InputSpec(name, onnx.helper.tensor_dtype_to_np_dtype(info.dtype), info.shape))
    return tuple(specs)


def fixed_inputs(file: Path, fixed: Mapping[str, float | int | str]) -> Sample:
    """The inputs that --fix-input has made constant, for files that still ask for them, as this one does.

    Raises:
        BadModel: it cannot be read; it is not where nothing is fixed.
    """
    specs = {spec.name: spec for spec in input_specs(load(file))} if fixed else {}
    shapes = {name: tuple(d or 1 for d in specs[name].shape) for name in fixed}
    return {name: np.full(shapes[name], value).astype(specs[name].dtype) for name, value in fixed.items()}


def listed(specs: tuple[InputSpec, ...]) -> str:
    """The inputs, for people."""
    return ", ".join(str(s) for s in specs)
