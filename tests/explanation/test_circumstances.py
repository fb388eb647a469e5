"""The command that measures a result again: what was fed and built, and what is gone."""

import shlex
from pathlib import Path

import numpy as np

from conftest import Call
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.explanation.report import report_of_run
from qdqtune.tuning.loop import tune
from runs import mixed, settings, write
from workers import in_process


def test_what_was_fed_and_built_is_measured_again(tmp_path: Path, call: Call) -> None:
    model = write(mixed(batch=None), tmp_path)
    names = [tmp_path / "small one.npz", tmp_path / "large.npz"]
    for name, batch in zip(names, (1, 4), strict=True):
        np.savez(name, x=np.ones((batch, 64, 64), np.float32))
    files = tuple(WorkloadFile(name, weight) for name, weight in zip(names, (0.75, 0.25), strict=True))
    with in_process():
        tune(settings(model, mode="cut", builds=4, workloads=files, time_limit=50.0))
        again = shlex.split(report_of_run(tmp_path / "out").commands[-1].value)
        assert again[again.index("--calibration-data") + 1] == str(model.with_suffix(".npz"))
        assert [again[n + 1] for n, word in enumerate(again) if word == "--workload"] == [str(f) for f in files]
        code, out, err = call(*again[1:], "--timing-runs", "12")
    assert code == 0, err
    assert "small one, 75% of the calls" in out


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    model = write(mixed(), tmp_path)
    with in_process():
        tune(settings(model, mode="cut", builds=4))
    model.unlink()
    model.with_suffix(".npz").unlink()
    hint = report_of_run(tmp_path / "out").commands[-1].hint
    assert f"against baseline.onnx: {model} is gone" in hint
    assert "model.npz is gone: name a file with your samples instead" in hint
