"""Files that meet: two of them as they lie on disk, on fresh builds of both, at a number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from qdqtune.engines.runner import Handle
from qdqtune.errors import BaselineFailed
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import nbytes
from qdqtune.system.checks import content_digest
from qdqtune.timing.pairing import as_many_pairs_as_needed, fresh_pairs, rounds_of
from qdqtune.timing.ratios import (
    BUILD_LOOKS,
    PAIRS,
    USUAL,
    Plan,
    Ratio,
    Spread,
    across_builds,
    compare,
    on_these_builds,
    ratio,
    spread_of,
)
from qdqtune.tuning.folder import BASELINE
from qdqtune.tuning.records import ComparisonRecord, Outcome
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.store import Store
from qdqtune.tuning.threads import Place
from qdqtune.types import Failure, Measurement, Placement

SIDE_BY_SIDE = 512 * 2**20
"""Bytes of two model files of which two builds each are held at once; larger ones meet one pair after the other."""

LEAST_SECONDS = 3.0
"""How long a point of a front meets a build at least, but for the last look: what else the machine does by turns shows
in all of them, and not in some."""

LOOKS = (1, *BUILD_LOOKS)
"""After how many pairs of builds a front looks: many points together may tell from one what two tell of a point alone.
"""

TRIES = 3
"""How often a comparison is tried that was killed, too slow or short of room: what ships must not hang on that."""

T = TypeVar("T")


@dataclass(frozen=True)
class Confirmed:
    """File b to file a, the median seconds per inference of each, and the builds that it took to know; `parts` say the
    same of each of several workloads."""

    ratio: Ratio
    a_seconds: float
    b_seconds: float
    builds: int = PROOF_BUILDS
    parts: tuple[Confirmed, ...] = ()

    @classmethod
    def of(
        cls, measured: Sequence[Measurement], plan: Plan, seen: Spread = USUAL, looks: int = len(BUILD_LOOKS)
    ) -> Self:
        """What several pairs of builds say together, at one of so many looks; `seen` is how much builds differ, as far
        as others have shown."""
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        b_seconds = float(np.median([seconds for m in measured for seconds in m.b]))
        both = across_builds([ratio(m, plan) for m in measured], plan, seen, looks)
        parts = tuple(cls.of(same, plan, seen, looks) for same in zip(*(m.parts for m in measured), strict=True))
        return cls(both, a_seconds, b_seconds, 2 * len(measured), parts)


def confirmed(measured: Sequence[Sequence[Measurement | Failure]], plan: Plan) -> list[Confirmed | None]:
    """What all pairs of builds of several files say of each, None where one failed. All have met the same builds of the
    user's file, and together they show how much builds differ."""
    parts = [[m for m in row if isinstance(m, Measurement)] for row in measured]
    rows = [[ratio(m, plan) for m in row[:PAIRS]] for row in parts]
    found = list[Confirmed | None]()
    for at, (row, known) in enumerate(zip(parts, measured, strict=True)):
        others = [other for number, other in enumerate(rows) if number != at and len(other) == PAIRS]
        is_whole = 0 < len(row) == len(known)
        found.append(Confirmed.of(row, plan, USUAL + spread_of(others), len(LOOKS)) if is_whole else None)
    return found


def confirm(key: str, a: Path, b: Path, run: Run, place: Place, *, is_won: bool = False) -> Confirmed | Failure:
    """Two files as they lie on disk, in fresh rounds on two fresh builds of each, or on more where these do not
    decide; kept in the store by `key` and place. `is_won`: elsewhere b has won, and here it is only not to be slower.

    What was measured of files that held anything else does not count.
    """
    pair, plan, begun = _Pair(key + place.suffix, a, b, run, place), run.settings.proof_plan, time.monotonic()

    def is_enough(ratios: Sequence[Ratio]) -> bool:
        is_settled = is_won and on_these_builds(ratios).median <= 1
        return is_settled or run.budget.lacks(time.monotonic() - begun)

    measured = as_many_pairs_as_needed(pair.builds, plan, is_enough)
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
        files = content_digest(files_of(self.a)), content_digest(files_of(self.b))
        store, least = self.run.store, self.run.settings.proof_plan.looks[0]
        records = {number: known(store, f"{self.key}:{number}", files, least) for number in numbers}
        measured = {number: record.result.result for number, record in records.items() if record is not None}
        missing = [number for number, record in records.items() if record is None]
        is_small = sum(map(nbytes, both)) <= SIDE_BY_SIDE
        size = PAIRS if is_small else 1
        turns = [missing[at : at + size] for at in range(0, len(missing), size)]
        for done, turn in enumerate(turns):
            if any(isinstance(result, Failure) for result in measured.values()):
                break
            self.run.observer.progress(done, len(turns))
            results = patiently(partial(self._fresh, turn, len(turns) - done))
            told: Sequence[Measurement | Failure] = [results] if isinstance(results, Failure) else results
            for number, result in zip(turn, told, strict=False):
                store.put(ComparisonRecord(of=f"{self.key}:{number}", result=Outcome.of(result), files=files))
                measured[number] = result
        failed = next((result for result in measured.values() if isinstance(result, Failure)), None)
        return failed or [result for _, result in sorted(measured.items()) if isinstance(result, Measurement)]

    def _fresh(self, numbers: Sequence[int], turns: int) -> list[Measurement] | Failure:
        """Rounds of pairs of builds, in the first of so many turns that have to have room in the time that is left."""
        plan, begun = self.run.settings.proof_plan, time.monotonic()
        seeds = [self.run.settings.seed + number for number in numbers]
        names = [f"final_{number}{self.place.mark}" for number in numbers]

        def is_late() -> bool:
            """Each look takes about as long as all before it; later turns are to have the time of this one."""
            return self.run.budget.lacks(turns * (time.monotonic() - begun))

        return fresh_pairs(self.place.runner, self.a, self.b, plan, seeds, names, is_late, to_decide=True)


