"""How long a run took: all of its sessions."""

import json
from pathlib import Path

import pytest

from qdqtune.tuning.loop import tune
from runs import settings


@pytest.mark.usefixtures("workers")
def test_the_time_is_that_of_all_sessions(model: Path, tmp_path: Path) -> None:
    tune(settings(model, builds=4))
    (tmp_path / "out" / "logs" / "seconds.json").write_text('{"seconds": 1000.0}')
    assert tune(settings(model, builds=6)).summary["seconds"] > 1000
    assert json.loads((tmp_path / "out" / "run.json").read_text())["seconds"] < 1000
    assert tune(settings(model, builds=6, restart=True)).summary["seconds"] < 1000
    (tmp_path / "out" / "logs" / "seconds.json").write_text('{"seconds": "long"}')
    assert tune(settings(model, builds=8)).summary["seconds"] < 1000
