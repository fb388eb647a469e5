"""`qdqtune layers`: what an engine made of a model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from qdqtune.cli.command import HTML, JSON_FOR_TABLE, command, command_line
from qdqtune.cli.output import print_json, show, width
from qdqtune.cli.streams import escaped
from qdqtune.commands.layers import LayersOptions, layers
from qdqtune.explanation.words import title
from qdqtune.graph.loading import load
from qdqtune.types import Layer

FIXED = 4 + 8 + 9 + 9 + 5 + 2 * 7
"""Characters of a table's row besides the names, gaps included."""
LEAST = 12


@command("layers", LayersOptions, HTML, JSON_FOR_TABLE)
def layers_command(options: LayersOptions, html: Path | None, as_machine: bool) -> None:
    """Show what the engine makes of MODEL: its layers in order, the nodes that each covers, and how long each takes.

    Times are of profiled inferences: they say where the time goes, and add up to more than the latency.

    \b
    qdqtune layers model.onnx --engine openvino
    qdqtune layers --graph-json model.graph.json --profile-json model.profile.json
    """
    model = None if options.model is None else Path(str(options.model))
    found = layers(options)
    if html is not None:
        from qdqtune.commands.result_pages import of_layers
        from qdqtune.explanation.page import write_report

        graph, name = (None, f"an engine of {found.engine}") if model is None else (load(model), title(model))
        write_report(of_layers(name, graph, found.engine, found.layers, command_line()), html)
    if as_machine:
        print_json(found.to_dict())
    else:
        show(table(found.layers, width()))


def table(layers: Sequence[Layer], width: int) -> Table:
    """The layers for people, at most `width` characters wide, with the sum of their times at the end."""
    total = sum(layer.time_ms or 0.0 for layer in layers)
    timed = any(layer.time_ms is not None for layer in layers)
    grid = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, collapse_padding=True)
    left = max(width - FIXED, 2 * LEAST)  # of numbers and kinds nothing may be cut, of names everything may
    name = min(max([LEAST, *(len(layer.name) for layer in layers)]), left // 2)
    nodes = min(max((len(", ".join(layer.nodes)) for layer in layers), default=0), left - name)
    grid.add_column("#", justify="right", width=4)
    grid.add_column("nodes", f"{len(layers)} layers", no_wrap=True, overflow="ellipsis", width=nodes)
    grid.add_column("kind", width=8)
    grid.add_column("precision", width=9)
    grid.add_column("ms", f"{total:.4f}" if timed else "", justify="right", width=9)
    grid.add_column("%", justify="right", width=5)
    grid.add_column("layer", no_wrap=True, width=name)
    for number, layer in enumerate(layers, 1):
        time = "" if layer.time_ms is None else f"{layer.time_ms:.4f}"
        share = "" if layer.time_ms is None or not total else f"{100 * layer.time_ms / total:.1f}"
        shown, covered = Text(shortened(escaped(layer.name), name)), Text(escaped(", ".join(layer.nodes)))
        grid.add_row(str(number), covered, layer.kind, layer.precision, time, share, shown)
    return grid


def shortened(name: str, width: int) -> str:
    """A long name's beginning and end."""
    end = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
