"""Writes a report as one HTML file without network requests. It runs no script; names from models are escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from qdqtune.errors import escaped, with_flags
from qdqtune.explanation import charts
from qdqtune.explanation.formatting import duration
from qdqtune.explanation.model_map import MapGroup
from qdqtune.explanation.report import Report, report_of_run
from qdqtune.explanation.units import total
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.folder import REPORT
from qdqtune.types import EQUAL_DB
from qdqtune.version import __version__

PARTS = Path(__file__).parent / "page"
"""The folder of the template and the style."""


def write_report(folder: Path, flags: Mapping[str, str]) -> Path:
    """Write the report of the run in `folder`, and return its path. `flags` are those of `errors.with_flags`.

    Raises:
        OutputError: it cannot be written.
    """
    report = report_of_run(folder)
    with atomic_write(folder / REPORT, "page") as fresh:
        fresh.write_text(render(report, flags), encoding="utf-8")
    return folder / REPORT


def render(report: Report, flags: Mapping[str, str]) -> str:
    style = (PARTS / "style.css").read_text(encoding="utf-8")
    return _template(tuple(flags.items())).render(
        report=report,
        style=Markup(style),
        policy=Markup(policy(style)),
        charts=charts,
        version=__version__,
    )


@cache
def _template(flags: tuple[tuple[str, str], ...]) -> Template:
    """The template of the page; cached, as it takes a third of a second to compile."""
    spelled = dict(flags)
    environment = Environment(
        loader=FileSystemLoader(PARTS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escaped(with_flags(value, spelled)) if type(value) is str else value,
    )
    environment.filters |= {
        "ms": _ms,
        "times": _times,
        "db": _db,
        "duration": duration,
        "colour": _colour,
        "total": total,
    }
    return environment.get_template("report.html.jinja")


FAINT_DB = 60.0
"""An error from this SQNR on is not marked. Chosen, not measured."""


def policy(style: str) -> str:
    """A Content-Security-Policy that allows this style, no script, and no request at all."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _db(value: float | None) -> str:
    return "equal" if value is None or value >= EQUAL_DB else f"{value:.1f}"


def _colour(group: MapGroup) -> str:
    """The CSS classes of a group: quantized operators and weights have a colour, and an edge by the error of rounding
    the group alone, if that is known."""
    colour = "q" if "bit" in group.state else "f"
    if group.error_db is None or group.error_db >= FAINT_DB:
        return colour
    return f"{colour} e{min(3, 1 + int((FAINT_DB - group.error_db) // 15))}"
