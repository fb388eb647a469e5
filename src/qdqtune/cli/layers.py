"""`qdqtune layers`: what an engine made of a model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.options import FILE, option
from qdqtune.cli.output import print_json, show, width
from qdqtune.cli.streams import escaped
from qdqtune.engines.runner import Runner, insist, unlogged
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load, read
from qdqtune.types import Layer, Sample

FIXED = 4 + 8 + 9 + 9 + 5 + 2 * 7
"""Characters of a table's row besides the names, gaps included."""
LEAST = 12


OPTIONS = (
    click.Argument(["model"], type=FILE, required=False),
    *options.ENGINE,
    *options.DATA,
    options.RUNS,
    option(
        "--graph-json",
        "Read what trtexec --exportLayerInfo wrote, and run nothing; MODEL tells the nodes.",
        FILE,
        metavar="FILE",
    ),
    options.PROFILE_JSON,
    options.HTML,
    options.JSON_FOR_TABLE,
)


@command("layers", OPTIONS)
def layers_command(
    model: Path | None,
    runs: int,
    graph_json: Path | None,
    profile_json: Path | None,
    html: Path | None,
    as_machine: bool,
    **given: Any,
) -> None:
    """Show what the engine makes of MODEL: its layers in order, the nodes that each covers, and how long each takes.

    Times are of profiled inferences: they say where the time goes, and add up to more than the latency.

    \b
    qdqtune layers model.onnx --engine openvino
    qdqtune layers --graph-json model.graph.json --profile-json model.profile.json
    """
    engine = given["engine"]
    options.check_page(html, [model] if model is not None else [], [graph_json, profile_json])
    if graph_json is not None:
        engine = "tensorrt"
        layers = read_report(graph_json, profile_json, read(model) if model is not None else None)
    elif model is None:
        raise BadOption("there is nothing to show: give a MODEL, or --graph-json FILE")
    elif profile_json is not None:
        raise BadOption("--profile-json goes with --graph-json")
    else:
        spec = options.engine(given)
        (sample,) = options.Data.of(given).prepared(load(model), spec, 0).samples.first(1)
        with unlogged(spec, time_limit_s=given["time_limit"]) as runner:
            layers = profiled(runner, model, sample, runs, refusal=f"{engine} has no layers of {model}")
    if html is not None:
        from qdqtune.report.of_commands import of_layers
        from qdqtune.report.page import write_report

        graph, name = (None, f"an engine of {engine}") if model is None else (load(model), model.name)
        write_report(of_layers(name, graph, engine, layers, options.command_line()), html)
    if as_machine:
        print_json({"engine": engine, "layers": [asdict(layer) for layer in layers]})
    else:
        show(table(layers, width()))


def profiled(runner: Runner, model: Path, sample: Sample, runs: int, *, refusal: str) -> tuple[Layer, ...]:
    """The layers of a model with their times.

    Raises:
        EngineFailure: `refusal`, and why.
    """
    return insist(runner.report(model, sample, runs, "layers"), refusal)


def table(layers: Sequence[Layer], width: int) -> Table:
    """The layers for people, at most `width` characters wide, with the sum of their times at the end."""
    total = sum(layer.time_ms or 0.0 for layer in layers)
    timed = any(layer.time_ms is not None for layer in layers)
    grid = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, collapse_padding=True)
    left = max(width - FIXED, 2 * LEAST)  # of numbers and kinds nothing may be cut, of names everything may
    name = min(max(max(len(layer.name) for layer in layers), LEAST), left // 2)
    nodes = min(max(len(", ".join(layer.nodes)) for layer in layers), left - name)
    grid.add_column("#", justify="right", width=4)
    grid.add_column("layer", f"{len(layers)} layers", no_wrap=True, width=name)
    grid.add_column("kind", width=8)
    grid.add_column("precision", width=9)
    grid.add_column("ms", f"{total:.4f}" if timed else "", justify="right", width=9)
    grid.add_column("%", justify="right", width=5)
    grid.add_column("nodes", no_wrap=True, overflow="ellipsis", width=max(nodes, LEAST))
    for number, layer in enumerate(layers, 1):
        time = "" if layer.time_ms is None else f"{layer.time_ms:.4f}"
        share = "" if layer.time_ms is None or not total else f"{100 * layer.time_ms / total:.1f}"
        shown, covered = Text(shortened(escaped(layer.name), name)), Text(escaped(", ".join(layer.nodes)))
        grid.add_row(str(number), shown, layer.kind, layer.precision, time, share, covered)
    return grid


def shortened(name: str, width: int) -> str:
    """A long name's beginning and end."""
    end = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
