"""Finds where QuantizeLinear/DequantizeLinear pairs belong in an ONNX model, by measuring on a real engine."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("qdqtune")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0"
