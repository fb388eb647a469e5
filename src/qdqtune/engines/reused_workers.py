"""Worker processes that several engines use one after the other: a process takes longer to start than many models to
run on all samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from qdqtune.engines import runner
from qdqtune.engines.devices import Device
from qdqtune.engines.execution import Execution
from qdqtune.engines.process import Worker
from qdqtune.system.writing import temporary_folder


@contextmanager
def reused_workers(execution: Execution) -> Iterator[Execution]:
    """`execution` with workers that are used again; they end with the block, or with that of the caller, if the caller
    has such a block already."""
    if execution.start is not None:
        yield execution
        return
    with temporary_folder() as folder:
        idle = _Idle(folder)
        try:
            yield replace(execution, start=idle.start)
        finally:
            idle.close()


class _Idle:
    """Workers without an engine, by what they run on. Their logs lie in `folder`, which outlives those of engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[tuple[str, ...], list[Worker]] = {}
        self._count = 0

    def start(self, log: Path, device: Device) -> Worker:
        """A worker that waits, or else a new one: a `StartWorker`."""
        free = self._free.setdefault(device.parts, [])
        while free:
            worker = free.pop()
            if worker.alive:
                return _Lent(worker, free)
            worker.kill()
        self._count += 1
        return _Lent(runner.start_worker(self._folder / f"{self._count}-{log.name}", device), free)

    def close(self) -> None:
        for free in self._free.values():
            while free:
                free.pop().kill()


class _Lent:
    """A worker that is put among the `free` ones when it is killed, unless it still owes an answer."""

    def __init__(self, worker: Worker, free: list[Worker]) -> None:
        self._worker, self._free = worker, free
        self._has_answered, self._is_mine = True, True

    @property
    def alive(self) -> bool:
        return self._is_mine and self._worker.alive

    @property
    def location(self) -> str:
        return self._worker.location

    def request(self, name: str, arguments: tuple[Any, ...], limit: float) -> tuple[bool, Any]:
        self._has_answered = False
        answer = self._worker.request(name, arguments, limit)
        self._has_answered = True
        return answer

    def kill(self) -> None:
        """Give the worker back: the next engine that opens there frees what this one has built. One that owes an answer
        would give it to the next request, so it ends."""
        if not self._is_mine:
            return
        self._is_mine = False
        if self._has_answered and self._worker.alive:
            self._free.append(self._worker)
        else:
            self._worker.kill()

    def exit_reason(self) -> str:
        return self._worker.exit_reason()

    def printed(self) -> str:
        return self._worker.printed()
