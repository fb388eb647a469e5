"""ModelOpt's module of this name: what its scripts import from there."""

from qdqtune.graph.operators import COMMUTATIVE


def get_symmetric_ops() -> set[str]:
    """Operators whose inputs can be swapped."""
    return set(COMMUTATIVE)
