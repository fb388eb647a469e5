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
    forward: Any

    def parameters(self) -> list[Any]:
        return []

    buffers = parameters

    def modules(self) -> list[Any]:
        return [self]

    def eval(self) -> None:
        """Nothing to do."""


def several(*tensors: Any) -> int:
    return len(tensors)


def mixed(first: Any, /, second: Any, *more: Any, **others: Any) -> int:
    return 2 + len(more) + len(others)


def named(first: Any, second: Any) -> int:
    return 2


BOTH = {"first": {0: BATCH}, "second": {0: BATCH}}


@pytest.mark.parametrize(
    ("forward", "shapes"), [(several, {"tensors": ({0: BATCH}, {0: BATCH})}), (mixed, BOTH), (named, BOTH)]
)
def test_forward_can_take_what_it_is_given(forward, shapes, tmp_path, monkeypatch):
    calls: list[tuple[int, Any]] = []
    module = Layer()
    module.forward = forward

    def exported(module: Any, by_position: Any, path: Path, *, kwargs: Any, dynamic_shapes: Any, **_: Any) -> None:
        calls.append((module.forward(*by_position, **kwargs), dynamic_shapes))

    torch = ModuleType("torch")
    torch.onnx = SimpleNamespace(export=exported, OnnxExporterError=ArithmeticError)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "onnxscript", ModuleType("onnxscript"))
    export(module, PAIR, tmp_path / "model.onnx")
    assert calls == [(2, shapes)]
