"""Makes the report of a finished run, as values that one template shows: its result, and how it was made.

Times are in ms. A speed is a factor: 2.0 takes half the time.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec

from qdqtune.errors import BadOption
from qdqtune.explanation.formatting import became_in_words, built, duration, origin_in_words, title
from qdqtune.explanation.model_map import Map, draw
from qdqtune.explanation.result_rows import Headline, is_judged, remarks, result_rows, verdict
from qdqtune.explanation.units import disturbance, explanations
from qdqtune.placement.reading import count_pairs
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.units import fusion_groups
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import Ratio, judge, ratio
from qdqtune.tuning.finished import FinishedRun, read_run
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT
from qdqtune.tuning.store import job_of
from qdqtune.types import EQUAL_DB, CostsByRule, Measurement, sqnr_of

OWN = "your Q/DQ file"
"""The name of the file that ships, if it is the user's Q/DQ file."""


@dataclass(frozen=True)
class Fact:
    """A name and its value, with a hint about its meaning."""

    name: str
    value: str
    hint: str = ""


Came = Literal["accepted", "faster", "undecided", "slower", "inaccurate", "failed", "costlier"]


@dataclass(frozen=True)
class Candidate:
    """A candidate of the search. `against_best` is its speed relative to the best candidate before it, `speed` relative
    to the float model. `outcome` is "costlier" if judged by rule. `ships`: optimized_final.onnx has its placement."""

    number: int
    origin: str
    outcome: Came
    told: str
    against_best: Ratio | None
    speed: float | None
    sqnr_db: float | None
    tensors: int
    seconds: float | None
    ships: bool = False


@dataclass(frozen=True)
class Point:
    """A placement with its speed and accuracy; `sqnr_db` is None for equal outputs. `proven`: on fresh builds."""

    name: str
    speed: Ratio
    sqnr_db: float | None
    shipped: bool
    proven: bool
    holds: bool


