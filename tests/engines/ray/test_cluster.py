"""Workers on a real Ray cluster of several nodes, all of them on this machine, and what becomes of a run when actors,
nodes and drivers die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loaded_modules import absent
from observers import When
from processes import family, on_all_cores, poison, until
from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.pool import allocate_workers
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.system.writing import ENDING, SCRATCH, TEMPORARY, sweep
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial
from runs import environment, mixed, settings, write
from workers import in_process

ray = pytest.importorskip("ray")
pytestmark = [
    on_all_cores,  # and so on one worker of pytest-xdist: one cluster serves all tests that want one
    pytest.mark.skipif(sys.platform != "linux" or len(devices.physical_cores()) < 2, reason="two nodes want two cores"),
]

BUSY = {
    # A node that is gone refuses to be asked, and is given up after so many tries; one that is slow to answer is not.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
    "health_check_timeout_ms": 120_000,
    "gcs_rpc_server_reconnect_timeout_s": 300,
    "agent_register_timeout_ms": 300_000,
    "worker_register_timeout_seconds": 300,
    "prestart_worker_first_driver": False,
}
"""What lets a cluster stand on a machine that does much else: its nodes are told all of it by the first."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, with room for one worker each."""
    from ray.cluster_utils import Cluster

    spare = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    quiet = {"num_cpus": 1, "object_store_memory": 80_000_000, **spare}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "300")
        nodes = Cluster(initialize_head=True, head_node_args={**quiet, "_system_config": BUSY})

        def given_up() -> None:
            """Nobody counts on a node any more that is gone: who connects to one of these ends."""
            nodes.wait_for_nodes(timeout=300)

        def remove(node: Any) -> None:
            nodes.remove_node(node)
            given_up()

        yield SimpleNamespace(address=nodes.address, add=lambda **how: nodes.add_node(**{**quiet, **how}),
                              lose=partial(nodes.remove_node, allow_graceful=False), remove=remove,
                              given_up=given_up)  # fmt: skip
        if ray.is_initialized():
            ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Trial, ...]]:
    """A model, and what one worker here finds of it."""
    model = write(mixed(), tmp_path_factory.mktemp("ray"))
    with in_process():
        return model, tune(asked(model, "alone")).history


def asked(model: Path, name: str, **more: Any) -> Settings:
    return settings(model, **{"output_dir": model.parent / name, "mode": "region", "builds": 14, **more})


def actors() -> list[int]:
    """The processes of our actors on all nodes."""
    return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if b"ray::WorkerActor" in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def leftovers(*places: Path) -> list[Path]:
    """Folders of temporary files that no process holds."""
    found = []
    for place in (Path("/tmp"), *places):
        before = set(place.glob(f"*qdqtune-*{ENDING}"))
        for prefix in (TEMPORARY, SCRATCH):
            sweep(place, prefix)
        found += before - set(place.glob(f"*qdqtune-*{ENDING}"))
    return found


def test_a_cluster_finds_what_one_worker_finds_and_loses_no_job_with_its_workers(
    cluster: Any, expected: tuple[Path, tuple[Trial, ...]]
) -> None:
    model, history = expected
    node = cluster.add()
    faults = When({1: lambda: os.kill(actors()[0], signal.SIGKILL), 6: lambda: cluster.lose(node)})
    assert tune(asked(model, "lost", ray=cluster.address), faults).history == history
    until(lambda: not actors() and not leftovers())
    cluster.given_up()


def test_a_result_is_proven_at_other_threads_where_there_are_as_many_cores(
    cluster: Any, expected: tuple[Path, tuple[Trial, ...]]
) -> None:
    one = EngineSpec("fake", {"threads": 1})
    told = {"engine": one, "ray": cluster.address, "workers": 1, "mode": "cut", "builds": 6}
    with pytest.raises(BadOption, match="2 threads: no node of the cluster has as many CPUs"):
        tune(asked(expected[0], "threads", threads=(1, 2), **told))
    node = cluster.add(num_cpus=2)
    result = tune(asked(expected[0], "threads", threads=(1, 2), **told))  # there are only two cores in all
    assert [(row["threads"], row["verdict"]) for row in result.summary["by_threads"]] == [(1, "faster"), (2, "faster")]
    cluster.remove(node)


def test_a_killed_driver_leaves_no_files_and_resumes(
    cluster: Any, expected: tuple[Path, tuple[Trial, ...]], tmp_path: Path
) -> None:
    model, history = expected
    out = asked(model, "driver").output_dir
    script = f"""
import sys
from pathlib import Path
from qdqtune.engines import EngineSpec
from qdqtune.tuning.loop import tune
sys.path.append({str(Path(__file__).parent)!r})
from test_cluster import asked
slow = EngineSpec("fake", {{"build_seconds": 0.3}})
tune(asked(Path({str(model)!r}), "driver", ray={cluster.address!r}, engine=slow))
"""
    told = environment() | {"TMPDIR": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", script], env=told, stderr=subprocess.DEVNULL)
    state = out / "autotuner_state.yaml"
    until(lambda: driver.poll() is not None or (state.exists() and b'"key": "trial:' in state.read_bytes()))
    assert driver.poll() is None
    driver.kill()
    driver.wait()
    until(lambda: not actors() and not family(tmp_path) and not leftovers(out, tmp_path))
    assert tune(asked(model, "driver", ray=cluster.address)).history == history


def test_a_lost_node_ends_the_run_with_a_message_and_leaves_no_files(tmp_path: Path) -> None:
    """Ray ends whoever was connected through it. No actor executes a module that lies in the current folder."""
    here = tmp_path / "here"
    here.mkdir()
    poison(here)
    out, said = tmp_path / "out", tmp_path / "said"
    words = f"tune {write(mixed(), tmp_path)} -o {out} --ray local --workers 1 --engine fake --mode region --builds 60"
    quick = ["--calibration-method", "minmax", "--no-bias-correction", "--engine-option", "build_seconds=0.7", "-q"]
    soon = {f"RAY_{name}": str(value) for name, value in BUSY.items() if name.startswith("health")}
    told = environment() | soon | {"TMPDIR": str(tmp_path)}
    with said.open("wb") as errors:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "qdqtune", *words.split(), *quick], env=told, stderr=errors, cwd=here
        )
    state = out / "autotuner_state.yaml"
    until(lambda: run.poll() is not None or (state.exists() and b'"key": "trial:' in state.read_bytes()), 300)
    assert run.poll() is None, said.read_text()
    (raylet,) = [pid for pid in family(tmp_path) if b"/raylet/raylet" in _read(Path(f"/proc/{pid}/cmdline"))]
    os.kill(raylet, signal.SIGKILL)
    assert run.wait() == EngineUnavailable.exit_code
    assert said.read_text().endswith(
        "error: the Ray node that the run was connected through is lost, and the run with it: the same command goes "
        "on from what was measured\n"
    )
    until(lambda: not family(tmp_path) and not leftovers(out, tmp_path), 300)
    assert (tmp_path / "executed").read_text() == ""


def test_without_a_cluster_or_without_ray_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = EngineSpec("fake")
    with pytest.raises(EngineUnavailable, match="no Ray cluster answers at"), allocate_workers(fake, 1, 1, "!"):
        pass
    absent(monkeypatch, "qdqtune.engines.cluster")
    monkeypatch.delattr("qdqtune.engines.cluster", raising=False)
    with pytest.raises(EngineUnavailable, match=r"pip install 'qdqtune\[ray\]'"), allocate_workers(fake, 1, 1, "auto"):
        pass
