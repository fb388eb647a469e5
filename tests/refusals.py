"""What an engine refuses, for tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qdqtune.errors import EngineRefused, Failure


def refusal(ask: Callable[[], object]) -> Failure:
    """The failure that a call raises."""
    with pytest.raises(EngineRefused) as raised:
        ask()
    return raised.value.failure


def or_raise(result: object) -> None:
    """Raise a failure, as a runner does."""
    if isinstance(result, Failure):
        raise EngineRefused(result)
