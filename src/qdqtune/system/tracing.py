"""Spans of OpenTelemetry around work that takes long, where the program that runs has loaded it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "qdqtune"
"""The name of the tracer."""


@contextmanager
def span(name: str, **attributes: str | int | float | bool) -> Iterator[None]:
    """A span around the block. Does nothing where nobody has imported OpenTelemetry: then nobody collects spans."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield
        return
    with trace.get_tracer(NAME).start_as_current_span(name, attributes=attributes):
        yield
