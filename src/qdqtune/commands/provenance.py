"""Whether the pairs of a file are what a tuning run has found: the records of the run lie beside the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from qdqtune.errors import InputError
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.reading import read_placement
from qdqtune.tuning.proof import BASELINE


def is_measured(file: Path, model: Model, engine: Mapping[str, str]) -> bool:
    """Whether `model`, read from `file`, carries the pairs that a run has proven faster than none on this very engine.

    `engine` is its description. An engine of another version, device or setting may fuse otherwise, and another
    placement than the recorded one was not measured.
    """
    folder = file.parent
    try:
        summary = json.loads((folder / "summary.json").read_text())
        if summary["shipped"] != "tuned" or summary["engine"] != dict(engine):
            return False
        recorded = read_placement_file(folder / "placement.yaml").placement
        return recorded == read_placement(load(folder / BASELINE), model).placement
    except (OSError, ValueError, KeyError, TypeError, InputError):  # no output folder of ours
        return False
