"""Formats numbers, counts, names and origins as text for people, in one way for all commands and reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqtune.errors import Failure
from qdqtune.placement.reading import count_pairs
from qdqtune.types import CostsByRule, Placement, Trial


def counted(count: int, what: str) -> str:
    """A count with its noun, in the plural unless it is one."""
    return f"{count} {what}{'s' * (count != 1)}"


def title(model: Path) -> str:
    """A model's name for titles: that of its file, with the folder in front if the file is called model.onnx."""
    folder = model.absolute().parent.name
    return f"{folder}/{model.name}" if model.name == "model.onnx" and folder else model.name


def built(summary: Mapping[str, Any]) -> str:
    """The number of builds of a finished run (as the option `builds` counts them), and of its proof."""
    proof = summary["proof_builds"]
    return f"{summary['builds']} and {proof} for the proof" if proof else str(summary["builds"])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def samples(count: int, is_held_out: bool) -> str:
    """On how many samples outputs were compared, and whether these were held out of calibration."""
    return counted(count, "held-out sample" if is_held_out else "sample")


def placed(placement: Placement) -> str:
    """The numbers of tensors with a Q/DQ pair and of weights with a weight format, as text."""
    count = len(placement.weight_only)
    weights = f"{count} {'weight is' if count == 1 else 'weights are'} stored in fewer bits"
    if count and not placement.edges:
        return weights
    return f"{counted(count_pairs(placement), 'tensor')} with a Q/DQ pair{f', {weights}' if count else ''}"


TAIL = 36
"""Most characters of a node's name in a table."""


def tail(name: str) -> str:
    """The last TAIL characters of a node's name, which say more than its beginning."""
    return name if len(name) <= TAIL else "…" + name[1 - TAIL :]


LONG_NAME = re.compile(rf"[^\s,'()]{{{TAIL + 1},}}")


def shortened(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows of a table with long names cut as by `tail`, but later where names would look the same."""
    names = {name for row in rows for cell in row for name in LONG_NAME.findall(cell)}
    short = {name: tail(name) for name in names}
    while (uses := Counter(short.values())).total() > len(uses):
        alike = [name for name in names if uses[short[name]] > 1]
        for name in alike:
            end = len(name) - len(short[name])
            cut = max(name.rfind("/", 0, end), name.rfind(";", 0, end)) + 1
            short[name] = f"…{name[cut:]}" if cut else name
    return [[LONG_NAME.sub(lambda found: short[found[0]], cell) for cell in row] for row in rows]


ORIGINS: Mapping[str, str] = {
    "cut": "the placement that layer times predict to be fastest",
    "front": "a placement that trades speed for accuracy",
    "polish": "an earlier placement with a few pairs added or removed",
    "fused units": "pairs wherever they can stand, around what the engine fuses",
    "weights in 4 bits": "weights of products in 4 bits, and no pairs",
    "weights in 8 bits": "weights of products in 8 bits, and no pairs",
    "dynamic quantization": "products with scales found at run time, and no pairs",
    "weights in fewer bits": "weights of products in several formats, and no pairs",
    "rules": "the placement that `quantize` makes",
    "imported": "the pairs of your Q/DQ model",
    "within the limits": "the placement that should lose least accuracy for its speed",
    "mutated": "region search",
    "cached": "the pattern cache",
    "merged winners": "the winners of region search together",
    "8 bits": "everything in 8 bits",
    "16 bits": "everything in 16 bits",
    "cut by rule": "the cheapest by rule at a price on noise",
    "narrowed": "the best before it with a part in fewer bits",
    "compute": "pairs at the inputs of convolutions and products",
    "residual": "pairs at the inputs of convolutions and products, and of skip connections",
    "islands": "pairs at the inputs of convolutions and products, and between them where values stay integers",
    "static": "pairs where quantize_static of ONNX Runtime places them",
    "everything": "pairs wherever they can stand, except inside of what the engine fuses",
}
"""Origins of candidates, in words."""


def origin_in_words(origin: str) -> str:
    return ORIGINS.get(origin, f"the candidate {origin!r}")


def became_in_words(trial: Trial, came: str, *, is_best: bool, missed: str | None) -> str:
    """The outcome `came` of a candidate (see `timing.limits.outcome`) as text. `is_best`: it was the best so far.
    `missed` is the limit on accuracy that it misses."""
    rival = "the best before it" if trial.against else "the float model"
    if isinstance(trial.result, Failure):
        return f"failed: {trial.result.reason}"
    if came == "inaccurate":
        return f"not taken: {missed or 'too inaccurate'}"
    if isinstance(trial.result, CostsByRule):
        return f"cheaper by rule than {rival}" if is_best else f"not taken: not cheaper by rule than {rival}"
    if came == "slower":
        return f"slower than {rival}"
    if came == "faster":
        others = "made for the front" if trial.proposal.origin == "front" else "slower than the best so far"
        return f"faster than {rival}: the best so far" if is_best else f"faster than {rival}, {others}"
    if is_best:
        return f"as fast as {rival} within noise, and more exact: the best so far"
    return f"not taken: not clearly faster than {rival}"
