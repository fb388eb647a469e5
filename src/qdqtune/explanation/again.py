"""The command that measures the result of a run again, on the same data and engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qdqtune.engines import THREADED, EngineSpec
from qdqtune.explanation.report_values import Fact
from qdqtune.tuning.finished import FinishedRun
from qdqtune.tuning.folder import BASELINE, FINAL

NAMED = ("calibration_samples", "seed", "time_limit")
"""Settings whose option of `compare` has their name, and a number as its value."""


def measured_again(run: FinishedRun) -> Fact:
    """The command, complete, and what it leaves out because the file is gone."""
    settings = {} if run.log is None else run.log.settings
    first, hints = Path(run.summary["model"]), list[str]()
    if settings.get("fix_inputs") or not first.is_file():
        why = "inputs were made constant in it" if first.is_file() else f"{first} is gone"
        first, hints = run.folder / BASELINE, [f"against {BASELINE}: {why}"]
    source, workloads = settings.get("calibration_data"), settings.get("workloads", [])
    options = [*_options(settings, run), *(word for text in workloads for word in ("--workload", text))]
    if source is not None:
        options += ["--calibration-data", source]
    named = [source] if source is not None and ":" not in source else []
    if gone := [name for name in (*named, *(text.rpartition(":")[0] for text in workloads)) if not Path(name).exists()]:
        hints.append(f"{', '.join(gone)} is gone: name a file with your samples instead")
    spec = EngineSpec(run.summary["engine"]["engine"]) if run.log is None else run.log.engine
    words = ["qdqtune", "compare", str(first), str(run.folder / FINAL), *_engine(spec), *options]
    return Fact("measure the result again", shlex.join(words), "; ".join(hints))


def _engine(spec: EngineSpec) -> Iterator[str]:
    yield from ("--engine", spec.name)
    for name, value in spec.options.items():
        if name == "threads" and spec.name in THREADED:
            yield from ("--threads", str(value))
        else:
            yield from ("--engine-option", f"{name}={json.dumps(value)}")


def _options(settings: Mapping[str, Any], run: FinishedRun) -> Iterator[str]:
    """What the inferences are fed, and at how many threads they run."""
    for name in NAMED:
        if name in settings:
            yield from (f"--{name.replace('_', '-')}", f"{settings[name]:g}")
    for name, sizes in settings.get("input_shapes", {}).items():
        yield from ("--input-shape", f"{name}:{'x'.join(map(str, sizes))}")
    for name, value in settings.get("fix_inputs", {}).items():
        yield from ("--fix-input", f"{name}={value}")
    if len(rows := run.summary["by_threads"]) > 1:
        yield from ("--deploy-threads", ",".join(str(row["threads"]) for row in rows))
