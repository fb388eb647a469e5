"""`qdqtune compare`: a user's own files against each other, measured as a search measures its candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration.samples import InputSpec, input_specs
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadOption, EngineFailure
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.measurement.accuracy import sqnr_db
from qdqtune.measurement.pairing import fresh_pair
from qdqtune.measurement.timing import Plan, Ratio, Verdict, envelope, ratio
from qdqtune.tuning.observer import Observer, Silent
from qdqtune.types import Array, Failure, Measurement, Sample


@dataclass(frozen=True)
class Row:
    """One file against the first: median latencies in ms, ratio b/a, and output SQNR against the first in dB.

    `reason` says why there is no ratio; `rounds` are those of each pair of builds.
    """

    file: str
    first_ms: float | None
    ms: float | None
    ratio: Ratio | None
    sqnr_db: float | None
    reason: str = ""
    rounds: tuple[Measurement, ...] = ()

    @property
    def verdict(self) -> Verdict | None:
        """Faster or slower than the first file, if the interval says so."""
        return self.ratio.verdict if self.ratio else None

    def as_json(self) -> dict[str, Any]:
        """The row for machines."""
        told = asdict(self) | {"verdict": self.verdict}
        return {name: value for name, value in told.items() if name != "rounds"}


def comparable(files: Sequence[Path]) -> list[Model]:
    """The models in the files.

    Raises:
        BadModel: one of them cannot be read.
        BadOption: fewer than two files, or one that takes other inputs than the first.
    """
    if len(files) < 2:
        raise BadOption("compare needs at least two files")
    models = [load(file) for file in files]
    wanted, *others = [{spec.name: spec for spec in input_specs(model)} for model in models]
    for file, specs in zip(files[1:], others, strict=True):
        if specs.keys() != wanted.keys() or not all(_agree(specs[name], wanted[name]) for name in wanted):
            raise BadOption(f"{file} takes other inputs ({_listed(specs)}) than {files[0]} ({_listed(wanted)})")
    return models


def compare_files(
    files: Sequence[Path],
    runner: Runner,
    samples: Sequence[Sample],
    plan: Plan,
    *,
    builds: int = 2,
    seed: int = 0,
    observer: Observer | None = None,
) -> list[Row]:
    """Pair the first file with each of the others, on `builds` fresh builds of both.

    Raises:
        EngineFailure: the engine cannot build or run the first file.
    """
    observer = observer or Silent()
    observer.stage(f"running {files[0].name}")
    runner.feed(samples[0])
    reference = _outputs(files[0], runner, samples)
    if isinstance(reference, Failure):
        raise EngineFailure(f"{files[0]} does not run, so there is nothing to compare with: {reference.reason}")
    rows = []
    for file in files[1:]:
        observer.stage(f"timing {file.name} against {files[0].name}")
        results = [
            fresh_pair(runner, files[0], file, plan, seed + build, f"compare_{build}") for build in range(builds)
        ]
        measured = [r for r in results if isinstance(r, Measurement)]
        failed = [r for r in results if isinstance(r, Failure)]
        if failed:
            rows.append(Row(str(file), None, None, None, None, failed[0].reason))
        else:
            rows.append(_row(file, measured, plan, _accuracy(file, runner, samples, reference)))
    return rows


def _agree(a: InputSpec, b: InputSpec) -> bool:
    """Whether one array can fit both: an unknown dimension fits every size."""
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        return False
    return all(None in (m, n) or m == n for m, n in zip(a.shape, b.shape, strict=True))


def _listed(specs: Mapping[str, InputSpec]) -> str:
    return ", ".join(map(str, specs.values()))


def _row(file: Path, measured: Sequence[Measurement], plan: Plan, sqnr: float | None) -> Row:
    both = envelope([ratio(m, plan) for m in measured])
    first = 1e3 * float(np.median([s for m in measured for s in m.a]))
    other = 1e3 * float(np.median([s for m in measured for s in m.b]))
    return Row(str(file), first, other, both, sqnr, rounds=tuple(measured))


def _outputs(file: Path, runner: Runner, samples: Sequence[Sample]) -> list[dict[str, Array]] | Failure:
    handle = runner.load(file, f"compare_{file.stem}")
    if isinstance(handle, Failure):
        return handle
    outputs = runner.outputs(handle, samples)
    runner.unload(handle)
    return outputs


def _accuracy(file: Path, runner: Runner, samples: Sequence[Sample], reference: list[dict[str, Array]]) -> float | None:
    """Output SQNR against the first file, or None where the outputs are equal or do not correspond."""
    outputs = _outputs(file, runner, samples)
    if isinstance(outputs, Failure) or outputs[0].keys() != reference[0].keys():
        return None
    if any(o[k].shape != r[k].shape for o, r in zip(outputs, reference, strict=True) for k in r):
        return None
    return sqnr_db(reference, outputs)
