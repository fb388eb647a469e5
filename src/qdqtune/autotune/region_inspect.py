"""`python -m qdqtune.autotune.region_inspect --model M` prints what `qdqtune inspect M --tree` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from qdqtune.autotune.__main__ import MODEL, exit_code, option
from qdqtune.autotune.region_search import CombinedRegionSearch, Region, has_quantizable_operations
from qdqtune.cli import main as cli
from qdqtune.cli.command import CHATTER, SILENCE, Guarded, is_verbose
from qdqtune.cli.output import print_lines, with_flags
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.tuning.subject import tuned_graph


def inspect_region_search(
    onnx_path: str | Path,
    max_sequence_size: int = 10,
    include_all_regions: bool = False,
    *,
    rewrites: str = "off",
    verbose: bool = False,
) -> list[Region]:
    """Print how a model divides into regions; gives those at the top that are shown, with their children.

    The functions of scripts tune a graph without rewrites, so that it has the nodes of the file; programs fold what
    they can (`rewrites` auto).
    """
    options = InspectOptions(
        onnx_path,
        rewrites=rewrites,
        max_sequence_size=max_sequence_size,
        include_all_regions=include_all_regions,
    )
    print_lines(map(with_flags, inspect(options).lines(tree=True, verbose=verbose)))
    graph = tuned_graph(Path(onnx_path), rewrites=rewrites)
    tops = CombinedRegionSearch(graph, maximum_sequence_region_size=max_sequence_size).search_regions()
    return [top for top in tops if include_all_regions or has_quantizable_operations(top, graph)]


def run(model: Path, max_sequence_size: int, include_all_regions: bool) -> None:
    """Show how a model divides into regions, as a run tunes them. `qdqtune inspect` has more options."""
    inspect_region_search(
        str(model),
        max_sequence_size=max_sequence_size,
        include_all_regions=include_all_regions,
        rewrites="auto",
        verbose=is_verbose(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Gives 0, or 1 where it fails."""
    size = option("--max-sequence-size", "Largest leaf, in nodes.", click.IntRange(1), default=10)
    every = option("--include-all-regions", "Show regions without quantizable operators as well.", is_flag=True)
    params: list[click.Parameter] = [MODEL, size, every, SILENCE, CHATTER]
    command = Guarded("region_inspect", cli.CONTEXT, callback=run, params=params, help=run.__doc__)
    return min(exit_code(lambda: cli.main(arguments, command, "python -m qdqtune.autotune.region_inspect")), 1)


if __name__ == "__main__":
    sys.exit(main())
