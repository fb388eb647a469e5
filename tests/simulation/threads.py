"""Threads of which one runs at a time, and which give way only where they wait: in an order that a seed decides."""

import threading
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

from simulation.clock import Clock


class HangsError(BaseException):
    """All threads wait for each other."""


class Strand:
    """A thread, or the one that has begun all others."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.until = 0.0  # when it may go on at the latest; 0: now
        self.is_over = False


class Threads:
    """The threads of a process."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock, self._random = clock, random
        self.main = self.current = Strand()
        self.interrupts = 0
        self._strands, self._hang = [self.main], False

    def pause(self, until: float = inf) -> None:
        """Let others run until somebody wakes this thread, or until a time of the clock.

        Raises:
            HangsError: nobody will, as all wait.
            KeyboardInterrupt: that is for the main thread, as in any process.
        """
        mine = self.current
        mine.until = until
        self._next().turn.release()
        mine.turn.acquire()
        self.current = mine
        mine.until = 0.0
        if self._hang:
            raise HangsError
        if self.interrupts and mine is self.main:
            self.interrupts -= 1
            raise KeyboardInterrupt

    @property
    def others(self) -> int:
        """How many threads there are beside the main one."""
        return len(self._strands) - 1

    def wake(self, strands: Sequence[Strand]) -> None:
        """Let threads go on."""
        for strand in strands:
            strand.until = 0.0

    def _next(self) -> Strand:
        able = [strand for strand in self._strands if strand.until == 0.0]
        if able:
            return self._random.choice(able)
        first = min(self._strands, key=lambda strand: strand.until)
        if first.until == inf:
            raise HangsError
        self.clock.advance(first.until - self.clock.now)
        return first

    def thread(self, target: Callable[..., None], args: Sequence[Any] = (), **_: Any) -> "Thread":
        """In place of `threading.Thread`."""
        return Thread(self, target, args)

    def condition(self) -> "Condition":
        """In place of `threading.Condition`."""
        return Condition(self)

    def begin(self, strand: Strand, run: Callable[[], None]) -> None:
        """Begin a thread, which waits for its turn."""

        def turns() -> None:
            strand.turn.acquire()
            self.current = strand
            try:
                run()
            finally:
                strand.is_over = True
                self._strands.remove(strand)
                self.wake(self._strands)  # somebody may have waited for the end
                try:
                    self._next().turn.release()
                except HangsError:
                    self._hang = True
                    self.main.turn.release()

        self._strands.append(strand)
        threading.Thread(target=turns, daemon=True).start()


class Thread:
    """See `Threads.thread`."""

    def __init__(self, threads: Threads, target: Callable[..., None], args: Sequence[Any]) -> None:
        self._threads, self._run, self._strand = threads, lambda: target(*args), Strand()

    def start(self) -> None:
        self._threads.begin(self._strand, self._run)

    def join(self) -> None:
        while not self._strand.is_over:
            self._threads.pause()


class Condition:
    """See `Threads.condition`. Nothing has to be locked: only waiting gives way."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: list[Strand] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return

    def wait(self, timeout: float | None = None) -> None:
        self._waiting.append(mine := self._threads.current)
        self._threads.pause(inf if timeout is None else self._threads.clock.now + timeout)
        if mine in self._waiting:
            self._waiting.remove(mine)

    def wait_for(self, is_over: Callable[[], Any], timeout: float | None = None) -> Any:
        ends = inf if timeout is None else self._threads.clock.now + timeout
        while not (found := is_over()) and (now := self._threads.clock.now) < ends:
            self.wait(None if ends == inf else ends - now)
        return found

    def notify_all(self) -> None:
        self._threads.wake(self._waiting)
        self._waiting = []


class OneAfterTheOther:
    """In place of a `ThreadPoolExecutor`."""

    def __init__(self, count: int) -> None:
        return

    def __enter__(self) -> "OneAfterTheOther":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def submit(self, do: Callable[[], Any]) -> Any:
        found = do()
        return SimpleNamespace(result=lambda: found)
