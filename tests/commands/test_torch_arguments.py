"""How the examples of a module reach PyTorch's exporter, which a stand-in takes here."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from loaded_modules import present
from qdqtune.commands.torch_export import BATCH, export

PAIR = np.zeros((2, 3)), np.zeros((2, 4))


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
    module = Mock(training=False, forward=forward, parameters=list, buffers=list, modules=lambda: [module])
    exported = Mock()
    torch = SimpleNamespace(onnx=SimpleNamespace(export=exported, OnnxExporterError=ArithmeticError))
    present(monkeypatch, {"torch": torch, "onnxscript": Mock()})
    export(module, PAIR, tmp_path / "model.onnx")
    (asked, by_position, _), how = exported.call_args
    assert asked is module
    assert forward(*by_position, **how["kwargs"]) == 2
    assert how["dynamic_shapes"] == shapes
