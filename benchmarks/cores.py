"""Cores for jobs that run side by side and must not disturb each other's times."""

from __future__ import annotations

import os
from typing import Protocol


def shares(jobs: int) -> list[list[int]]:
    """Equal shares of the cores; of even size where possible, since neighbours are often two threads of one core."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // jobs
    if size == 0:
        raise SystemExit(f"--jobs {jobs} is more than the {len(cores)} cores here")
    size -= size % 2 if jobs > 1 and size > 1 else 0
    return [cores[i * size : (i + 1) * size] for i in range(jobs)]


class Places(Protocol):
    """A queue of shares, of whatever kind of process."""

    def get(self) -> list[int]:
        """The next one."""


def take_place(places: Places) -> None:
    """Pin this process, and with it all that it starts, to a share of the cores."""
    os.sched_setaffinity(0, places.get())
