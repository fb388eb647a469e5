"""The folder `deploy` of a run: settings.json says how to run the shipped model and under which conditions it was
measured; run.py runs it.

`qdqtune verify` reads the settings on another machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from qdqtune.calibration.inputs import input_specs
from qdqtune.engines import EngineSpec, threads_of
from qdqtune.engines.library_settings import library_settings, script_of
from qdqtune.errors import BadModel, BadOption, InputError, writing
from qdqtune.graph.loading import files_of, load
from qdqtune.graph.model_folder import companions
from qdqtune.system.checks import content_digest, file_digest, real
from qdqtune.system.writing import atomic_write, write_json
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.folder import BASELINE, DEPLOY_SCRIPT, DEPLOY_SETTINGS, FINAL, FRONT
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import at_threads
from qdqtune.tuning.store import Shipped, plain
from qdqtune.tuning.summary import Count, Positive, read_json

FORMAT = 1


@dataclass(frozen=True)
class Proven:
    """What was measured of the shipped model: latency relative to float with its interval, the numbers of threads at
    which it is not slower, the output SQNR in dB (None: exact or unknown), and the limits on outputs. `ratio` is None
    if the float model ships or nothing was `timed`. `unchecked`: its outputs were not compared with those of float."""

    ratio: Positive | None
    low: Positive | None
    high: Positive | None
    threads: tuple[Count, ...]
    sqnr_db: float | None
    min_sqnr_db: float | None
    min_agreement: float | None
    timed: bool = True
    unchecked: bool = False

    @property
    def speed(self) -> Ratio | None:
        """The ratio with its interval; None if the float model ships."""
        return None if self.ratio is None else Ratio(self.ratio, self.low, self.high)


class DeploySettings(msgspec.Struct, frozen=True, kw_only=True):
    """deploy/settings.json. Files are named from the folder of the run: `model` is the shipped file, `baseline` the
    float model, `sha256` has the digests of both and of their external data. `engine` describes the engine and the
    machine that measured, `spec` opens the engine, `library` has the settings that run.py gives the vendor's library.
    `inputs` has the type and shape of each. `fix_inputs` are as in placement.yaml, `scores` the outputs that the user
    declared as class scores, `data` the digest of the calibration data (empty without any). `given` is the user's file
    with its digest, if that was the float model compared with and `baseline` has rewrites or another precision."""

    format: int = FORMAT
    told: str
    shipped: Shipped
    model: Literal["optimized_final.onnx"] = "optimized_final.onnx"
    baseline: Literal["baseline.onnx"] = "baseline.onnx"
    sha256: dict[str, str]
    proven: Proven
    engine: dict[str, str]
    spec: EngineSpec
    library: dict[str, Any]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    fix_inputs: dict[str, float | int | str] = {}
    scores: tuple[str, ...] = ()
    data: str | None = None
    given: tuple[str, str] | None = None


def write_kit(run: Run, summary: Mapping[str, Any]) -> None:
    """Write the folder `deploy`, after the other files of the run; `summary` is the content of summary.json."""
    folder, spec, fed = run.settings.output_dir, run.settings.engine, run.subject.mix[0].inputs
    with writing(folder / DEPLOY_SCRIPT):
        (folder / DEPLOY_SCRIPT).parent.mkdir(exist_ok=True)
    with atomic_write(folder / DEPLOY_SCRIPT) as fresh:
        fresh.write_text(script_of(spec), encoding="utf-8")
    spec = EngineSpec(spec.name, {name: value for name, value in spec.options.items() if name != "timing_cache"})
    is_given = summary["shipped"] == "given"  # else the file has the inputs of the model that was read
    specs = input_specs(load(folder / FINAL) if is_given else run.subject.model)
    names = [one.name for one in specs if one.name in fed]
    inputs = {name: (str(fed[name].dtype), tuple(map(int, fed[name].shape))) for name in names}
    shipped, engine = summary["shipped"], summary["engine"]
    is_tuned = shipped == "tuned"
    proven = Proven(
        ratio=summary["ratio"] if is_tuned else None,
        low=summary["ratio_low"] if is_tuned else None,
        high=summary["ratio_high"] if is_tuned else None,
        threads=tuple(row["threads"] for row in summary["by_threads"] if row["verdict"] != "slower"),
        sqnr_db=summary["output_sqnr_db"],
        min_sqnr_db=summary["min_sqnr_db"],
        min_agreement=summary["min_agreement"],
        timed=summary["timed"],
        unchecked=summary["unchecked"],
    )
    row = next((row for row in summary["by_threads"] if row["ratio"] == proven.ratio), None)
    if row is not None and threads_of(spec) is not None:
        spec = EngineSpec(spec.name, {**spec.options, "threads": row["threads"]})
    if proven.speed is not None:
        at = at_threads(None if row is None else row["threads"])
        told = f"{FINAL}: proven {proven.speed.speedup} as fast as the float model{at}"
    elif not proven.timed and is_tuned:
        told = f"{FINAL}: not timed, the cheapest by rule that holds the limits on accuracy"
    else:
        own = "the float model" if shipped == "baseline" else "a copy of the file that was given"
        told = f"{FINAL} is {own}: nothing faster was proven"
    open_sizes = {one.name for one in specs if None in one.shape}
    sizes = {name: shape for name, (_, shape) in inputs.items() if name in open_sizes}
    given = None
    is_folded = bool(run.settings.fix_inputs) and not run.subject.rewrites.names
    if run.subject.changes and is_tuned and not run.settings.from_qdq and not is_folded:
        path = run.settings.model.absolute()
        given = str(path), content_digest(files_of(path))
    settings = DeploySettings(
        told=f"{told}, on {engine['engine']} {engine.get('version', '')}",
        shipped=shipped,
        sha256=digests(folder, (FINAL, BASELINE)),
        proven=proven,
        engine=engine,
        spec=spec,
        library=library_settings(spec, engine, sizes),
        inputs=inputs,
        fix_inputs=dict(run.settings.fix_inputs),
        scores=tuple(run.settings.scores),
        data=run.subject.prepared.samples.digest if run.settings.has_samples else "",
        given=given,
    )
    write_json(folder / DEPLOY_SETTINGS, plain(settings))


def copy_companions(run: Run) -> None:
    """Copy settings and tokenizers beside the user's model (see `model_folder`) to the run's folder, so that Optimum
    can load the shipped model."""
    folder = run.settings.output_dir
    for file in companions(run.settings.model):
        if real(file.parent) != real(folder):
            with writing(folder / file.name), atomic_write(folder / file.name) as fresh:
                shutil.copyfile(file, fresh)


def digests(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The SHA-256 of models and of their external data, by file name in the folder. Raises BadModel if one is
    missing."""
    found = {}
    for file in (file for name in names for file in files_of(folder / name)):
        if not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts or not file.is_file():
            raise BadModel(f"{file} is no file in {folder}")
        found[file.relative_to(folder).as_posix()] = file_digest(file)
    return found


def changed_files(folder: Path, settings: DeploySettings) -> list[str]:
    """The models that are missing or have changed since they were measured, external data included; the shipped one
    first."""
    changed: list[str] = []
    for model in (settings.model, settings.baseline):
        try:
            known = digests(folder, (model,))
        except BadModel:
            known = {}
        if not known or any(settings.sha256.get(name) != digest for name, digest in known.items()):
            changed.append(model)
    return changed


def calibrated_on(file: Path) -> str | None:
    """The digest of the data that calibrated a model file of a run; None if it is in no run's folder."""
    try:
        return read_settings(file.parent.parent if file.parent.name == FRONT else file.parent).data
    except InputError:
        return None


def read_settings(folder: Path) -> DeploySettings:
    settings = read_json(folder / DEPLOY_SETTINGS, DeploySettings)
    if settings is None:
        raise BadOption(f"{folder / DEPLOY_SETTINGS} is not there: name the output folder of a finished qdqtune tune")
    if settings.format != FORMAT:
        raise BadOption(f"{folder / DEPLOY_SETTINGS} has format {settings.format}, not {FORMAT}: tune again")
    return settings
