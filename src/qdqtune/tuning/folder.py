"""The output folder of a run: locked, and with a list of what in it is ours.

Nothing that an input refers to is written, and nothing is overwritten or deleted that is not on the list, or that lies
elsewhere behind a link. A name that a run needs and that somebody else's file has is refused before the run begins.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from qdqtune.calibration.samples import files_named
from qdqtune.engines.tensorrt.options import timing_cache
from qdqtune.errors import BadOption, BadState, parsed_json, writing
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import CONSTANTS, data_of
from qdqtune.system.checks import (
    HEAD,
    LIST,
    RECORD_KIND,
    Inputs,
    Output,
    check_inside,
    check_outputs,
    check_single,
    is_list,
    listed,
    overwritten,
    real,
    replaceable,
)
from qdqtune.system.cleanup import remove_left
from qdqtune.system.writing import SCRATCH
from qdqtune.tuning.price_file import read_cache, usual_place
from qdqtune.tuning.settings import STATE, Settings
from qdqtune.tuning.store import BEGINNING, may_continue

LOGS = "logs"
BASELINE, FINAL = "baseline.onnx", "optimized_final.onnx"
RAW = "optimized_raw.onnx"
"""In subgraph mode: all groups that gain alone, whether or not the whole model gains by them."""

PLACEMENT, SUMMARY = "placement.yaml", "summary.json"
RUN, REPORT = "run.json", "report.html"
UNITS, PROGRESS = "units.json", "autotune_cache.json"
REGION_MODELS, PARTS, FRONT = "region_models", "subgraphs", "front"

OURS = {
    LOGS: ("*.log", "*.json"),
    REGION_MODELS: ("region_*.onnx", CONSTANTS),
    PARTS: ("group_*.onnx", CONSTANTS),
    FRONT: ("exact*.onnx*", "exact*.yaml", "*db*.onnx*", "*db*.yaml"),
}
"""Folders below, and how the files are named that we write there."""


class OutputFolder:
    """The output folder of one run, made if it is missing. A context manager; one process at a time."""

    def __init__(self, settings: Settings) -> None:
        """Make the folder, take it, and list the files that this run will write.

        Raises:
            BadOption: an input or somebody else's file would be overwritten.
            BadState: another run is at work there.
            OutputError: it cannot be written, or a link leads out of it.
        """
        self.path = settings.output_dir
        self._list = self.path / LIST
        check_run(settings)
        self._ours = listed(self.path)
        is_new, logs = not self._list.exists(), self.path / LOGS
        self._made = tuple(folder for folder in (logs, *logs.parents) if is_new and not folder.exists())
        with writing(f"to {self.path}"):
            logs.mkdir(parents=True, exist_ok=True)
            self._file = _taken(self.path)
            remove_left(self.path, SCRATCH)
        for name in _names(settings):
            self.claim(self.path / name, is_folder=name.endswith("/"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file, suppress(OSError):
            self._leave_no_trace()

    def _leave_no_trace(self) -> None:
        """Remove the list and the folders that this run has made, where it ends before it has written anything."""
        logs, files = self.path / LOGS, [self.path / name for name in (*self._ours, STATE)]
        if logs in self._made and not any(logs.iterdir()) and not any(file.is_file() for file in files):
            self._list.unlink()
            for folder in self._made:
                folder.rmdir()

    @property
    def ours(self) -> frozenset[str]:
        """What is on the list."""
        return frozenset(self._ours)

    def claim(self, path: Path, *, is_folder: bool = False) -> Path:
        """Put a path on the list before it is written.

        Raises:
            OutputError: it leads out of the folder by a link, or the list cannot be written.
        """
        check_inside(path, self.path)
        name = path.relative_to(self.path).as_posix() + "/" * is_folder
        if name not in self._ours:
            with writing(self._list):
                self._file.write((f"{name}\n" if self._file.tell() else f"{HEAD}\n{name}\n").encode())
            self._ours.add(name)
        return path

    def clear(self, folder: str) -> Path:
        """Delete the files of ours in a folder below, and the folder if it holds no others.

        Raises:
            OutputError: one cannot be deleted, or lies elsewhere, behind a link.
        """
        check_inside(self.path / folder, self.path)
        with writing(self.path / folder):
            for path in sorted(map(Path, self._ours)):
                if path.parent == Path(folder):
                    (self.path / path).unlink(missing_ok=True)
            if (self.path / folder).is_dir() and not any((self.path / folder).iterdir()):
                (self.path / folder).rmdir()
        return self.path / folder


def check_run(settings: Settings, written: Inputs | None = None) -> None:
    """Ask whether a run may write all that its settings name, and what it writes to its folder. `written` is what the
    same command writes beside it.

    Raises:
        BadOption, BadState, OutputError: it may not.
    """
    folder, names, read = settings.output_dir, _names(settings), {**_inputs(settings), **(written or {})}
    if (folder / LIST).is_file() and (folder / LIST).stat().st_size and not is_list(folder / LIST):
        raise BadOption(f"{folder / LIST} is not of qdqtune's making: move it, or choose another --output-dir")
    below = [path for name in OURS for path in (folder / name).glob("**/*")]
    of_state, beside = _state_option(settings), [settings.state, pattern_cache_of(settings.state)]
    for option, outputs in (("--output-dir", [*(folder / name for name in names), *below]), (of_state, beside)):
        if (found := overwritten(outputs, read)) is not None:
            file, what = found
            hint = "" if what == "model" else f", the {what},"
            raise BadOption(f"{file}{hint} would be overwritten: choose another {option}")
    for path in (folder / LIST, *(folder / name for name in OURS), *below):
        check_inside(path, folder)
        if path.is_relative_to(folder / LOGS) or path.name == LIST:
            check_single(path)
    ours = listed(folder)
    parts = [path for part in _folders(settings, ours) for named in OURS[part] for path in (folder / part).glob(named)]
    check_names(folder, [*names, *(path.relative_to(folder).as_posix() for path in parts)])
    own = [folder / name for name in names if not name.endswith("/")]
    check_outputs([*_elsewhere(settings)], {**read, "result of this run": own})


def check_names(folder: Path, names: Iterable[str]) -> None:
    """Refuse names in the folder of a run which files have that are not on its list, or that lead out of it.

    Raises:
        BadOption, OutputError: there is such a name.
    """
    ours, home = listed(folder), real(folder)
    for name in names:
        path = folder / name
        check_inside(path, folder)
        places = {name, real(path).relative_to(home).as_posix()}
        if not name.endswith("/") and path.exists() and not places <= ours:
            what = f"{path} is not of qdqtune's making, and would be overwritten"
            raise BadOption(f"{what}: choose another --output-dir, or move it")


def _state_option(settings: Settings) -> str:
    """The option that says where the state file lies."""
    return "--output-dir" if settings.state_file is None else "--state-file"


def _elsewhere(settings: Settings) -> Iterator[Output]:
    """The files of a run that need not lie in its folder."""
    state, prices, times = settings.state, settings.price_cache, settings.engine.options.get("timing_cache")
    option = _state_option(settings)
    has_begun = state.is_file() and state.stat().st_size > 0
    yield Output(state, option, may_continue, is_appended=True, makes_folder=True)
    patterns = replaceable(RECORD_KIND)
    yield Output(pattern_cache_of(state), option, lambda file: has_begun and patterns(file), makes_folder=True)
    if prices is not None and prices != usual_place():  # nobody has named that one: what is wrong with it is told
        yield Output(prices, "--price-cache", lambda file: read_cache(file) is not None, makes_folder=True)
    if isinstance(times, str):
        yield timing_cache(Path(times), "--timing-cache")


def lines_of_state(progress: Path) -> list[str]:
    """The lines of a state file that a file of progress holds; none where it is no such file of this version."""
    try:
        lines = parsed_json(progress.read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return []
    is_ours = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
    return lines if is_ours and lines and lines[0].encode().startswith(BEGINNING) else []


def restored_state(settings: Settings) -> str | None:
    """Make the state file of the file of progress, where that is all that is left of a run in subgraph mode.

    Gives what to tell the user; None where there was nothing to do.

    Raises:
        OutputError: the state file cannot be written.
    """
    path = settings.output_dir / PROGRESS
    if settings.mode != "subgraph" or settings.restart or settings.state.exists():
        return None
    if not (lines := lines_of_state(path)):
        return None
    with writing(settings.state):
        settings.state.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{settings.state} is gone: this run goes on from {path}; --restart starts over"


def _taken(folder: Path) -> IO[bytes]:
    """The list of an output folder, locked until it is closed, or its process has ended in whatever way.

    Raises:
        BadState: another run has it.
        OutputError: it is a link out of the folder, or has another name as well.
    """
    check_inside(folder / LIST, folder)
    check_single(folder / LIST)
    while True:
        file = (folder / LIST).open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BadState(f"{folder} is in use by another run: choose another --output-dir") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (folder / LIST).stat()):
                return file
        file.close()  # a run that ended meanwhile has removed it


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep runs out of an output folder meanwhile; where there is no list, none writes to it.

    Raises:
        BadState: a run is at work there.
        OutputError: the list cannot be written.
    """
    with ExitStack() as stack:
        if (folder / LIST).is_file():
            with writing(folder / LIST):
                stack.enter_context(_taken(folder))
        yield


