"""Killed at any step and started again, a run ends with the same files as one that nobody disturbed.

In every run of the tests: what a driver has on disk at some of its steps, on the fake engine. `pytest tests/fuzz
--kills 200` kills workers and drivers of ONNX Runtime and OpenVINO, their latencies replaced by steady ones.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest

from qdqtune.tuning.loop import tune
from qdqtune.tuning.store import Store
from runs import environment, mixed, settings, write

STATE = "autotuner_state.yaml"
SHIPPED = (STATE, "baseline.onnx", "optimized_final.onnx", "placement.yaml")
MODES = {
    "cut": {"builds": 6},
    "region": {"builds": 8, "mode": "region"},
    "subgraph": {"builds": 4, "mode": "subgraph"},
    "front": {"builds": 14, "front": True},
}
ENGINES = ("onnxruntime", "openvino")
EACH = 14
"""Every so many steps of a driver are looked at in every run of the tests."""

DRIVER = """
import sys
from pathlib import Path
from qdqtune.engines import EngineSpec
from qdqtune.engines.process import WorkerProcess
from qdqtune.tuning.loop import tune
from qdqtune.tuning.store import Store
from runs import settings
from steady_worker import step

who, engine, mode, model, out = sys.argv[1:]
WorkerProcess.PROGRAM = "steady_worker"
if who == "driver":
    import steady_worker
    append, replace = Store._append, Path.replace
    def appended(self, record):
        step("before a record")
        append(self, record)
        step("behind a record")
    def replaced(self, target):
        step("before a name")
        return replace(self, target)
    Store._append, Path.replace = appended, replaced
from test_kills import MODES
tune(settings(Path(model), engine=EngineSpec(engine, {"threads": 1}), output_dir=Path(out),
              **{"mode": "cut"} | MODES[mode]))
"""


def shipped(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in SHIPPED}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", MODES)
def test_what_a_driver_leaves_at_any_step_is_gone_on_with(model, mode, monkeypatch):
    """A driver that is killed leaves what is on disk: so what is there at its steps is what a kill leaves."""
    out, steps = model.parent / "out", [0]
    append, replace = Store._append, Path.replace

    def step() -> None:
        steps[0] += 1
        if steps[0] % EACH == 0:
            shutil.copytree(out, model.parent / f"killed_{steps[0]}")

    def appended(self: Store, record: dict[str, object]) -> None:
        append(self, record)
        step()

    def replaced(self: Path, target: Path) -> Path:
        step()
        return replace(self, target)

    asked = {"mode": "cut"} | MODES[mode]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_append", appended)
        patch.setattr(Path, "replace", replaced)
        expected = tune(settings(model, **asked))
    left = sorted(model.parent.glob("killed_*"))
    assert len(left) >= 2
    for folder in left:
        found = tune(settings(model, output_dir=folder, **asked))
        assert found.history == expected.history, folder.name
        assert shipped(folder) == shipped(out), folder.name
        assert not list(folder.glob(".qdqtune-*")), folder.name


def drive(who: str, engine: str, mode: str, model: Path, out: Path, at: int) -> tuple[int, int]:
    """Run a driver with steady workers of a real engine, killed at that step (0 for none): its exit code, and how many
    steps there were."""
    steps = out.with_suffix(f".{at}.steps")
    tests = str(Path(__file__).parent)
    told = environment() | {"STEPS": str(steps), "KILLED_AT": str(at)}
    told["PYTHONPATH"] = os.pathsep.join([tests, told["PYTHONPATH"]])
    command = [sys.executable, "-c", DRIVER, who, engine, mode, str(model), str(out)]
    done = subprocess.run(command, env=told, check=False, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, len(steps.read_text().splitlines()) if steps.exists() else 0


Kill = tuple[str, str, str, float]
"""Who is killed, on which engine, in which mode, and where in its steps (0 to 1)."""


def kills(count: int) -> Iterator[Kill]:
    """That many, spread evenly over all that can be chosen."""
    engines = [e for e in ENGINES if e == "onnxruntime" or importlib.util.find_spec("openvino")]
    table = [(who, engine, mode) for mode in MODES for engine in engines for who in ("worker", "driver")]
    rounds = -(-count // len(table))
    for number, (who, engine, mode) in enumerate(islice(cycle(table), count)):
        yield who, engine, mode, (number // len(table) + 0.5) / rounds


def test_real_engines_and_drivers_are_killed(request, tmp_path, capfd):
    count = request.config.getoption("--kills")
    if not count:
        pytest.skip("a long run: --kills N")
    model = write(mixed(), tmp_path)
    whole: dict[tuple[str, str, str], int] = {}
    differing: list[str] = []
    died = 0
    for number, (who, engine, mode, where) in enumerate(kills(count)):
        expected = tmp_path / f"{who}_{engine}_{mode}"
        if (who, engine, mode) not in whole:
            code, whole[who, engine, mode] = drive(who, engine, mode, model, expected, 0)
            assert code == 0
        at = 1 + int(where * whole[who, engine, mode])
        out = tmp_path / f"killed_{number}"
        code, _ = drive(who, engine, mode, model, out, at)
        if who == "driver":
            died += code == -signal.SIGKILL
            code, _ = drive(who, engine, mode, model, out, 0)
        else:
            died += 1
        is_same = code == 0 and shipped(out) == shipped(expected) and not list(out.rglob(".qdqtune-*"))
        if not is_same:
            differing.append(f"{who} {engine} {mode} at {at} of {whole[who, engine, mode]}")
        with capfd.disabled():
            print(
                f"\n{number + 1} {who} {engine} {mode} at {at}: {'same' if is_same else 'DIFFERENT'}",
                end="",
                flush=True,
            )
        if is_same:
            shutil.rmtree(out)
    with capfd.disabled():
        print(f"\n{died} of {count} killed, {len(differing)} different: {differing}")
    assert not differing
