"""`qdqtune inspect`: the regions and patterns of a model."""

from __future__ import annotations

from qdqtune.cli.command import AS_JSON, command, is_verbose
from qdqtune.cli.output import print_json, print_lines
from qdqtune.commands.inspect import InspectOptions, inspect


@command("inspect", InspectOptions, AS_JSON)
def inspect_command(options: InspectOptions, as_machine: bool) -> None:
    """Show how MODEL divides into regions, and which of them share a pattern.

    More patterns mean a longer search: every pattern is tuned once, wherever it occurs. With --tree every region
    is shown, with -v every node and tensor as well.
    """
    found = inspect(options)
    if as_machine:
        print_json(found.to_dict())
    else:
        print_lines(found.named if is_verbose() else found.lines)
