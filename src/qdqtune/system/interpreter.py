"""How the Python processes of this package are started: all of them alike, by what `subprocess` is told here."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).parents[2])
"""The folder that this package lies in."""


def python(*arguments: str, **variables: str) -> dict[str, Any]:
    """`args` and `env` of a process that runs this Python with these arguments, and with variables of the environment
    besides those of this process.

    It finds the modules that this process finds, but for those in the current folder: nobody has named a numpy.py that
    happens to lie there. Only if this package itself lies there, the folder is searched.
    """
    folders = [os.path.abspath(folder) for folder in sys.path if _is_current(HOME) or not _is_current(folder)]
    path = {"PYTHONPATH": os.pathsep.join(folders)}
    return {"args": [sys.executable, "-P", *arguments], "env": os.environ | path | variables}


def _is_current(folder: str) -> bool:
    with suppress(OSError):  # there is none
        return os.path.samefile(folder or os.curdir, os.curdir)
    return False
