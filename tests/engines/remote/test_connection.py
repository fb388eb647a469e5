"""Another machine over SSH: through a stand-in, and through a real server where one is installed."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observers import When
from processes import on_all_cores, until
from qdqtune.engines import EngineSpec, devices
from qdqtune.engines.devices import Device
from qdqtune.engines.execution import Execution
from qdqtune.engines.machine import MachineFacts
from qdqtune.engines.options import on_device
from qdqtune.engines.process import Program
from qdqtune.engines.remote import Destination, FarSession, packed, why_not
from qdqtune.engines.runner import Runner, temporary_runner
from qdqtune.errors import BadOption, EngineUnavailable, OutputError
from qdqtune.graph.loading import load
from qdqtune.graph.saving import ConstantFile
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial
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
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Far, Destination]]:
    """A machine that several tests use."""
    with stand_in(tmp_path_factory.mktemp("board")) as found:
        yield found, Destination.parsed(found.on)
        found.clean()


@pytest.fixture(scope="module")
def machine(board: tuple[Far, Destination]) -> MachineFacts:
    """What is known of any of the machines here."""
    return board[1].facts()


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
        machine = Destination.parsed(far.on).facts()
        result = tune(asked(model, way, on=far.on, machine=machine))
        assert result.history == history
        assert (machine.where, machine.cores) == (far.name, devices.usable_cores())
        told = f"built, run and timed on {far.name} (cost model, {machine.cores} cores), calibrated here"
        assert told in result.notes
        assert json.loads((model.parent / way / "summary.json").read_text())["engine"]["machine"] == far.name
        far.clean()


# What is missing


@pytest.mark.parametrize(("on", "words"), [
    ("nowhere", "ssh to nowhere fails (Could not resolve hostname nowhere"),
    ("board:/none/python", "no worker starts with /none/python on board ("),
    ("board:/bin/echo", "no worker starts with /bin/echo on board (exit code 0): it has to be Python 3.11 or"),
    ("-oProxyCommand=x", "is no machine: give user@host, user@host:path/of/python, ssh://user@host:port/path"),
    ("adb:a b", "path/of/python or adb:SERIAL:/path/of/python"),
])  # fmt: skip
def test_a_line_says_what_is_missing(far: Far, on: str, words: str, call: Callable[..., Any]) -> None:
    (line,) = call("doctor", f"--on={on}")[2].splitlines()
    assert words in line


def test_a_machine_that_cannot_be_reached_is_told_once_for_many_models(
    far: Far, tmp_path: Path, call: Callable[..., Any]
) -> None:
    for name in "ab":
        write(mixed(), tmp_path, name)
    code, out, err = call("tune", str(tmp_path), "--on", "nowhere", "--engine", "fake", "-o", str(tmp_path / "out"))
    assert (code, out, len(err.splitlines())) == (5, "", 1)


@pytest.mark.parametrize(("code", "printed", "words"), [
    (1, "/v/python: No module named 'qdqtune'", "no worker starts with python3 on pi (/v/python: No module named"),
    (255, "pi: Permission denied (publickey).\nConnection to pi closed.", "ssh to pi fails (pi: Permission denied"),
])  # fmt: skip
def test_reasons_are_read_from_what_the_other_side_prints(code: int, printed: str, words: str) -> None:
    assert why_not(Destination("pi"), code, printed.splitlines()).startswith(words)


def test_another_version_is_refused(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.remote.__version__", "9.9")
    with pytest.raises(EngineUnavailable, match=r"board has qdqtune \S+, and here is 9.9: install one version"):
        Destination.parsed(far.on).facts()
    far.clean()


@pytest.mark.parametrize(("spec", "kind", "words"), [
    (EngineSpec("trtexec", {"trtexec": "/none"}), EngineUnavailable, "on board: there is no program '/none'"),
    (EngineSpec("onnxruntime", {"threads": 0}), BadOption, "on board: options of engine 'onnxruntime'"),
])  # fmt: skip
def test_an_engine_that_cannot_be_opened_there_is_told_with_the_place(
    board: tuple[Far, Destination], tmp_path: Path, spec: EngineSpec, kind: type[Exception], words: str
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
    *((text, "", "") for text in ("", "-v", "a b", ":/python", "ssh://")),
])  # fmt: skip
def test_a_machine_is_named_as_for_ssh_and_may_have_a_python(text: str, host: str, python: str) -> None:
    if host:
        *_, dashes, found, command = Destination.parsed(text).command("x")
        assert (dashes, found, command) == ("--", host, f"exec {python} -P -m x")
    else:
        with pytest.raises(BadOption, match="is no machine"):
            Destination.parsed(text)


@pytest.mark.parametrize(("cores", "kind"), [(1, EngineUnavailable), (1000, BadOption)])
def test_cores_that_stay_in_use_lose_the_worker_and_not_the_run(
    cores: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtune.engines.devices.LEASE_SECONDS", -1.0)
    monkeypatch.setattr(devices, "is_free", lambda _: False)
    good, error = request(FarSession(tmp_path), "open", FAKE, (), Device(wants=cores))
    assert (good, type(error)) == (False, kind)


# Contents


def test_of_contents_those_that_no_build_needs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.remote.MOST_KEPT", 20)
    desk = FarSession(tmp_path)
    for digest in "abc":
        desk.put(digest, np.zeros(8, np.uint8))
    desk._constants[0] = ("a",)
    assert desk.missing(["d"]) == ["d"]
    desk.put("d", np.zeros(8, np.uint8))
    assert desk.missing(["b"]) == []
    assert desk.missing([]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert desk.missing(["a", "b", "c", "d"]) == ["b", "c", "d"]


def test_a_disk_without_room_loses_the_worker_with_a_reason(tmp_path: Path) -> None:
    model, desk = saved_with_constants(tmp_path), FarSession(tmp_path)
    assert request(desk, "open", FAKE) == (True, None)
    _, constants = packed(model)
    with room_for(5):
        (good, error), *_ = [desk.answer("put", digest, values) for digest, values in constants.items()]
    assert (good, type(error)) == (False, OutputError)
    assert re.fullmatch("cannot write to .*: File too large; it may be full", str(error))


def request(desk: FarSession, name: str, *words: Any) -> Any:
    return desk.answer("stored", name, pickle.dumps(words), ())


def saved_with_constants(folder: Path) -> Path:
    with ConstantFile(folder / "constants.bin") as constants:
        constants.save(load(write(mixed(None), folder)), folder / "candidate.onnx")
    return folder / "candidate.onnx"


# Workers


def test_contents_go_there_once_and_builds_are_removed_when_they_are_freed(
    board: tuple[Far, Destination], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (far, machine) = saved_with_constants(tmp_path), board
    sent, ask = Counter[str](), Program.ask

    def counted(program: Program, name: str, arguments: tuple[Any, ...], limit: float) -> Any:
        if name == "put":
            sent[arguments[0]] += 1
        return ask(program, name, arguments, limit)

    monkeypatch.setattr(Program, "ask", counted)
    inputs = {"x": np.ones((16, 64, 64), np.float32)}
    with Runner(FAKE, log_dir=tmp_path / "logs", start=machine.start) as runner:
        first, second = runner.load(model), runner.load(model, fresh=True)
        for handle in (first, second):
            runner.outputs(handle, [inputs])
        assert set(sent.values()) == {1}
        assert len(sent) == len(packed(model)[1]) + len(inputs)
        names = [f"{handle.build}-candidate.onnx" for handle in (first, second)]
        assert {path.name for path in far.temporary.rglob("*.onnx")} == {*names}
        runner.unload(first)
        assert [path.name for path in far.temporary.rglob("*.onnx")] == names[1:]


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_costs_its_job(far: Far, tmp_path: Path, harm: signal.Signals) -> None:
    model = write(mixed(), tmp_path)
    execution = on_device(far.on, Execution(seconds=2.0))
    with (
        temporary_runner(FAKE, execution) as runner,
        temporary_runner(FAKE, execution) as other,
    ):
        runner.describe()
        (victim,) = far.engines()
        other.describe()
        os.kill(victim, harm)
        if harm == signal.SIGSTOP:
            assert refusal(lambda: runner.load(model)).stage == "timeout"
        runner.load(model)
        other.load(model)
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

    kills = When({3: partial(kill, "ways"), 4: partial(kill, "engines")})  # the first three race together
    with in_process():
        assert tune(asked(model, "killed", on=far.on, machine=machine), kills).history == history
    assert {"ways", "engines"} == set(struck)
    far.clean()


DRIVER = """
import sys
from pathlib import Path
sys.path += {tests!r}
from test_connection import Destination, asked
from qdqtune.engines import EngineSpec
from qdqtune.tuning.loop import tune

