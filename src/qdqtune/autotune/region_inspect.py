"""`python -m qdqtune.autotune.region_inspect --model M` prints what `qdqtune inspect M --tree` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qdqtune.autotune.__main__ import exit_code
from qdqtune.autotune.region_search import CombinedRegionSearch, Region, has_quantizable_operations
from qdqtune.cli import main as cli
from qdqtune.cli.command import Command, Terminal
from qdqtune.cli.output import print_json, print_lines
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.options import COUNT, REQUIRED, SWITCH, File, Flag, Int, option
from qdqtune.tuning.options import MODEL
from qdqtune.tuning.subject import tuned_graph


def inspect_region_search(
    onnx_path: str | Path,
    max_sequence_size: int = 10,
    include_all_regions: bool = False,
) -> list[Region]:
    """Print how a model divides into regions; gives those at the top that are shown, with their children.

    The functions of scripts tune a graph without rewrites, so that it has the nodes of the file.
    """
    options = InspectOptions(
        onnx_path,
        rewrites="off",
        max_sequence_size=max_sequence_size,
        include_all_regions=include_all_regions,
    )
    print_lines(inspect(options).lines(tree=True))
    graph = tuned_graph(Path(onnx_path))
    tops = CombinedRegionSearch(graph, maximum_sequence_region_size=max_sequence_size).search_regions()
    return [top for top in tops if include_all_regions or has_quantizable_operations(top, graph)]


@dataclass(kw_only=True)
class Arguments(Terminal):
    """The flags of this program."""

    model: File = option(MODEL, REQUIRED, "ONNX file.", "Model", flags="-m --onnx-path --model", short="ONNX file")
    max_sequence_size: Int = option(COUNT, 10, "Largest leaf, in nodes.", "Search")
    include_all_regions: Flag = option(SWITCH, False, "Show regions without quantizable operators as well.", "Output")


def run(options: Arguments) -> None:
    """Show how a model divides into regions, as a run tunes them. `qdqtune inspect` has more options."""
    shared = {name: getattr(options, name) for name in ("max_sequence_size", "include_all_regions")}
    found = inspect(InspectOptions(options.model, rewrites="auto", **shared))
    if options.as_machine:
        print_json(found.to_dict())
    else:
        print_lines(found.lines(tree=True, verbose=options.verbose))


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Gives 0, or 1 where it fails."""
    command = Command("region_inspect", Arguments, run, context_settings=cli.CONTEXT)
    return min(exit_code(partial(cli.main, arguments, command, "python -m qdqtune.autotune.region_inspect")), 1)


if __name__ == "__main__":
    sys.exit(main())
