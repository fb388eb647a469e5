"""Several models at a time, what is left when any of the processes is ended, and what none of them executes: a module
that happens to lie in the current folder, and that the user does not name."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_lines import UNCHECKED
from processes import family, on_all_cores, poison, until
from qdqtune.cli import fleet
from qdqtune.engines import devices
from qdqtune.engines.devices import Device
from remote_machines import parent_of
from runs import environment, hopeless, mixed, write

QUICK = ["--engine", "fake", "--calibration-method", "minmax", "--no-bias-correction", "--no-report"]
NEEDS_TWO = pytest.mark.skipif(len(devices.physical_cores()) < 2, reason="two workers want two cores")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    write(mixed(), folder, "fast")
    write(hopeless(), folder, "slow")
    return folder


def left(folder: Path) -> list[Path]:
    """Temporary files, also of processes that are removing some meanwhile."""
    found = [Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    ours = (".qdqtune-*", "worker-*", "*.onnx.data")
    return [path for path in found if any(map(path.match, ours)) and not path.match("worker-*.log")]


def begin(arguments: Sequence[object], out: Path) -> subprocess.Popen[bytes]:
    """A command at work: it has measured something. What it says is in `stderr.txt` beside its output."""
    told = environment() | {"TMPDIR": str(out.parent)}
    slow = ["--engine-option", "build_seconds=0.2"]

    with (out.parent / "stderr.txt").open("wb") as errors:
        run = subprocess.Popen(
            [sys.executable, "-m", "qdqtune", "tune", *map(str, arguments), "-o", str(out), *QUICK, *slow],
            env=told, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
    states = partial(out.rglob, "autotuner_state.yaml")
    until(lambda: any(b'"key": "trial:' in state.read_bytes() for state in states()) or run.poll())
    assert run.poll() is None, (out.parent / "stderr.txt").read_text()
    assert left(out)
    return run


@NEEDS_TWO
@on_all_cores
def test_nothing_is_left_of_a_fleet_that_is_killed(models: Path, tmp_path: Path) -> None:
    asked = [models / "fast.onnx", models / "slow.onnx", "--workers", 2, "--builds", 60, "--mode", "region"]
    run = begin(asked, tmp_path / "out")
    assert len(family(tmp_path)) >= 5  # the fleet, two drivers, and an engine of each
    run.kill()
    run.wait()
    until(lambda: not family(tmp_path))
    assert not left(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("qdqtune-")]


@NEEDS_TWO
@on_all_cores
@pytest.mark.parametrize("who", ["Ctrl-C", "worker"])
def test_nothing_is_left_of_workers_side_by_side(models: Path, tmp_path: Path, who: str) -> None:
    out = tmp_path / "out"
    run = begin([models / "fast.onnx", "--workers", 2, "--builds", 6, "--mode", "region", *UNCHECKED], out)
    told = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(tmp_path)}
    engines = [pid for pid, words in told.items() if b"qdqtune.engines.worker" in words]
    engines = [pid for pid in engines if parent_of(pid) not in engines]  # each leaves a process that ends it
    assert len(engines) >= 2
    if who == "worker":
        os.kill(engines[0], signal.SIGKILL)
    else:
        run.send_signal(signal.SIGINT)
    assert run.wait() == {"Ctrl-C": 130, "worker": 0}[who], (tmp_path / "stderr.txt").read_text()
    until(lambda: not family(tmp_path))
    assert not left(tmp_path)
    until(lambda: all(devices.is_free(Device(cores=(cores[0],))) for cores in devices.physical_cores()))


@pytest.mark.usefixtures("eight_cores")
def test_models_are_shared_out_and_told_in_their_order(call, models, tmp_path, monkeypatch):
    met: list[tuple[str, tuple[int, ...]]] = []
    both = threading.Barrier(2)

    def ask(request: dict[str, Any], device: Device, _: int) -> tuple[int, Any]:
        both.wait(timeout=60)
        met.append((Path(request["options"]["model"]).name, device.cores))
        return 0, {"shipped": "tuned", "ratio": 0.5}

    monkeypatch.setattr(fleet, "ask", ask)
    asked = ["tune", models, "-o", tmp_path / "out", *QUICK, "--workers", 4, "--cores-per-worker", 2]
    code, out, _ = call(*asked, "--json")
    assert code == 0
    assert [Path(row["model"]).name for row in json.loads(out)] == ["fast.onnx", "slow.onnx"]
    assert sorted(met) in ([("fast.onnx", a), ("slow.onnx", b)] for a, b in (((0, 1), (2, 3)), ((2, 3), (0, 1))))
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(f"jobs: [{{model: {models}/fast.onnx, threads: 3}}, {{model: {models}/slow.onnx}}]")
    met.clear()
    assert call("run", jobs, "--workers", 2)[0] == 0
    assert {len(cores) for _, cores in met} == {3}
    code, _, err = call("run", jobs, "--workers", 4)
    assert (code, "--workers 4 of 3 cores each want 12 cores" in err) == (2, True)


def test_half_a_result_of_a_child_that_was_ended_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **how: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["sh", "-c", "echo '{'; exit 2"], **how)

    monkeypatch.setattr(fleet, "start", start)
    assert fleet.ask({"options": {"model": "a.onnx", "quiet": False}}, devices.ANYWHERE, 0) == (2, {})


# The current folder

COMMANDS = {
    "functions of the user": ["tune", "a.onnx", "-o", "out", "--builds", "2", *QUICK,
                              "--calibration-data", "user:samples", "--evaluate", "user:score"],
    "models side by side": ["run", "jobs.yaml", "--workers", "2"],
}  # fmt: skip
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
    pytest.param(way, marks=[NEEDS_TWO, on_all_cores] if "run" in words else ()) for way, words in COMMANDS.items()
])  # fmt: skip
def test_no_process_executes_what_lies_in_the_current_folder(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    write(mixed(), folder, "a")
    write(hopeless(), folder, "b")
    quick = {"engine": "fake", "builds": 2, "report": False, "calibration-method": "minmax", "bias-correction": False}
    jobs = {"defaults": quick, "jobs": [{"model": model} for model in ("a.onnx", "b.onnx")]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    poison(folder)
    for name, text in (("user", USER), ("beside", ""), ("later", "VALUE = 0.5")):
        (folder / f"{name}.py").write_text(text)
    # as it is installed: without the current folder on the search path, which `python -m` has unless -P is given
    words = [sys.executable, "-P", "-m", "qdqtune", *COMMANDS[way]]
    done = subprocess.run(words, env=environment(), cwd=folder, capture_output=True, text=True, check=False)
    assert (tmp_path / "executed").read_text() == ""
    assert done.returncode in (0, 3), done.stderr
