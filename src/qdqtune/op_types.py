"""What scripts for ModelOpt import from a module of this name."""

from qdqtune.graph.operators import COMMUTATIVE


def get_symmetric_ops() -> set[str]:
    """Operators whose inputs may change places."""
    return set(COMMUTATIVE)
