"""The output folder of a run: it is locked, and has a list of the files that runs wrote there.

Inputs are never overwritten. Neither are files that are not on the list, or that a link leads to outside of the folder:
a run that needs such a name is refused before it begins.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from qdqtune.calibration.samples import files_named
from qdqtune.engines.tensorrt.options import timing_cache
from qdqtune.errors import BadOption, BadState, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.model_folder import companions
from qdqtune.graph.saving import CONSTANTS, data_of
from qdqtune.system.checks import (
    LIST,
    Inputs,
    Output,
    below,
    check_inside,
    check_outputs,
    check_single,
    in_list,
    listed,
    real,
    written_as,
)
from qdqtune.system.writing import SCRATCH, WORKERS, append_lines, sweep
from qdqtune.tuning.settings import STATE, Settings
from qdqtune.tuning.store import may_continue

LOGS = "logs"
BASELINE, FINAL = "baseline.onnx", "optimized_final.onnx"
RAW = "optimized_raw.onnx"
"""The file of subgraph mode with pairs in all groups that gain alone, even if the whole model does not gain."""

PLACEMENT, SUMMARY = "placement.yaml", "summary.json"
RUN, REPORT = "run.json", "report.html"
PROGRESS = "autotune_cache.json"
REGION_MODELS, GROUP_MODELS, FRONT, DEPLOY = "region_models", "subgraphs", "front", "deploy"
DEPLOY_SETTINGS, DEPLOY_SCRIPT = f"{DEPLOY}/settings.json", f"{DEPLOY}/run.py"

WRITTEN = {
    LOGS: ("*.log", "*.json"),
    REGION_MODELS: ("region_*.onnx", CONSTANTS),
    GROUP_MODELS: ("group_*.onnx", CONSTANTS),
    DEPLOY: ("settings.json", "run.py"),
    FRONT: ("exact*.onnx*", "exact*.yaml", "*db*.onnx*", "*db*.yaml"),
}
"""Subfolders, and the names of files that runs write there."""


class OutputFolder:
    """The output folder of one run, made if it is missing, and locked against other processes. A context manager."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.output_dir
        self._list = self.path / LIST
        check_run(settings)
        is_new, logs = not self._list.exists(), self.path / LOGS
        self._made = tuple(folder for folder in (logs, *logs.parents) if is_new and not folder.exists())
        with writing(f"to {self.path}"):
            logs.mkdir(parents=True, exist_ok=True)
            self._file = _locked(self.path)
            for part in ("", *WRITTEN):
                sweep(self.path / part, SCRATCH)
            sweep(logs, WORKERS)
        self._ours = listed(self.path) or set()
        self._claim([*_files(settings), f"{LOGS}/"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder. If the run has written nothing, remove the list and the folders that it made."""
        with self._file, suppress(OSError):
            logs, files = self.path / LOGS, [self.path / name for name in (*self._ours, STATE)]
            if logs in self._made and not any(logs.iterdir()) and not any(file.is_file() for file in files):
                self._list.unlink()
                for folder in self._made:
                    folder.rmdir()

    def claim(self, path: Path) -> Path:
        """Add a path to the list, before its file is written, and return it."""
        check_inside(path, self.path)
        self._claim([path.relative_to(self.path).as_posix()])
        return path

    def _claim(self, names: Iterable[str]) -> None:
        """Add names to the list and flush it to the disk, since a file that is not on it is never overwritten."""
        fresh = list(dict.fromkeys(name for name in names if name not in self._ours))
        if fresh:
            with writing(self._list):
                append_lines(self._file, fresh)
            self._ours.update(fresh)

    def clear(self, folder: str) -> Path:
        """Delete the listed files of a subfolder, and the subfolder if nothing else is in it; returns its path."""
        check_inside(self.path / folder, self.path)
        with writing(self.path / folder):
            for path in sorted(map(Path, self._ours)):
                if path.parent == Path(folder):
                    (self.path / path).unlink(missing_ok=True)
            if (self.path / folder).is_dir() and not any((self.path / folder).iterdir()):
                (self.path / folder).rmdir()
        return self.path / folder


def check_run(settings: Settings) -> None:
    """Raise if a run may not write one of the files that its settings name, or that belong in its folder."""
    folder, state, times = settings.output_dir, settings.state, settings.engine.options.get("timing_cache")
    check_inside(folder / LIST, folder)
    lines = listed(folder)
    if lines is None:
        raise BadOption(f"{folder / LIST} is not of qdqtune's making: move it, or choose another `output_dir`")
    is_ours, names = in_list(folder), dict.fromkeys(_files(settings))
    outputs = [Output(folder / name, "`output_dir`", is_ours, folder, makes_folder=True) for name in names]
    named = {output.path for output in outputs}
    outputs += [output for output in _present(folder, lines) if output.path not in named]
    of_state = "`output_dir`" if settings.state_file is None else "`state_file`"
    outputs.append(Output(state, of_state, may_continue, makes_folder=True))
    outputs.append(Output(pattern_cache_of(state), of_state, written_as("record"), makes_folder=True))
    if isinstance(times, str):
        outputs += timing_cache(Path(times), "`engine_options` timing_cache")
    check_outputs(outputs, _inputs(settings))


def _present(folder: Path, lines: Collection[str]) -> Iterator[Output]:
    """The existing files in the subfolders of a run, as outputs that may be replaced: those with names that runs write
    must be on the list, logs at least their folder."""
    is_ours = in_list(folder)
    for part, patterns in WRITTEN.items():
        check_inside(folder / part, folder)
        for path in below(folder / part):
            check_inside(path, folder)
            if part == LOGS:
                check_single(path)
            if path.is_file():
                is_named = path.parent == folder / part and any(path.match(pattern) for pattern in patterns)
                must_be_ours = is_named and f"{part}/" not in lines
                yield Output(path, "`output_dir`", is_ours if must_be_ours else Path.exists, folder, makes_folder=True)


def _locked(folder: Path) -> IO[bytes]:
    """Open and lock the list of an output folder. Closing it, or the end of the process, unlocks it."""
    check_inside(folder / LIST, folder)
    while True:
        file = (folder / LIST).open("ab", buffering=0)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BadState(f"{folder} is in use by another run: choose another `output_dir`") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (folder / LIST).stat()):
                return file
        file.close()  # a run that ended meanwhile has removed it


def _files(settings: Settings) -> Iterator[str]:
    models = [BASELINE, FINAL]
    yield from (PLACEMENT, SUMMARY, RUN, REPORT, DEPLOY_SETTINGS, DEPLOY_SCRIPT)
    if settings.mode == "subgraph":
        models.append(RAW)
        yield PROGRESS
        if settings.graph_json is None:
            yield from (f"{settings.model.stem}.fp16{ending}" for ending in (".graph.json", ".build.log"))
    for model in models:
        yield model
        yield data_of(Path(model)).name
    given = settings.model.parent
    if real(given) != real(settings.output_dir):
        yield from (file.name for file in companions(settings.model))
    if settings.from_qdq and real(given) != real(settings.output_dir):  # the model may be copied as the result
        beside = (
            file for file in files_of(settings.model)[1:] if file.is_relative_to(given) and ".." not in file.parts
        )
        yield from (file.relative_to(given).as_posix() for file in beside)


def _inputs(settings: Settings) -> Inputs:
    baseline = files_of(settings.qdq_baseline) if settings.qdq_baseline else []
    named = {
        "`graph_json`": settings.graph_json,
        "`pattern_cache`": settings.pattern_cache,
        "`calibration_cache`": settings.calibration_cache,
    }
    return {
        "model": [*files_of(settings.model), *companions(settings.model)],
        "calibration data": files_named(settings.calibration_data),
        "workload": [workload.path for workload in settings.workloads],
        "metric": files_named(settings.evaluate),
        "labels": [] if settings.label_file is None else [settings.label_file],
        "`qdq_baseline`": baseline,
        **{what: [] if file is None else [file] for what, file in named.items()},
    }


def pattern_cache_of(state: Path) -> Path:
    return state.with_name(state.stem + "_pattern_cache.yaml")
