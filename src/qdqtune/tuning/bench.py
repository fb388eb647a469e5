"""The bench: where a placement becomes a file, a build, outputs and samples. Everything that touches the engine."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Self

import numpy as np

from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BaselineFailed, EngineFailure, writing
from qdqtune.graph.files import ConstantFile, save
from qdqtune.measurement.accuracy import is_finite, sqnr_db
from qdqtune.measurement.limits import Limits
from qdqtune.measurement.metric import Evaluation, evaluate
from qdqtune.measurement.pairing import fresh_pair, rounds_of
from qdqtune.measurement.timing import Plan, Ratio, compare, envelope, judge, ratio
from qdqtune.placement.insertion import Inserter
from qdqtune.tuning.store import Record, Store, pack_layers, pack_placement, pack_result, unpack_layers, unpack_result
from qdqtune.types import Array, Failure, Layer, Measurement, Placement, Proposal, Sample, Trial

FUTILE = 0.997
"""A candidate whose median ratio is no better than this at a look is not worth more rounds."""


PROFILED = (12, 400)
"""The least and the most inferences behind a layer report."""

PROFILED_SECONDS = 0.05
"""How long they are to take in all, where that is within these numbers: short layers need many."""


class Bench:
    """Builds and times placements of one model against each other. Results are kept in a store, and never taken twice.

    A context manager: candidate files are deleted at the end.
    """

    def __init__(
        self,
        runner: Runner,
        inserter: Inserter,
        store: Store,
        folder: Path,
        plan: Plan,
        samples: Sequence[Sample],
        seed: int,
        *,
        limits: Limits | None = None,
        evaluation: Evaluation | None = None,
        check_wins: bool = True,
    ) -> None:
        self._runner, self._inserter, self._store = runner, inserter, store
        self._plan, self._samples, self._seed = plan, samples, seed
        self._limits, self._evaluation = limits or Limits(), evaluation
        self._check_wins = check_wins
        self._folder = folder
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._constants = ConstantFile(folder / "constants.bin")
        self._loaded: dict[Placement, Handle] = {}
        self._reference: list[dict[str, Array]] | None = None
        self._float_seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # on a full disk closing fails again
            self._constants.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, number: int, proposal: Proposal, against: Placement) -> tuple[Trial, bool]:
        """Time a candidate against another placement; and whether the result was in the store.

        A win is repeated at once on another build of both files: one build may be fast by the luck of its memory
        layout, and stays so in every round. A win that misses the limit on SQNR is repeated only when another run
        allows more, and one of a search that learns from layers never: it makes too few candidates for luck.

        Raises:
            BaselineFailed: the engine cannot run the float model.
            EngineFailure: the engine refuses the other placement, which it has built before.
        """
        key = job_key("trial", proposal.placement, against)
        record = self._store.get(key)
        trial = (
            self._measured(number, proposal, against) if record is None else _trial(number, proposal, against, record)
        )
        unchecked = self._needs_check(trial)
        if unchecked:
            trial = replace(trial, check=self._checked(trial))
        if record is None or unchecked:
            self._store.put(key, {
                "origin": proposal.origin, "pattern": proposal.pattern, "against": against.digest,
                "placement": pack_placement(proposal.placement), "sqnr_db": trial.sqnr_db,
                "result": pack_result(trial.result),
                "check": None if trial.check is None else pack_result(trial.check),
                "layers": None if trial.layers is None else pack_layers(trial.layers)})  # fmt: skip
        if proposal.placement in self._loaded and not self._won(trial):
            self._drop(proposal.placement)
        return trial, record is not None and not unchecked

    def metric(self, placement: Placement) -> float | Failure:
        """The user's metric of a placement, on the engine.

        Raises:
            BadOption: the user's function fails.
        """
        assert self._evaluation is not None  # nobody asks without --evaluate
        key = f"metric:{self._evaluation.digest}:{placement.digest}"
        record = self._store.get(key)
        if record is None:
            handle = self._load(placement, f"metric_{placement.digest}")
            found = handle if isinstance(handle, Failure) else evaluate(self._evaluation, self._runner, handle)
            record = self._store.put(key, {"failure": found.reason} if isinstance(found, Failure) else {"value": found})
        return Failure("run", record["failure"]) if "failure" in record else float(record["value"])

    def float_layers(self) -> tuple[Layer, ...]:
        """The layer report of the float build; empty if the engine has none.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        record = self._store.get("layers")
        if record is None:
            self.reference()
            found = self._runner.layers(self._loaded[Placement()], profiled_runs(self._float_seconds))
            record = self._store.put("layers", {"layers": [] if isinstance(found, Failure) else pack_layers(found)})
        return unpack_layers(record["layers"])

    def keep_only(self, placement: Placement) -> None:
        """Unload every model but this one, and the float model's outputs stay."""
        for other in [p for p in self._loaded if p != placement]:
            self._drop(other)

    def write_linked(self, placement: Placement, path: Path) -> None:
        """Write a placement as a small file in another folder, its constants linked there.

        Raises:
            OutputError: a file cannot be written.
        """
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            candidate = self._file(placement)
            self._constants.link_into(path.parent)
            shutil.copyfile(candidate, path)

    def write_whole(self, placement: Placement, path: Path) -> None:
        """Write a placement as a self-contained file."""
        save(self._inserter.insert(placement), path)

    def confirm(self, key: str, a: Path, b: Path, plan: Plan) -> Ratio | Failure:
        """Ratio of two files as they lie on disk, from fresh rounds on two fresh builds of each."""
        found: list[Ratio] = []
        for number in range(2):
            name = f"{key}:{number}"
            record = self._store.get(name)
            if record is None:
                result = fresh_pair(self._runner, a, b, plan, self._seed + number, f"final_{number}", _decided)
                record = self._store.put(name, pack_result(result))
            result = unpack_result(record)
            if isinstance(result, Failure):
                return result
            found.append(ratio(result, plan))
        return envelope(found)

    def latency(self, key: str) -> Measurement:
        """Both measurements of a confirmed pair as one."""
        parts = [unpack_result(r) for n in range(2) if (r := self._store.get(f"{key}:{n}")) is not None]
        good = [p for p in parts if isinstance(p, Measurement)]
        return Measurement(tuple(s for p in good for s in p.a), tuple(s for p in good for s in p.b))

    def reference(self) -> list[dict[str, Array]]:
        """The float model's outputs on the samples.

        Raises:
            BaselineFailed: the engine cannot build or run the float model.
        """
        if self._reference is None:
            handle = self._load(Placement(), "baseline")
            outputs = handle if isinstance(handle, Failure) else self._runner.outputs(handle, self._samples)
            if isinstance(outputs, Failure):
                raise BaselineFailed(f"the engine cannot run the float model: {outputs.reason}")
            timed = self._runner.rounds(
                self._loaded[Placement()],
                self._loaded[Placement()],
                1,
                seed=0,
                first_round=0,
                slot_seconds=0.0,
                warmup=0,
            )
            if isinstance(timed, Failure):
                raise BaselineFailed(f"the engine cannot time the float model: {timed.reason}")
            if not is_finite(outputs):
                raise BaselineFailed("the float model's outputs hold NaN or infinite values on the calibration data")
            self._reference = outputs
            self._float_seconds = timed.a[0]
        return self._reference

    def _measured(self, number: int, proposal: Proposal, against: Placement) -> Trial:
        reference = self.reference()
        opponent = self._load(against, "best")
        if isinstance(opponent, Failure):  # it was built before, so the candidate is not to blame
            raise EngineFailure(f"the engine does not build the best model so far again: {opponent.reason}")
        placement = proposal.placement
        candidate = self._load(placement, f"trial_{number:03}")
        if isinstance(candidate, Failure):
            return Trial(number, proposal, against, candidate)
        outputs = self._runner.outputs(candidate, self._samples)
        if isinstance(outputs, Failure):
            result: Measurement | Failure = outputs
        elif not is_finite(outputs):
            result = Failure("output", "the outputs hold NaN or infinite values")
        else:
            result = compare(
                rounds_of(self._runner, opponent, candidate, self._plan, self._seed), self._plan, decided=_settled
            )
        if isinstance(result, Failure) or isinstance(outputs, Failure):
            return Trial(number, proposal, against, result)
        runs = profiled_runs(float(np.median(result.b)))
        layers = self._runner.layers(candidate, runs) if proposal.wants_layers else None
        report = None if isinstance(layers, Failure) else layers
        return Trial(number, proposal, against, result, sqnr_db=sqnr_db(reference, outputs), layers=report)

    def _won(self, trial: Trial) -> bool:
        """Whether a trial is a win as far as it was measured."""
        found = judge(trial, self._plan)
        return found is not None and found.verdict == "faster" and self._limits.is_exact_enough(trial.sqnr_db)

    def _needs_check(self, trial: Trial) -> bool:
        is_one_of_many = self._check_wins and not trial.proposal.wants_layers
        return is_one_of_many and trial.check is None and self._won(trial)

    def _checked(self, trial: Trial) -> Measurement | Failure:
        files = self._file(trial.against), self._file(trial.placement)
        return fresh_pair(self._runner, *files, self._plan, self._seed + 1, f"trial_{trial.number:03}", _settled)

    def _file(self, placement: Placement) -> Path:
        path = self._folder / f"{placement.digest}.onnx"
        if not path.exists():
            self._constants.save(self._inserter.insert(placement), path)
        return path

    def _load(self, placement: Placement, log_name: str) -> Handle | Failure:
        if placement not in self._loaded:
            handle = self._runner.load(self._file(placement), log_name)
            if isinstance(handle, Failure):
                return handle
            self._loaded[placement] = handle
        return self._loaded[placement]

    def _drop(self, placement: Placement) -> None:
        self._runner.unload(self._loaded.pop(placement))
        self._file(placement).unlink(missing_ok=True)


def _trial(number: int, proposal: Proposal, against: Placement, record: Record) -> Trial:
    """What the store remembers of a trial."""
    check = None if record["check"] is None else unpack_result(record["check"])
    layers = None if record.get("layers") is None else unpack_layers(record["layers"])
    return Trial(number, proposal, against, unpack_result(record["result"]), check, record["sqnr_db"], layers)


def profiled_runs(seconds: float) -> int:
    """Inferences for a layer report of a model that takes so many seconds each."""
    least, most = PROFILED
    return most if seconds * most <= PROFILED_SECONDS else max(least, ceil(PROFILED_SECONDS / seconds))


def job_key(kind: str, placement: Placement, against: Placement) -> str:
    """The name of a job: a hash of its content, so that jobs may run in any order and be found again."""
    return kind + ":" + hashlib.sha256(f"{placement.digest}:{against.digest}".encode()).hexdigest()[:16]


def _settled(found: Ratio) -> bool:
    return found.verdict != "undecided" or found.median > FUTILE


def _decided(found: Ratio) -> bool:
    return found.verdict != "undecided"
