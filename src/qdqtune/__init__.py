"""Finds where QuantizeLinear/DequantizeLinear pairs belong in an ONNX model, by measuring on a real engine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdqtune.commands.quantize import Quantized

try:
    __version__ = version("qdqtune")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0"


def quantize(model: Path | str, output: Path | str, **options: Any) -> Quantized:
    """Write a Q/DQ version of a float model, its pairs placed by rules; options are those of `quantizing.Request`.

    Raises:
        QdqtuneError: see `quantizing.quantize`.
    """
    from qdqtune.commands import quantize as quantizing  # slow to import

    return quantizing.quantize(quantizing.Request(Path(model), Path(output), **options))
