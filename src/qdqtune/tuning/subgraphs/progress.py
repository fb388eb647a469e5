"""Progress of a subgraph run as a file to read, for people and scripts.

A run goes on from its state file. The lines of that are in here as well: where they are all that is left of an earlier
run, they become the state file again (`restored_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdqtune.search.costs.profiles import Profile
from qdqtune.search.costs.units import Partition
from qdqtune.system.writing import write_json
from qdqtune.tuning.folder import PROGRESS
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.store import Store
from qdqtune.tuning.subgraphs.profiler import GroupKind
from qdqtune.types import Trial


class CacheFile(Silent):
    """Follows a run, and writes the file anew after each answer.

    Every method raises OutputError if the file cannot be written.
    """

    def __init__(self, folder: Path, parts: Partition, kinds: Sequence[GroupKind], store: Store) -> None:
        self._path, self._store = folder / PROGRESS, store
        self._left = len(kinds)
        names = {u.number: [parts.model.nodes[n].name for n in u.nodes] for kind in kinds for u in kind.units}
        self._groups: dict[int, dict[str, Any]] = {
            k.number: {"groups": [names[u.number] for u in k.units]} for k in kinds
        }
        self._validation: list[dict[str, Any]] = []

    def timed(self, kind: GroupKind, profile: Profile) -> None:
        """A kind of group was timed alone (or found in the state of an earlier run)."""
        self._groups[kind.number] |= {
            "float_ms": profile.float_ms,
            "schemes_ms": {option.scheme: option.ms for option in profile.options},
            "failures": dict(profile.failures),
        }
        self._left -= 1
        self._write()

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        row = {"number": trial.number, "origin": trial.proposal.origin, "edges": len(trial.placement)}
        self._validation.append(row | {"verdict": outcome, "best_ratio": state.best_ratio})
        self._write()

    def _write(self) -> None:
        phase = "timing groups alone" if self._left else "validating on the whole model"
        content = {"phase": phase, "profiling": list(self._groups.values()), "validation": self._validation}
        write_json(self._path, content | {"state": self._store.lines()})
