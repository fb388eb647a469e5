"""`qdqtune completion`: what makes a shell complete commands and options."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.shell_completion import get_completion_class

from qdqtune.cli.command import AS_JSON, command
from qdqtune.cli.main import COMPLETING, app
from qdqtune.cli.output import print_json
from qdqtune.options import REQUIRED, Options, Text, choice, option

SHELLS = ("bash", "zsh", "fish")


@dataclass(kw_only=True)
class CompletionOptions(Options):
    """The options of `completion`."""

    shell: Text = option(choice(*SHELLS), REQUIRED, "The shell.", is_positional=True)


@command("completion", CompletionOptions, AS_JSON)
def completion_command(options: CompletionOptions, as_machine: bool) -> None:
    """Print what makes a shell complete the commands and options of qdqtune.

    \b
    eval "$(qdqtune completion bash)"      in ~/.bashrc
    eval "$(qdqtune completion zsh)"       in ~/.zshrc
    qdqtune completion fish | source       in ~/.config/fish/config.fish
    """
    shell = options.shell
    kind = get_completion_class(shell)
    assert kind is not None  # one of those that the argument takes
    script = kind(app, {}, "qdqtune", COMPLETING).source()
    if as_machine:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
