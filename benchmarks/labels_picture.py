"""Draws what labels.py has found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEFT, WIDE, HIGH, TOP, APART = 52, 290, 230, 30, 50
DECIBELS, SHARES = (5, 10, 15, 20, 25, 30, 40), (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
LOSSES, SMALL = (-1, 0, 0.3, 1, 3, 10, 30), 0.3
"""Marks on the axes. Losses up to `SMALL` points or so are drawn to scale, larger ones by their logarithm."""

KINDS = ("depthwise", "plain", "transformer", "recurrent")
STYLE = """text { font: 12px system-ui, sans-serif; fill: #24292f } .axis { stroke: #57606a; fill: none }
.limit { stroke: #57606a; stroke-dasharray: 3 3 } .dots { stroke-width: 5; stroke-linecap: round; opacity: 0.65 }
.depthwise { stroke: #cf222e } .plain { stroke: #0969da } .transformer { stroke: #1a7f37 }
.recurrent { stroke: #9a6700 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .depthwise { stroke: #ff7b72 } .plain { stroke: #58a6ff }
.transformer { stroke: #3fb950 } .recurrent { stroke: #d29922 } }"""

Dot = tuple[str, float, float, float]
"""The kind of a network, and the decibels, the share of first choices and the points lost of one of its files."""


def picture(dots: Sequence[Dot], floor: float, least: float, allowed: float) -> str:
    """Two panels as SVG: the points lost by decibels and by agreement, with the limits on all three as lines."""
    size = 'viewBox="0 0 720 310" width="720" height="310"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        "<title>Loss of the metric by output SQNR and by agreement</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT - 40}" y="16">points lost</text>',
    ]
    for number, kind in enumerate(KINDS):
        x = LEFT + 120 + 130 * number
        parts.append(f'<path class="dots {kind}" d="M{x} 12h0"/><text x="{x + 8}" y="16">{kind}</text>')
    parts += [f'<text x="{LEFT - 6}" y="{_height(n) + 4:.0f}" text-anchor="end">{n:g}</text>' for n in LOSSES]
    title = "output SQNR in dB"
    parts += _panel(LEFT, title, {f"{n}": (n - 3) / 42 for n in DECIBELS}, (floor - 3) / 42, allowed)
    parts += _dots(LEFT, [(kind, (db - 3) / 42, loss) for kind, db, _, loss in dots])
    left, title = LEFT + WIDE + APART, "first choices as in float"
    parts += _panel(left, title, {f"{n:.4g}": _place(n) for n in SHARES}, _place(least), allowed)
    parts += _dots(left, [(kind, _place(share), loss) for kind, _, share, loss in dots])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(share: float) -> float:
    """Where a share stands on its axis of 0 to 1: by the logarithm of what is missing, from all to 0.05 %."""
    return 1 - float(np.log10(max(1 - share, 5e-4) / 5e-4)) / 3.1


def _height(loss: float) -> float:
    """Where a loss stands, in pixels from the top."""
    most, least, here = np.arcsinh(np.array([50, -2, np.clip(loss, -2, 50)]) / SMALL)
    return float(TOP + HIGH * (most - here) / (most - least))


def _panel(left: int, title: str, marks: dict[str, float], limit: float, allowed: float) -> list[str]:
    at = left + WIDE * limit
    parts = [
        f'<path class="axis" d="M{left} {TOP}v{HIGH}h{WIDE}M{left} {_height(0):.0f}h{WIDE}"/>',
        f'<path class="limit" d="M{at:.0f} {TOP}v{HIGH}M{left} {_height(allowed):.0f}h{WIDE}"/>',
        f'<text x="{left + WIDE / 2:.0f}" y="{TOP + HIGH + 36}" text-anchor="middle">{title}</text>',
    ]
    for mark, place in marks.items():
        x = left + WIDE * place
        parts.append(f'<text x="{x:.0f}" y="{TOP + HIGH + 17}" text-anchor="middle">{mark}</text>')
    return parts


def _dots(left: int, dots: Sequence[tuple[str, float, float]]) -> list[str]:
    parts = []
    for kind in KINDS:
        mine = [(left + WIDE * min(max(place, 0), 1), _height(loss)) for of, place, loss in dots if of == kind]
        path = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in mine)
        parts.append(f'<path class="dots {kind}" d="{path}"/>')
    return parts
