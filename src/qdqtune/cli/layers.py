"""`qdqtune layers`: what an engine made of a model, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qdqtune.calibration.samples import open_samples
from qdqtune.cli import options
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import unlogged
from qdqtune.engines.shapes import check_spans
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption, EngineFailure
from qdqtune.graph.loading import load, read, with_input_shapes
from qdqtune.types import Failure, Layer, Tensors

FIXED = 4 + 8 + 9 + 9 + 5 + 2 * 7
"""Characters of a table's row besides the names, gaps included."""
LEAST = 12


@click.command("layers")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@options.engine_options
@options.data_options
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Inferences to take the times of.")
@click.option("--graph-json", type=click.Path(path_type=Path), metavar="FILE",
              help="Read what trtexec --exportLayerInfo wrote, and run nothing; MODEL tells the nodes.")  # fmt: skip
@click.option("--profile-json", type=click.Path(path_type=Path), metavar="FILE",
              help="The times to it: what trtexec --exportProfile wrote.")  # fmt: skip
@click.option("--json", "as_machine", is_flag=True, help="Print JSON instead of the table.")
def layers_command(
    model: Path | None, engine: str, spec: EngineSpec,
    time_limit: float, calibration_data: str | None, calibration_samples: int | None,
    input_shapes: Mapping[str, tuple[int, ...]], seed: int, runs: int, graph_json: Path | None,
    profile_json: Path | None, as_machine: bool,
) -> None:  # fmt: skip
    """Show what the engine makes of MODEL: its layers in order, the nodes that each covers, and how long each takes.

    Times are of profiled inferences: they say where the time goes, and add up to more than the latency.

    \b
    qdqtune layers model.onnx --engine openvino
    qdqtune layers --graph-json model.graph.json --profile-json model.profile.json
    """
    if graph_json is not None:
        engine = "tensorrt"
        found = read_report(graph_json, profile_json, read(model) if model is not None else None)
    elif model is None:
        raise BadOption("there is nothing to show: give a MODEL, or --graph-json FILE")
    elif profile_json is not None:
        raise BadOption("--profile-json goes with --graph-json")
    else:
        graph = load(model)
        check_spans(spec, graph)
        shaped = with_input_shapes(graph, input_shapes) if input_shapes else graph
        sample = open_samples(calibration_data, shaped, seed=seed, limit=calibration_samples).first(1)[0]
        found = _profiled(model, spec, sample, runs, time_limit)
    if as_machine:
        print(json.dumps({"engine": engine, "layers": [asdict(layer) for layer in found]}, indent=2))
    else:
        console = Console()
        console.print(table(found, console.width))


def _profiled(model: Path, spec: EngineSpec, sample: Tensors, runs: int, time_limit: float) -> tuple[Layer, ...]:
    with unlogged(spec, time_limit_s=time_limit) as runner:
        result = runner.report(model, sample, runs, "layers")
    if isinstance(result, Failure):
        raise EngineFailure(f"{spec.name} has no layers of {model}: {result.reason}")
    return result


def table(layers: Sequence[Layer], width: int) -> Table:
    """The layers for people, at most `width` characters wide, with the sum of their times at the end."""
    total = sum(layer.time_ms or 0.0 for layer in layers)
    timed = any(layer.time_ms is not None for layer in layers)
    grid = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, collapse_padding=True)
    left = max(width - FIXED, 2 * LEAST)  # of numbers and kinds nothing may be cut, of names everything may
    name = min(max(max(len(layer.name) for layer in layers), LEAST), left // 2)
    grid.add_column("#", justify="right", width=4)
    grid.add_column("layer", f"{len(layers)} layers", no_wrap=True, width=name)
    grid.add_column("kind", width=8)
    grid.add_column("precision", width=9)
    grid.add_column("ms", f"{total:.4f}" if timed else "", justify="right", width=9)
    grid.add_column("%", justify="right", width=5)
    grid.add_column("nodes", no_wrap=True, overflow="ellipsis", width=left - name)
    for number, layer in enumerate(layers, 1):
        time = "" if layer.time_ms is None else f"{layer.time_ms:.4f}"
        share = "" if layer.time_ms is None or not total else f"{100 * layer.time_ms / total:.1f}"
        grid.add_row(str(number), Text(_shortened(layer.name, name)), layer.kind, layer.precision, time, share,
                     Text(", ".join(layer.nodes)))  # fmt: skip
    return grid


def _shortened(name: str, width: int) -> str:
    """A long name's beginning and end."""
    end = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
