"""What tests that end processes share: waiting, and who is at work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def family(folder: Path) -> list[int]:
    """The processes of qdqtune that work on what lies in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            told = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in told and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found
