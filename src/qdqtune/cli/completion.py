"""`qdqtune completion`: what makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from qdqtune.cli import options
from qdqtune.cli.grouped import command
from qdqtune.cli.main import COMPLETING, app
from qdqtune.cli.output import print_json

SHELLS = ("bash", "zsh", "fish")


@command("completion", [click.Argument(["shell"], type=click.Choice(SHELLS)), options.AS_JSON])
def completion_command(shell: str, as_machine: bool) -> None:
    """Print what makes a shell complete the commands and options of qdqtune.

    \b
    eval "$(qdqtune completion bash)"      in ~/.bashrc
    eval "$(qdqtune completion zsh)"       in ~/.zshrc
    qdqtune completion fish | source       in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # one of those that the argument takes
    script = kind(app, {}, "qdqtune", COMPLETING).source()
    if as_machine:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
