"""How the flags are written that ModelOpt's programs have."""

from __future__ import annotations

from typing import Any

import click


def option(flags: str, help: str | None, type: click.ParamType[Any] | None = None, **how: Any) -> click.Option:
    """An option that tells its default. `flags` are its names, and that of its parameter where that is another."""
    shows = how.pop("show_default", how.get("default") not in (None, ""))
    return click.Option(flags.split(), help=help, type=type, show_default=shows, **how)


def flag(flags: str, help: str) -> click.Option:
    """An option that is given or not."""
    return click.Option(flags.split(), help=help, is_flag=True)


def repeated(flags: str, metavar: str | None, help: str, **how: Any) -> click.Option:
    """An option that can be given several times."""
    return click.Option(flags.split(), help=help, metavar=metavar, multiple=True, **how)
