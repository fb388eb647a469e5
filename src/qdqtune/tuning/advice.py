"""Advice to users about busy machines and undecided results, as sentences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import load, usable_cores
from qdqtune.engines.machine import COST_MODEL, MachineFacts, is_simulated
from qdqtune.graph.model import Model
from qdqtune.search import products_left_in_float, ratios_to_float
from qdqtune.timing.ratios import Plan, Ratio, judge
from qdqtune.types import Trial

WIDE_INTERVAL = 1.5
"""An interval whose ends are further apart than this factor suggests a busy machine: with two pairs of builds, 20 to 30
% are usual on a quiet one."""

TO_DECIDE = "a quieter machine, or more rounds (`effort` extensive, `restart`), would decide"


def busy(engine: EngineSpec, machine: MachineFacts | None = None) -> str | None:
    """Advice about this machine, or another `machine` that measures, see `busy_with`; None for the fake engine, and
    where times mean nothing."""
    if engine.name == COST_MODEL or is_simulated(engine.name, machine):
        return None
    if machine is not None:
        facts = machine.cores, machine.cores, machine.load or 0.0
        return busy_with(engine.options.get("threads", 1), *facts, machine.where)
    return busy_with(engine.options.get("threads", 1), usable_cores(), os.cpu_count() or 1, load() or 0.0)


def busy_with(threads: Any, usable: int, cores: int, load: float, where: str = "") -> str | None:
    """Advice if a run with so many threads has fewer `usable` cores, or if other processes use those of the machine
    `where`, "" for this one; `load` is their average number in the last minute."""
    if isinstance(threads, int) and threads > usable:
        whose = f"the {usable} core{'s' * (usable > 1)} that this process may use{where and f' on {where}'}"
        return f"`threads` {threads} is more than {whose}: threads wait for each other, and times say little"
    if load + threads <= cores + 0.5:
        return None
    share = (
        f"{load:.1f} processes want the {cores} core{'s' * (cores > 1)} of {where or 'this machine'} beside this run"
    )
    return f"the machine is busy ({share}): intervals will be wide; end other work, or tune at a quieter time"


def wide(ratio: Ratio) -> str | None:
    """Advice if an interval is wide, which that of a few pairs of builds is on any machine."""
    if ratio.low is None or ratio.high is None or ratio.high / ratio.low <= WIDE_INTERVAL:
        return None
    return f"the interval {ratio.speedup} is wide: more time, or a quieter machine, makes it narrower"


def unproven(ratio: Ratio, of: str = "float") -> str:
    """How fast a model was that did not prove faster, and what would decide it."""
    known = f"{ratio.speedup} the speed of {of}"
    return f"{known}; {TO_DECIDE}" if ratio.verdict == "undecided" else known


def undecided(history: Sequence[Trial], plan: Plan) -> str | None:
    """The best candidate that seemed faster if none was accepted: how fast, and what would decide it."""
    floats = ratios_to_float(history, plan)
    seeming = [
        (measured.scaled(floats[trial.against]), trial)
        for trial in history
        if (measured := judge(trial, plan)) is not None and trial.holds is not False
    ]
    ratio, trial = min(seeming, key=lambda pair: pair[0].median, default=(None, None))
    if trial is None or ratio is None or ratio.median >= 1 or any(t.accepted for t in history):
        return None
    return f"the best candidate, {trial.proposal.origin}, was {ratio.speedup} the speed of float; {TO_DECIDE}"


def no_kernels(history: Sequence[Trial], model: Model, plan: Plan) -> str | None:
    """What shows that an engine has no 8-bit kernels, if a trial does."""
    for trial in history:
        if left := products_left_in_float(trial, model, plan):
            speed = ratios_to_float(history, plan).get(trial.placement)
            slower = f" ({1 / speed:.2f}x the speed of float)" if speed else ""
            return (
                f"the engine ran all {left} products with pairs of the candidate {trial.proposal.origin} in float"
                f"{slower}: it has no 8-bit kernels for them, so no other pairs were tried"
            )
    return None


def no_format(formats: Sequence[str] | None, *, has_pairs: bool) -> str | None:
    """Why nothing was tried where weight formats alone were asked for; None where pairs may be placed, too."""
    if formats is None or has_pairs:
        return None
    return (
        f"`formats` {','.join(formats)}: no weight of a product gains by them here; they take too small a part of "
        "the time, fit in a cache in float, or are not faster so on this engine"
    )
