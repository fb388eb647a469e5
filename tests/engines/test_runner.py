import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from engine_contract import IMAGE, conv_model, quantized_conv_model
from models import build
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.fake import latency
from qdqtune.engines.memory import LARGE_MODEL, MemoryBudget
from qdqtune.engines.process import Channel
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadOption, Failure, OutputError
from qdqtune.graph.loading import nbytes
from qdqtune.graph.saving import save
from qdqtune.types import Measurement, NumericFormat, QType
from refusals import refusal
from trtexec_stand_in import stand_in
from workers import InProcess, Workers

QUANTIZED = quantized_conv_model(NumericFormat(QType.INT8, QType.INT8, symmetric=True))
ROUNDS: dict[str, Any] = {"seed": 3, "first_round": 0, "turn_seconds": 0.0, "warmup": 0}


@pytest.fixture(autouse=True)
def short_turns() -> None:
    """Turns are as long as the tests ask for."""


@pytest.fixture
def files(tmp_path: Path) -> SimpleNamespace:
    """Four models on disk, two of them with pairs."""
    made = {"plain": conv_model(), "large": conv_model(32), "quantized": QUANTIZED, "again": QUANTIZED}
    for name, model in made.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
    return SimpleNamespace(**{name: tmp_path / f"{name}.onnx" for name in made})


@contextmanager
def opened(folder: Path, limit: float = 60.0, engine: str = "fake", **options: Any) -> Iterator[Runner]:
    with Runner(EngineSpec(engine, options), execution=Execution(limit), log_dir=folder / "logs") as runner:
        runner.feed(IMAGE)
        yield runner


def raced(
    runner: Runner, a: Handle, b: Handle, count: int, *, seed: int, first_round: int, turn_seconds: float, warmup: int
) -> Measurement:
    """Rounds of two builds."""
    turns = runner.turns([a, b], turn_seconds)
    rounds = range(first_round, first_round + count)
    return runner.rounds([a, b], rounds, seed=seed, turns=turns, warmup=warmup).pair(0, 1)


def failed(ask: Callable[[], object]) -> Failure:
    failure = refusal(ask)
    assert len(failure.reason.splitlines()) == 1
    return failure


def pid(runner: Runner) -> int:
    assert runner._worker is not None
    return runner._worker._process.pid


