"""How long samples may take to come, and how many a generator may give.

A generator may sleep or never end; a file may take minutes to unpack. Each is read in a thread of its
own, so that whoever waits can give up, hears Ctrl-C, and is told in one line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from qdqtune.engines.process import CHECK_SECONDS, current_check
from qdqtune.engines.runner import current_limit
from qdqtune.errors import BadData

T = TypeVar("T")

MOST = 10_000
"""Samples that a generator may give where nobody says how many to take: one that gives more is likely to be endless."""


class TooSlow(BadData):
    """Samples do not come in time."""


@dataclass(frozen=True)
class Patience:
    """How long reading may take: `seconds` in all for each pass over the samples, and until `ends` by `monotonic`."""

    seconds: float = field(default_factory=lambda: current_limit()[0])
    ends: float | None = field(default_factory=lambda: current_limit()[1])

    def check(self, spent: float, origin: str) -> None:
        """Raises TooSlow where a pass over `origin` has `spent` too many seconds."""
        if spent > self.seconds:
            raise TooSlow(
                f"reading {origin} took longer than {self.seconds:.4g} s: --time-limit gives it longer, "
                "--calibration-samples takes fewer"
            )
        if self.ends is not None and monotonic() > self.ends:
            raise TooSlow(
                f"--time-budget has ended while {origin} was read: give more time, or fewer samples "
                "(--calibration-samples)"
            )

    def over(self, make: Callable[[], Iterator[T]], origin: str) -> Iterator[T]:
        """What an iterator gives, which is made and asked in a thread of its own, one item at a time.

        What it raises is raised here. A thread that does not answer in time is
        left alone: the process does not wait for it at its end.

        Raises:
            TooSlow: all items together took too long to come.
            Cancelled: another thread has asked for the end.
        """
        wanted, answers = SimpleQueue[bool](), SimpleQueue[tuple[T] | BaseException | None]()
        arguments = copy_context().run, (_give, make, wanted, answers)
        thread = threading.Thread(target=arguments[0], args=arguments[1], name=f"reading {origin}", daemon=True)
        thread.start()
        spent = 0.0
        try:
            while True:
                wanted.put(True)
                begun = monotonic() - spent
                answer = self._awaited(answers, begun, origin)
                spent = monotonic() - begun
                if answer is None:
                    return
                if isinstance(answer, BaseException):
                    raise answer
                yield answer[0]
        finally:
            wanted.put(False)
            thread.join(CHECK_SECONDS)  # a generator that cleans up has done so when the next one is made

    def _awaited(self, answers: SimpleQueue[Any], begun: float, origin: str) -> Any:
        check = current_check()
        while True:
            try:
                return answers.get(timeout=CHECK_SECONDS)
            except Empty:
                if check is not None:
                    check()
                self.check(monotonic() - begun, origin)


def _give(make: Callable[[], Iterator[T]], wanted: SimpleQueue[bool], answers: SimpleQueue[Any]) -> None:
    """Answer each wish with the next item in a tuple, with the end (None), or with what was raised."""
    try:
        items = None
        while wanted.get():
            items = make() if items is None else items
            answers.put(next(((item,) for item in items), None))
    except BaseException as error:  # noqa: BLE001  (it is raised where the answer is awaited)
        answers.put(error)


def few_enough(items: Iterable[T], origin: str) -> Iterator[T]:
    """The same items.

    Raises:
        BadData: there are more than `MOST`.
    """
    for number, item in enumerate(items, 1):
        if number > MOST:
            raise BadData(f"{origin} gives more than {MOST:,} samples: --calibration-samples says how many to take")
        yield item
