"""`qdqtune run`: several models from a YAML file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from conftest import Call
from processes import ran

JOBS = {
    "defaults": {"engine": "fake", "builds": 7, "output-dir": "out"},
    "jobs": [
        {"model": "a.onnx", "restart": True, "front": False},
        {"model": "gone.onnx", "fix_input": ["sr=16000", "n=1"], "output-dir": "b"},
    ],
}


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([0, 3], 3), ([4, 3], 4), ([2, 0], 2), ([3, 5], 5)])
def test_every_job_runs_and_the_worst_decides(
    codes: list[int], worst: int, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump(JOBS))
    started = ran(monkeypatch, codes)
    code, out, _ = call("run", file, "--json")
    assert code == worst
    assert [row["model"] for row in json.loads(out)] == ["a.onnx", "gone.onnx"]
    assert [row["exit_code"] for row in json.loads(out)] == codes
    assert started[0][:3] == ["tune", "a.onnx", "--output-dir=out"]
    assert set(started[0][3:]) == {"--engine=fake", "--builds=7", "--restart", "--json"}
    assert [word for word in started[1] if word.startswith("--fix")] == ["--fix-input=sr=16000", "--fix-input=n=1"]
    assert "--output-dir=b" in started[1]


def test_a_table_ends_it(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump(JOBS))
    ran(monkeypatch, [0, 2])
    code, out, _ = call("run", file)
    assert code == 2
    first, second = out.strip().splitlines()[-2:]
    assert first.split() == ["a.onnx", "tuned", "2.000", "1.000", "2.00x", "30.0", "0"]
    assert second.split() == ["gone.onnx", "failed", "2"]
