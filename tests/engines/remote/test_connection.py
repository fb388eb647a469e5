"""Another machine over SSH or adb: through a stand-in for both, and through a real server where one is installed."""

import io
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from processes import on_all_cores, until
from qdqtune.cli import main
from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.execution import Execution
from qdqtune.engines.machine import MachineFacts, this_machine
from qdqtune.engines.options import on_device
from qdqtune.engines.remote import agent, messages
from qdqtune.engines.remote import connection as connections
from qdqtune.engines.remote.agent import GREETING, Store
from qdqtune.engines.remote.connection import ConnectedLink, Destination, RemoteMachine, connected, facts_of, why_not
from qdqtune.engines.remote.messages import Pipe, Reply
from qdqtune.engines.remote.worker import LinkLostError
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, Failure, OutputError
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.settings import Settings
from qdqtune.types import Accuracy, Layer, Trial
from refusals import refusal
from remote_machines import WAYS, Far, stand_in
from runs import environment, mixed, room_for, rows, settings, write
from workers import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc")

FAKE = EngineSpec("fake")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    (tmp_path / "board").mkdir()
    with stand_in(tmp_path / "board") as found:
        yield found


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Far, RemoteMachine]]:
    """A machine, and a connection to it that several tests use."""
    with stand_in(tmp_path_factory.mktemp("board")) as found:
        with connected(found.on) as machine:
            yield found, machine
        found.clean()


@pytest.fixture(scope="module")
def machine(board: tuple[Far, RemoteMachine]) -> MachineFacts:
    """What is known of any of the machines here."""
    return board[1].facts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Trial, ...]]:
    """A model, and what a run finds that measures here."""
    model = write(mixed(), tmp_path_factory.mktemp("ssh"))
    with in_process():
        return model, tune(asked(model, "here")).history


def asked(model: Path, name: str, **more: Any) -> Settings:
    return settings(model, **{"output_dir": model.parent / name, "builds": 8, "mode": "cut", **more})


@pytest.mark.parametrize("way", WAYS)
def test_a_run_finds_on_another_machine_what_it_finds_here_and_leaves_nothing(
    way: str, expected: tuple[Path, tuple[Trial, ...]], tmp_path: Path
) -> None:
    model, history = expected
    with WAYS[way](tmp_path) as far:
        machine = facts_of(far.on)
        result = tune(asked(model, way, on=far.on, machine=machine))
        assert result.history == history
        assert (machine.where, machine.cores) == (far.name, devices.usable_cores())
        assert machine.name == this_machine().name
        told = f"built, run and timed on {far.name} (cost model, {machine.cores} cores), calibrated here"
        assert told in result.notes
        assert json.loads((model.parent / way / "summary.json").read_text())["engine"]["machine"] == far.name
        far.clean()


# What is missing