class Opponents:
    """Fresh builds of the user's file at a place, by number, which many files meet one after the other; of the float
    model as we write it where the engine does not run that. A context manager.

    `builds` is what all meetings took, as if none of them were known from before.
    """

    def __init__(self, run: Run, place: Place) -> None:
        self._run, self._place = run, place
        self._handles: dict[int, Handle | None] = {}
        self._stay = PAIRS if 2 * nbytes(run.settings.model) <= SIDE_BY_SIDE else 0
        self.builds = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._leave(list(self._handles))

    def is_open(self, number: int) -> bool:
        """Whether a further meeting with that build takes no build of the user's file."""
        return number in self._handles

    def meet(
        self, number: int, placement: Placement, file: Path, look: Callable[[Handle], None] | None = None
    ) -> Measurement | Failure:
        """The rounds of a fresh build of a file against the build of that number, from the store where it has them and
        nobody wants to `look` at the build.

        Raises:
            BaselineFailed: the engine does not build the float model again.
        """
        run = self._run
        if number not in self._handles:
            self._leave([other for other in self._handles if other >= self._stay])
            self._handles[number] = None
            self.builds += 1
        self.builds += 1
        files = content_digest(files_of(run.settings.model)), content_digest(files_of(file))
        key = f"front:{placement.digest}{self._place.suffix}:{number}"
        record = known(run.store, key, files, run.settings.proof_plan.looks[0])
        if record is None or look is not None:
            result = Outcome.of(patiently(partial(self._fresh, number, file, look)))
            record = run.store.put(ComparisonRecord(of=key, result=result, files=files))
        return record.result.result

    def _fresh(self, number: int, file: Path, look: Callable[[Handle], None] | None) -> Measurement | Failure:
        runner, plan = self._place.runner, self._run.settings.proof_plan
        handle = runner.load(file, f"front_{number}{self._place.mark}_{file.stem}", fresh=True)
        if isinstance(handle, Failure):
            return handle
        if look is not None:
            look(handle)
        rounds = rounds_of(runner, self._handle(number), handle, plan, self._run.settings.seed + number)
        begun = time.monotonic()

        def is_told(found: Ratio) -> bool:
            return found.verdict != "undecided" and time.monotonic() - begun >= LEAST_SECONDS

        result = compare(rounds, plan, decided=is_told)
        runner.unload(handle)
        return result

    def _handle(self, number: int) -> Handle:
        found = self._handles[number]
        settings = self._run.settings
        for file, name in ((settings.model, "given"), (settings.output_dir / BASELINE, "baseline")):
            if found is None:
                built = self._place.runner.load(file, f"front_{number}{self._place.mark}_{name}", fresh=True)
                if isinstance(built, Failure) and (built.is_transient or name == "baseline"):
                    raise BaselineFailed(f"the engine does not build the float model again: {built.reason}")
                found = None if isinstance(built, Failure) else built
        assert found is not None  # else it has raised
        self._handles[number] = found
        return found

    def _leave(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (handle := self._handles.pop(number)) is not None:
                self._place.runner.unload(handle)


def known(store: Store, of: str, files: tuple[str, str], least: int) -> ComparisonRecord | None:
    """The record of a comparison of those very files, with at least so many rounds if it did not fail."""
    record = store.get(ComparisonRecord, of)
    if record is None or record.files != files:
        return None
    samples = record.result.samples
    return record if samples is None or len(samples.a) >= least else None


def patiently(ask: Callable[[], T | Failure]) -> T | Failure:
    """What is asked for, tried again where the failure is transient."""
    result = ask()
    for _ in range(TRIES - 1):
        if not (isinstance(result, Failure) and result.is_transient):
            break
        result = ask()
    return result
