"""Engines that remember: what a file gives on them is computed once for all runs, as it depends on nothing else."""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qdqtune.engines import Built, Engine, EngineSpec, open_engine
from qdqtune.errors import EngineFailure, QdqtuneError
from qdqtune.types import Array, Layer, NumericFormat, QuantType, Tensors

Key = tuple[Any, ...]
MEMORY: dict[Key, Any] = {}
"""What was computed before. It only saves time: one test computes without it."""

LOG = Path(os.devnull)

Aside = Callable[[], AbstractContextManager[None]]
"""Where engines compute for the memory: nothing that they write there is a write of the run."""


def remembered(key: Key, compute: Callable[[], Any], aside: Aside = nullcontext) -> Any:
    """What `compute` gives; an error of an engine is remembered as well."""
    if key not in MEMORY:
        try:
            with aside():
                MEMORY[key] = compute()
        except QdqtuneError as error:
            MEMORY[key] = error
    found = MEMORY[key]
    if isinstance(found, QdqtuneError):
        raise type(found)(str(found))
    return found


def content_of(file: Path) -> bytes:
    """A digest of a model with the constants that it refers to.

    Raises:
        EngineFailure: it cannot be read.
    """
    try:
        data = file.read_bytes()
        alone, spans = remembered(("parts", data), lambda: _parts(data))
        digest = hashlib.sha256(alone)
        for place, offset, length in spans:
            with (file.parent / place).open("rb") as other:
                other.seek(offset)
                digest.update(other.read(length))
    except OSError as error:
        raise EngineFailure(f"cannot read {file}: {error}") from error
    return digest.digest()


def _parts(data: bytes) -> tuple[bytes, list[tuple[str, int, int]]]:
    """A model without the places of its constants in other files, and these places."""
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's errors have no common class
        raise EngineFailure(f"no model: {error}") from error
    spans = []
    for tensor in model.graph.initializer:
        if told := {e.key: e.value for e in tensor.external_data}:
            spans.append((told["location"], int(told["offset"]), int(told["length"])))
            tensor.ClearField("external_data")
    return model.SerializeToString(), spans


def _digest(inputs: Tensors) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        digest.update(f"{name}{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.digest()


class Remembering:
    """An engine whose answers are remembered by the content of the file."""

    def __init__(self, spec: EngineSpec, noise: Callable[[bytes], float], aside: Aside) -> None:
        self._key, self._spec = (spec.name, repr(sorted(spec.options.items()))), spec
        self._noise, self._aside = noise, aside

    def _known(self, what: Key, compute: Callable[[], Any]) -> Any:
        return remembered((*self._key, *what), compute, self._aside)

    @property
    def _engine(self) -> Engine:
        return self._known(("engine",), lambda: open_engine(self._spec))

    def describe(self) -> dict[str, str]:
        return dict(self._known(("describe",), lambda: self._engine.describe()))

    def numeric_format(self, quant_type: QuantType) -> NumericFormat:
        return self._known(("numbers", quant_type), lambda: self._engine.numeric_format(quant_type))

    def build(self, model: Path, log: Path) -> Built:
        content = content_of(model)
        log.write_bytes(b"built\n")
        key = (*self._key, content)
        return RememberingModel(key, lambda: self._engine.build(model, LOG), self._noise, self._aside)


@dataclass
class RememberingModel:
    """See `Remembering`."""

    key: Key
    make: Callable[[], Built]
    noise: Callable[[bytes], float]
    aside: Aside
    made: Built | None = None

    def __post_init__(self) -> None:
        self._known(("build",), lambda: bool(self.real))  # raises if the engine refuses the file

    def _known(self, what: Key, compute: Callable[[], Any]) -> Any:
        return remembered((*self.key, *what), compute, self.aside)

    @property
    def real(self) -> Built:
        if self.made is None:
            self.made = self.make()
        return self.made

    def run(self, inputs: Tensors) -> dict[str, Array]:
        return dict(self._known(("run", _digest(inputs)), lambda: _fixed(self.real.run(inputs))))

    def time(self, inputs: Tensors, runs: int) -> float:
        seconds: float = self._known(("time", _sizes(inputs)), lambda: self.real.time(inputs, 1))
        return seconds * self.noise(self.key[-1])

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        return self._known(("layers", _sizes(inputs)), lambda: self.real.layers(inputs, 1))

    def save(self, path: Path) -> None:
        self.real.save(path)

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
        self.made = None


def _sizes(inputs: Tensors) -> Key:
    return tuple((name, np.shape(array)) for name, array in inputs.items())


def _fixed(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs that nobody can change: they serve all later runs."""
    for value in outputs.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return dict(outputs)