def gone(process: int) -> bool:
    """Whether a process has ended (one that nobody has waited for yet has ended as well)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
        if listed.stdout.strip()[:1] in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("engine", ["fake", "onnxruntime"])
def test_a_session_from_load_to_unload(tmp_path: Path, files: SimpleNamespace, engine: str) -> None:
    with opened(tmp_path, engine=engine) as runner:
        assert runner.describe()["engine"] == engine
        assert runner.numeric_format("int8").weight is QType.INT8
        plain, large = runner.load(files.plain, log_name="baseline"), runner.load(files.quantized)
        assert (tmp_path / "logs" / "baseline.log").exists()
        outputs = runner.outputs(plain, [IMAGE, IMAGE])
        np.testing.assert_allclose(outputs[1]["y"], ReferenceEvaluator(conv_model()).run(None, IMAGE)[0], atol=1e-4)
        several = [{"x": IMAGE["x"] * factor} for factor in range(11)]
        for together, alone in zip(runner.outputs(plain, several, 2), runner.outputs(plain, several), strict=True):
            np.testing.assert_array_equal(together["y"], alone["y"])
        samples = raced(runner, plain, large, 4, seed=0, first_round=0, turn_seconds=0.001, warmup=1)
        assert len(samples.a) == len(samples.b) == 4
        runner.unload(plain)
        runner.unload(plain)
        with pytest.raises(ValueError, match="not loaded"):
            runner.outputs(plain, [IMAGE])


def test_a_file_is_built_once_unless_a_fresh_build_is_asked_for(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path, build_seconds=0.05) as runner:
        first = runner.load(files.plain)
        assert first.build_seconds >= 0.05
        assert runner.load(files.plain) == first
        second = runner.load(files.plain, fresh=True)
        assert second != first
        assert raced(runner, first, second, 2, **ROUNDS).a
        runner.unload(second)
        assert runner.load(files.plain) == first
        runner.unload(first)
        assert runner.load(files.plain) not in (first, second)


def test_the_slower_model_fills_a_slot(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path) as runner:
        (slot,) = runner.turns([runner.load(files.plain), runner.load(files.large)], 0.01)
    assert slot.seconds == latency(conv_model(32))
    assert (slot.runs - 1) * slot.seconds < 0.01 <= slot.runs * slot.seconds


@pytest.mark.parametrize(
    ("fault", "stage", "words"),
    [("refuse", "build", "no implementation"), ("crash", "crash", "exit code 70"), ("hang", "timeout", "longer than")],
)
def test_a_build_that_fails_leaves_the_rest_usable(
    tmp_path: Path, files: SimpleNamespace, fault: str, stage: str, words: str
) -> None:
    with opened(tmp_path, faults={fault: "conv"}) as runner:
        a, b = runner.load(files.plain), runner.load(files.large)
        before = raced(runner, a, b, 2, **ROUNDS)
        for _ in range(2):
            runner._execution = Execution(1.0 if fault == "hang" else 60.0)
            failure = failed(lambda: runner.load(files.quantized, "bad"))
            runner._execution = Execution(60.0)  # the good ones may take their time
            assert failure.stage == stage
            assert words in failure.reason
            assert f"fault: {fault}" in failure.log
        assert raced(runner, a, b, 2, **ROUNDS) == before


def test_a_failure_quotes_no_earlier_worker(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path, faults={"crash": "conv"}) as runner:
        (runner.log_dir / "worker.log").write_text("an earlier worker said this\n")
        assert "earlier" not in failed(lambda: runner.load(files.quantized, "bad")).log


def test_inputs_that_do_not_fit_are_a_failed_run(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path, engine="onnxruntime") as runner:
        plain = runner.load(files.plain)
        assert failed(lambda: runner.outputs(plain, [{"x": np.zeros((1, 3, 8, 8), np.float32)}])).stage == "run"
        runner.feed({"x": np.zeros((1, 3, 8, 8), np.float32)})
        assert failed(lambda: raced(runner, plain, plain, 1, **ROUNDS)).stage == "run"
        assert len(runner.outputs(plain, [IMAGE])) == 1


def test_a_worker_killed_between_calls_is_replaced(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path) as runner:
        a, b = runner.load(files.plain), runner.load(files.large)
        before = raced(runner, a, b, 2, **ROUNDS)
        first = pid(runner)
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        assert raced(runner, a, b, 2, **ROUNDS) == before
        assert pid(runner) != first
        os.kill(pid(runner), signal.SIGKILL)
        runner.unload(a)
        assert runner.outputs(b, [{"x": np.zeros((1, 4, 32, 32), np.float32)}])


def kill_when_they_hang(runner: Runner, log: Path, count: int) -> None:
    """Kill so many workers, one after the other, as they hang in a build."""
    killed: set[int] = set()
    while len(killed) < count:
        time.sleep(0.01)
        if (worker := runner._worker) is None or not log.exists() or "fault: hang" not in log.read_text():
            continue
        number = worker._process.pid  # type: ignore[attr-defined]
        if number not in killed:
            killed.add(number)
            log.unlink()
            os.kill(number, signal.SIGKILL)


def test_a_worker_killed_twice_during_a_call_is_a_crash_that_names_the_signal(tmp_path, files):
    with opened(tmp_path, faults={"hang": "conv"}) as runner:
        plain = runner.load(files.plain)
        threading.Thread(target=kill_when_they_hang, args=(runner, tmp_path / "logs" / "bad.log", 2)).start()
        failure = failed(lambda: runner.load(files.quantized, "bad"))
        assert (failure.stage, "SIGKILL" in failure.reason) == ("crash", True)
        assert len(runner.outputs(plain, [IMAGE])) == 1


def test_a_model_that_cannot_be_built_again_is_a_failure(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path) as runner:
        plain = runner.load(files.plain)
        runner.close()
        files.plain.write_bytes(b"damaged")
        assert failed(lambda: runner.outputs(plain, [IMAGE])).stage == "build"


def test_an_interrupt_while_waiting_leaves_the_runner_usable(tmp_path, files, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path, faults={"hang": "conv"}) as runner:
        plain = runner.load(files.plain)
        hung = pid(runner)
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "recv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.load(files.quantized)
        assert gone(hung)
        assert len(runner.outputs(plain, [IMAGE])) == 1
        last = pid(runner)
    assert gone(last)


def test_an_interrupt_from_the_terminal_is_not_for_the_worker(tmp_path: Path, files: SimpleNamespace) -> None:
    with opened(tmp_path) as runner:
        plain = runner.load(files.plain)
        worker = pid(runner)
        assert os.getpgid(worker) != os.getpgid(0)
        os.kill(worker, signal.SIGINT)
        assert len(runner.outputs(plain, [IMAGE])) == 1
        assert pid(runner) == worker


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_parent_leaves_no_worker(tmp_path: Path, files: SimpleNamespace, busy: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(f"""
import sys, time
from pathlib import Path
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
print("imported", flush=True)  # a worker that imported this script would say so again
runner = Runner(EngineSpec("fake", {{"faults": {{"hang": "conv"}}}}), log_dir=Path({str(tmp_path)!r}))
runner.load(Path({str(files.plain)!r}))
print(runner._worker._process.pid, flush=True)
if {busy}:
    runner.load(Path({str(files.quantized)!r}))
