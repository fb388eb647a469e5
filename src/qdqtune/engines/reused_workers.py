"""Worker processes that several engines use one after the other: a process takes longer to start than many models to
run on all samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qdqtune.engines import runner
from qdqtune.engines.devices import Device
from qdqtune.engines.execution import Execution
from qdqtune.engines.process import Worker
from qdqtune.system.writing import temporary_folder


@contextmanager
def reused_workers(execution: Execution) -> Iterator[Execution]:
    """`execution` with workers that are used again; they end with the block, or with that of the caller, if the caller
    has such a block already."""
    if execution.idle is not None:
        yield execution
        return
    with temporary_folder() as folder:
        idle = IdleWorkers(folder)
        try:
            yield replace(execution, idle=idle)
        finally:
            idle.close()


class IdleWorkers:
    """Workers without an engine, by what they run on. Their logs lie in `folder`, which outlives those of engines."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count(1)
        self._free: dict[tuple[str, ...], list[Worker]] = {}

    def start(self, log: Path, device: Device) -> Worker:
        """A worker that waits, or else a new one: a `StartWorker`."""
        free = self._free.get(device.parts, [])
        while free:
            worker = free.pop()
            if worker.alive:
                return worker
            worker.kill()
        return runner.start_worker(self._folder / f"{next(self._numbers)}-{log.name}", device)

    def keep(self, worker: Worker, device: Device) -> None:
        """Let a worker wait: the next engine that opens there frees what this one has built."""
        self._free.setdefault(device.parts, []).append(worker)

    def close(self) -> None:
        for free in self._free.values():
            while free:
                free.pop().kill()
