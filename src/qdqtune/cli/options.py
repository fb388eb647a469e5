"""What commands tell of options that another command takes."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence


def to_exclude(nodes: Sequence[str]) -> str:
    """Options of quantize that keep these nodes in float, as a shell takes them."""
    return " ".join(f"--nodes-to-exclude {shlex.quote(glob.escape(node))}" for node in nodes)
