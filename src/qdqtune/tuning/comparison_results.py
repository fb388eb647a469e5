"""Results of comparing two files: decisions are made of them, and summary.json shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from qdqtune.timing.ratios import BUILD_LOOKS, PAIRS, UNSEEN, Plan, Ratio, Spread, across_builds, ratio, spread_of
from qdqtune.types import Failure, Measurement, Mix

LOOKS = (1, *BUILD_LOOKS)
"""After how many pairs of builds the files of a front are judged. One pair can decide there if other files have two,
which show how much builds differ."""


@dataclass(frozen=True)
class Compared:
    """File b against file a in one context.

    `ratio` is the time of b to that of a. `a_seconds` is the median per inference, `b_seconds` that times the ratio:
    the machine drifts while both are timed, so two medians may contradict the ratio, which rounds give. `threads` is
    the context's number, None where the engine has none; `measured` are the rounds of each pair of builds.
    `by_workload` has a comparison for each of several workloads alone, in the order of the mix.
    """

    ratio: Ratio
    a_seconds: float
    b_seconds: float
    threads: int | None = None
    measured: tuple[Measurement, ...] = ()
    by_workload: tuple[Compared, ...] = ()

    @classmethod
    def of(
        cls,
        measured: Sequence[Measurement],
        plan: Plan,
        threads: int | None = None,
        *,
        seen: Spread = UNSEEN,
        looks: int = len(BUILD_LOOKS),
    ) -> Self:
        """Judge pairs of builds at one of so many looks; `seen` is how much builds are known to differ."""
        both = across_builds([ratio(m, plan) for m in measured], plan, seen, looks)
        a_seconds = float(np.median([seconds for m in measured for seconds in m.a]))
        workloads = zip(*(m.parts for m in measured), strict=True)
        parts = tuple(cls.of(same, plan, threads, seen=seen, looks=looks) for same in workloads)
        return cls(both, a_seconds, a_seconds * both.median, threads, tuple(measured), parts)

    @property
    def builds(self) -> int:
        """The number of builds: for each pair, one of each file."""
        return 2 * len(self.measured)

    @property
    def figures(self) -> dict[str, Any]:
        """Ratio and times for summary.json, where a is the float model and b the final one."""
        return {
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "verdict": self.ratio.verdict,
            "baseline_ms": 1e3 * self.a_seconds,
            "final_ms": 1e3 * self.b_seconds,
        }


def judged_together(
    measured: Sequence[Sequence[Measurement | Failure]], plan: Plan, threads: int | None = None
) -> list[Compared | None]:
    """Judge several files that were compared with the same builds of one file, a row of pairs for each; None where a
    pair failed. How much builds differ is learned from the rows of the other files."""
    parts = [[m for m in row if isinstance(m, Measurement)] for row in measured]
    rows = [[ratio(m, plan) for m in row[:PAIRS]] for row in parts]
    found = list[Compared | None]()
    for at, (row, known) in enumerate(zip(parts, measured, strict=True)):
        others = [other for number, other in enumerate(rows) if number != at and len(other) == PAIRS]
        is_whole = 0 < len(row) == len(known)
        seen = spread_of(others)
        found.append(Compared.of(row, plan, threads, seen=seen, looks=len(LOOKS)) if is_whole else None)
    return found


def first_faster(contexts: Sequence[Compared]) -> Compared:
    """The context whose figures a result is shown with: the first in which b is faster, else the first."""
    return next((one for one in contexts if one.ratio.verdict == "faster"), contexts[0])


def rows_by_threads(contexts: Sequence[Compared]) -> list[dict[str, Any]]:
    """The rows `by_threads` of summary.json; none for an engine that has no number of threads."""
    return [{"threads": one.threads} | one.figures for one in contexts if one.threads is not None]


def rows_by_workload(contexts: Sequence[Compared], mix: Mix) -> list[dict[str, Any]]:
    """The rows `workloads` of summary.json: names and shares, with figures where something is proven."""
    named = [{"name": w.name, "share": w.share} for w in mix]
    if not contexts:
        return named
    return [row | one.figures for row, one in zip(named, first_faster(contexts).by_workload, strict=False)]
