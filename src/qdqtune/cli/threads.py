"""The option that names numbers of threads, and what its text means."""

from __future__ import annotations

import re

import click

from qdqtune.cli.options import option


def counts(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between, as 1,4,16, or as Python writes a list of them."""
    if value is None:
        return None
    plain = value.replace(" ", "").strip("[](),")
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", plain):
        raise click.BadParameter(f"{value!r} are no numbers of threads: give 1,4,16")
    return tuple(dict.fromkeys(int(count) for count in plain.split(",")))


DEPLOY_THREADS = option(
    "--deploy-threads",
    "Numbers of threads that the model will run with: the result is proven at each, and ships only if it is slower at "
    "none of them and faster at one.  [default: --threads, and what the engine takes by itself here: a thread a core]",
    callback=counts,
    metavar="1,4,16",
)
