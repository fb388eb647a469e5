"""A finished run as a report."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqtune.commands.evidence import explain
from qdqtune.commands.explain import evidence_of
from qdqtune.commands.explanation import ORIGINS, RULED
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model
from qdqtune.graph.operators import QDQ
from qdqtune.measurement.limits import outcome
from qdqtune.measurement.timing import Ratio, judge, ratio
from qdqtune.report.graph import Ran, draw, everywhere
from qdqtune.report.values import Bar, Candidate, Fact, Group, Map, Point, Report, Speed, Strip, Verdict
from qdqtune.report.words import decibels, duration, rewrites_gave
from qdqtune.search import ratios_to_float
from qdqtune.search.costs.attribution import Priced, attribute
from qdqtune.search.front import undominated
from qdqtune.tuning.finished import Finished, read_run
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT
from qdqtune.tuning.subgraphs.groups import by_rules, from_layers
from qdqtune.types import EQUAL_DB, Failure, Layer, Measurement, Placement, Trial

BARS = 24
"""Groups that have a bar of their own."""

TAIL = 36
"""Characters of a node's name beside a bar."""


def report_of_run(folder: Path) -> Report:
    """What a finished run says.

    Raises:
        BadOption: the folder holds no finished run, or lacks its baseline.onnx.
        BadState: its state file is damaged.
    """
    run = read_run(folder)
    if not (folder / BASELINE).is_file():
        raise BadOption(f"{folder} has lost {BASELINE}, which holds the graph: run the same tune command again")
    evidence = evidence_of(run.left)
    drawn = _map(run, evidence.model, {row.node: row.reason for row in explain(evidence)})
    return Report(
        title=Path(run.summary["model"]).name,
        kind="tune",
        verdict=verdict(run),
        facts=tuple(_facts(run)),
        notes=tuple(run.told.get("notes", ())),
        bars=bars(drawn),
        bars_lead=_bars_lead(drawn, run),
        map=drawn,
        points=tuple(_points(run)),
        floor_db=run.summary.get("min_sqnr_db"),
        proof=tuple(_proof(run)),
        candidates=tuple(candidates(run)),
        circumstances=tuple(_circumstances(run)),
        commands=tuple(_commands(run)),
    )


def speed(measured: Ratio) -> Speed:
    """Times as fast: the other way round than ratios of time."""
    low, high = (None if end is None else 1 / end for end in (measured.high, measured.low))
    return Speed(1 / measured.median, low, high)


def strip(name: str, measurement: Measurement, measured: Ratio) -> Strip:
    """The rounds of a comparison."""
    rounds = tuple(a / b for a, b in zip(measurement.a, measurement.b, strict=True))
    return Strip(name, rounds, speed(measured))


def verdict(run: Finished) -> Verdict:
    """What came out, in a sentence."""
    summary = run.summary
    name = Path(summary["model"]).name
    if summary["shipped"] == "tuned":
        found = speed(Ratio(summary["ratio"], summary["ratio_low"], summary["ratio_high"]))
        saved = 1 - summary["ratio"]
        meaning = f"Side by side an inference takes {saved:.0%} less time; over all rounds the medians are "
        meaning += f"{summary['final_ms']:.4g} ms instead of {summary['baseline_ms']:.4g} ms. "
        meaning += "Measured on the finished files, on fresh builds that the search never saw."
        return Verdict(f"{name} runs {found.median:.2f} times as fast", meaning, True, found, "the float model")
    kept = "your own file" if summary["shipped"] == "given" else "the float model"
    if summary.get("constraint_met") is False:
        meaning = f"Faster candidates were found, but none keeps the outputs close enough. {FINAL} is {kept}."
        return Verdict(f"Nothing faster is exact enough for {name}", meaning, False)
    if not summary["trials"]:
        return Verdict(f"Nothing was tried in {name}", f"No pair was tried in this run. {FINAL} is {kept}.", False)
    meaning = f"No candidate proved faster than the float model beyond the noise of measuring. {FINAL} is {kept}."
    return Verdict(f"Nothing faster was found for {name}", meaning, False)


