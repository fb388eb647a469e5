"""The function that scripts for ModelOpt import from a module of this name."""

from qdqtune.autotune.graphs import get_tensor_consumer_node_indices

__all__ = ["get_tensor_consumer_node_indices"]
