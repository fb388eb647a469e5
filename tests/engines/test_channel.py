"""Messages between two ends of a socket: small ones as they are, large arrays through memory that is used again."""

import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from qdqtune.engines.channel import SHARED, Channel
from qdqtune.engines.execution import Deadline
from qdqtune.errors import Cancelled

Ends = tuple[Channel, Channel]
LARGE = SHARED // 4 + 5


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = tuple(Channel(end.detach()) for end in socket.socketpair())
    yield both[0], both[1]
    for end in both:
        end.close()


def files_of_this_process() -> int:
    return len(os.listdir("/proc/self/fd"))


def passed(message: object, ends: Ends) -> object:
    ends[0].send(message)
    return ends[1].recv()


@pytest.mark.parametrize("size", [0, 3, LARGE])
def test_what_is_sent_arrives(size: int, ends: Ends) -> None:
    arrays = {"a": np.arange(size, dtype=np.float32), "b": np.full((2, size), 7, np.int8), "t": np.ones((size, 2)).T}
    good, found = passed((True, arrays), ends)
    assert good
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert found[name].flags.writeable


def test_arrays_stay_as_they_were_whatever_follows(ends: Ends) -> None:
    sent = np.zeros(LARGE, np.float32)
    first = passed(sent, ends)
    sent[:] = 1
    first[0] = 5
    second = passed(sent, ends)
    assert first[0] == 5
    assert not first[1:].any()
    assert second.all()


def test_memory_is_used_again_when_its_arrays_are_gone(ends: Ends) -> None:
    counts = []
    for number in range(6):
        found = passed(np.full(LARGE + number, number, np.float32), ends)
        assert (found == number).all()
        del found
        ends[1].send("next")
        assert ends[0].recv() == "next"
        counts.append(files_of_this_process())
    assert len(set(counts)) == 1


def test_what_is_still_held_is_not_written_over(ends: Ends) -> None:
    held = []
    for number in range(4):
        held.append(passed(np.full(LARGE, number, np.float32), ends))
        ends[1].send("next")
        ends[0].recv()
    assert [int(array.min()) for array in held] == [int(array.max()) for array in held] == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [250_000, LARGE])
def test_who_reads_nothing_holds_up_no_send(ends: Ends, count: int) -> None:
    """As long as the buffers take a message it is sent; large arrays need next to no room in them."""

    def send_for_ever() -> None:
        while True:
            ends[0].send(np.zeros(count, np.uint8), Deadline(0.01))

    with pytest.raises(TimeoutError):
        send_for_ever()


@pytest.mark.parametrize("part", [b"", b"\0\0\0\0", b"\0\0\0\0\0\0\0\x09half"])
def test_half_an_answer_holds_up_no_receive(part: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Channel(ours.detach())) as channel:
        theirs.sendall(part)
        with pytest.raises(TimeoutError):
            channel.recv(Deadline(0.01))


def test_a_wait_may_be_cancelled(ends: Ends) -> None:
    def cancel() -> None:
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        ends[0].recv(Deadline(60.0, cancel))
    with pytest.raises(Cancelled):
        ends[0].send(np.zeros(900_000, np.uint8), Deadline(60.0, cancel))


def test_the_other_end_is_gone(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises((EOFError, OSError)):
        ends[1].recv()
    with pytest.raises(OSError):
        ends[1].send(np.zeros(LARGE, np.float32))


def test_closed_ends_keep_no_files() -> None:
    before = files_of_this_process()
    both = tuple(Channel(end.detach()) for end in socket.socketpair())
    found = passed(np.zeros(LARGE, np.float32), both)
    for end in both:
        end.close()
    assert not found.any()
    assert files_of_this_process() <= before + 1  # the memory of the array that is still held
