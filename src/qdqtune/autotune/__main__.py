"""`python -m qdqtune.autotune`: ModelOpt's flags become those of `qdqtune tune`, which does the rest.

Ctrl-C ends it quietly from its first moment on.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while the rest is being imported

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from qdqtune.autotune.autotuner import default_engine, spec_of
from qdqtune.autotune.workflows import TIMING_CACHE, AutotuneOptions, copy_logs
from qdqtune.cli import main as cli
from qdqtune.cli import tune
from qdqtune.cli.command import Command
from qdqtune.cli.output import say, say_notes
from qdqtune.cli.streams import INTERRUPTED
from qdqtune.commands.tune import NO_IMPROVEMENT
from qdqtune.engines.facts import facts_of
from qdqtune.engines.tensorrt.options import usual_shapes
from qdqtune.options import options_of
from qdqtune.tuning.folder import SUMMARY
from qdqtune.tuning.settings import EFFORTS


def run(options: AutotuneOptions) -> int:
    """Find the fastest Q/DQ placement for a model, by the flags of ModelOpt's autotuner.

    The exit code is 0 also where nothing faster was found; the files are all there.

    \b
    python -m qdqtune.autotune --onnx_path model.onnx --output_dir results
    python -m qdqtune.autotune --model model.onnx --mode subgraph --mode quick
    """
    asked = "trtexec" if options.use_trtexec else options.engine
    engine, why = (asked, "as you asked") if asked else default_engine()
    say(f"engine: {engine} ({why})")
    spec = spec_of(engine, str(options.timing_cache or TIMING_CACHE), options.plugin_libraries, options.trtexec_args)
    changed: dict[str, Any] = {"engine": engine, "engine_options": {**spec.options, **options.engine_options}}
    if options.trtexec_args and engine != "trtexec":
        say_notes([f"{engine} takes no arguments of trtexec: of --trtexec_benchmark_args only shapes are used"])
        usual = usual_shapes(spec_of("trtexec", None, None, options.trtexec_args), None)
        changed["input_shapes"] = {**usual, **options.input_shapes}
    if options.plugin_libraries and not facts_of(engine).has_timing_cache:
        say_notes([f"{engine} loads no TensorRT plug-ins, so --plugin_libraries is passed over"])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    code, summary = tune.run(replace(options, **changed)), options.output_dir / SUMMARY
    if options.dry_run or code == INTERRUPTED or not summary.exists():
        return code
    if options.mode == "region":
        copy_logs(options.output_dir)
    if code not in (0, NO_IMPROVEMENT):
        return code
    values = json.loads(summary.read_text(encoding="utf-8"))
    before, after = values["baseline_ms"], values["final_ms"]
    lines = [f"Baseline: {before:.3f} ms"]
    if after is not None:
        speedup = f"({before / after:.3f}x speedup)"
        lines += [f"Final: {after:.3f} ms {speedup}", f"Results: {before:.3f} ms -> {after:.3f} ms {speedup}"]
    click.echo("\n".join(lines), err=options.as_machine)  # scripts look for them
    return 0


command = Command("autotune", AutotuneOptions, run, context_settings=cli.CONTEXT)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    words, flag, number = list[str](), "", 0
    for argument in sys.argv[1:] if arguments is None else arguments:
        name, _, value = argument.partition("=")
        if name == "--mode" and value in EFFORTS:
            argument = f"--effort={value}"
        if argument.startswith("-"):
            flag, number = argument.replace("_", "-"), 0
        elif flag in ("--plugin-libraries", "--plugins"):
            number += 1
            if number > 1:  # ModelOpt's flag takes several files, click's is repeated
                words.append(flag)
        elif flag == "--mode" and argument in EFFORTS:
            words[-1] = "--effort"
        words.append(argument)
    cli.main(words, command, "python -m qdqtune.autotune")


# ModelOpt's parser, for programs that take it as a part of their own

DEFAULT_NUM_SCHEMES, DEFAULT_WARMUP_RUNS, DEFAULT_TIMING_RUNS = 50, 50, 100
MODE_PRESETS = {
    "quick": {"schemes_per_region": 30, "warmup_runs": 10, "timing_runs": 50},
    "default": {"schemes_per_region": 50, "warmup_runs": 50, "timing_runs": 100},
    "extensive": {"schemes_per_region": 200, "warmup_runs": 50, "timing_runs": 200},
}
"""Values that `apply_mode_presets` sets for each mode. `python -m qdqtune.autotune` does not use them: it takes a mode
as an effort (`EFFORTS`), which limits builds as well."""


def get_parser() -> argparse.ArgumentParser:
    """A parser of ModelOpt's flags; those in `MODE_PRESETS` are None until `apply_mode_presets` sets them."""
    parser = argparse.ArgumentParser("python -m qdqtune.autotune", description="--help of the program tells more.")
    parser.add_argument("-m", "--onnx_path", required=True)
    parser.add_argument("-o", "--output_dir", default="./autotuner_output")
    parser.add_argument("--mode", choices=["region", "subgraph", *EFFORTS], default="default")
    parser.add_argument("--quant_type", default="int8")
    parser.add_argument("--default_dq_dtype", default="float32")
    parser.add_argument("--timing_cache", default=TIMING_CACHE)
    for name in ("pattern_cache", "qdq_baseline", "state_file", "node_filter_list", "trtexec_benchmark_args"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--plugin_libraries", "--plugins", nargs="+")
    parser.add_argument("--use_trtexec", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-s", "--schemes_per_region", type=int, dest="num_schemes")
    parser.add_argument("--warmup_runs", type=int)
    parser.add_argument("--timing_runs", type=int)
    return parser


def apply_mode_presets(args: argparse.Namespace) -> None:
    for name, number in MODE_PRESETS.get(args.mode, MODE_PRESETS["default"]).items():
        target = "num_schemes" if name == "schemes_per_region" else name
        if getattr(args, target) is None:
            setattr(args, target, number)


def get_node_filter_list(node_filter_list_path: str | Path | None) -> list[str] | None:
    if node_filter_list_path is None:
        return None
    return list(options_of(AutotuneOptions)["node_filter"].read(node_filter_list_path))


if __name__ == "__main__":
    main()
