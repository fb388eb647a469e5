"""Finds where QuantizeLinear/DequantizeLinear pairs belong in an ONNX model, by measuring on a real engine."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qdqtune.version import __version__

if TYPE_CHECKING:
    from qdqtune.commands.quantize import Quantized
    from qdqtune.engines import EngineSpec
    from qdqtune.tuning.loop import Result, tune
    from qdqtune.tuning.settings import Settings
    from qdqtune.types import Edge, Placement

__all__ = ["Edge", "EngineSpec", "Placement", "Result", "Settings", "__version__", "quantize", "tune"]

_HOMES = {
    "Edge": "types",
    "EngineSpec": "engines",
    "Placement": "types",
    "Result": "tuning.loop",
    "Settings": "tuning.settings",
    "tune": "tuning.loop",
}
"""Public names by module: each is imported when somebody asks for it, since numpy and onnx take their time."""

_FORMER = {
    "data": "calibration.samples",
    "loading": "graph.loading",
    "settings": "tuning.settings",
    "strategies.mincut": "search.costs.mincut",
    "timing": "measurement.timing",
    "tune": "tuning.loop",
}
"""Modules that version 0.1 documented, and where they live now."""


def quantize(model: Path | str, output: Path | str, **options: Any) -> Quantized:
    """Write a Q/DQ version of a float model, its pairs placed by rules; options are those of `quantize.Request`.

    Raises:
        QdqtuneError: see `commands.quantize.quantize`.
    """
    command = import_module("qdqtune.commands.quantize")
    done: Quantized = command.quantize(command.Request(Path(model), Path(output), **options))
    return done


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


class _Former(ModuleType):
    """A module under the name that it had: `from qdqtune.tune import tune` goes on to work."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home = f"qdqtune.{_FORMER[self.__name__.removeprefix('qdqtune.')]}"
        warnings.warn(f"{self.__name__} is {home} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), name)


for _name in _FORMER:
    sys.modules[f"{__name__}.{_name}"] = _Former(f"{__name__}.{_name}")
