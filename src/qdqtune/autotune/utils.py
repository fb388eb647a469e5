"""The presets and the parser of the command line, in the module where scripts look for them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
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

COUNTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("schemes_per_region", ("-s",), "num_schemes"),
    ("warmup_runs", (), "warmup_runs"),
    ("timing_runs", (), "timing_runs"),
)
"""What a mode presets, with its short flags, and the name under which a parser keeps it."""


class StoreWithExplicitFlag(argparse.Action):
    """Store a value, and that it was given, under the name `explicit_attr`."""

    def __init__(self, *given: Any, explicit_attr: str, **options: Any) -> None:
        super().__init__(*given, **options)
        self._mark = explicit_attr

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """See `argparse.Action`."""
        setattr(namespace, self.dest, values)
        setattr(namespace, self._mark, True)


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
    for name, _, dest in COUNTS if args.mode in MODE_PRESETS else ():
        if not getattr(args, f"_explicit_{dest}", False):
            setattr(args, dest, MODE_PRESETS[args.mode][name])


def get_parser() -> argparse.ArgumentParser:
    """The flags of the command as a parser of argparse, for programs that take it as a part of their own.

    `python -m qdqtune.autotune --help` has more.
    """
    parser = argparse.ArgumentParser(prog="python -m qdqtune.autotune", description="Find the fastest Q/DQ placement.")
    parser.add_argument("--onnx_path", "-m", type=str, required=True, help="ONNX file")
    parser.add_argument("--output_dir", "-o", type=str, default="./autotuner_output", help="where everything goes")
    parser.add_argument("--mode", choices=[*MODE_PRESETS], default="default", help="preset of the three counts")
    parser.add_argument("--workflow", choices=["region", "subgraph"], default="region", help="how to search")
    parser.add_argument("--graph_json", help="subgraph: layers that trtexec exported")
    parser.add_argument("--incremental_validation", action=argparse.BooleanOptionalAction, default=True,
                        help="subgraph: add groups one by one, as long as the model gains")  # fmt: skip
    for name, flags, dest in COUNTS:
        parser.add_argument(
            f"--{name}",
            *flags,
            type=int,
            default=MODE_PRESETS["default"][name],
            dest=dest,
            action=StoreWithExplicitFlag,
            explicit_attr=f"_explicit_{dest}",
            help="see --mode",
        )
    parser.add_argument("--pattern_cache", dest="pattern_cache_file", help="schemes of an earlier run")
    parser.add_argument("--qdq_baseline", help="a quantized version of the model to start from")
    parser.add_argument("--state_file", help="default: <output_dir>/autotuner_state.yaml")
    parser.add_argument("--node_filter_list", help="file of node-name wildcards, one a line")
    parser.add_argument("--quant_type", choices=["int8", "fp8"], default="int8", help="numbers of the pairs")
    parser.add_argument("--default_dq_dtype", choices=["float16", "float32", "bfloat16"], default="float32")
    parser.add_argument("--use_trtexec", action="store_true", help="time with trtexec")
    parser.add_argument("--timing_cache", default=str(Path(tempfile.gettempdir()) / "trtexec_timing.cache"))
    parser.add_argument("--plugin_libraries", "--plugins", nargs="+", default=None, help="TensorRT plug-ins")
    parser.add_argument("--trtexec_benchmark_args", help="more arguments of trtexec, as one string")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line for every candidate")
    return parser
