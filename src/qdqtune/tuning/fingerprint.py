"""The fingerprint of a run: its state file begins with it, and is refused by runs with another one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from qdqtune.calibration.workloads import description
from qdqtune.errors import reading
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.subject import Subject
from qdqtune.types import NumericFormat


class CalibrationData(msgspec.Struct, frozen=True):
    """Calibration data: a digest of its content, how many samples were asked for, and how many are held out."""

    digest: str
    samples: int | None
    held_out: int


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that measurements depend on; budgets are no part of it, nor are the rounds that they have room for:
    candidates and rewrites that a plan with fewer rounds has left open are measured again (see `ratios.is_cut_short`).
    Blocks of the proof are kept by the content of the files and by the looks, see `Racer`.

    Options come before entries that follow from them, so that the first difference is the one that the user made.
    """

    mode: str
    graph_json: str | None
    quant_type: str
    rewrites: str
    formats: tuple[str, ...] | None
    seed: int
    regions: Literal["auto", "names", "topology"]
    node_filter: tuple[str, ...]
    from_qdq: bool
    workloads: str | None
    input_shapes: dict[str, tuple[int | None, ...]]
    engine: dict[str, str]
    threads: tuple[int, ...]
    portable: bool | None = None
    numeric_format: NumericFormat
    model: str
    calibration_method: str
    calibration_data: CalibrationData
    calibration_cache: str | None
    scores: tuple[str, ...] | None = None


def fingerprint_of(settings: Settings, subject: Subject, engine: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of a run; `engine` is the description that the engine gives of itself.

    Raises:
        BadOption: a file that an option names cannot be read.
    """
    formats, data = settings.formats, subject.prepared.samples.digest
    return Fingerprint(
        mode=settings.mode,
        graph_json=_digest("`graph_json`", settings.graph_json),
        quant_type=settings.quant_type,
        rewrites=settings.rewrites,
        formats=None if formats is None else tuple("pairs" if f == settings.quant_type else f for f in formats),
        seed=settings.seed,
        regions=settings.regions,
        node_filter=settings.node_filter,
        from_qdq=settings.from_qdq,
        workloads=description(subject.mix) if settings.workloads else None,
        threads=tuple(count for count in settings.thread_counts if count is not None),
        portable=settings.portable or None,
        input_shapes={name: tuple(sizes) for name, sizes in sorted(subject.prepared.sizes.items())},
        engine=dict(engine),
        numeric_format=subject.numbers,
        model=subject.model.fingerprint,
        calibration_method=str(settings.calibration),
        calibration_data=CalibrationData(
            data, settings.calibration_samples, len(subject.accuracy) if subject.prepared.is_held_out else 0
        ),
        calibration_cache=_digest("`calibration_cache`", settings.calibration_cache),
        scores=settings.scores or None,
    )


def _digest(option: str, path: Path | None) -> str | None:
    with reading(f"{option} {path}"):
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
