"""The function that scripts for ModelOpt import from a module of this name."""

from qdqtune.autotune.region_search import get_tensor_consumer_node_indices

__all__ = ["get_tensor_consumer_node_indices"]
