"""No process of ours executes a module that happens to lie in the current folder; what the user names is executed."""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from processes import on_all_cores
from qdqtune.cli.main import app
from qdqtune.engines import devices
from runs import environment, hopeless, mixed, write

RANGES = "--calibration-method minmax --no-bias-correction"
QUICK = f"--engine fake --builds 2 {RANGES} --no-report"
COMMANDS = {
    "apply": f"apply a.onnx --placement placement.yaml --calibration-data a.npz -o q.onnx {RANGES}",
    "build": "build a.onnx --engine onnxruntime -o built.onnx",
    "check": "check q8.onnx --engine onnxruntime",
    "compare": "compare a.onnx q8.onnx --engine fake",
    "debug": "debug a.onnx q8.onnx --calibration-data a.npz --engine fake",
    "doctor": "doctor",
    "check, layers": "check a.onnx --layers --engine onnxruntime",
    "quantize": f"quantize a.onnx --calibration-data user:samples --evaluate user:score -o q {RANGES}",
    "run": "run one.yaml",
    "run, side by side": "run jobs.yaml --workers 2",
    "tune, side by side": f"tune a.onnx -o out {QUICK} --workers 2",
    "tune, on a cluster": f"tune a.onnx -o out {QUICK} --ray local --workers 1",
    "tune": f"tune a.onnx -o out {QUICK} --calibration-data user:samples --evaluate user:score",
    "verify": "verify ran --calibration-data user:samples",
}
"""Every command that starts processes; those that take functions of the user, with functions."""
IN_ONE_PROCESS = ("apply", "build", "check", "check, layers", "compare", "debug", "run", "doctor")
"""Commands that put nothing on the search path: one process runs them in turn, each with the processes that it starts.
"""
IN_TURN = """
import sys
from qdqtune.cli import main
for command in sys.argv[1:]:
    try:
        main.main(command.split())
    except SystemExit as end:
        assert end.code in (0, 3, 4), command
"""
START_NONE = {"explain", "inspect", "report"}
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


def ours(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Commands as they are installed: they have no current folder on the search path, as `python -m` has without -P."""
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands want, and a module by the name of each that there is: who executes one leaves
    its name in `executed`, beside the folder in which that lies."""
    here = tmp_path_factory.mktemp("base")
    write(mixed(), here, "a")
    write(hopeless(), here, "b")
    made = f"quantize a.onnx --calibration-data a.npz -o q8.onnx {RANGES}"
    ran = f"tune a.onnx -o ran {QUICK.replace('--builds 2', '--builds 4')} --calibration-data a.npz"
    ours(here, "-c", IN_TURN, made, ran).check_returncode()
    (here / "placement.yaml").write_text("{version: 1, engine: fake, quant_type: int8, edges: []}")
    quick = {"engine": "fake", "builds": 2, "report": False}
    quick |= {"calibration-method": "minmax", "bias-correction": False}
    jobs = {"defaults": quick, "jobs": [{"model": model} for model in ("a.onnx", "b.onnx")]}
    (here / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    (here / "one.yaml").write_text(yaml.safe_dump(jobs | {"jobs": jobs["jobs"][:1]}))
    poison(here)
    return here


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """The same with modules that the commands are told of."""
    here = tmp_path / "here"
    shutil.copytree(base, here, copy_function=os.link)  # nothing of it is written to, and it has a thousand modules
    (here / "user.py").write_text(USER)
    (here / "beside.py").write_text("")
    (here / "later.py").write_text("VALUE = 0.5")
    return here


def poison(folder: Path) -> None:
    installed = {*packages_distributions(), *sys.stdlib_module_names} - set(sys.builtin_module_names)
    for name in {"qdqtune", *installed}:
        if name.isidentifier():
            left = f"open(__file__.rpartition('/')[0] + '/../executed', 'a').write({name + ' '!r})"
            (folder / f"{name}.py").write_text(f"{left}\nraise ImportError")


def test_every_command_is_known_here() -> None:
    assert {name.partition(",")[0] for name in COMMANDS} | START_NONE == set(app.commands)


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=on_all_cores if "--workers" in words else pytest.mark.xdist_group("current folder"))
    for n, words in {"in turn": "", **COMMANDS}.items() if n not in IN_ONE_PROCESS
])  # fmt: skip
def test_no_process_executes_what_lies_in_the_current_folder(name: str, folder: Path) -> None:
    command = COMMANDS.get(name, "")
    if "--ray" in command and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    if "--workers 2" in command and len(devices.physical_cores()) < 2:
        pytest.skip("two workers want two cores")
    each = [COMMANDS[other] for other in IN_ONE_PROCESS]
    done = ours(folder, *(("-m", "qdqtune", *command.split()) if command else ("-c", IN_TURN, *each)))
    executed = folder.parent / "executed"
    assert not executed.exists(), executed.read_text()
    assert done.returncode in (0, 3, 4), done.stderr
