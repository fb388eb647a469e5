"""How a run was made, for its report: engine, machine, calibration, samples and settings, and commands to repeat it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qdqtune.engines import THREADED, EngineSpec
from qdqtune.explanation.formatting import duration
from qdqtune.explanation.report_values import Fact
from qdqtune.tuning.finished import FinishedRun
from qdqtune.tuning.folder import BASELINE, FINAL
from qdqtune.tuning.run_log import RunLog

SAME_NAMES = ("calibration_samples", "seed", "time_limit")
"""Numeric settings of a run that are options of `compare` under the same name."""


def _compare_command(run: FinishedRun) -> Fact:
    """The `compare` command that measures the result again, and hints about files that are gone."""
    settings = {} if run.log is None else run.log.settings
    first, hints = Path(run.summary["model"]), list[str]()
    if settings.get("fix_inputs") or not first.is_file():
        why = "inputs were made constant in it" if first.is_file() else f"{first} is gone"
        first, hints = run.folder / BASELINE, [f"against {BASELINE}: {why}"]
    source, workloads = settings.get("calibration_data"), settings.get("workloads", [])
    options = [*_input_options(settings, run), *(word for text in workloads for word in ("--workload", text))]
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


def _input_options(settings: Mapping[str, Any], run: FinishedRun) -> Iterator[str]:
    """The options of `compare` for inputs and numbers of threads."""
    for name in SAME_NAMES:
        if name in settings:
            yield from (f"--{name.replace('_', '-')}", f"{settings[name]:g}")
    for name, sizes in settings.get("input_shapes", {}).items():
        yield from ("--input-shape", f"{name}:{'x'.join(map(str, sizes))}")
    for name, value in settings.get("fix_inputs", {}).items():
        yield from ("--fix-input", f"{name}={value}")
    if len(rows := run.summary["by_threads"]) > 1:
        yield from ("--deploy-threads", ",".join(str(row["threads"]) for row in rows))


def circumstances(run: FinishedRun) -> Iterator[Fact]:
    """The engine, the machine and the settings of a run."""
    summary, log = run.summary, run.log
    engine = summary["engine"]
    for name in ("engine", "version", "provider", "plugin", "device", "driver", "isa", "threads", "denormals_as_zero"):
        if engine.get(name):
            yield Fact({"isa": "instruction sets"}.get(name, name.replace("_", " ")), engine[name])
    if log is not None:
        yield Fact("cores", str(log.machine.cores))
        loads = [f"{load:g}" for load in log.machine.load if load is not None]
        if loads:
            yield Fact("load, begin and end", " and ".join(loads), "processes that wanted the cores")
        yield Fact("system", log.machine.system)
        yield Fact("begun", log.begun.replace("T", " ").replace("+00:00", " UTC"))
        if spent := _longest_stages(log):
            yield Fact("where the time of the run went", spent)
    yield Fact("seed", str(summary["seed"]))
    yield Fact("mode", summary["mode"])
    if log is not None:
        yield Fact("calibration", log.calibration)
    if judging := summary["accuracy_samples"]:
        held = "kept apart from calibration" if summary["accuracy_held_out"] else "which calibration saw as well"
        yield Fact("outputs judged on", f"{judging} samples, {held}")
    for name, version in summary["versions"].items():
        yield Fact(name, version)


def _longest_stages(log: RunLog) -> str:
    """The stages of the run that took longest, with their durations."""
    ends = [*(seconds for _, seconds in log.stages[1:]), log.seconds]
    took: dict[str, float] = {}
    for (text, begin), end in zip(log.stages, ends, strict=False):
        took[text] = took.get(text, 0.0) + end - begin  # a stage may come twice
    first = sorted(took.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{text} {duration(seconds)}" for text, seconds in first if seconds >= 1)


def commands(run: FinishedRun) -> Iterator[Fact]:
    """The commands that made the run, start it again, and measure its result again."""
    typed = () if run.log is None else run.log.command
    if typed:
        yield Fact("what was run", shlex.join(typed))
        yield Fact(
            "again from the beginning", shlex.join([*typed, *(["--restart"] if "--restart" not in typed else [])])
        )
    elif run.log is not None and run.log.settings:
        yield Fact("settings", ", ".join(f"{name}={value!r}" for name, value in run.log.settings.items()))
    yield _compare_command(run)
