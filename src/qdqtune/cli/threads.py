"""The option that names numbers of threads, and what its text means."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from qdqtune.cli.options import repeated


def counts(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[int, ...] | None:
    """Whole numbers with commas between, as 1,4,16; None of no text."""
    told = [count for value in values for count in value.replace(" ", "").split(",")]
    if wrong := [count for count in told if not re.fullmatch(r"[1-9]\d{0,3}", count)]:
        raise click.BadParameter(f"{wrong[0]!r} is no number of threads: give 1,4,16")
    return tuple(dict.fromkeys(map(int, told))) or None


DEPLOY_THREADS = repeated(
    "--deploy-threads",
    "1,4,16",
    "Numbers of threads that the model will run with: the result is proven at each, and ships only if it is slower at "
    "none of them and faster at one. A search runs at the largest, unless --threads says otherwise.  "
    "[default: --threads, and what the engine takes by itself here: a thread a core]",
    callback=counts,
)
