"""Runs that are killed, interrupted or ended by their budget go on as if nothing had happened."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_lines import exit_code
from qdqtune.tuning.loop import tune
from runs import environment, mixed, rows, settings, timeless, write
from workers import in_process

STATE = "autotuner_state.yaml"
FILES = [STATE, "autotuner_state_pattern_cache.yaml", "baseline.onnx", "optimized_final.onnx", "placement.yaml"]


def command(model: Path, out: Path, *more: str) -> list[str]:
    data = ["--calibration-data", str(model.with_suffix(".npz"))]
    fake = ["--engine", "fake", "--engine-option", "asymmetric=true"]
    search = ["--mode", "region", "--builds", "24", "--calibration-method", "minmax", "--no-bias-correction"]
    return ["tune", str(model), "-o", str(out), "--no-report", *search, *data, *fake, *more]


def killed(model: Path, out: Path, records: int) -> bytes:
    """Kill a run, with an order of sets of its own, when the state file has that many records: what it held by then."""
    slow = ("--engine-option", "build_seconds=0.05")  # so that the run cannot end before the signal comes
    state = out / STATE
    with subprocess.Popen(
        [sys.executable, "-m", "qdqtune", *command(model, out, *slow)],
        env=environment() | {"PYTHONHASHSEED": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as run:  # fmt: skip
        while not state.exists() or state.read_bytes().count(b"\n") < records:
            assert run.poll() is None, "it ended too early"
            time.sleep(0.01)
        before = state.read_bytes()
        run.kill()
    return before[: before.rfind(b"\n") + 1]


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in FILES}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


def untimed(folder: Path) -> dict[str, bytes]:
    files = contents(folder)
    return files | {STATE: timeless(files[STATE])}


@pytest.fixture(scope="session")
def unbroken(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """The model, and the files of a run that nobody disturbed."""
    model = write(mixed(), folder)
    with in_process():
        assert exit_code(*command(model, folder / "unbroken")) == 0
    return model, contents(folder / "unbroken")


def test_a_run_that_is_killed_ends_with_the_same_files(unbroken, tmp_path, call):
    model, expected = unbroken
    held = killed(model, tmp_path, 8)
    assert (tmp_path / STATE).read_bytes().startswith(held)
    assert timeless(expected[STATE]).startswith(timeless(held))
    assert not (tmp_path / "optimized_final.onnx").exists()
    assert call(*command(model, tmp_path))[0] == 0
    assert untimed(tmp_path) == expected | {STATE: timeless(expected[STATE])}


@pytest.mark.usefixtures("workers")
def test_a_larger_budget_goes_on_where_the_smaller_one_ended(model: Path) -> None:
    whole = tune(settings(model, builds=32, cut_seed=True, output_dir=model.parent / "whole"))
    for builds in (4, 13, 18, 32):
        part = tune(settings(model, builds=builds, cut_seed=True))
        assert part.history[:-4] == whole.history[: len(part.history[:-4])]
    assert part.history == whole.history
    states = (rows(model.parent / name / STATE) for name in ("out", "whole"))
    trials, expected = ([row["key"] for row in state if row["kind"] == "trial"] for state in states)
    assert trials == expected