def _shown(run: Finished) -> tuple[Placement, str]:
    """The placement beside the float model, and what it is called: what ships, or else the fastest candidate whose
    layers are known."""
    if run.final:
        return run.final, "tuned"
    ratios = ratios_to_float(run.history, run.plan)
    known = [t for t in run.history if t.layers and t.placement in ratios]
    if not known:
        return Placement(), ""
    best = min(known, key=lambda t: (t.holds is False, ratios[t.placement]))
    return best.placement, f"candidate {best.number}"


def _map(run: Finished, model: Model, whys: Mapping[str, str]) -> Map:
    shown, name = _shown(run)
    grouped = from_layers(model, run.float_layers, "") if run.float_layers else by_rules(model, everywhere(model))
    known: dict[Placement, Sequence[Layer]] = {t.placement: t.layers for t in run.history if t.layers}
    if run.final:
        known[run.final] = run.final_layers
    float_ms = run.left.float_ms
    ratios = ratios_to_float(run.history, run.plan)
    if run.final:
        ratios[run.final] = run.left.here["final_ms"] / float_ms  # fresh builds count before those of the search
    before = _ran(model, Placement(), run.float_layers, 1.0, float_ms)
    after = _ran(model, shown, known.get(shown, ()), ratios.get(shown, 1.0), float_ms) if shown else None
    error_db = {tensor: _db(noise) for tensor, noise in run.alone.items()}
    return draw(model, grouped.groups, frozenset(grouped.folded), before, after, error_db, whys, name)


def _ran(model: Model, placement: Placement, layers: Sequence[Layer], share: float, float_ms: float) -> Ran:
    timed = any(layer.time_ms for layer in layers)
    times = attribute(model, Priced(placement, tuple(layers), share), float_ms) if timed else None
    return Ran(placement, tuple(layers), times)


def _db(noise: float) -> float:
    """Signal to noise of a power of noise; what cannot be told from none has the most that can be told."""
    return EQUAL_DB if noise <= 10 ** (-EQUAL_DB / 10) else -10 * math.log10(noise)


def bars(drawn: Map) -> tuple[Bar, ...]:
    """The groups that take the most time, and all the others as one."""
    timed = [(n, g) for n, g in enumerate(drawn.groups) if g.float_ms is not None]
    if not sum(g.float_ms or 0.0 for _, g in timed):
        return ()
    timed.sort(key=lambda pair: -max(pair[1].float_ms or 0.0, (pair[1].tuned_ms or 0.0) + pair[1].conversion_ms))
    rows = [
        Bar(
            g.label,
            tail(foremost(drawn, g)),
            n,
            g.float_ms or 0.0,
            g.tuned_ms,
            g.conversion_ms,
            g.precision == "8 bit",
        )
        for n, g in timed[:BARS]
    ]
    if rest := [g for _, g in timed[BARS:]]:
        tuned = None if rest[0].tuned_ms is None else sum(g.tuned_ms or 0.0 for g in rest)
        floats, conversions = sum(g.float_ms or 0.0 for g in rest), sum(g.conversion_ms for g in rest)
        rows.append(Bar(f"the other {len(rest)} groups", "", None, floats, tuned, conversions))
    return tuple(rows)


def foremost(drawn: Map, group: Group) -> str:
    """The name of a group's first node that is not of a pair, or else of its first."""
    nodes = [drawn.nodes[n] for n in group.nodes]
    return next((node.name for node in nodes if node.op not in QDQ), nodes[0].name)


def tail(name: str) -> str:
    """The end of a node's name, which tells more than its beginning."""
    return name if len(name) <= TAIL else "…" + name[1 - TAIL :]


def _bars_lead(drawn: Map, run: Finished) -> str:
    spent = sum(g.conversion_ms for g in drawn.groups)
    told = f"{run.left.float_ms:.4g} ms in float, as measured"
    if run.final:
        told += f", and {run.left.here['final_ms']:.4g} ms tuned"
    told += ", shared out over layers as the engine told of inferences that it profiled."
    if not drawn.tuned:
        return told
    what = "the tuned model" if run.final else f"{drawn.tuned}, the fastest that was tried, which does not ship"
    return f"{told} Conversions between 8 bits and float take {spent:.3g} ms of {what}."


