"""The inputs of a model: name, type and shape of each, and random samples; sizes left open are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune.errors import BadModel, BadOption, first_of
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COPIES
from qdqtune.types import Array, Sample


@dataclass(frozen=True)
class InputSpec:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]"

    def fits(self, shape: Sequence[int | None]) -> bool:
        """Whether an array of this shape is a valid input; an unknown dimension fits every size."""
        pairs = zip(self.shape, shape, strict=False)
        return len(shape) == len(self.shape) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def input_specs(model: Model) -> tuple[InputSpec, ...]:
    specs = []
    for name in model.inputs:
        info = model.tensors.get(name)
        if info is None or info.shape is None or info.dtype == onnx.TensorProto.UNDEFINED:
            raise BadModel(f"input '{name}' is not a tensor of known type and rank; such inputs are not supported")
        if info.dtype == onnx.TensorProto.STRING:
            raise BadModel(f"input '{name}' holds strings: export what is behind the operators that encode them")
        specs.append(InputSpec(name, onnx.helper.tensor_dtype_to_np_dtype(info.dtype), info.shape))
    return tuple(specs)


def fixed_inputs(file: Path, fixed: Mapping[str, float | int | str]) -> Sample:
    """Values for those inputs of `file` that option `fix_inputs` makes constant in another file."""
    specs = {spec.name: spec for spec in input_specs(load(file))} if fixed else {}
    own = [(specs[name], value) for name, value in fixed.items() if name in specs]
    return {s.name: np.full([d or 1 for d in s.shape], value).astype(s.dtype) for s, value in own}


def listed(specs: tuple[InputSpec, ...]) -> str:
    return ", ".join(str(s) for s in specs)


PICTURE, SEQUENCE = 224, 64
"""Sizes in the hint for `input_shapes`: the side of a picture, and the length of a sequence."""


def random_samples(model: Model, specs: tuple[InputSpec, ...], seed: int, count: int) -> Callable[[], Iterator[Sample]]:
    """A function that makes `count` samples: normal floats, booleans, and integers that are valid indices of every
    table that the model looks up with them. A dynamic first dimension is 1; other dynamic dimensions raise
    BadOption."""
    if hints := size_hints(model, specs):
        raise BadOption(
            f"input {next(s for s in specs if None in s.shape[1:])} has dynamic dimensions: give `calibration_data`, "
            f"which have sizes, or for all inputs those you run with, like {first_of(hints, ' ')}"
        )
    tops = {s.name: _index_end(model, s.name) for s in specs}

    def draw(rng: np.random.Generator, spec: InputSpec) -> Array:
        shape = tuple(1 if d is None else d for d in spec.shape)
        if spec.dtype.kind in "iu":
            return np.asarray(rng.integers(0, tops[spec.name], shape), spec.dtype)
        if spec.dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, shape), np.bool_)
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(spec.dtype)

    def produce() -> Iterator[Sample]:
        for i in range(count):
            rng = np.random.default_rng((seed, i))
            try:
                yield {s.name: draw(rng, s) for s in specs}
            except (MemoryError, ValueError) as error:  # numpy: no memory, or a size beyond its limits
                raise BadModel(f"inputs are too large to make up: {listed(specs)}; give smaller sizes") from error

    return produce


def size_hints(model: Model, specs: Iterable[InputSpec]) -> list[str]:
    """For each input with dynamic sizes besides the first, an option that sets likely ones: 1 for the batch, and the
    usual side of a picture (if height and width are dynamic) or length of a sequence."""
    hints = []
    symbols = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in model.proto.graph.input}
    batches = {names[0] for names in symbols.values() if names and names[0]}
    for spec in specs:
        usual = PICTURE if len(spec.shape) == 4 and spec.shape[1:].count(None) > 1 else SEQUENCE
        sizes = []
        for at, (size, name) in enumerate(zip(spec.shape, symbols[spec.name], strict=True)):
            likely = 1 if at == 0 or name in batches else usual
            sizes.append(str(likely if size is None else size))
        if None in spec.shape[1:]:
            hints.append(f"`input_shapes` {spec.name}:{'x'.join(sizes)}")
    return hints


def _index_end(model: Model, name: str) -> int:
    """The end of the range of valid integers for an input: the length of the shortest table that it indexes, else 2."""
    tables, copies = [], {name}
    for node in model.nodes:
        if node.op == "Gather" and node.inputs[1] in copies and node.inputs[0] in model.constants:
            shape = model.constants[node.inputs[0]].shape
            tables.append(shape[node.attributes.get("axis", 0)])
        elif node.op in COPIES | {"Slice"} and node.inputs[0] in copies:
            copies.update(node.outputs)
    return max(min(tables, default=2), 1)
