"""Samples that do not come, do not end, fill the memory or raise anything: one line, in every command."""

import os
import sys
import threading
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

import qdqtune
from conftest import Call
from qdqtune.__main__ import main
from qdqtune.calibration import user_code
from qdqtune.calibration.samples import open_samples
from qdqtune.calibration.user_code import TooSlow, call_in_thread, read_in_thread
from qdqtune.engines.execution import Execution
from qdqtune.errors import BadData
from runs import mixed, write
from sample_files import one_line

GENERATOR = """
import itertools, threading
import numpy as np

class Odd(BaseException):
    def __str__(self):
        raise ValueError("even this")

def act():
    {does}

def generator():
    for number in itertools.count():
        if number == {at}:
            act()
        yield {{"x": np.ones((2, 8, 64), np.float32)}}

def call():
    if {at} < 0:
        act()
    return generator()
"""

RAISED = ("SystemExit", "GeneratorExit", "ValueError", "Odd")
DOES = {"threading.Event().wait()": "took longer than 0.2 s", "pass": "gives more than 50 samples"}
DOES |= {f"raise {error}": error for error in RAISED}
AT = (-1, 0, 3)
"""Which sample it does that at: none, as it does so before there is a generator."""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(mixed(batch=2), tmp_path)


def source(folder: Path, does: str, at: int) -> str:
    (folder / "given.py").write_text(GENERATOR.format(does=does, at=at))
    return f"{folder / 'given.py'}:call"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 50 samples are taken for endless ones."""
    monkeypatch.setattr(user_code, "MOST_GENERATED", 50)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("does", "at"), [*product(DOES, AT)])
def test_whatever_a_generator_does_is_one_line(tmp_path: Path, does: str, at: int) -> None:
    with pytest.raises(BadData, match=DOES[does]) as error:
        list(open_samples(source(tmp_path, does, at), mixed(batch=2), Execution(0.2)))
    one_line(error)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("command", ["quantize", "tune", "compare"])
def test_every_command_ends_with_that_line(call: Call, small: Path, command: str) -> None:
    given = {
        "quantize": ["-o", small.parent / "q.onnx"],
        "tune": ["-o", small.parent / "out", "--engine", "fake", "-q"],
    }
    more = given.get(command, [small, "--engine", "fake"])
    data = ["--calibration-data", source(small.parent, "threading.Event().wait()", 0)]
    code, printed, err = call(command, small, *more, *data, "--time-limit", "0.2s")
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, len(told), printed) == (2, 1, ""), err
    assert "took longer than 0.2 s: --time-limit gives it longer" in told[0]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("at", AT)
def test_a_time_budget_holds_for_samples_that_do_not_come(call: Call, small: Path, at: int) -> None:
    data = ["--calibration-data", source(small.parent, "threading.Event().wait()", at)]
    code, _, err = call("tune", small, "--engine", "fake", "--time-budget", "0.5s", *data, "-o", small.parent / "o")
    assert (code, "--time-budget has ended" in err) == (2, True), err


def test_threads_that_user_code_has_left_hold_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, gate = list[int](), threading.Event()

    def run() -> None:
        with pytest.raises(TooSlow):
            call_in_thread(gate.wait, "a gate", Execution(0.05))
        sys.exit(2)

    monkeypatch.setattr("qdqtune.cli.main.main", run)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["qdqtune"])
    with pytest.raises(SystemExit):
        main()
    gate.set()
    assert ended == [2]


def never() -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    yield np.ones((2, 8, 64), np.float32)
    threading.Event().wait()


@pytest.mark.usefixtures("workers")
def test_functions_end_in_any_thread(small: Path) -> None:
    caught: list[Exception] = []

    def quantize() -> None:
        with pytest.raises(BadData) as error:
            qdqtune.quantize(small, output=small.parent / "q.onnx", calibration_data=never(), time_limit=0.2)
        caught.append(error.value)

    thread = threading.Thread(target=quantize)
    thread.start()
    thread.join()
    assert "calibration_data" in str(caught[0])


def test_time_that_is_spent_elsewhere_does_not_count() -> None:
    gate = threading.Event()
    given = read_in_thread(lambda: iter(range(3)), "numbers", Execution(0.3))
    assert next(given) == 0
    gate.wait(0.5)
    assert list(given) == [1, 2]
    with pytest.raises(TooSlow):
        list(read_in_thread(lambda: iter(gate.wait, False), "a gate", Execution(ends=monotonic())))


def test_items_that_come_fast_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "monotonic", count().__next__)
    with pytest.raises(TooSlow, match="took longer than 20 s"):
        list(read_in_thread(lambda: iter(range(100)), "numbers", Execution(20.0)))


@pytest.mark.parametrize("name", ["pipe.npz", "pipe.npy"])
def test_a_pipe_is_no_file_of_samples(call: Call, small: Path, name: str) -> None:
    os.mkfifo(small.parent / name)
    for given in (small.parent / name, small.parent):
        small.with_suffix(".npz").unlink(missing_ok=True)
        code, _, err = call("quantize", small, "--calibration-data", given, "-o", small.parent / "q.onnx")
        assert (code, "is no file" in err) == (2, True), err


def test_only_what_is_asked_for_is_made_and_generators_are_closed() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        try:
            for number in range(10):
                made.append(number)
                yield number
        finally:
            made.append(-1)

    given = read_in_thread(numbers, "numbers", Execution())
    assert [next(given), next(given)] == [0, 1]
    given.close()
    assert made == [0, 1, -1]
    assert list(read_in_thread(numbers, "numbers", Execution())) == list(range(10))
