"""What a finished run leaves: summary.json, placement.yaml, the pattern cache, models of regions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqtune.errors import OutputError


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for machines.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(dict(content), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
