"""Messages between two ends of two pipes: what is sent arrives, waits end, and no program comes through."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from qdqtune.engines.execution import cancelled_by
from qdqtune.engines.process import Channel
from qdqtune.errors import Cancelled, EngineFailure, Failure
from qdqtune.types import Accuracy, Layer

Ends = tuple[Channel, Channel]
"""The end that asks, and the one that answers."""


@pytest.fixture
def ends() -> Iterator[Ends]:
    with opened() as both:
        yield both


@contextmanager
def opened(welcome: bytes = b"") -> Iterator[Ends]:
    (reads, answer), (read, writes) = os.pipe(), os.pipe()
    os.write(answer, welcome)
    asks = Channel(os.fdopen(reads, "rb", 0), os.fdopen(writes, "wb", 0), asks=True)
    answers = Channel(os.fdopen(read, "rb", 0), os.fdopen(answer, "wb", 0), asks=False)
    yield asks, answers
    asks.close()
    answers.close()


def passed(message: object, ends: Ends) -> Any:
    """A message as the end that asks receives it."""
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(ends[1].send, message)
        answer = ends[0].recv(60.0)
        sending.result()
    return answer


@pytest.mark.parametrize("size", [0, 3, 2**16])
def test_what_is_sent_arrives(size: int, ends: Ends) -> None:
    arrays = {"a": np.arange(size, dtype=np.float32), "b": np.full((2, size), 7, np.int8), "t": np.ones((size, 2)).T}
    good, answer = passed((True, arrays), ends)
    assert good
    for name, array in arrays.items():
        np.testing.assert_array_equal(answer[name], array)
        assert answer[name].dtype == array.dtype
        assert answer[name].flags.writeable


def test_values_arrive(ends: Ends) -> None:
    values = [Layer("conv", ("a",), "int8", 0.5, "compute"), Failure("run", "no"), Accuracy(1.0), np.float64(2)]
    assert passed(values, ends) == values
    assert passed(np.array(["a"], object), ends) == ["a"]
    assert str(passed(EngineFailure("refused"), ends)) == "refused"


class _Program:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("message", [_Program(), Path("/"), Channel, subprocess.Popen])
def test_programs_do_not_arrive(message: object, ends: Ends) -> None:
    with pytest.raises(EOFError, match=r"what came is no answer: UnpicklingError: .* is no value"):
        passed(message, ends)


@pytest.mark.parametrize("data", [b"\0" * 8, b"\xff" * 99, (1).to_bytes(8) + (3).to_bytes(8) + b"abc"])
def test_other_bytes_are_no_answer(data: bytes, ends: Ends) -> None:
    ends[1]._writes.write(data)
    with pytest.raises(EOFError):
        ends[0].recv(60.0)


def test_lines_before_the_first_answer_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.process.LONGEST_WELCOME", 100)
    with opened(b"welcome\n") as ends:
        assert passed("facts", ends) == "facts"
        assert passed("more", ends) == "more"
    with opened(b"welcome\n" * 100) as ends, pytest.raises(EOFError):
        ends[0].recv(60.0)


@pytest.mark.parametrize("count", [1, 250_000, 10_000_000])
def test_who_reads_nothing_holds_up_no_send(ends: Ends, count: int) -> None:
    """As a process that has been stopped. As long as the pipe takes messages they are sent."""

    def send_for_ever() -> None:
        while True:
            ends[0].send(np.zeros(count, np.uint8), 0.01)

    with pytest.raises(TimeoutError):
        send_for_ever()


@pytest.mark.parametrize("part", [b"", b"\0\0\0\0", (1).to_bytes(8) + (9).to_bytes(8) + b"half"])
def test_half_an_answer_holds_up_no_receive(part: bytes, ends: Ends) -> None:
    if part:
        ends[1]._writes.write(part)
    with pytest.raises(TimeoutError):
        ends[0].recv(0.01)


def test_a_wait_may_be_cancelled(ends: Ends) -> None:
    def cancel() -> None:
        raise Cancelled("cancelled")

    with cancelled_by(cancel), pytest.raises(Cancelled):
        ends[0].recv(60.0)
    with cancelled_by(cancel), pytest.raises(Cancelled):
        ends[0].send(np.zeros(10_000_000, np.uint8), 60.0)
    ends[1]._writes.write((1).to_bytes(8))  # an answer has begun
    with cancelled_by(cancel), pytest.raises(Cancelled):
        ends[0].recv(60.0)


def test_the_other_end_is_gone(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].recv(60.0)
    with pytest.raises(OSError):
        ends[0].send(np.zeros(2**16, np.float32), 60.0)


def test_the_limit_is_for_the_whole_answer(ends: Ends) -> None:
    here, there = ends
    is_over = Event()

    def drip() -> None:
        while not is_over.wait(0.05):
            there._writes.write(b"x")

    with ThreadPoolExecutor() as threads:
        threads.submit(drip)
        with pytest.raises(TimeoutError):
            here.recv(0.4)
        is_over.set()