time.sleep(600)
""")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip() for _ in range(2)]
    worker = int(lines[1])
    os.kill(worker, 0)
    parent.kill()
    assert parent.communicate()[0] == ""
    assert lines[0] == "imported"
    assert gone(worker)


def scratch(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("worker-*") if path.is_dir())


def test_temporary_files_of_the_engine_are_removed_with_the_worker(tmp_path: Path, files: SimpleNamespace) -> None:
    spec = EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")})
    with Runner(spec, execution=Execution(60), log_dir=tmp_path / "logs") as runner:
        assert isinstance(runner.load(files.plain), Handle)
        first = scratch(tmp_path / "logs")
        assert len(list(first[0].rglob("*.plan"))) == 1
        os.kill(pid(runner), signal.SIGKILL)
        gone(pid(runner))
        assert isinstance(runner.load(files.plain, fresh=True), Handle)
        assert len(scratch(tmp_path / "logs")) == 1
        assert scratch(tmp_path / "logs") != first
    assert not scratch(tmp_path / "logs")


def test_errors_of_the_engine_keep_their_class_and_message(tmp_path: Path) -> None:
    with opened(tmp_path, engine="nosuch") as runner, pytest.raises(BadOption, match="unknown engine 'nosuch'"):
        runner.describe()
    with opened(tmp_path, engine="onnxruntime") as runner:
        with pytest.raises(BadOption, match="FP8"):
            runner.numeric_format("fp8")
        assert runner.describe()["engine"] == "onnxruntime"


def test_the_log_folder_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(OutputError, match="logs"), opened(tmp_path):
        pass


def held(runner: Runner) -> set[int]:
    """Numbers of the builds that the worker holds."""
    return {handle.build for handle in runner._loaded if handle in runner._builds._held}


class TestMemoryBudget:
    """Builds of several runners together take no more memory than their budget, or than one request needs."""

    def test_the_least_recently_used_build_is_freed_first(self, files: SimpleNamespace, tmp_path: Path) -> None:
        workers = Workers()
        size = nbytes(files.large)
        with self.runner(tmp_path, workers, MemoryBudget(2 * size)) as runner:
            first, second = runner.load(files.large), runner.load(files.large, fresh=True)
            assert isinstance(runner.outputs(first, [IMAGE]), list)
            third = runner.load(files.large, fresh=True)
            assert held(runner) == {first.build, third.build}
            raced(runner, second, third, 2, **ROUNDS)
            assert held(runner) == {second.build, third.build}
            assert [build.path.stem for build in workers.builds] == ["large"] * 4

    def test_runners_share_a_budget_and_needed_builds_stay(self, files: SimpleNamespace, tmp_path: Path) -> None:
        workers = Workers()
        budget = MemoryBudget(1.5 * nbytes(files.large))
        with (
            self.runner(tmp_path, workers, budget) as runner,
            self.runner(tmp_path / "other", workers, budget) as other,
        ):
            a, b = runner.load(files.large), runner.load(files.large, fresh=True)
            raced(runner, a, b, 2, **ROUNDS)
            assert held(runner) == {a.build, b.build}
            other.load(files.large)
            assert (held(runner), len(held(other))) == (set(), 1)
            assert isinstance(runner.outputs(a, [IMAGE]), list)
            assert (held(runner), held(other)) == ({a.build}, set())

    def test_builds_with_unpacked_weights_count_file_and_weights(self, files: SimpleNamespace, tmp_path: Path) -> None:
        size = nbytes(files.large)
        with self.runner(tmp_path, Workers(), budget := MemoryBudget(2 * size)) as runner:
            runner.load(files.large)
            spec, shared, unpacked = EngineSpec("fake"), Execution(memory=budget), size - nbytes(files.plain) + 1
            with Runner(spec, log_dir=tmp_path, execution=shared, start=Workers(), unpacked=unpacked) as other:
                other.load(files.plain)
                assert (held(runner), len(held(other))) == (set(), 1)

    def test_without_a_budget_all_builds_stay_but_those_of_reports(self, files, tmp_path) -> None:
        with self.runner(tmp_path, Workers()) as runner:
            builds = {runner.load(files.large, fresh=True).build for _ in range(4)}
            assert runner.report(files.plain, IMAGE, 1, "layers")
            assert held(runner) == builds

    @staticmethod
    @contextmanager
    def runner(folder: Path, workers: Workers, memory: MemoryBudget | None = None) -> Iterator[Runner]:
        spec, logs = EngineSpec("fake"), folder / "logs"
        with Runner(spec, execution=Execution(60, memory=memory), log_dir=logs, start=workers) as runner:
            runner.feed(IMAGE)
            yield runner


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONNX Runtime and OpenVINO set this on x86 only")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_denormal_numbers_are_zero(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    save(build("net (float[64] x) => (float[64] y) { p = Mul(x, x) y = Mul(p, s) }", {"s": np.float32(1e30)}),
         tmp_path / "model.onnx")  # fmt: skip
    with opened(tmp_path, engine=engine) as runner:
        (outputs,) = runner.outputs_of(tmp_path / "model.onnx", [{"x": np.full(64, 1e-20, np.float32)}])
    assert not outputs["y"].any()


def test_a_worker_that_ends_while_it_frees_a_build_is_started_again(files: SimpleNamespace, tmp_path: Path) -> None:
    class Ending(InProcess):
        def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
            if name == "unload":
                raise EOFError("signal SIGKILL")
            return super().ask(name, arguments, limit)

    workers, size = Workers(), nbytes(files.large)
    budget = MemoryBudget(2.5 * size)
    how: Any = {"start": lambda _: Ending(workers), "execution": Execution(memory=budget)}
    with (
        Runner(EngineSpec("fake"), log_dir=tmp_path / "logs", **how) as runner,
        Runner(EngineSpec("fake"), log_dir=tmp_path / "logs", unpacked=2 * size, **how) as large,
    ):
        builds = [runner.load(files.large, fresh=True).build for _ in range(4)]
        assert held(runner) == {*builds[2:]}  # the third had no room, and the worker ended with the first two
        large.load(files.large)
        assert (held(runner), len(held(large))) == (set(), 1)
    assert [build.path for build in workers.builds] == [files.large] * 5


def test_the_worker_frees_what_is_unloaded(files: SimpleNamespace, tmp_path: Path) -> None:
    asked: list[str] = []

    class Watched(InProcess):
        def ask(self, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
            asked.append(name)
            return super().ask(name, arguments, limit)

    with Runner(EngineSpec("fake"), log_dir=tmp_path, start=lambda *_: Watched(Workers())) as runner:
        handle = runner.load(files.plain)
        runner.unload(handle)
        runner.unload(handle)
    assert asked.count("unload") == 1


def test_only_large_models_have_a_budget() -> None:
    assert MemoryBudget.for_model(LARGE_MODEL - 1) is None
    assert MemoryBudget.for_model(LARGE_MODEL) is not None
