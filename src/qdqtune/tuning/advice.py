"""What a user should do about noise: a machine that is busy, and results that nothing decides."""

from __future__ import annotations

import os
from collections.abc import Sequence

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usable_cores
from qdqtune.search import ratios_to_float
from qdqtune.timing.ratios import Plan, Ratio, judge, overlap, speed
from qdqtune.types import Trial

WIDE = 1.5
"""Ends of an interval that are further apart than this factor tell of a busy machine: 20 to 30 % is usual on a quiet
one, where two pairs of builds have decided."""

LESS = 1.15
"""A gain at another number of threads that is smaller by more than this factor asks for a search there."""

QUIETER = "a quieter machine, or more rounds (--effort extensive --restart), would decide"


def busy(engine: EngineSpec) -> str | None:
    """What to do where other processes want the cores that this run needs: their number in the last minute, on the
    whole machine, of which this run may have a part for itself."""
    threads = engine.options.get("threads", 1)
    if engine.name == "fake":
        return None
    if isinstance(threads, int) and threads > (own := usable_cores()):
        whose = f"the {own} core{'s' * (own > 1)} that this process may use"
        return f"--threads {threads} is more than {whose}: threads wait for each other, and times say little"
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    if load + threads <= cores + 0.5:
        return None
    share = f"{load:.1f} processes want the {cores} core{'s' * (cores > 1)} of this machine beside this run"
    return f"the machine is busy ({share}): intervals will be wide; end other work, or tune at a quieter time"


def wide(ratio: Ratio) -> str | None:
    """What to do where an interval is wide."""
    if ratio.low is None or ratio.high is None or ratio.high / ratio.low <= WIDE:
        return None
    return f"the interval {ratio.speedup} is wide, as on a busy machine: a run at a quieter time says more"


def elsewhere(searched: int | None, proven: Sequence[tuple[int | None, Ratio]]) -> str | None:
    """Where to search, if what was proven at some numbers of threads is much less at one of them than at that of the
    search, or if the search was at none of them: other placements pay there (benchmarks/findings.md)."""
    known = dict(proven)
    others = {threads: ratio for threads, ratio in known.items() if threads not in (None, searched)}
    if searched is None or not others:
        return None
    threads, least = max(others.items(), key=lambda pair: pair[1].median)
    if searched not in known:
        return f"the search was at --threads {searched}, not deployed: --threads {threads} finds what pays there"
    home = known[searched]
    if least.median <= LESS * home.median or overlap(least, home):
        return None
    told = f"{speed(least.median)} at {threads} threads, {speed(home.median)} at {searched}"
    return f"{told}: who deploys at {threads} may gain more by a search there (--threads {threads} --restart)"


def unproven(ratio: Ratio, of: str = "float") -> str:
    """How fast something was that did not prove faster, and what would decide it."""
    known = f"{ratio.speedup} the speed of {of}"
    return f"{known}; {QUIETER}" if ratio.verdict == "undecided" else known


def undecided(history: Sequence[Trial], plan: Plan) -> str | None:
    """The best candidate that seemed faster, where none was: how fast, and what would decide it."""
    floats = ratios_to_float(history, plan)
    seeming = [
        (measured.scaled(floats[trial.against]), trial)
        for trial in history
        if (measured := judge(trial, plan)) is not None and trial.holds is not False
    ]
    ratio, trial = min(seeming, key=lambda pair: pair[0].median, default=(None, None))
    if trial is None or ratio is None or ratio.median >= 1 or any(t.accepted for t in history):
        return None
    return f"the best candidate, {trial.proposal.origin}, was {ratio.speedup} the speed of float; {QUIETER}"
