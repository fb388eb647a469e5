"""A runner whose every build and round is scripted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.engines.runner import Handle
from qdqtune.errors import Failure
from qdqtune.types import Mix, Times, Turn, Workload
from refusals import or_raise


@dataclass
class Script:
    """Stands in for the runner. `speed(file, build)` is what one build of a file takes, in seconds; calls of `rounds`
    fail with `failures`, one after the other, and all in which a file with the stem `broken` runs."""

    speed: Callable[[str, int], float] = lambda _file, _build: 1.0
    refused: Callable[[str, int], Failure | None] = lambda _file, _build: None
    spoiled: float | Failure = 0.01
    """The error of the outputs of all builds but the first, or the failure in their place."""
    failures: list[Failure | None] = field(default_factory=list)
    broken: str = ""
    builds: list[Path] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    present: set[Handle] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    """How many builds ran in each call of `rounds`."""
    rounds_taken: int = 0
    memory = None
    mix: Mix = (Workload({}),)

    def load(self, path: Path, log_name: str = "", *, fresh: bool = False) -> Handle:
        kept = [handle for handle in self.present if handle.path == path]
        if kept and not fresh:
            return kept[0]
        handle = Handle(path, len(self.builds), 0.0)
        self.builds.append(path)
        self.logs.append(log_name)
        or_raise(self.refused(path.stem, handle.build))
        self.present.add(handle)
        return handle

    def unload(self, handle: Handle) -> None:
        self.present.remove(handle)

    def outputs(self, handle: Handle, samples: Any) -> list[dict[str, Any]]:
        assert handle in self.present
        error = self.spoiled if len(self.builds) > 1 else 0.0
        or_raise(error)
        return [{"y": np.array([1.0, -1.0]) + error} for _ in samples]

    def start_seconds(self, handle: Handle) -> float:
        return 0.0

    def turns(self, handles: Sequence[Handle], _: float) -> list[Turn]:
        assert set(handles) <= self.present
        return [Turn(1, 1, 1.0)]

    def rounds(self, handles: Sequence[Handle], numbers: range, **_: Any) -> Times:
        assert set(handles) <= self.present
        self.held.append(len(handles))
        self.rounds_taken += len(numbers)
        or_raise(Failure("run", "no") if self.broken in [one.path.stem for one in handles] else None)
        or_raise(self.failures.pop(0) if self.failures else None)
        return Times(tuple(((self.speed(one.path.stem, one.build),),) * len(numbers) for one in handles))

    def timed(self, handle: Handle, count: int, _: float) -> Times:
        return self.rounds([handle], range(count))
