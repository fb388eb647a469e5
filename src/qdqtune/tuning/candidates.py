"""Makes the file of a placement, and the build of a file that the engine holds ready."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Lock

from qdqtune.engines.runner import Handle, Runner
from qdqtune.graph.saving import ConstantFile, save
from qdqtune.placement.insertion import Inserter
from qdqtune.types import Failure, Placement


class Candidates:
    """Files of one model's placements, each written when it is first asked for, in the folder of `constants`. Several
    threads may ask."""

    def __init__(self, inserter: Inserter, constants: ConstantFile) -> None:
        self.folder = constants.path.parent
        self._inserter, self._constants = inserter, constants
        self._lock = Lock()
        self._used: Counter[Placement] = Counter()

    def file(self, placement: Placement) -> Path:
        """A small file of the placement that refers to the constants which all candidates share.

        Raises:
            OutputError: it cannot be written.
        """
        path = self.folder / f"{placement.digest}.onnx"
        with self._lock:
            if not path.exists():
                self._constants.save(self._inserter.insert(placement), path)
        return path

    def keep(self, placement: Placement) -> Path:
        """The file of a placement, which exists until `drop` was called as often as this."""
        with self._lock:
            self._used[placement] += 1
        return self.file(placement)

    def drop(self, placement: Placement) -> None:
        """Delete the file, unless another caller keeps it."""
        with self._lock:
            self._used[placement] -= 1
            if self._used[placement] <= 0:
                (self.folder / f"{placement.digest}.onnx").unlink(missing_ok=True)

    def write_whole(self, placement: Placement, path: Path) -> None:
        """Write a placement as a self-contained file.

        Raises:
            OutputError: it cannot be written.
        """
        save(self._inserter.insert(placement), path, self._constants)


class Loaded:
    """Builds of one model's placements on one device, each made when it is first asked for."""

    def __init__(self, runner: Runner, candidates: Candidates) -> None:
        self._candidates = candidates
        self._runner = runner
        self._loaded: dict[Placement, Handle] = {}

    def load(self, placement: Placement, log_name: str) -> Handle | Failure:
        """The build of a placement, made now if there is none; what the engine prints then goes to that log.

        Raises:
            OutputError: its file cannot be written.
        """
        if placement not in self._loaded:
            handle = self._runner.load(self._candidates.keep(placement), log_name)
            if isinstance(handle, Failure):
                self._candidates.drop(placement)
                return handle
            self._loaded[placement] = handle
        return self._loaded[placement]

    def drop(self, placement: Placement) -> None:
        """Unload a placement and delete its file, if it is loaded."""
        if placement in self._loaded:
            self._runner.unload(self._loaded.pop(placement))
            self._candidates.drop(placement)

    def keep_only(self, placement: Placement) -> None:
        """Unload every placement but this one."""
        for other in [p for p in self._loaded if p != placement]:
            self.drop(other)
