"""`python -m qdqtune.autotune.region_inspect --model M` is `qdqtune inspect M`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from qdqtune import cli


@click.command(context_settings=cli.CONTEXT)
@click.option("-m", "--model", type=click.Path(path_type=Path), required=True, help="ONNX file.")
@click.option("--max-sequence-size", type=click.IntRange(1), default=10, show_default=True,
              help="Largest leaf, in nodes.")  # fmt: skip
@click.option("--include-all-regions", is_flag=True, help="Show regions without quantizable operators as well.")
@click.option("-v", "--verbose", is_flag=True, help="Name every node and tensor.")
@click.pass_context
def command(context: click.Context, /, **given: object) -> None:
    """Show how a model divides into regions, and which of them share a pattern."""
    context.invoke(cli.inspect_command, **given)


def main(arguments: Sequence[str] | None = None, name: str = "qdqtune.autotune.region_inspect") -> NoReturn:
    """Run the command and exit, as `qdqtune.cli.main` does."""
    cli.main(arguments, command, f"python -m {name}")


if __name__ == "__main__":
    main()
