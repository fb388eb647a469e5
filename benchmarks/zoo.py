"""The models that the benchmarks run on, and how they are asked for on the command line.

A folder holds each model as NAME.onnx, or as NAME/model.onnx with calibration data in NAME/calib.npz.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import onnx
import onnxruntime

from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner

FIXED: Mapping[str, Mapping[str, int]] = {"silero_vad": {"sr": 16000}}
"""Inputs that a model wants as constants."""


@dataclass(frozen=True)
class Entry:
    """One model. `data` is the path of its calibration data, None for random inputs."""

    name: str
    path: Path
    data: str | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)


def parser(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """What every benchmark asks for: a folder of models, and which of them (by default `names`)."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", default=list(names), help="models to run on (default: %(default)s)")
    made.add_argument("--models", type=Path, required=True, help="folder with NAME.onnx or NAME/model.onnx")
    return made


def find(folder: Path, names: Sequence[str]) -> list[Entry]:
    """The named models of a folder; all that it holds if no name is given. Ends the program where one is missing."""
    found: dict[str, Entry] = {}
    for path in sorted([*folder.glob("*.onnx"), *folder.glob("*/model.onnx")]):
        name = path.stem if path.parent == folder else path.parent.name
        data = path.parent / "calib.npz"
        has_data = path.parent != folder and data.exists()
        found[name] = Entry(name, path, str(data) if has_data else None, FIXED.get(name, {}))
    if missing := [name for name in names if name not in found]:
        raise SystemExit(f"{folder} has no model {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    return [found[name] for name in names or found]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table; all columns but the first are numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print(f"| {' | '.join(cells)} |")


def print_rows(
    given: argparse.Namespace,
    columns: Sequence[str],
    row: Callable[[Entry, Runner, Path], list[str]],
    options: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """A table of the models that were asked for, each with ONNX Runtime and an empty folder of its own; every row as
    soon as it is known, too. `options` are those of the engine."""
    print_machine()
    rows, spec = [], EngineSpec("onnxruntime", options)
    for entry in find(given.models, given.names):
        with (
            TemporaryDirectory() as folder,
            Runner(spec, execution=Execution(120), log_dir=Path(folder) / "logs") as runner,
        ):
            rows.append(row(entry, runner, Path(folder)))
        print("  ".join(rows[-1]), flush=True)
    print_table(columns, rows)


def print_machine() -> None:
    """The versions, the CPU and the cores that the numbers below were taken with."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    isa = [flag for flag in ("avx512_vnni", "avx_vnni", "amx_int8") if flag in text]
    cpu = " ".join([named[0] if named else platform.machine(), *isa])
    versions = f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}, Python {platform.python_version()}"
    print(f"{cpu}, {os.cpu_count()} cores; {versions}", flush=True)
