"""Fixtures that several test files ask for by name."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from qdqtune.cli import main
from runs import without_processes

Call = Callable[..., tuple[int, str, str]]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: so would what the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line in this process: exit code, standard output, standard error."""
    without_processes(monkeypatch)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main.main([str(a) for a in arguments])
        assert isinstance(end.value.code, int)
        return end.value.code, *capfd.readouterr()

    return run