def _facts(run: Finished) -> Iterator[Fact]:
    summary = run.summary
    yield Fact("float", f"{summary['baseline_ms']:.4g} ms", "median time of one inference")
    if summary["shipped"] == "tuned":
        yield Fact("tuned", f"{summary['final_ms']:.4g} ms", "median time of one inference")
        if len(by_threads := summary.get("by_threads", [])) > 1:
            for row in by_threads:
                median = 1 / row["ratio"]
                named = f"at {row['threads']} thread{'s' * (row['threads'] > 1)}"
                times = f"{row['final_ms']:.4g} ms instead of {row['baseline_ms']:.4g} ms"
                yield Fact(named, f"{median:.2f}×", f"as fast: {times}, {row['verdict']} on fresh builds there")
        for row in summary.get("workloads", []):
            times = f"{row['final_ms']:.4g} ms instead of {row['baseline_ms']:.4g} ms"
            which = f"{row['name']}, {row['share']:.0%} of the calls"
            yield Fact(which, f"{1 / row['ratio']:.2f}×", f"as fast: {times}, {row['verdict']} on fresh builds")
        if (given := summary.get("ratio_to_given")) is not None:
            yield Fact("against your file", f"{1 / given:.2f}×", f"as fast as {Path(summary['model']).name} as it is")
        exact = summary["output_sqnr_db"]
        hint = "signal over error at the outputs; 20 dB is an error of a tenth, 30 of a thirtieth"
        yield Fact("output accuracy", "equal" if exact is None else f"{exact:.1f} dB", hint)
        if summary.get("metric_before") is not None and summary.get("metric_after") is not None:
            yield Fact("your metric", f"{summary['metric_after']:.4g}", f"float: {summary['metric_before']:.4g}")
        if "gave" in (rewrites := summary.get("rewrites", {})):
            gave, placed = rewrites_gave(summary)
            told = "" if placed is None else f"; the placement gave {1 / placed:.2f}× on top"
            yield Fact(
                "rewrites gave", f"{1 / gave:.2f}×", f"as fast as your file: {', '.join(rewrites['names'])}{told}"
            )
        yield Fact("tensors in 8 bits", str(summary["pairs"]), "values that carry a Q/DQ pair")
    elif (without := summary.get("fastest_without_limits")) is not None:
        ends = "equal outputs" if without["sqnr_db"] is None else decibels(without["sqnr_db"])
        yield Fact("fastest without limits", f"{1 / without['ratio']:.2f}×", f"as fast as float, at {ends}")
    builds = f"{summary['builds']} build{'s' * (summary['builds'] != 1)}"
    yield Fact("candidates", str(summary["trials"]), f"{builds} in {duration(summary['seconds'])}")


def _points(run: Finished) -> Iterator[Point]:
    """Proven points of a front, and the candidates of the search."""
    proven = run.summary.get("front") or ()
    for row in proven:
        ends = speed(Ratio(row["ratio"], row["low"], row["high"]))
        yield Point(f"{FRONT}/{row['name']}", ends, row["sqnr_db"], row["shipped"], True, row["holds_limits"])
    ratios = ratios_to_float(run.history, run.plan)
    best = {point.trial.placement for point in undominated(run.history, run.plan)}
    last = {t.placement: t for t in run.history if t.placement in ratios and t.accuracy is not None}
    for placement, trial in last.items():
        is_final = placement == run.final
        if is_final and proven:
            continue
        ends = Speed(1 / ratios[placement])
        if is_final:
            ends = speed(Ratio(run.summary["ratio"], run.summary["ratio_low"], run.summary["ratio_high"]))
        name = f"candidate {trial.number}" + (", unbeaten" if placement in best else "")
        yield Point(name, ends, trial.sqnr_db, is_final, is_final, trial.holds is not False)


def _proof(run: Finished) -> Iterator[Strip]:
    for number, measured in enumerate(run.proof, 1):
        yield strip(f"builds {number}", measured, ratio(measured, run.proof_plan))


def candidates(run: Finished) -> Iterator[Candidate]:
    """The candidates in the order in which they were tried."""
    ratios = ratios_to_float(run.history, run.plan)
    rows = {row["key"]: row for row in run.told.get("trials", ())}
    seconds = [row["seconds"] for row in rows.values()] if len(rows) == len(run.history) else [None] * len(run.history)
    for trial, when in zip(run.history, seconds, strict=True):
        came = "accepted" if trial.accepted else outcome(trial, run.plan)
        measured = judge(trial, run.plan)
        shown = None
        if isinstance(trial.result, Measurement) and measured is not None:
            shown = strip(f"candidate {trial.number}", trial.result, measured)
        found = ratios.get(trial.placement)
        yield Candidate(
            trial.number,
            origin(trial),
            came,
            told(trial, run),
            shown,
            None if found is None or measured is None else 1 / found,
            trial.sqnr_db,
            len({e.tensor for e in trial.placement}),
            trial.builds,
            when,
        )


