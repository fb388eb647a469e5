"""`python -m qdqtune.autotune.region_inspect --model M` is `qdqtune inspect M --tree`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qdqtune.autotune.command import MODEL, exit_code, like
from qdqtune.autotune.insertion_points import has_quantizable_operations
from qdqtune.autotune.region_search import CombinedRegionSearch
from qdqtune.autotune.regions import Region
from qdqtune.cli import main as cli
from qdqtune.cli.command import is_verbose
from qdqtune.cli.models import inspect_command
from qdqtune.cli.output import print_lines, with_flags
from qdqtune.commands.inspect import InspectOptions, inspect
from qdqtune.tuning.subject import tuned_graph


def inspect_region_search(
    onnx_path: str | Path, max_sequence_size: int = 10, include_all_regions: bool = False, *, rewrites: str = "off"
) -> list[Region]:
    """Print how a model divides into regions; gives those at the top that are shown, with their children.

    The functions of scripts tune a graph without rewrites, so that it has the nodes of the file; programs fold what
    they can (`rewrites` auto).
    """
    how: dict[str, Any] = {"max_sequence_size": max_sequence_size, "include_all_regions": include_all_regions}
    print_lines(map(with_flags, inspect(InspectOptions(onnx_path, tree=True, rewrites=rewrites, **how)).lines))
    graph = tuned_graph(Path(onnx_path), rewrites=rewrites)
    tops = CombinedRegionSearch(graph, maximum_sequence_region_size=max_sequence_size).search_regions()
    return [top for top in tops if include_all_regions or has_quantizable_operations(top, graph)]


def _run(**given: Any) -> int | None:
    """Show what was asked for: with the flags of ModelOpt's program alone, that is the function of scripts."""
    if is_verbose() or given["as_machine"] or given["fix_inputs"] or given["regions"] != "auto":
        code: int | None = inspect_command.callback(**given | {"tree": True})  # type: ignore[misc]
        return code
    names = ("max_sequence_size", "include_all_regions", "rewrites")
    inspect_region_search(onnx_path=str(given["model"]), **{name: given[name] for name in names})
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Gives 0, or 1 where it fails."""
    command, name = like(inspect_command, [MODEL], callback=_run), "python -m qdqtune.autotune.region_inspect"
    return min(exit_code(partial(cli.main, arguments, command, name)), 1)


if __name__ == "__main__":
    sys.exit(main())
