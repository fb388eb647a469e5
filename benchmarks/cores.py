"""Cores for jobs that run side by side and must not disturb each other's times."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.queues import Queue


def shares(jobs: int) -> list[list[int]]:
    """Equal shares of the cores; of even size where possible, since neighbours are often two threads of one core."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // jobs
    if size == 0:
        raise SystemExit(f"--jobs {jobs} is more than the {len(cores)} cores here")
    size -= size % 2 if jobs > 1 and size > 1 else 0
    return [cores[i * size : (i + 1) * size] for i in range(jobs)]


@contextmanager
def pinned(places: Sequence[list[int]]) -> Iterator[ProcessPoolExecutor]:
    """Processes, each pinned with all that it starts to one of these shares of the cores."""
    context = multiprocessing.get_context("spawn")
    waiting: Queue[list[int]] = context.Queue()
    for place in places:
        waiting.put(place)
    with ProcessPoolExecutor(len(places), context, _take_place, (waiting,)) as pool:
        yield pool


def _take_place(places: Queue[list[int]]) -> None:
    os.sched_setaffinity(0, places.get())