slow = EngineSpec("fake", {{"build_seconds": 0.1}})
tune(asked(Path({model!r}), "driver", on={on!r}, machine=Destination.parsed({on!r}).facts(), engine=slow))
"""
TESTS = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


def test_a_killed_driver_leaves_nothing_on_either_side_and_the_run_goes_on(
    far: Far, expected: tuple[Path, tuple[Trial, ...]], machine: MachineFacts
) -> None:
    model, history = expected
    state = model.parent / "driver" / "autotuner_state.yaml"
    script = DRIVER.format(tests=TESTS, model=str(model), on=far.on)
    here = far.folder / "here"  # its temporary files lie beside those of the machine
    here.mkdir()
    told = environment() | {"TMPDIR": str(here)}
    driver = subprocess.Popen([sys.executable, "-c", script], env=told, stderr=subprocess.DEVNULL)
    until(lambda: driver.poll() is not None or (far.engines() and known(state) >= 2))
    assert driver.poll() is None
    driver.kill()
    driver.wait()
    far.clean()
    until(lambda: not far.ways())
    with in_process():
        assert tune(asked(model, "driver", on=far.on, machine=machine)).history == history
    far.clean()
    assert not [*(model.parent / "driver").glob(".qdqtune-*")]


def known(state: Path) -> int:
    return 0 if not state.exists() else sum(row.get("kind") == "trial" for row in rows(state))


def test_other_commands_run_on_another_machine_as_well(
    board: tuple[Far, Destination], tuned: Path, call: Callable[..., Any]
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


def test_a_board_is_reached_by_adb() -> None:
    command = Destination.parsed("adb:10.0.0.2:5555:/opt/env/bin/python").command("m")
    assert command == ["adb", "-s", "10.0.0.2:5555", "shell", "-T", "exec /opt/env/bin/python -P -m m"]
    assert Destination.parsed("adb:").command("m") == ["adb", "shell", "-T", "exec python3 -P -m m"]
    reason = why_not(Destination("adb:a"), 255, ["error: closed"])
    assert reason.startswith("no worker starts with python3 on adb:a (error: closed): it has to be Python 3.11")
