"""Draws docs/speedups.svg from the first two tables of docs/explanation/measured.md.

python benchmarks/speedups.py
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent / "docs"
TABLE, PICTURE = DOCS / "explanation" / "measured.md", DOCS / "speedups.svg"

ROW = re.compile(r"^\| (\w+) \| ([\d.]+)[^|]*\|[^|]*\| (?:([\d.]+) \[[^|]*|refused )\|", re.MULTILINE)
"""A network, and the ratios to float of what `tune` ships and of quantize_static, empty if that cannot be loaded."""

LEFT, SCALE, STEP, TOP, HEAD = 130, 145, 26, 28, 24
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px }
.tuned { fill: #1a7f37 } .usual { fill: #8c959f } line { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .tuned { fill: #3fb950 } .usual { fill: #6e7681 } }"""


def picture(table: str) -> str:
    """The chart as SVG: for each network how many times as fast as float the two quantized models are."""
    one, four = table.split("\n### Larger networks")[0].split("\n### At four threads\n")
    groups = {title: sorted(ROW.findall(text), key=lambda row: float(row[1])) for title, text in
              (("one thread", one), ("four threads", four))}  # fmt: skip
    height = TOP + sum(HEAD + STEP * len(rows) for rows in groups.values()) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" role="img">',
        "<title>Times as fast as the float model, on ONNX Runtime</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="18">times as fast as float (ONNX Runtime)</text>',
        f'<rect class="tuned" x="{LEFT + 310}" y="8" width="10" height="10"/>',
        f'<text class="small" x="{LEFT + 325}" y="17">qdqtune tune</text>',
        f'<rect class="usual" x="{LEFT + 420}" y="8" width="10" height="10"/>',
        f'<text class="small" x="{LEFT + 435}" y="17">quantize_static</text>',
        f'<line x1="{LEFT + SCALE}" y1="{TOP}" x2="{LEFT + SCALE}" y2="{height - 6}"/>',
    ]
    y = TOP
    for title, rows in groups.items():
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" style="font-weight: 600">{title}</text>')
        y += HEAD
        for name, *ratios in rows:
            parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
            for place, (kind, ratio) in enumerate(zip(("tuned", "usual"), ratios, strict=True)):
                if not ratio:
                    continue
                speed = 1 / float(ratio)
                at, width = y + 11 * place, SCALE * speed
                parts.append(f'<rect class="{kind}" x="{LEFT}" y="{at}" width="{width:.1f}" height="9"/>')
                parts.append(f'<text class="small" x="{LEFT + width + 5:.1f}" y="{at + 9}">{speed:.2f}x</text>')
            y += STEP
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(TABLE.read_text()))
