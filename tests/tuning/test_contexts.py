"""A result holds at every number of threads that it is deployed with, or it does not ship."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.facts import ENGINES
from qdqtune.engines.fake import latency
from qdqtune.engines.machine import MachineFacts, this_machine
from qdqtune.errors import BadOption, BadState
from qdqtune.tuning import contexts
from qdqtune.tuning.contexts import counts_of
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from runs import settings
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")

ONE = EngineSpec("fake", {"threads": 1})
HERE = this_machine()


def run(model: Path, counts: tuple[int, ...] | None = (1, 4), **changes: Any) -> Result:
    return tune(settings(model, **{"engine": ONE, "mode": "cut", "builds": 8, "threads": counts, **changes}))


def cost(path: Path, count: int) -> float:
    return latency(onnx.load(path), count)


def is_final(build: Build, count: int) -> bool:
    """Whether it is one of the file that is to prove itself, at a number of threads."""
    return build.path.name == "optimized_final.onnx" and build.threads == count


# What is proven
def test_a_result_is_proven_at_each_number_of_threads(model: Path) -> None:
    result = run(model, (4, 1))
    assert result.improved
    final, rows = model.parent / "out" / "optimized_final.onnx", result.summary["by_threads"]
    assert [row["threads"] for row in rows] == [1, 4]
    for row in rows:
        expected = cost(final, row["threads"]) / cost(model, row["threads"])
        assert row["ratio"] == pytest.approx(expected)
        assert row["low"] == pytest.approx(expected) == row["high"], "the engine is exact"
        assert row["baseline_ms"] == pytest.approx(1e3 * cost(model, row["threads"]))
    assert rows[0]["ratio"] < rows[1]["ratio"] < 1
    assert rows[0]["verdict"] == "faster"
    assert (result.summary["ratio"], result.summary["proof_builds"]) == (rows[0]["ratio"], 6)
    with pytest.raises(BadState, match=r"`threads` \[1, 4\], now it is \[1, 2, 4\]"):
        run(model, (1, 2, 4))


def test_nothing_ships_that_is_slower_at_a_number_of_threads(model: Path, workers: Workers) -> None:
    workers.slower = lambda build: 3.0 if is_final(build, 4) else 1.0
    result = run(model)
    assert (result.shipped, result.ratio, result.summary["by_threads"]) == ("baseline", None, [])
    assert any("is no gain where it may run" in note and "at 4 threads" in note for note in result.notes)
    assert run(model, (1,), output_dir=model.parent / "one").shipped == "tuned"


def test_points_of_a_front_hold_at_each_number(model: Path, workers: Workers) -> None:
    result = run(model, front=True, builds=25)
    rows = result.summary["front"]
    built = sum(build.engine == "fake" for build in workers.builds)
    assert built / 2 == result.summary["builds"] + result.summary["proof_builds"] <= 25  # at two numbers of threads
    assert len(rows) > 2
    assert all([at["threads"] for at in row["by_threads"]] == [1, 4] for row in rows)
    assert result.summary["by_threads"] == next(row for row in rows if row["shipped"])["by_threads"]


# What counts
def test_the_error_is_shared_by_the_numbers_at_which_a_file_may_win(model: Path) -> None:
    one, two = settings(model, engine=ONE), settings(model, engine=ONE, threads=(1, 2))
    assert two.proof_plan.error == one.proof_plan.error / 2
    assert two.proof_plan.looks[0] >= one.proof_plan.looks[0]


def test_the_usual_number_is_the_engines() -> None:
    assert counts_of(EngineSpec("onnxruntime"), None, HERE) == (1,)
    assert counts_of(EngineSpec("openvino", {"threads": 8}), None, HERE) == (8,)
    assert counts_of(EngineSpec("onnxruntime", {"threads": 4}), (16, 1, 4), None) == (4, 1, 16)
    assert counts_of(EngineSpec("tensorrt"), None, HERE) == (None,)
    gpu = EngineSpec("onnxruntime", {"threads": 1, "provider": "CUDAExecutionProvider"})
    assert counts_of(gpu, None, HERE) == (None,)


@pytest.mark.parametrize(
    ("engine", "asked", "said"),
    [
        ("onnxruntime", (1, 9999), r"`threads` 9999: only \d+ cores? can be used here"),
        ("onnxruntime", (), "such as 1,4,16"),
        ("tensorrt", (1, 4), "is about the threads of a CPU"),
    ],
)
def test_numbers_that_nothing_can_be_proven_at(model: Path, engine: str, asked: tuple[int, ...], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        settings(model, engine=EngineSpec(engine), threads=asked)


# What is told
@pytest.mark.parametrize(("at_four", "threads", "is_told"), [(8.0, None, True), (8.0, (4,), False), (1.0, None, False)])
def test_a_float_model_that_is_faster_at_one_thread_is_told_of(model, workers, monkeypatch, at_four, threads, is_told):
    monkeypatch.setitem(ENGINES, "fake", replace(ENGINES["fake"], is_threaded=True))
    monkeypatch.setattr("qdqtune.engines.machine.usable_cores", lambda: 4)
    workers.slower = lambda build: at_four if build.threads == 4 else 1.0
    result = run(model, threads, engine=EngineSpec("fake", {"threads": 4}), builds=3)
    one, four = 1e3 * cost(model, 1), 1e3 * cost(model, 4) * at_four
    told = f"the float model takes {one:.3g} ms at one thread and {four:.3g} ms at 4: `threads` 1 tunes for one"
    assert (told in result.notes) is is_told
    assert any("at one thread" in note for note in result.notes) is is_told
    assert [build.threads for build in workers.builds if build.log.stem == "glance"] == ([] if threads else [4, 1])


@pytest.mark.parametrize(
    ("load", "threads", "said"),
    [
        (0.1, 1, None),
        (1.9, 1, "(1.9 processes want the 2 cores of this machine beside this run)"),
        (0.0, 2, None),
        (0.9, 2, "(0.9 processes want the 2 cores of this machine beside this run)"),
        (0.0, 4, "`threads` 4: this process may use 2 cores of this machine, so threads wait for each other"),
    ],
)
def test_a_busy_machine_is_noted_before_the_run(monkeypatch, load, threads, said):
    machine = replace(HERE, cores=2, all_cores=2, load=load)
    note = contexts.busy(EngineSpec("onnxruntime", {"threads": threads}), machine)
    assert (note is None) == (said is None)
    assert (said or "") in (note or "")
    assert contexts.busy(EngineSpec("fake", {"threads": threads}), machine) is None
    monkeypatch.setattr(contexts, "simulated", lambda name, machine: "a simulator")
    assert contexts.busy(EngineSpec("onnxruntime", {"threads": threads}), machine) is None


def test_advice_about_another_machine_names_it() -> None:
    board = MachineFacts(4, 4, 4, "aarch64", False, "Linux", 3.0, "me@board")
    threads = {n: contexts.busy(EngineSpec("onnxruntime", {"threads": n}), board) for n in (1, 2, 8)}
    assert threads[1] is None
    assert "(3.0 processes want the 4 cores of me@board beside this run)" in str(threads[2])
    assert "this process may use 4 cores of me@board" in str(threads[8])


def test_what_is_slower_at_a_number_is_not_accepted_in_the_search(model: Path, workers: Workers) -> None:
    def slower(build: Build) -> float:
        has_pairs = b"QuantizeLinear" in build.path.read_bytes()
        return {1: 0.1, 4: 1.8}[build.threads] if has_pairs else 1.0  # faster in the mean of both

    workers.slower = slower
    result = run(model)
    assert result.history
    assert not any(trial.accepted for trial in result.history)
    assert result.shipped == "baseline"
