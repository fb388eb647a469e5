"""The proof: the files that may ship meet the user's own on fresh builds, and what is not faster does not ship."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from qdqtune.errors import BaselineFailed, writing
from qdqtune.graph.constants import places
from qdqtune.graph.files import data_of
from qdqtune.graph.loading import files_of, load, read
from qdqtune.graph.outputs import appearing, exchange
from qdqtune.graph.stamps import content
from qdqtune.measurement.pairing import fresh_pairs
from qdqtune.measurement.timing import Plan, Ratio, envelope, ratio
from qdqtune.tuning import advice
from qdqtune.tuning.folder import BASELINE, FINAL
from qdqtune.tuning.run import Run
from qdqtune.tuning.settings import PROOF_BUILDS
from qdqtune.tuning.store import Record, Store, pack_result, unpack_result
from qdqtune.types import Failure, Measurement, Placement, Trial

FINALISTS = 2
"""Placements that may try to prove themselves."""

PAIRS = 2
"""Pairs of builds that a comparison of the proof takes."""

SIDE_BY_SIDE = 512 * 2**20
"""Bytes of two model files of which two builds each are held at once; larger ones meet one pair after the other."""

T = TypeVar("T")

TRIES = 3
"""How often a comparison is tried that was killed, too slow or short of room: what ships must not hang on that."""


@dataclass(frozen=True)
class Proof:
    """What ships ("tuned", "baseline", or "given": a copy of the user's file), and how it compares.

    `ratio` is the final file's to the float model, `to_given` that to the user's file where this has pairs already;
    both None where nothing is proven. Seconds per inference are medians.
    """

    shipped: str
    placement: Placement
    ratio: Ratio | None
    to_given: Ratio | None
    float_seconds: float
    final_seconds: float
    notes: tuple[str, ...]
    builds: int


@dataclass(frozen=True)
class Confirmed:
    """File b to file a, and the median seconds per inference of each."""

    ratio: Ratio
    a_seconds: float
    b_seconds: float

    @classmethod
    def of(cls, measured: Sequence[Measurement], plan: Plan) -> Self:
        """What several pairs of builds say together."""
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        b_seconds = float(np.median([seconds for m in measured for seconds in m.b]))
        return cls(envelope([ratio(m, plan) for m in measured]), a_seconds, b_seconds)


@dataclass(frozen=True)
class _Meeting:
    """A file against the float model and against the user's own file; the latter None if the engine does not run it."""

    to_float: Ratio
    to_given: Ratio | None
    float_seconds: float
    seconds: float
    builds: int
    note: str = ""


def prove(history: Sequence[Trial], run: Run) -> Proof:
    """Write the files that may ship, and pair them as they lie on disk.

    The search's favourite is flattered by its luck. Where it does not prove itself, the one before it gets a chance.
    In the end the float model as we write it meets the user's file, and is not to be slower either, unless there is no
    time for that.

    Raises:
        BaselineFailed: the engine fails on a finished file.
        OutputError: a file cannot be written.
    """
    settings, folder = run.settings, run.settings.output_dir
    baseline, final = folder / BASELINE, _unproven(run)
    run.candidates.write_whole(Placement(), baseline)
    accepted = [t.placement for t in reversed(history) if t.accepted]
    pairs_hold = settings.from_qdq and not any(t.proposal.origin == "imported" and t.holds is False for t in history)
    notes: dict[str, None] = {}
    builds = 0
    met, is_short = None, not history and settings.time_budget is not None
    finalists = FINALISTS if settings.time_budget is None else 1
    for placement in (*accepted[:finalists], Placement()):
        begun = time.monotonic()
        if not placement and is_short:
            break
        run.candidates.write_whole(placement, final)
        met = _meet(placement, run)
        builds += met.builds
        notes |= {met.note: None} if met.note else {}
        is_short = run.budget.lacks(time.monotonic() - begun)
        is_faster = met.to_float.verdict == "faster"
        if pairs_hold and met.to_given is not None:
            is_faster = is_faster and met.to_given.verdict == "faster"
        run.given.check()
        if placement and is_faster:
            _move(final, folder / FINAL)
            to_given = met.to_given if settings.from_qdq else None
            seconds = met.float_seconds, met.seconds
            return Proof("tuned", placement, met.to_float, to_given, *seconds, tuple(notes), builds)
        if placement:
            edges = f"a candidate of {len(placement)} edges"
            notes[f"{edges} did not prove faster on fresh builds: {advice.unproven(met.to_float)}"] = None
    is_slower = met is not None and met.to_given is not None and met.to_given.verdict == "slower"
    is_given = pairs_hold if settings.from_qdq else is_slower
    copy_model(settings.model if is_given else baseline, folder / FINAL)
    kept = "given" if is_given else "baseline"
    float_seconds = run.bench.float_seconds if met is None else met.float_seconds
    return Proof(kept, Placement(), None, None, float_seconds, float_seconds, tuple(notes), builds)


def _unproven(run: Run) -> Path:
    """Where the file that is to prove itself lies: it moves to its place when it has."""
    return run.candidates.folder / FINAL


def _meet(placement: Placement, run: Run) -> _Meeting:
    """A float file of the user's is the float model: only beside pairs, or where the engine does not run it as it is,
    the baseline that we write takes its place."""
    settings, final = run.settings, _unproven(run)
    given = confirm(f"given:{placement.digest}", settings.model, final, run)
    to_given, note = (None, given.reason) if isinstance(given, Failure) else (given.ratio, "")
    if isinstance(given, Confirmed) and not settings.from_qdq:
        return _Meeting(given.ratio, given.ratio, given.a_seconds, given.b_seconds, PROOF_BUILDS)
    if note:
        note = f"the engine does not run {settings.model.name} as it is, so it was not compared: {note}"
    beside = confirm(f"proof:{placement.digest}", settings.output_dir / BASELINE, final, run)
    if isinstance(beside, Failure):
        raise BaselineFailed(f"the engine failed on the finished files: {beside.reason}")
    builds = PROOF_BUILDS * (1 if note else 2)
    return _Meeting(beside.ratio, to_given, beside.a_seconds, beside.b_seconds, builds, note)


def confirm(key: str, a: Path, b: Path, run: Run) -> Confirmed | Failure:
    """Two files as they lie on disk, in fresh rounds on two fresh builds of each; kept in the store by `key`.

    What was measured of files that held anything else does not count.
    """
    files: Record = {"files": [content(files_of(a)), content(files_of(b))]}
    records = {number: known(run.store, f"{key}:{number}", files) for number in range(PAIRS)}
    measured = {number: unpack_result(record) for number, record in records.items() if record is not None}
    missing = [number for number, record in records.items() if record is None]
    weight = sum(file.stat().st_size for model in (a, b) for file in files_of(model))
    turns = ([missing] if weight <= SIDE_BY_SIDE else [[number] for number in missing]) if missing else []
    for done, numbers in enumerate(turns):
        if any(isinstance(result, Failure) for result in measured.values()):
            break
        run.observer.progress(done, len(turns))
        results = insist(partial(_fresh, run, a, b, numbers, len(turns) - done))
        told: Sequence[Measurement | Failure] = [results] if isinstance(results, Failure) else results
        for number, result in zip(numbers, told, strict=False):
            measured[number] = unpack_result(run.store.put(f"{key}:{number}", pack_result(result) | files))
    failed = next((result for result in measured.values() if isinstance(result, Failure)), None)
    whole = [result for _, result in sorted(measured.items()) if isinstance(result, Measurement)]
    return failed or Confirmed.of(whole, run.settings.proof_plan)


def known(store: Store, key: str, files: Record) -> Record | None:
    """The record of a comparison of those very files; earlier versions did not record what these held."""
    record = store.get(key)
    return record if record is not None and record.get("files", files["files"]) == files["files"] else None


def _fresh(run: Run, a: Path, b: Path, numbers: Sequence[int], turns: int) -> list[Measurement] | Failure:
    """The rounds of pairs of builds, in the first of so many turns that have to have room in the time that is left."""
    settings, begun = run.settings, time.monotonic()
    seeds, names = [settings.seed + number for number in numbers], [f"final_{number}" for number in numbers]

    def is_late() -> bool:
        """Each look takes about as long as all before it; later turns are to have the time of this one."""
        return run.budget.lacks(turns * (time.monotonic() - begun))

    return fresh_pairs(run.runner, a, b, settings.proof_plan, seeds, names, is_late)


def insist(ask: Callable[[], T | Failure]) -> T | Failure:
    """What is asked for, tried again where the failure is transient."""
    result = ask()
    for _ in range(TRIES - 1):
        if not (isinstance(result, Failure) and result.is_transient):
            break
        result = ask()
    return result


def _move(source: Path, target: Path) -> None:
    """Move a model of ours, with the file of its constants where it has one."""
    with writing(target):
        both = [(data_of(source), data_of(target)), (source, target)]
        exchange([(old, new) for old, new in both if old.exists()], source.with_name("replaced"))


def copy_model(source: Path, target: Path) -> None:
    """Copy a model to another folder or name, and the external data that it refers to. The copy is loaded before it
    gets its name.

    Raises:
        BadModel: it cannot be loaded.
        OutputError: it cannot be written.
    """
    data = places(read(source))
    missing = [
        p for p in data if not ((target.parent / p).exists() and (target.parent / p).samefile(source.parent / p))
    ]
    with appearing(target) as fresh:
        shutil.copyfile(source, fresh)
        for place in missing:
            copy = fresh.parent / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / place, copy)
        if len(missing) == len(data):  # else the others lie beside the target
            load(fresh)
