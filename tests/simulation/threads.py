"""Threads of which one runs at a time, and which give way only where they wait: in an order that a seed decides."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from random import Random
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

    def executor(self, count: int) -> "Executor":
        """In place of a `ThreadPoolExecutor`."""
        return Executor(self, count)

    def wait(self, futures: set[Future[Any]], timeout: float, _: str) -> tuple[set[Future[Any]], set[Future[Any]]]:
        """In place of `concurrent.futures.wait`."""
        ends = self.clock.now + timeout
        while not any(future.done() for future in futures) and self.clock.now < ends:
            self.pause(ends)
        done = {future for future in futures if future.done()}
        return done, futures - done

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


class Executor:
    """See `Threads.executor`."""

    def __init__(self, threads: Threads, count: int) -> None:
        self._threads, self._count = threads, count
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._strands: list[Strand] = []

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def submit(self, do: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._waiting.append((future := Future[Any](), partial(do, *arguments)))
        self._strands = [strand for strand in self._strands if not strand.is_over]
        if len(self._strands) < self._count:
            self._strands.append(Strand())
            self._threads.begin(self._strands[-1], self._serve)
        return future

    def _serve(self) -> None:
        while self._waiting:
            future, do = self._waiting.pop(0)
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  (raised where the result is read)
                future.set_exception(error)
            self._threads.wake([self._threads.main])

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._waiting.clear()
        while not all(strand.is_over for strand in self._strands):
            self._threads.pause()
