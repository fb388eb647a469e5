"""The function that scripts for ModelOpt import from a module of this name."""

from qdqtune.autotune.graphs import get_symmetric_ops

__all__ = ["get_symmetric_ops"]
