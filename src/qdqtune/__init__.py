"""Finds where QuantizeLinear/DequantizeLinear pairs belong in an ONNX model, by measuring on a real engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qdqtune.version import __version__ as __version__

if TYPE_CHECKING:
    from qdqtune.api import apply as apply
    from qdqtune.api import build as build
    from qdqtune.api import check as check
    from qdqtune.api import compare as compare
    from qdqtune.api import explain as explain
    from qdqtune.api import inspect as inspect
    from qdqtune.api import layers as layers
    from qdqtune.api import quantize as quantize
    from qdqtune.api import tune as tune
    from qdqtune.api import verify as verify
    from qdqtune.commands.tune import Result as Result
    from qdqtune.engines import EngineSpec as EngineSpec
    from qdqtune.errors import Cancelled as Cancelled
    from qdqtune.errors import QdqtuneError as QdqtuneError
    from qdqtune.explanation.units import Explanation as Explanation
    from qdqtune.tuning.observer import Observer as Observer
    from qdqtune.tuning.observer import State as State
    from qdqtune.tuning.settings import Settings as Settings
    from qdqtune.types import Edge as Edge
    from qdqtune.types import Placement as Placement
    from qdqtune.types import Trial as Trial

_HOMES = {
    "Cancelled": "errors",
    "Edge": "types",
    "EngineSpec": "engines",
    "Explanation": "explanation.units",
    "Observer": "tuning.observer",
    "Placement": "types",
    "QdqtuneError": "errors",
    "Result": "commands.tune",
    "Settings": "tuning.settings",
    "State": "tuning.observer",
    "Trial": "types",
    **dict.fromkeys(("apply", "build", "check", "compare", "explain", "inspect", "layers", "tune", "verify"), "api"),
    "quantize": "autotune.quantization:either",
}
"""Public names by module; each is imported when first used, since numpy and onnx are slow to import."""

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, other = _HOMES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), other or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
