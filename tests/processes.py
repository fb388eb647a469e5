"""What tests that end processes share: waiting, and who is at work."""

import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from qdqtune.cli import fleet

on_all_cores = pytest.mark.xdist_group("cores")
"""For tests whose workers want a core each: they run one after another, so that none waits for cores of another."""


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


def poison(folder: Path) -> None:
    """Put a module by the name of each that there is into a folder. A process that executes one leaves its name in the
    file `executed` beside the folder, which is empty before."""
    (folder.parent / "executed").touch()
    installed = {*packages_distributions(), *sys.stdlib_module_names} - set(sys.builtin_module_names)
    for name in {"qdqtune", *installed}:
        if name.isidentifier():
            left = f"open(__file__.rpartition('/')[0] + '/../executed', 'a').write({name + ' '!r})"
            (folder / f"{name}.py").write_text(f"{left}\nraise ImportError")


def ran(monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> list[dict[str, Any]]:
    """The options that children are asked to tune with, in place of processes."""
    asked: list[dict[str, Any]] = []

    def ask(request: dict[str, Any], *_: object) -> tuple[int, dict[str, Any]]:
        asked.append(request["options"])
        code = codes[len(asked) - 1]
        done = {"shipped": "tuned", "patterns": 3, "baseline_ms": 2.0, "final_ms": 1.0, "ratio": 0.5}
        done |= {"output_sqnr_db": 30.0}
        return code, done if code in (0, 3) else {}

    monkeypatch.setattr(fleet, "ask", ask)
    return asked
