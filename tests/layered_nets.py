"""Small Q/DQ models in ONNX text, and layers that an engine might run for them: for tests of findings and reasons."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from models import build, normal
from qdqtune.explanation.unfused import Finding, check
from qdqtune.graph.model import Model
from qdqtune.types import Layer, NumericFormat

CONSTANTS: dict[str, Any] = {
    "w": np.ones((4, 4, 3, 3), np.int8), "wf": normal(4, 4, 3, 3), "ws": np.full(4, 0.1, np.float32),
    "wz": np.zeros(4, np.int8), "s": np.float32(0.1), "s2": np.float32(0.2), "z": np.int8(0), "z5": np.int8(5),
    "low": np.int8(-128), "zu": np.uint8(0), "bias": np.ones(4, np.int32), "bf": normal(4),
    "ss": np.full(4, 0.01, np.float32),
}  # fmt: skip
FIRST = "[xq] a = QuantizeLinear(x, s, z) [xd] b = DequantizeLinear(a, s, z)"
WEIGHT = "[wd] v = DequantizeLinear <axis=0>(w, ws, wz)"
CONV = "[conv] c = Conv <pads=[1,1,1,1]>(b, v)"
LAST = "[yq] e = QuantizeLinear(d, s, z) [yd] y = DequantizeLinear(e, s, z)"


Kind = Literal["compute", "quantize", "reformat"]


def net(*parts: str, outputs: Sequence[str] = ("y",), shape: str = "1,4,8,8") -> Model:
    results = ", ".join(f"float[{shape}] {output}" for output in outputs)
    text = f"net (float[{shape}] x) => ({results}) {{ {' '.join(parts)} }}"
    used = {n: v for n, v in CONSTANTS.items() if any(f"{before}{n}{after}" in text
            for before in "( " for after in ",)")}  # fmt: skip
    return build(text, used)


def layers(*given: str) -> tuple[Layer, ...]:
    """Of `nodes joined by +: precision`. A layer of Qs and DQs alone is of kind quantize, one without nodes a reformat.

    Nodes of constants that no layer has are folded.
    """
    found = []
    for number, text in enumerate(given):
        names, _, precision = text.partition(": ")
        nodes = tuple(names.split(" + ")) if names else ()
        computes = any(not name.endswith(("q", "d")) for name in nodes)
        kind: Kind = "compute" if computes else "quantize" if nodes else "reformat"
        found.append(Layer(f"layer {number}", nodes, precision, 0.5, kind))
    return tuple(found)


def failing(model: Model, *given: str, numbers: NumericFormat | None = None) -> list[Finding]:
    return [finding for finding in check(model, layers(*given), numbers) if finding.fails]


def reason(model: Model, *given: str, numbers: NumericFormat | None = None) -> str:
    """Of the one float layer."""
    (finding,) = [f for f in failing(model, *given, numbers=numbers) if f.kind == "float compute"]
    return finding.reason
