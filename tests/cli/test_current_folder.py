"""No process of ours executes a module that happens to lie in the current folder; what the user names is executed."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from processes import on_all_cores, poison
from qdqtune.engines import devices
from runs import environment, hopeless, mixed, write

RANGES = "--calibration-method minmax --no-bias-correction"
QUICK = f"--engine fake --builds 2 {RANGES} --no-report"
COMMANDS = {
    "functions of the user": f"tune a.onnx -o out {QUICK} --calibration-data user:samples --evaluate user:score",
    "models side by side": "run jobs.yaml --workers 2",
}
"""Engines, functions of the user and whole runs. Actors of Ray are looked at in `test_cluster.py`."""
USER = """
import numpy as np
import beside

def samples():
    import later
    yield {"x": np.full((8, 8, 64), later.VALUE, np.float32)}

def score(predict):
    import later
    return float(np.mean(predict({"x": np.full((8, 8, 64), later.VALUE, np.float32)})["y"]))
"""


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=on_all_cores if "--workers" in words else ()) for way, words in COMMANDS.items()
])  # fmt: skip
def test_no_process_executes_what_lies_in_the_current_folder(way: str, tmp_path: Path) -> None:
    command = COMMANDS[way]
    if "--workers 2" in command and len(devices.physical_cores()) < 2:
        pytest.skip("two workers want two cores")
    folder = tmp_path / "here"
    folder.mkdir()
    write(mixed(), folder, "a")
    write(hopeless(), folder, "b")
    quick = {"engine": "fake", "builds": 2, "report": False}
    quick |= {"calibration-method": "minmax", "bias-correction": False}
    jobs = {"defaults": quick, "jobs": [{"model": model} for model in ("a.onnx", "b.onnx")]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    poison(folder)
    for name, text in (("user", USER), ("beside", ""), ("later", "VALUE = 0.5")):
        (folder / f"{name}.py").write_text(text)
    # as it is installed: without the current folder on the search path, which `python -m` has unless -P is given
    words = [sys.executable, "-P", "-m", "qdqtune", *command.split()]
    done = subprocess.run(words, env=environment(), cwd=folder, capture_output=True, text=True, check=False)
    assert (tmp_path / "executed").read_text() == ""
    assert done.returncode in (0, 3), done.stderr
