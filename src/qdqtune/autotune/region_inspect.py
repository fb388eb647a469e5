"""`python -m qdqtune.autotune.region_inspect --model M` prints the same as `qdqtune inspect M --tree`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from qdqtune.autotune.region_search import CombinedRegionSearch, Region, has_quantizable_operations
from qdqtune.cli import main as cli
from qdqtune.cli.output import print_lines
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.graph.loading import load
from qdqtune.tuning.subject import tuned_graph


def inspect_region_search(
    onnx_path: str | Path,
    max_sequence_size: int = 10,
    include_all_regions: bool = False,
    *,
    rewrites: str = "off",
    verbose: bool = False,
) -> list[Region]:
    """Print the regions of a model; returns the top-level ones that are printed, with their children.

    Scripts tune the graph without `rewrites`, so that it has the nodes of the file.
    """
    options = InspectOptions(
        onnx_path, rewrites=rewrites, max_sequence_size=max_sequence_size, include_all_regions=include_all_regions
    )
    print_lines(inspect(options).lines(tree=True, verbose=verbose))
    graph = tuned_graph(load(Path(onnx_path)), rewrites)
    tops = CombinedRegionSearch(graph, maximum_sequence_region_size=max_sequence_size).search_regions()
    return [top for top in tops if include_all_regions or has_quantizable_operations(top, graph)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the regions that a run tunes. The exit code is 1 if that fails."""
    parser = argparse.ArgumentParser("python -m qdqtune.autotune.region_inspect", description=main.__doc__)
    parser.add_argument("-m", "--model", "--onnx_path", dest="onnx_path", required=True)
    parser.add_argument("--max-sequence-size", "--max_sequence_size", type=int, default=10)
    parser.add_argument("--include-all-regions", "--include_all_regions", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = vars(parser.parse_args(arguments))
    command = click.Command("region_inspect", callback=partial(inspect_region_search, **given, rewrites="auto"))
    try:
        cli.main([], command, parser.prog)
    except SystemExit as end:
        return 1 if end.code else 0


if __name__ == "__main__":
    sys.exit(main())
