"""`python -m qdqtune.autotune.region_inspect --model M` is `qdqtune inspect M --tree`."""

from __future__ import annotations

from pathlib import Path

from qdqtune.autotune.regions import Region
from qdqtune.commands.inspect import render
from qdqtune.graph.loading import load
from qdqtune.search.regions import discovery
from qdqtune.search.regions.patterns import group, is_quantizable


def inspect_region_search(
    onnx_path: str | Path, max_sequence_size: int = 10, include_all_regions: bool = False
) -> list[Region]:
    """Print how a model divides into regions; gives those at the top that are shown, with their children."""
    graph = load(Path(onnx_path))
    found = discovery.find(graph, max_sequence_size=max_sequence_size)
    print("\n".join(render(graph, found, group(graph, found), include_all_regions=include_all_regions)))
    return [Region.of(top) for top in found.root.children if include_all_regions or is_quantizable(graph, top)]


def main() -> None:
    """The program."""
    from qdqtune.autotune.command import inspect

    inspect("region_inspect")


if __name__ == "__main__":
    main()
