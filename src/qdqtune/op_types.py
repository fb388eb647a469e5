"""The function that scripts for ModelOpt import from a module of this name."""

from qdqtune.autotune.region_search import get_symmetric_ops

__all__ = ["get_symmetric_ops"]
