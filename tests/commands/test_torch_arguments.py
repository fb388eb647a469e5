"""How the examples of a module reach PyTorch's exporter, which a stand-in takes here."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qdqtune.commands.torch_export import BATCH, export

PAIR = np.zeros((2, 3)), np.zeros((2, 4))


class Layer:
    """What the exporter asks a module for."""

    training = False

    def parameters(self) -> list[Any]:
        return []

    buffers = parameters

    def modules(self) -> list[Any]:
        return [self]

    def eval(self) -> None:
        """Nothing to do."""


class Several(Layer):
    def forward(self, *tensors: Any) -> int:
        return len(tensors)


class Mixed(Layer):
    def forward(self, first: Any, /, second: Any, *more: Any, **others: Any) -> int:
        return 2 + len(more) + len(others)


class Named(Layer):
    def forward(self, first: Any, second: Any) -> int:
        return 2


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (Several(), {"tensors": ({0: BATCH}, {0: BATCH})}),
        (Mixed(), {"first": {0: BATCH}, "second": {0: BATCH}}),
        (Named(), {"first": {0: BATCH}, "second": {0: BATCH}}),
    ],
)
def test_forward_can_take_what_it_is_given(
    module: Any, shapes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, Any]] = []

    def exported(module: Any, by_position: Any, path: Path, *, kwargs: Any, dynamic_shapes: Any, **_: Any) -> None:
        calls.append((module.forward(*by_position, **kwargs), dynamic_shapes))

    torch = ModuleType("torch")
    torch.onnx = SimpleNamespace(export=exported, OnnxExporterError=ArithmeticError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "onnxscript", ModuleType("onnxscript"))
    export(module, PAIR, tmp_path / "model.onnx")
    assert calls == [(2, shapes)]
