"""The program that tunes one of several models; it reads options as JSON from standard input."""

from __future__ import annotations

import json
import sys

import click

from qdqtune.cli.command import Command, Terminal
from qdqtune.cli.main import main
from qdqtune.cli.tune import TuneArguments, tune_command


def answer(_: Terminal) -> int | None:
    """Tune the model that standard input asks for."""
    request = json.load(sys.stdin)
    click.get_current_context().obj = tuple(request["command"])
    return tune_command.body(TuneArguments(**request["options"]))


if __name__ == "__main__":
    main([], Command("tune", Terminal, answer))