def _folders(settings: Settings, listed: set[str]) -> Iterator[str]:
    """The folders below in which a run of these settings may overwrite what it finds."""
    if f"{LOGS}/" not in listed:
        yield LOGS
    if settings.mode == "region":
        yield REGION_MODELS
    if settings.mode == "subgraph":
        yield PARTS
    if settings.front:
        yield FRONT


def _names(settings: Settings) -> list[str]:
    """What a run of these settings may write right into its folder, that of its logs among it."""
    return [*_files(settings), f"{LOGS}/"]


def _files(settings: Settings) -> Iterator[str]:
    """The files that a run of these settings may write right into its folder."""
    models = [BASELINE, FINAL]
    yield from (PLACEMENT, SUMMARY, RUN, REPORT)
    if settings.mode == "cut":
        yield UNITS
    if settings.mode == "subgraph":
        models.append(RAW)
        yield PROGRESS
        if settings.graph_json is None:
            yield from (f"{settings.model.stem}.fp16{ending}" for ending in (".graph.json", ".build.log"))
    for model in models:
        yield model
        yield data_of(Path(model)).name
    given = settings.model.parent
    if settings.from_qdq and real(given) != real(settings.output_dir):  # it may ship as it is
        beside = (
            file for file in files_of(settings.model)[1:] if file.is_relative_to(given) and ".." not in file.parts
        )
        yield from (file.relative_to(given).as_posix() for file in beside)


def _inputs(settings: Settings) -> Inputs:
    """Every file that the settings refer to."""
    baseline = files_of(settings.qdq_baseline) if settings.qdq_baseline else []
    named = {
        "--graph-json": settings.graph_json,
        "--pattern-cache": settings.pattern_cache,
        "--calibration-cache": settings.calibration_cache,
    }
    return {
        "model": files_of(settings.model),
        "calibration data": files_named(settings.calibration_data),
        "workload": [workload.path for workload in settings.workloads],
        "metric": files_named(settings.evaluate),
        "--qdq-baseline": baseline,
        **{what: [] if file is None else [file] for what, file in named.items()},
    }


def pattern_cache_of(state: Path) -> Path:
    """Where a run with that state file writes its pattern cache."""
    return state.with_name(state.stem + "_pattern_cache.yaml")
