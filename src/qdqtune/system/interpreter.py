"""Starts Python processes, and ends processes together with their children."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).parents[2])
"""The folder that holds this package."""

USER_CODE = "code of the user: "
"""Prefix of the names of threads that run the user's code, which may never end."""


def python(*arguments: str, **variables: str) -> dict[str, Any]:
    """`args` and `env` for `subprocess` to run this Python with these arguments and additional environment variables.

    The process finds the modules that this one finds, except those in the current folder: a numpy.py there must not be
    imported by chance. The current folder counts only if it holds this package.
    """
    folders = [os.path.abspath(folder) for folder in sys.path if _is_current(HOME) or not _is_current(folder)]
    path = {"PYTHONPATH": os.pathsep.join(folders)}
    return {"args": [sys.executable, "-P", *arguments], "env": os.environ | path | variables}


def _is_current(folder: str) -> bool:
    with suppress(OSError):  # there is no such folder
        return os.path.samefile(folder or os.curdir, os.curdir)
    return False


def end_group(leader: int) -> None:
    """Kill the process group of `leader` (started with `process_group=0`), if it exists; 0: our own group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