@dataclass(frozen=True)
class Report:
    """A whole report, section by section; empty sections are left out."""

    title: str
    verdict: Headline
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    bars_lead: str = ""
    map: Map | None = None
    points: tuple[Point, ...] = ()
    floor_db: float | None = None
    has_accuracy: bool = True
    outputs: Mapping[str, float | None] = field(default_factory=dict)
    """The SQNR in dB of each float output where there are several, the worst first; None where it is equal."""
    proof: tuple[Ratio, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    circumstances: tuple[Fact, ...] = ()
    commands: tuple[Fact, ...] = ()


def report_of_run(folder: Path) -> Report:
    """Make the report of a finished run.

    Raises:
        BadOption: the folder holds no finished run, or lacks its baseline.onnx.
        BadState: its state file is damaged.
    """
    run = read_run(folder)
    if not (folder / BASELINE).is_file():
        raise BadOption(f"{folder} has lost {BASELINE}, which holds the graph: run the same tune command again")
    error_db = {tensor: sqnr_of(noise) or 0.0 if noise else EQUAL_DB for tensor, noise in run.alone.items()}
    tuned = OWN if run.keeps_own_pairs else "tuned" if run.placement else ""
    kernels = fusion_groups(run.model, run.shipped_layers)
    drawn = draw(run.model, explanations(run), error_db, tuned, run.floats, kernels)
    summary = msgspec.to_builtins(run.summary)
    plan = replace(run.plan, looks=run.log.proof)
    by_output: Mapping[str, float | None] = (summary["output_accuracy"] or {}).get("by_output", {})
    return Report(
        title=title(Path(run.summary["model"])),
        verdict=verdict(run.summary),
        facts=tuple(_facts(run, summary)),
        notes=tuple(dict.fromkeys(filter(None, (run.log.ended, *run.log.notes, *remarks(summary))))),
        bars_lead=_bars_lead(drawn, run),
        map=drawn,
        points=tuple(_points(run)),
        floor_db=run.summary["min_sqnr_db"],
        has_accuracy=is_judged(run.summary),
        outputs=dict(sorted(by_output.items(), key=lambda each: inf if each[1] is None else each[1])),
        proof=tuple(ratio(each, plan).inverse for each in run.proof),
        candidates=tuple(candidates(run)),
        circumstances=tuple(circumstances(run)),
        commands=tuple(commands(run)),
    )


def _bars_lead(drawn: Map, run: FinishedRun) -> str:
    if run.float_ms is None:
        return ""
    text = f"{drawn.before.capitalize()} takes {run.float_ms:.4g} ms"
    if drawn.tuned and run.here["final_ms"] is not None:
        text += f", {drawn.tuned} {run.here['final_ms']:.4g} ms"
    threads = run.summary["engine"].get("threads")
    at = f" at {threads} thread{'s' * (threads != '1')}" if threads else ""
    text += f"{at}. The engine's profile says how this is divided among the groups."
    if rough := disturbance(run):
        text += f" {rough[0].upper()}{rough[1:]}."
    spent = sum(group.conversion_ms for group in drawn.groups)
    what = OWN if run.keeps_own_pairs else "the tuned model"
    return f"{text} Conversions between 8 bits and float take {spent:.3g} ms of {what}." if drawn.tuned else text


def _facts(run: FinishedRun, summary: Mapping[str, Any]) -> Iterator[Fact]:
    """The rows of the result that `tune` prints, without its headline; where else nodes run; and what the search
    used."""
    for row in result_rows(summary):
        if row.final and row.name != "speedup [interval]":
            is_plain = row.before in ("", "0", "1x", row.final)
            yield Fact(row.name.strip(), row.final, row.note if is_plain else f"float: {row.before}")
    if run.summary["baseline_ms"] and run.summary["final_ms"]:
        before, after = (f"{1e3 / ms:.4g}" for ms in (run.summary["baseline_ms"], run.summary["final_ms"]))
        yield Fact("inferences a second", after, f"float: {before}")
    left = run.summary.get("fallback")
    if left is not None:
        yield Fact("nodes that run elsewhere", f"{len(left.left)} of {left.nodes}")
    yield Fact("candidates", str(summary["trials"]), f"builds: {built(summary)}, in {duration(summary['seconds'])}")


def _points(run: FinishedRun) -> Iterator[Point]:
    proven = run.summary.get("front", [])
    for row in proven:
        ends = Ratio(row["ratio"], row["low"], row["high"]).inverse
        yield Point(f"{FRONT}/{row['name']}", ends, row["sqnr_db"], row["shipped"], True, row["holds_limits"])
    if not run.summary["timed"] or not is_judged(run.summary):
        return
    final = run.summary["ratio"]
    if run.keeps_own_pairs and final is not None:
        yield Point(OWN, Ratio(1 / final, None, None), run.summary["output_sqnr_db"], True, False, True)
    ratios = ratios_to_float(run.history, run.plan)
    last = {t.placement: t for t in run.history if t.placement in ratios and t.accuracy is not None}
    for placement, trial in last.items():
        is_final = placement == run.placement and not run.keeps_own_pairs
        if is_final and proven:
            continue
        ends = Ratio(1 / ratios[placement], None, None)
        if is_final and final is not None:
            ends = Ratio(final, run.summary["ratio_low"], run.summary["ratio_high"]).inverse
        yield Point(f"candidate {trial.number}", ends, trial.sqnr_db, is_final, is_final, trial.holds is not False)


def candidates(run: FinishedRun) -> Iterator[Candidate]:
    ratios = ratios_to_float(run.history, run.plan)
    seconds = {row.of: row.seconds for row in run.log.trials}
    for trial in run.history:
        measured = judge(trial, run.plan)
        shown = measured.inverse if measured is not None and isinstance(trial.result, Measurement) else None
        result = outcome(trial, run.plan)
        is_costlier = isinstance(trial.result, CostsByRule) and result != "inaccurate"
        came: Came = "accepted" if trial.accepted else "costlier" if is_costlier else result
        missed = run.limits.why_refused(trial) if result == "inaccurate" else None
        became = became_in_words(trial, result, is_best=trial.accepted, missed=missed)
        if trial is run.trial:
            became = f"this is {FINAL}" + (": proven on fresh builds" if run.summary["timed"] else "")
        yield Candidate(
            number=trial.number,
            origin=origin_in_words(trial.proposal.origin),
            outcome=came,
            told=became,
            against_best=shown,
            speed=None if shown is None or trial.placement not in ratios else 1 / ratios[trial.placement],
            sqnr_db=trial.sqnr_db,
            tensors=count_pairs(trial.placement),
            seconds=seconds.get(job_of(trial)),
            ships=trial is run.trial,
        )


# ---- how the run was made


def circumstances(run: FinishedRun) -> Iterator[Fact]:
    summary, log = run.summary, run.log
    engine = summary["engine"]
    for name in ("engine", "provider", "plugin", "device", "driver", "isa"):
        if engine.get(name):
            yield Fact({"isa": "instruction sets"}.get(name, name.replace("_", " ")), engine[name])
    yield Fact("cores", str(log.machine.cores))
    yield Fact("load", f"{log.machine.load:g}", "processes that wanted the cores when it began")
    yield Fact("system", log.machine.system)
    yield Fact("begun", log.begun.replace("T", " ").replace("+00:00", " UTC"))
    yield Fact("seed", str(summary["seed"]))
    yield Fact("mode", summary["mode"])
    yield Fact("calibration", log.calibration)
    for name, version in summary["versions"].items():
        yield Fact(name, version)


def commands(run: FinishedRun) -> Iterator[Fact]:
    """The commands that made the run, repeat it, and measure its result again."""
    typed = run.log.command
    if typed:
        yield Fact("what was run", shlex.join(typed))
        yield Fact(
            "again from the beginning", shlex.join([*typed, *(["--restart"] if "--restart" not in typed else [])])
        )
    if run.summary["shipped"] == "tuned":
        yield Fact("measure the result again", shlex.join(["qdqtune", "verify", str(run.folder)]))
