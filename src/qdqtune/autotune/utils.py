"""The presets of the command line, and what reads its arguments, in the module where scripts look for them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from qdqtune.errors import reading

DEFAULT_NUM_SCHEMES, DEFAULT_WARMUP_RUNS, DEFAULT_TIMING_RUNS = 50, 50, 100
MODE_PRESETS = {
    "quick": {"schemes_per_region": 30, "warmup_runs": 10, "timing_runs": 50},
    "default": {
        "schemes_per_region": DEFAULT_NUM_SCHEMES,
        "warmup_runs": DEFAULT_WARMUP_RUNS,
        "timing_runs": DEFAULT_TIMING_RUNS,
    },
    "extensive": {"schemes_per_region": 200, "warmup_runs": 50, "timing_runs": 200},
}
"""What the modes mean to `apply_mode_presets`. `python -m qdqtune.autotune` limits builds besides (`EFFORTS`)."""

COUNTS = {"schemes_per_region": "num_schemes", "warmup_runs": "warmup_runs", "timing_runs": "timing_runs"}
"""What a mode presets, and the name under which a parser keeps it."""


class StoreWithExplicitFlag(argparse.Action):
    """Store a value, and that it was given, under the name `explicit_attr`."""

    def __init__(self, *given: Any, explicit_attr: str, **options: Any) -> None:
        super().__init__(*given, **options)
        self._mark = explicit_attr

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, self._mark, True)


def add_flag(parser: argparse.ArgumentParser, flags: str, **how: Any) -> None:
    """Add a flag by its names, each spelled with underscores and with dashes; its value has that of the first long
    one."""
    spelled = (form for name in flags.split() for form in (name, name[:2] + name[2:].replace("_", "-")))
    parser.add_argument(*dict.fromkeys(spelled), **how)


def validate_file_path(path: str | Path | None, description: str) -> Path | None:
    """A path whose file exists; without such a file the program ends with code 1."""
    if path is None or Path(path).exists():
        return None if path is None else Path(path)
    print(f"{description} not found: {path}", file=sys.stderr)
    sys.exit(1)


def get_node_filter_list(node_filter_list_path: str | Path | None) -> list[str] | None:
    """The wildcards of a file, one a line; lines that begin with # are comments. None without a file."""
    path = validate_file_path(node_filter_list_path, "Node filter list file")
    if path is None:
        return None
    with reading(path):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def apply_mode_presets(args: argparse.Namespace) -> None:
    """Put the presets of `args.mode` where their own option was not given; nothing for a mode that has none."""
    for name, dest in COUNTS.items() if args.mode in MODE_PRESETS else ():
        if not getattr(args, f"_explicit_{dest}", False):
            setattr(args, dest, MODE_PRESETS[args.mode][name])