def origin(trial: Trial) -> str:
    """Where a candidate comes from, in words."""
    name = trial.proposal.origin
    return ORIGINS.get(name, f"the rule '{name}'" if name in RULED else name)


def told(trial: Trial, run: Finished) -> str:
    """Why a candidate was taken or not."""
    measured = judge(trial, run.plan)
    if measured is None:
        failures = [part for part in (trial.result, trial.check) if isinstance(part, Failure)]
        return f"the engine refused it: {failures[0].reason}" if failures[0].stage == "build" else failures[0].reason
    if trial.accepted:
        return "faster than the best before it beyond noise, and exact enough: the new best"
    if trial.holds is False:
        floor = run.summary.get("min_sqnr_db")
        limit = f", and {floor:g} dB are asked for" if floor is not None and trial.sqnr_db is not None else ""
        exact = "" if trial.sqnr_db is None else f": {trial.sqnr_db:.1f} dB"
        return f"its outputs are too far from the float model's{exact}{limit}"
    words = {
        "faster": "faster than the best before it, but another one of its batch was taken",
        "slower": "slower than the best before it, beyond noise",
        "undecided": "the interval holds 1: too close to the best before it to tell",
    }
    return words[measured.verdict]


def _circumstances(run: Finished) -> Iterator[Fact]:
    summary, machine = run.summary, run.told.get("machine", {})
    engine = summary["engine"]
    for name in ("engine", "version", "provider", "device", "driver", "isa", "threads"):
        if engine.get(name):
            yield Fact({"isa": "instruction sets"}.get(name, name), str(engine[name]))
    if machine:
        yield Fact("cores", str(machine["cores"]))
        loads = [f"{load:g}" for load in machine["load"] if load is not None]
        if loads:
            yield Fact("load, begin and end", " and ".join(loads), "processes that wanted the cores")
        yield Fact("system", machine["system"])
    if run.told.get("begun"):
        yield Fact("begun", run.told["begun"].replace("T", " ").replace("+00:00", " UTC"))
    if spent := _spent(run):
        yield Fact("where the time of the run went", spent)
    yield Fact("seed", str(summary["seed"]))
    yield Fact("mode", summary["mode"])
    if run.told.get("calibration"):
        yield Fact("calibration", run.told["calibration"])
    if (judging := summary.get("accuracy_samples")) is not None:
        held = "kept apart from calibration" if summary.get("accuracy_held_out") else "which calibration saw as well"
        yield Fact("outputs judged on", f"{judging} samples, {held}")
    for name, version in summary["versions"].items():
        yield Fact(name, str(version))


def _spent(run: Finished) -> str:
    """Seconds by stage, those that took longest first; empty for runs of versions that wrote no diary."""
    stages = run.told.get("stages", ())
    ends = [*(seconds for _, seconds in stages[1:]), run.told.get("seconds", run.summary["seconds"])]
    took = Counter[str]()
    for (text, begin), end in zip(stages, ends, strict=False):
        took[text] += end - begin  # a stage may come twice
    return ", ".join(f"{text} {duration(seconds)}" for text, seconds in took.most_common(4) if seconds >= 1)


def _commands(run: Finished) -> Iterator[Fact]:
    typed: Sequence[str] = run.told.get("command", ())
    if typed:
        yield Fact("what was run", shlex.join(typed))
        yield Fact(
            "again from the beginning", shlex.join([*typed, *(["--restart"] if "--restart" not in typed else [])])
        )
    settings: Mapping[str, Any] = run.told.get("settings", {})
    if settings and not typed:
        yield Fact("settings", ", ".join(f"{name}={value!r}" for name, value in settings.items()))
    given, final = run.summary["model"], str(run.folder / FINAL)
    yield Fact("measure the result again", shlex.join(["qdqtune", "compare", given, final]))
