"""A disk that fills up: the old file stays, one line says so, and with room again a run ends as if nothing had been."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mutations import FAKE, PLAIN
from qdqtune.cli import main
from runs import contents, environment, mixed, write
from workers import in_process

SIZES = (48, 200)
"""Sizes of the disk in KB: where next to nothing fits, and where a search does, but not its result."""

SHIPPED = ("baseline.onnx", "optimized_final.onnx", "placement.yaml")
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
OLD = b"old"


def call(*arguments: object) -> tuple[int, list[str]]:
    """Run a command line in this process: its exit code, and its lines of error."""
    err = io.StringIO()
    with pytest.raises(SystemExit) as end, in_process(), redirect_stderr(err), redirect_stdout(io.StringIO()):
        main.main([str(a) for a in arguments])
    assert isinstance(end.value.code, int)
    assert "Traceback" not in err.getvalue()
    return end.value.code, [line for line in err.getvalue().splitlines() if line.startswith("error: ")]


def on_disks(model: Path, disk: Path) -> None:
    """In a name space of its own: what happens on disks of several sizes."""
    data = ["--calibration-data", model.with_suffix(".npz"), *PLAIN.split()]
    tuning = ["tune", model, *FAKE.split(), *data, "--builds", "5", "-o"]
    assert call(*tuning, model.parent / "whole")[0] == 0
    expected = [(model.parent / "whole" / name).read_bytes() for name in SHIPPED]
    failures = []
    for size in SIZES:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", disk], check=True)
        (disk / "q.onnx").write_bytes(OLD)
        code, told = call("quantize", model, *data, "-o", disk / "q.onnx")
        failures.append(code)
        assert (code, len(told)) in ((0, 0), (2, 1)), (size, told)
        assert code == 0 or contents(disk) == {"q.onnx": OLD}, size
        code, told = call(*tuning, disk / "out")
        failures.append(code)
        assert (code, len(told)) in ((0, 0), (2, 1)), (size, told)
        assert code == 0 or "No space left" in told[0], told
        assert code == 0 or not list(disk.rglob(".qdqtune-*")), size
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert call(*tuning, disk / "out") == (0, []), size
        assert [(disk / "out" / name).read_bytes() for name in SHIPPED] == expected, size
        subprocess.run(["umount", disk], check=True)
    print(json.dumps(failures))


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    tried = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    model, disk = write(mixed(), tmp_path), tmp_path / "disk"
    disk.mkdir()
    script = (
        "import sys; from pathlib import Path; from test_full_disk import on_disks; on_disks(*map(Path, sys.argv[1:]))"
    )
    told = environment()
    told["PYTHONPATH"] = f"{Path(__file__).parent}:{told['PYTHONPATH']}"
    command = [*UNSHARE, sys.executable, "-c", script, str(model), str(disk)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]).count(2) >= len(SIZES)
