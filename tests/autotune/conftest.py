"""What the tests of the guest interface ask for by name."""

import pytest

from qdqtune.autotune import autotuner as benchmark


@pytest.fixture
def no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark that all functions share is to be made yet, and is forgotten after the test."""
    monkeypatch.setattr(benchmark, "_instance", None)
