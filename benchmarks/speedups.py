"""Draws docs/speedups.svg from the first table of docs/measured.md.

python benchmarks/speedups.py
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent / "docs"
TABLE, PICTURE = DOCS / "measured.md", DOCS / "speedups.svg"

ROW = re.compile(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \[.*\| ([\d.]+) \[[^|]*\] \|$", re.MULTILINE)
"""A network, the ratio of the cut to float, and in the last column that of quantize_static."""

LEFT, SCALE, STEP, TOP = 130, 150, 26, 52
STYLE = """text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px }
.tuned { fill: #1a7f37 } .usual { fill: #8c959f } line { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .tuned { fill: #3fb950 } .usual { fill: #6e7681 } }"""


def picture(table: str) -> str:
    """The chart as SVG: for each network how many times as fast as float the two quantized models are."""
    rows = sorted(ROW.findall(table.split("\n## OpenVINO\n")[0]), key=lambda row: float(row[1]))
    height = TOP + STEP * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" role="img">',
        "<title>Times as fast as the float model, on ONNX Runtime</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="18">times as fast as the float model (ONNX Runtime, one thread)</text>',
        f'<rect class="tuned" x="{LEFT}" y="28" width="10" height="10"/>',
        f'<text class="small" x="{LEFT + 15}" y="37">qdqtune tune</text>',
        f'<rect class="usual" x="{LEFT + 110}" y="28" width="10" height="10"/>',
        f'<text class="small" x="{LEFT + 125}" y="37">quantize_static</text>',
        f'<line x1="{LEFT + SCALE}" y1="44" x2="{LEFT + SCALE}" y2="{height - 6}"/>',
    ]
    for number, (name, *ratios) in enumerate(rows):
        y = TOP + STEP * number
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for place, (kind, ratio) in enumerate(zip(("tuned", "usual"), ratios, strict=True)):
            speed = 1 / float(ratio)
            at, width = y + 11 * place, SCALE * speed
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{at}" width="{width:.1f}" height="9"/>')
            parts.append(f'<text class="small" x="{LEFT + width + 5:.1f}" y="{at + 9}">{speed:.2f}x</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(TABLE.read_text()))