@pytest.mark.parametrize(("on", "words"), [
    ("nowhere", "ssh to nowhere fails (Could not resolve hostname nowhere"),
    ("adb:nowhere", "adb to adb:nowhere fails (device 'nowhere' not found): connect it, and look whether"),
    ("adb::/none/python", "adb: has no /none/python that runs: name the Python that has qdqtune, as in --on adb::PATH"),
    ("board:/none/python", "board has no /none/python that runs: name the Python that has qdqtune, as in --on"),
    ("board:/bin/echo", "no worker starts with /bin/echo on board: exit code 0"),
    ("-oProxyCommand=x", "is no machine: give user@host, user@host:path/of/python or ssh://user@host:port/path"),
])  # fmt: skip
def test_a_line_says_what_is_missing(far: Far, on: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["doctor", f"--on={on}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_machine_that_cannot_be_reached_is_told_once_for_many_models(
    far: Far, tmp_path: Path, call: Callable[..., Any]
) -> None:
    for name in "ab":
        write(mixed(), tmp_path, name)
    code, out, err = call("tune", str(tmp_path), "--on", "nowhere", "--engine", "fake", "-o", str(tmp_path / "out"))
    assert (code, out, len(err.splitlines())) == (5, "", 1)


@pytest.mark.parametrize(("code", "printed", "words"), [
    (1, "/v/python: No module named 'qdqtune'", "python3 on pi has no qdqtune of this version: pip install qdqtune=="),
    (2, "Unknown option: -P\nusage: python3", "python3 on pi is older than 3.11"),
    (255, "pi: Permission denied (publickey).", "ssh to pi fails (pi: Permission denied (publickey)): it has"),
    (255, "Host key verification failed.", "ssh to pi fails (Host key verification failed): run ssh pi once"),
    (1, "ModuleNotFoundError: No module named 'msgspec'", "python3 on pi lacks the package msgspec: pip install"),
    (1, "ImportError: libfoo.so\nConnection to pi closed.", "no worker starts with python3 on pi: ImportError: libfoo"),
])  # fmt: skip
def test_reasons_are_read_from_what_the_other_side_prints(code: int, printed: str, words: str) -> None:
    assert why_not(Destination("pi"), code, printed.splitlines()).startswith(words)


@pytest.mark.parametrize(("printed", "words"), [
    ("* daemon started successfully\nadb: no devices/emulators found", "(no devices/emulators found): connect it"),
    ("error: more than one device/emulator", "(more than one device/emulator): name one that `adb devices` lists"),
    ("adb: device unauthorized.\nThis adb server's keys are not set", "(device unauthorized): accept the key"),
    ("adb: insufficient permissions for device: missing udev rules?", "missing udev rules?): this user may not open"),
    ("error: target doesn't support PTY args -Tt", "(target doesn't support PTY args -Tt): its adbd is too old"),
    ("error: closed", "(closed): see what `adb devices` says of it"),
])  # fmt: skip
def test_reasons_are_read_from_what_adb_prints(printed: str, words: str) -> None:
    told = why_not(Destination("adb:"), 1, printed.splitlines())
    assert told.startswith("adb to adb: fails (")
    assert words in told


def test_another_version_is_refused(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.remote.connection.__version__", "9.9")
    with pytest.raises(EngineUnavailable, match=r"board has qdqtune \S+, and here is 9.9: install one version on both"):
        facts_of(far.on)
    far.clean()


@pytest.mark.parametrize(("spec", "kind", "words"), [
    (EngineSpec("trtexec", {"trtexec": "/none"}), EngineUnavailable, "on board: there is no program '/none'"),
    (EngineSpec("onnxruntime", {"threads": 4096}), BadOption, "on board: `threads` 4096 is too many for"),
])  # fmt: skip
def test_an_engine_that_cannot_be_opened_there_is_told_with_the_place(
    board: tuple[Far, RemoteMachine], tmp_path: Path, spec: EngineSpec, kind: type[Exception], words: str
) -> None:
    with (
        Runner(spec, log_dir=tmp_path, start=board[1].start) as runner,
        pytest.raises(kind, match=words),
    ):
        runner.describe()


@pytest.mark.parametrize(("text", "host", "python"), [
    ("board", "board", "python3"),
    ("me@board:/opt/python", "me@board", "/opt/python"),
    ("me@board:~/env/bin/python", "me@board", "env/bin/python"),
    ("ssh://me@board:2222", "ssh://me@board:2222", "python3"),
    ("ssh://me@board:2222/opt/python", "ssh://me@board:2222", "/opt/python"),
    ("board:/with space/python", "board", "'/with space/python'"),
])  # fmt: skip
def test_a_machine_is_named_as_for_ssh_and_may_have_a_python(text: str, host: str, python: str) -> None:
    *_, dashes, found, command = Destination.parsed(text).command("x")
    assert (dashes, found, command) == ("--", host, f"exec {python} -P -m x")


@pytest.mark.parametrize(("text", "chosen", "python"), [
    ("adb:", [], "python3"),
    ("adb::/opt/python", [], "/opt/python"),
    ("adb:8f2a", ["-s", "8f2a"], "python3"),
    ("adb:10.0.0.7:5555", ["-s", "10.0.0.7:5555"], "python3"),
    ("adb:10.0.0.7:5555:/opt/python", ["-s", "10.0.0.7:5555"], "/opt/python"),
])  # fmt: skip
def test_a_device_is_named_by_its_serial_number(text: str, chosen: list[str], python: str) -> None:
    assert Destination.parsed(text).command("x") == ["adb", *chosen, "shell", "-T", f"exec {python} -P -m x"]


@pytest.mark.parametrize("text", ["", "adb:/opt/python", "adb::env/bin/python", "-v", "a b", ":/python", "ssh://"])
def test_other_texts_name_no_machine(text: str) -> None:
    with pytest.raises(BadOption, match=r"is no (machine|device)"):
        Destination.parsed(text)


# Messages


def sent_through(message: object) -> Any:
    way = io.BytesIO()
    Pipe(way, way, values_only=True).send(message)
    way.seek(0)
    return Pipe(way, way, values_only=True).receive()


def test_a_message_that_is_not_taken_has_a_deadline_and_is_the_last() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as nobody, os.fdopen(writes, "wb") as way:
        pipe = Pipe(nobody, way, values_only=True)
        pipe.send((0, "ping", None), 60.0)
        with pytest.raises(TimeoutError):
            pipe.send(np.zeros(10**6), 0.01)
        with pytest.raises(BrokenPipeError):
            pipe.send((0, "ping", None), 60.0)


def test_a_message_with_a_deadline_arrives_whole() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as source, os.fdopen(writes, "wb") as way, ThreadPoolExecutor(1) as other:
        arrived = other.submit(Pipe(source, way, values_only=True).receive)
        Pipe(source, way, values_only=True).send(np.arange(10**5), 60.0)
        assert np.array_equal(arrived.result(), np.arange(10**5))


def test_a_message_over_a_slow_way_arrives_as_long_as_something_of_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deadline:
        pause = 0.0

        def __init__(self, *_: object) -> None:
            self.pauses = 0

        def after_pause(self) -> None:
            self.pauses += 1
            if self.pauses == 3:
                raise TimeoutError

    taken = iter([False, False, True] * 10)
    monkeypatch.setattr(messages, "Deadline", Deadline)
    monkeypatch.setattr(messages, "_takes_bytes", lambda *_: next(taken))
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as source, os.fdopen(writes, "wb") as way:
        pipe = Pipe(source, way, values_only=True)
        pipe.send(b"x" * 3 * select.PIPE_BUF, 1.0)
        assert pipe.receive() == b"x" * 3 * select.PIPE_BUF


def waiting(pipe: SimpleNamespace) -> connections.Connection:
    """A connection that waits for an answer of the worker 1 through this pipe."""
    connection = object.__new__(connections.Connection)
    connection._answers, connection.lost, connection._pipe = {1: SimpleQueue()}, None, pipe  # type: ignore[assignment]
    return connection


def test_an_answer_is_waited_for_after_its_time_only_while_it_comes_in() -> None:
    connection = waiting(SimpleNamespace(is_receiving=False, heard=time.monotonic()))
    with pytest.raises(TimeoutError):
        connection.answer(1, 0.0, None)
    connection = waiting(SimpleNamespace(is_receiving=True, heard=time.monotonic() + 3600))
    assert connection.answer(1, 0.0, lambda: connection._answers[1].put("late")) == "late"
    connection = waiting(SimpleNamespace(is_receiving=True, heard=time.monotonic() - 3600))
    with pytest.raises(TimeoutError):
        connection.answer(1, 0.0, None)


def test_a_request_to_another_machine_ends_a_second_after_its_limit() -> None:
    limits = list[float]()

    class Recorded:
        def send(self, number: int, kind: str, content: object, limit: float, check: object) -> None:
            limits.append(limit)

        def answer(self, number: int, seconds: float, check: object) -> Reply:
            limits.append(seconds)
            return Reply("answer", True)

    recorded: Any = Recorded()
    ConnectedLink(recorded, 1).ask("run", (), 5.0, None)
    assert limits == [5.0, 6.0]


class Late(dict[int, Any]):
    """Answers that are waited for, until one has come."""

    def __contains__(self, number: object) -> bool:
        return True


@pytest.mark.parametrize("last", [EOFError, KeyError, IndexError, struct.error, UnpicklingError])
def test_no_answer_ends_the_thread_that_receives_without_a_word(last: type[Exception]) -> None:
    """Neither one for a worker that has ended meanwhile, nor one that cannot be read."""
    messages = iter([(7, None), (8, "late")])

    def receive() -> object:
        for message in messages:
            return message
        raise last("no more")

    connection = object.__new__(connections.Connection)
    answers = SimpleQueue[Any]()
    connection._answers, connection._greeted, connection.lost = Late({8: answers}), SimpleQueue(), None
    connection._pipe = SimpleNamespace(receive=receive, heard=time.monotonic())  # type: ignore[assignment]
    connection._printed = deque()
    connection._receive(io.BytesIO(GREETING + b"{}\n"))
    assert [answers.get_nowait(), answers.get_nowait()] == ["late", None]
    assert connection.lost
    with pytest.raises(LinkLostError):
        connection.answer(7, 60.0, None)


def test_the_far_side_keeps_neither_what_is_forgotten_nor_files_of_workers_that_ended(tmp_path: Path) -> None:
    messages = [(0, "content", ("a", np.zeros(3))), (0, "content", ("b", np.zeros(3))), (0, "forget", "a")]
    told = iter(messages)

    def receive() -> object:
        for message in told:
            return message
        raise EOFError

    pipe: Any = SimpleNamespace(receive=receive)
    agent.serve(pipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b.bin"]
    for number in (3, 13):
        (tmp_path / f"{number}-1-net.onnx").touch()
    served = agent.Served(3, agent.Store(tmp_path), pipe)
    served.stop()
    served.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["13-1-net.onnx", "b.bin"]


def test_values_come_through() -> None:
    arrays = {"y": np.arange(6, dtype="f").reshape(2, 3), "n": np.array(["a"], object), "z": np.ones(70_000)}
    layer = Layer("conv", ("a",), "int8", 0.5, "compute")
    reply = sent_through(
        (3, Reply("answer", True, [arrays, layer, Failure("run", "no"), Accuracy(1.0), np.float64(2)]))
    )
    (found, *rest) = reply[1].result
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    assert rest == [layer, Failure("run", "no"), Accuracy(1.0), 2.0]
    assert str(sent_through(EngineFailure("refused"))) == "refused"


class _Program:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("message", [_Program(), Path("/"), Store, subprocess.Popen])
def test_programs_do_not_come_through(message: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no value"):
        sent_through(message)


def test_a_disk_without_room_is_told_where_the_array_is_needed(tmp_path: Path) -> None:
    store, values = Store(tmp_path), np.arange(1000.0)
    store.put("kept", values)
    with room_for(100):
        store.put("lost", values)
    assert np.array_equal(store.get("kept"), values)
    with pytest.raises(OutputError, match="it may be full"):
        store.get("lost")


# Workers


def test_a_file_goes_there_once_and_builds_are_removed_when_they_are_freed(
    board: tuple[Far, RemoteMachine], tmp_path: Path
) -> None:
    model, (far, machine) = write(mixed(), tmp_path), board
    with Runner(FAKE, log_dir=tmp_path / "logs", start=machine.start) as runner:
        first = runner.load(model)
        runner.load(model, fresh=True)
        files = sorted(path.name.partition("-")[2] for path in far.temporary.rglob("*.onnx"))
        assert files == ["0-model.onnx", "1-model.onnx"]
        runner.unload(first)
        assert [path.name.partition("-")[2] for path in far.temporary.rglob("*.onnx")] == ["1-model.onnx"]


def test_workers_share_a_connection_and_one_that_hangs_is_ended_alone(far: Far, tmp_path: Path) -> None:
    slow = EngineSpec("fake", {"build_seconds": 60.0})
    model = write(mixed(), tmp_path)
    with (
        on_device(far.on, Execution(seconds=1.0)) as (execution, _),
        temporary_runner(slow, execution) as hanging,
        temporary_runner(FAKE, execution) as other,
    ):
        assert other.describe()["device"] == "cost model"
        assert refusal(lambda: hanging.load(model)).stage == "timeout"
        other.load(model)
        assert len(far.agents()) == 1
    far.clean()


@on_all_cores
@pytest.mark.skipif(len(devices.physical_cores()) < 2, reason="two workers want two cores")
def test_several_workers_have_cores_of_their_own_there(
    far: Far, expected: tuple[Path, tuple[Trial, ...]], machine: MachineFacts
) -> None:
    model, _ = expected
    told = {"on": far.on, "workers": 2, "machine": machine, "mode": "region", "builds": 8}
    with in_process():
        here = tune(asked(model, "alone", mode="region", builds=8)).history
        assert tune(asked(model, "two", **told)).history == here
    far.clean()


# Kills


class When(Silent):
    """Does something when so many candidates are known."""

    def __init__(self, acts: Mapping[int, Callable[[], object]]) -> None:
        self.acts = acts

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self.acts.get(trial.number, lambda: None)()


def test_a_run_outlives_the_end_of_its_connection_and_of_its_worker(
    far: Far, expected: tuple[Path, tuple[Trial, ...]], machine: MachineFacts
) -> None:
    model, history = expected
    struck = list[str]()

    def kill(whom: str) -> None:
        for pid in getattr(far, whom)():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                struck.append(whom)

    kills = When({n: partial(kill, whom) for n, whom in enumerate(("ways", "agents", "engines"), 1)})
    with in_process():
        assert tune(asked(model, "killed", on=far.on, machine=machine), kills).history == history
    assert {"ways", "agents", "engines"} == set(struck)
    far.clean()


def test_a_worker_starts_on_a_connection_that_ended_a_moment_ago(far: Far, tmp_path: Path) -> None:
    with connected(far.on) as machine:
        for number, whom in enumerate(("ways", "agents")):
            (victim,) = getattr(far, whom)()
            os.kill(victim, signal.SIGKILL)  # no thread has noticed it yet
            machine.start(tmp_path / f"{number}.log", devices.ANYWHERE).kill()
    far.clean()


def test_a_run_outlives_an_agent_that_is_stopped(
    far: Far, expected: tuple[Path, tuple[Trial, ...]], machine: MachineFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, history = expected
    monkeypatch.setattr(connections, "SILENT_SECONDS", 3.0)
    far.pulse_every(0.1)
    stopped = list[int]()

    def stop() -> None:
        stopped.extend(far.agents())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    with in_process():
        assert tune(asked(model, "stopped", on=far.on, machine=machine), When({2: stop})).history == history
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    far.clean()


def test_a_message_that_nobody_reads_ends_with_a_reason(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 4.0)
    far.pulse_every(0.1)
    connection = connections.Connection(Destination.parsed(far.on))
    (agent,) = far.agents()
    os.kill(agent, signal.SIGSTOP)
    with pytest.raises(LinkLostError, match="nothing has come from there for 4 s"):
        connection.send(0, "content", ("digest", np.zeros(10**7)))
    os.kill(agent, signal.SIGCONT)
    connection.close()
    far.clean()


DRIVER = """
import sys
from pathlib import Path
sys.path += {tests!r}
from test_connection import asked, facts_of
from qdqtune.engines import EngineSpec
from qdqtune.tuning.loop import tune

slow = EngineSpec("fake", {{"build_seconds": 0.1}})
tune(asked(Path({model!r}), {name!r}, on={on!r}, machine=facts_of({on!r}), engine=slow))
"""
TESTS = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


def started(far: Far, model: Path, name: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own, whose temporary files lie in the folder `here` beside those of the machine."""
    script = DRIVER.format(tests=TESTS, model=str(model), name=name, on=far.on)
    here = far.folder / "here"
    here.mkdir(exist_ok=True)
    told = environment() | {"TMPDIR": str(here)}
    return subprocess.Popen([sys.executable, "-c", script], env=told, stderr=subprocess.DEVNULL)


def test_a_killed_driver_leaves_nothing_on_either_side_and_the_run_goes_on(
    far: Far, expected: tuple[Path, tuple[Trial, ...]], machine: MachineFacts
) -> None:
    model, history = expected
    state = model.parent / "driver" / "autotuner_state.yaml"
    driver = started(far, model, "driver")
    until(lambda: driver.poll() is not None or (far.engines() and known(state) >= 2))
    assert driver.poll() is None
    driver.kill()
    driver.wait()
    far.clean()
    with in_process():
        assert tune(asked(model, "driver", on=far.on, machine=machine)).history == history
    far.clean()
    assert not [*(model.parent / "driver").glob(".qdqtune-*")]


def known(state: Path) -> int:
    return 0 if not state.exists() else sum(row.get("kind") == "trial" for row in rows(state))


def test_what_a_machine_left_that_died_is_removed_by_the_next_connection(far: Far) -> None:
    left = far.temporary / "qdqtune-somebody.tmp"
    left.mkdir()
    assert facts_of(far.on).where == "board"
    until(lambda: not left.exists())


def test_other_commands_run_on_another_machine_as_well(
    board: tuple[Far, RemoteMachine], tuned: Path, call: Callable[..., Any]
) -> None:
    on, out = ("--on", board[0].on), tuned.parent / "out"
    code, said, err = call("verify", out, *on, "--calibration-data", tuned.with_suffix(".npz"))
    assert code == 0
    assert " as fast as float on board (proven: " in said.splitlines()[-1]
    assert "run and timed on board" in err
    code, said, _ = call("check", out / "optimized_final.onnx", "--engine", "fake", *on, "--json")
    found = json.loads(said)
    assert (code, found["engine"], found["machine"]) == (0, "fake", "board")
    code, said, _ = call("check", "--layers", tuned, "--engine", "fake", *on, "--json")
    assert code == 0
    found = json.loads(said)
    assert (found["engine"], found["machine"]) == ("fake", "board")
    assert found["layers"] == json.loads(call("check", "--layers", tuned, "--engine", "fake", "--json")[1])["layers"]
