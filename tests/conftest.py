"""Fixtures that several test files ask for by name."""

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:  # or each of the many processes of a run compiles all that it imports, in every run
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parent.parent / "build" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of NumPy: several spin where each core has its tests

import importlib.util
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, settings

import trtexec_stand_in
from command_lines import QUICK, exit_code
from engine_contract import conv_model
from models import build
from qdqtune.engines import devices, library_settings
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt import trtexec
from runs import mixed, write
from workers import Workers, in_process

Call = Callable[..., tuple[int, str, str]]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: so would what the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("unhurried", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # how long an example takes says nothing where many processes share the cores


def pytest_addoption(parser: pytest.Parser) -> None:
    """The long runs of tests/fuzz."""
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="run N mutated files")
    parser.addoption("--fuzz-from", type=int, default=1, metavar="SEED", help="the first seed of --fuzz")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default engines take one thread: no test opens all cores."""
    monkeypatch.setattr(MachineFacts, "usual_threads", lambda *_: 1)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real engines run for a millisecond a turn: what they take means nothing where others share the cores."""
    turns = Runner.turns

    def shortly(runner: Runner, builds: Any, turn_seconds: float) -> Any:
        return turns(runner, builds, min(turn_seconds, 0.001))

    monkeypatch.setattr(Runner, "turns", shortly)


@pytest.fixture(autouse=True, scope="session")
def unsafe_files() -> Iterator[None]:
    """No file is flushed to the disk, which can take longer than all else in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def denormal_numbers_stay() -> None:
    """An engine that a test opens here would make denormal numbers zero in all tests that follow: it is the first
    session of a process that decides. OpenVINO asks each model."""
    configuration = library_settings.openvino_configuration
    library_settings.openvino_configuration = lambda *how: configuration(*how) | {"CPU_DENORMALS_OPTIMIZATION": False}
    if importlib.util.find_spec("onnxruntime") is not None:
        runtime = importlib.import_module("onnxruntime")
        model = build("net (float[1] x) => (float[1] y) { y = Relu(x) }")
        runtime.InferenceSession(model.proto.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(autouse=True, scope="session")
def stand_in_for_trtexec() -> None:
    """What stands in for trtexec runs in this process: an interpreter for each of many calls takes long."""
    trtexec.launch = trtexec_stand_in.launch


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders of this process lie in the folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight free cores, as far as this process can tell."""
    monkeypatch.setattr(devices, "physical_cores", lambda: [[core] for core in range(8)])
    monkeypatch.setattr(devices, "is_free", lambda _: True)


@pytest.fixture
def set_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Sets the machine's name and the text of /proc/cpuinfo."""

    def set_both(machine: str, cpuinfo: str) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr("qdqtune.engines.machine.CPUINFO", tmp_path / "cpuinfo")

    return set_both


@pytest.fixture
def workers() -> Iterator[Workers]:
    """No processes: every runner works in this one, some times faster, and good for all but crashes and hangs."""
    with in_process() as started:
        yield started


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with a model on which pairs pay in parts, and samples beside it."""
    return write(mixed(), tmp_path)


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in `out` beside it what a tuning run on the fake engine has written."""
    path = write(mixed(), tmp_path_factory.mktemp("tuned"))
    arguments = ["tune", str(path), *QUICK, "--calibration-data", str(path.with_suffix(".npz"))]
    with in_process():
        assert exit_code(*arguments, "-o", path.parent / "out") == 0
    return path


@pytest.fixture
def final(tuned: Path) -> Path:
    """What that run ships."""
    return tuned.parent / "out" / "optimized_final.onnx"


@pytest.fixture
def placement(final: Path) -> Path:
    return final.with_name("placement.yaml")


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], workers: Workers) -> Call:
    """Run a command line in this process: exit code, standard output, standard error."""
    return lambda *arguments: (exit_code(*arguments), *capfd.readouterr())


@pytest.fixture
def float_file(tmp_path: Path) -> Path:
    """A convolution and a Relu in float."""
    onnx.save(conv_model(), tmp_path / "float.onnx")
    return tmp_path / "float.onnx"
