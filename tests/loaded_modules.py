"""Modules as a test wants them to be there or not, whatever is installed."""

import sys
from collections.abc import Mapping

import pytest

CUDA = "cuda.bindings.runtime"
"""The module of cuda-python without which there is no GPU to use."""


def present(patch: pytest.MonkeyPatch, modules: Mapping[str, object]) -> None:
    """Let imports of these names find these objects; of those whose object is None, fail."""
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)


def absent(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Let imports of these modules fail, as where they are not installed."""
    present(patch, dict.fromkeys(names))


def forgotten(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the next import of a module execute it again."""
    patch.delitem(sys.modules, name, raising=False)
