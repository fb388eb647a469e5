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
QUICK = f"--engine fake --builds 2 {RANGES} --no-report --price-cache none"
COMMANDS = {
    "apply": f"apply a.onnx --placement placement.yaml --calibration-data a.npz -o q.onnx {RANGES}",
    "build": "build a.onnx --engine onnxruntime -o built.onnx",
    "check": "check q8.onnx --engine onnxruntime",
    "compare": "compare a.onnx q8.onnx --engine fake",
    "debug": "debug a.onnx q8.onnx --calibration-data a.npz --engine fake",
    "doctor": "doctor",
    "layers": "layers a.onnx --engine onnxruntime",
    "quantize": f"quantize a.onnx --calibration-data user:samples --evaluate user:score -o q {RANGES}",
    "run": "run one.yaml",
    "run, side by side": "run jobs.yaml --workers 2",
    "tune, of several": f"tune a.onnx b.onnx -o out {QUICK}",
    "tune, side by side": f"tune a.onnx -o out {QUICK} --workers 2",
    "tune, on a cluster": f"tune a.onnx -o out {QUICK} --ray local --workers 1",
    "tune": f"tune a.onnx -o out {QUICK} --calibration-data user:samples --evaluate user:score",
    "verify": "verify ran --calibration-data user:samples",
}
"""Every command that starts processes; those that take functions of the user, with functions."""
START_NONE = {"completion", "explain", "inspect", "report", "rules", "skill"}
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


def ours(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command as it is installed: that has no current folder on its search path, as `python -m` has without -P."""
    words = [sys.executable, "-P", "-m", "qdqtune", *command.split()]
    return subprocess.run(words, env=environment(), cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands want, and a module by the name of each that there is: who executes one leaves
    its name in `executed`, beside the folder in which that lies."""
    here = tmp_path_factory.mktemp("base")
    write(mixed(), here, "a")
    write(hopeless(), here, "b")
    ours(f"quantize a.onnx --calibration-data a.npz -o q8.onnx {RANGES}", here).check_returncode()
    ran = f"tune a.onnx -o ran --engine fake --builds 4 --no-report --price-cache none {RANGES}"
    ours(f"{ran} --calibration-data a.npz", here).check_returncode()
    (here / "placement.yaml").write_text("{version: 1, engine: fake, quant_type: int8, edges: []}")
    quick = {"engine": "fake", "builds": 2, "report": False, "price-cache": "none"}
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=on_all_cores if "--workers" in words else ()) for n, words in COMMANDS.items()]
)
def test_no_process_executes_what_lies_in_the_current_folder(name: str, folder: Path) -> None:
    if "--ray" in COMMANDS[name] and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    if "--workers 2" in COMMANDS[name] and len(devices.physical_cores()) < 2:
        pytest.skip("two workers want two cores")
    done = ours(COMMANDS[name], folder)
    executed = folder.parent / "executed"
    assert not executed.exists(), executed.read_text()
    assert done.returncode in (0, 3, 4), done.stderr
