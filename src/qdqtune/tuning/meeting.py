"""Files that meet: two of them as they lie on disk, on fresh builds of both, at a number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from qdqtune.graph.files import nbytes
from qdqtune.graph.loading import files_of
from qdqtune.graph.stamps import content
from qdqtune.measurement.pairing import as_many_pairs_as_needed, fresh_pairs
from qdqtune.measurement.timing import PAIRS, Plan, Ratio, across_builds, ratio
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.store import Record, Store, pack_result, unpack_result
from qdqtune.tuning.threads import Place
from qdqtune.types import Failure, Measurement

SIDE_BY_SIDE = 512 * 2**20
"""Bytes of two model files of which two builds each are held at once; larger ones meet one pair after the other."""

TRIES = 3
"""How often a comparison is tried that was killed, too slow or short of room: what ships must not hang on that."""

T = TypeVar("T")


@dataclass(frozen=True)
class Confirmed:
    """File b to file a, the median seconds per inference of each, and the builds that it took to know."""

    ratio: Ratio
    a_seconds: float
    b_seconds: float
    builds: int = PROOF_BUILDS

    @classmethod
    def of(cls, measured: Sequence[Measurement], plan: Plan) -> Self:
        """What several pairs of builds say together."""
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        b_seconds = float(np.median([seconds for m in measured for seconds in m.b]))
        return cls(across_builds([ratio(m, plan) for m in measured], plan), a_seconds, b_seconds, 2 * len(measured))


def confirm(key: str, a: Path, b: Path, run: Run, place: Place) -> Confirmed | Failure:
    """Two files as they lie on disk, in fresh rounds on two fresh builds of each; kept in the store by `key` and place.

    What was measured of files that held anything else does not count.
    """
    pair, plan, begun = _Pair(key + place.suffix, a, b, run, place), run.settings.proof_plan, time.monotonic()
    measured = as_many_pairs_as_needed(pair.builds, plan, lambda: run.budget.lacks(time.monotonic() - begun))
    return measured if isinstance(measured, Failure) else Confirmed.of(measured, plan)


@dataclass(frozen=True)
class _Pair:
    """Two files and where they meet; `key` is that of their records."""

    key: str
    a: Path
    b: Path
    run: Run
    place: Place

    def builds(self, numbers: Sequence[int]) -> list[Measurement] | Failure:
        """Pairs of builds by number, from the store where it has them: all in turns, but for large files."""
        both = self.a, self.b
        files: Record = {"files": [content(files_of(file)) for file in both]}
        store, least = self.run.store, self.run.settings.proof_plan.looks[0]
        records = {number: known(store, f"{self.key}:{number}", files, least) for number in numbers}
        measured = {number: unpack_result(record) for number, record in records.items() if record is not None}
        missing = [number for number, record in records.items() if record is None]
        is_small = sum(map(nbytes, both)) <= SIDE_BY_SIDE
        size = PAIRS if is_small else 1
        turns = [missing[at : at + size] for at in range(0, len(missing), size)]
        for done, turn in enumerate(turns):
            if any(isinstance(result, Failure) for result in measured.values()):
                break
            self.run.observer.progress(done, len(turns))
            results = insist(partial(self._fresh, turn, len(turns) - done))
            told: Sequence[Measurement | Failure] = [results] if isinstance(results, Failure) else results
            for number, result in zip(turn, told, strict=False):
                measured[number] = unpack_result(store.put(f"{self.key}:{number}", pack_result(result) | files))
        failed = next((result for result in measured.values() if isinstance(result, Failure)), None)
        return failed or [result for _, result in sorted(measured.items()) if isinstance(result, Measurement)]

    def _fresh(self, numbers: Sequence[int], turns: int) -> list[Measurement] | Failure:
        """Rounds of pairs of builds, in the first of so many turns that have to have room in the time that is left."""
        settings, begun = self.run.settings, time.monotonic()
        seeds = [settings.seed + number for number in numbers]
        names = [f"final_{number}{self.place.suffix.replace(':', '_')}" for number in numbers]

        def is_late() -> bool:
            """Each look takes about as long as all before it; later turns are to have the time of this one."""
            return self.run.budget.lacks(turns * (time.monotonic() - begun))

        return fresh_pairs(self.place.runner, self.a, self.b, settings.proof_plan, seeds, names, is_late)


def known(store: Store, key: str, files: Record, least: int) -> Record | None:
    """The record of a comparison of those very files, with at least so many rounds if it did not fail; earlier versions
    did not record what the files held."""
    record = store.get(key)
    if record is None or record.get("files", files["files"]) != files["files"]:
        return None
    return record if "failure" in record or len(record["samples"]["a"]) >= least else None


def insist(ask: Callable[[], T | Failure]) -> T | Failure:
    """What is asked for, tried again where the failure is transient."""
    result = ask()
    for _ in range(TRIES - 1):
        if not (isinstance(result, Failure) and result.is_transient):
            break
        result = ask()
    return result
