"""Tables about results, and the line that names the file to use."""

from __future__ import annotations

import glob
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qdqtune.cli.progress import failure
from qdqtune.commands.compare import Row
from qdqtune.commands.tune import is_judged, result_rows
from qdqtune.errors import escaped
from qdqtune.explanation.words import builds, built, duration, samples
from qdqtune.search.costs.decisions import UnitPrice
from qdqtune.timing.ratios import Ratio, speed
from qdqtune.tuning.estimate import Estimate
from qdqtune.tuning.records import GroupOutcome
from qdqtune.tuning.result import Result

LARGEST_UNITS = 12
"""The most rows of the table of units."""

LARGEST_GROUPS = 20
"""The most rows of the table of groups."""

SHORT = 7
"""Words of up to so many characters are not broken in columns."""

CANDIDATE = re.compile(r"\b[0-9a-f]{16}\.onnx\b")
"""Matches names of candidate files, which differ in reasons that are otherwise equal."""


def result_table(found: Result) -> Table:
    """The float and the tuned model side by side; below, what the search has spent and what outputs were compared."""
    summary = found.summary
    table = table_of(("", "baseline", "final"), result_rows(found))
    failed = sum(failure(trial) is not None for trial in found.history)
    between = sum(trial.proposal.origin == "front" for trial in found.history)  # not shown while the search runs
    besides = (f"{number} {what}" for number, what in ((failed, "failed"), (between, "made for the front")) if number)
    candidates = f"candidates: {summary['trials']}" + (f" ({told})" if (told := ", ".join(besides)) else "")
    table.caption = f"{candidates}, builds: {built(summary)}, time: {duration(summary['seconds'])}"
    if found.improved and (judged := summary["accuracy_samples"]):
        is_held_out = summary["accuracy_held_out"]
        seen = "" if is_held_out else ", which calibration saw: of forty or more, every fifth is kept apart"
        table.caption += f"\noutputs compared on {samples(judged, is_held_out)}{seen}"
    return table


def front_table(summary: Mapping[str, Any]) -> Table:
    """A table of the proven points of a front."""
    cells, has_accuracy = [], is_judged(summary)
    for row in summary["front"]:
        ends = Ratio(row["ratio"], row["low"], row["high"]).speedup
        if len(row["by_threads"]) > 1:
            ends += "".join(f"\n  {speed(at['ratio'])} at {at['threads']}" for at in row["by_threads"])
        metric = "" if row["metric"] is None else f"{row['metric']:g}"
        agreement = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
        mark = "ships" if row["shipped"] else "" if row["holds_limits"] else "below the limits"
        cells.append((row["name"], ends, _db(row, has_accuracy), agreement, metric, _carry(row), mark))
    table = _filled(("point", "speedup [interval]", "SQNR, dB", "agreement", "metric", "tensors", ""), cells)
    table.caption = "each point is front/NAME.onnx; --pick NAME makes another one optimized_final.onnx"
    return table


def met_table(summary: Mapping[str, Any]) -> Table:
    """A table of candidates of the search that no other one beat in both latency and accuracy."""
    cells = [
        (
            str(row["number"]),
            row["origin"],
            speed(row["ratio"]),
            _db(row, is_judged(summary)),
            _carry(row),
            "ships" if row["shipped"] else "" if row["holds_limits"] else "below the limits",
        )
        for row in summary["met"]
    ]
    table = _filled(("candidate", "from", "speedup", "SQNR, dB", "tensors", ""), cells)
    proven = "none proved to be a point of the front" if "front" in summary else "--front proves such points"
    table.caption = f"what no other candidate beat in both, as the search measured it; {proven}"
    return table


def _carry(row: Mapping[str, Any]) -> str:
    """How many tensors have a pair, and how many weights are stored in fewer bits (a count, or counts by format)."""
    weights = row.get("weights") or 0
    count = weights if isinstance(weights, int) else sum(weights.values())
    return str(row["pairs"]) + (f" + {count} weights" if count else "")


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The table without empty columns; columns without a title stay."""
    told = [n for n, name in enumerate(columns) if not name or any(row[n] for row in rows)]
    return table_of([columns[n] for n in told], [[row[n] for n in told] for row in rows])


def _db(row: Mapping[str, Any], has_accuracy: bool) -> str:
    sqnr_db = row["sqnr_db"]
    return "" if not has_accuracy else "exact" if sqnr_db is None else f"{sqnr_db:.1f}"


def failure_note(result: Result, logs: Path) -> str | None:
    """If every candidate failed: the most frequent reason, its count, and the log of the first such candidate."""
    failures = [(trial.number, failed) for trial in result.history if (failed := failure(trial))]
    if not failures or len(failures) < len(result.history):
        return None
    reasons = [(number, CANDIDATE.sub("a candidate", failure.reason)) for number, failure in failures]
    counts = Counter(reason for _, reason in reasons)
    commonest, count = counts.most_common(1)[0]
    first = next(number for number, reason in reasons if reason == commonest)
    which = f"all {len(failures)} candidates" if len(failures) > 1 else "the only candidate"
    share = f", {count} of them" if count < len(failures) else ""
    return f"{which} failed{share}: {commonest.rstrip('.')} (see {logs / f'trial_{first:03}.log'})"


def mode_table(result: Result, *, verbose: bool) -> Table | None:
    """A table of the mode: the outcomes of groups, or with `verbose` the prices of units."""
    units = [row for row in result.recorded.rows if isinstance(row, UnitPrice)]
    groups = [row for row in result.recorded.rows if isinstance(row, GroupOutcome)]
    return units_table(units) if verbose and units else groups_table(groups) if groups else None


def units_table(units: Sequence[UnitPrice]) -> Table:
    """The units that take the most time in float: their prices in float and in 8 bits, and the decision."""
    rows, has_stored = [], any(unit.stored_ms for unit in units)
    for unit in units[:LARGEST_UNITS]:
        quantized = "" if unit.quantized_ms is None else f"{unit.quantized_ms:.3f}" + ("" if unit.seen else " ?")
        margin = "" if unit.margin_ms is None else f"{unit.margin_ms:+.3f}"
        decision = "8 bits" if unit.quantized else unit.weight_format or "float"
        stored = unit.stored_ms.get(unit.weight_format, min(unit.stored_ms.values(), default=None))
        name = unit.nodes[0] + (f" and {len(unit.nodes) - 1} more" if len(unit.nodes) > 1 else "")
        weights = [] if not has_stored else ["" if stored is None else f"{stored:.3f}"]
        rows.append((name, f"{unit.float_ms:.3f}", *weights, quantized, f"{unit.boundary_ms:.3f}", decision, margin))
    weights = ["weights, ms"] if has_stored else []
    columns = ("unit", "float, ms", *weights, "8 bits, ms", "borders, ms", "runs in", "otherwise, ms")
    table = table_of(columns, rows)
    table.caption = "the largest units, in inferences that are profiled, which take longer; ?: guessed, not measured; "
    table.caption += "otherwise: what the other decision would cost more"
    return table


def groups_table(outcomes: Sequence[GroupOutcome]) -> Table:
    """The kinds of groups that take the most time in float: gain alone and in the model, and the verdict.

    Equal groups with one verdict share a row.
    """
    together: dict[tuple[int | None, str], list[GroupOutcome]] = {}
    for group in outcomes:
        if group.kind is not None:
            together.setdefault((group.kind, group.why), []).append(group)
    rows = []
    for groups in list(together.values())[:LARGEST_GROUPS]:
        first = groups[0]
        more = [f"and {len(first.nodes) - 1} more"] if len(first.nodes) > 1 else []
        more += [f"({len(groups)} times)"] if len(groups) > 1 else []
        alone = "" if first.gain_alone is None else f"{first.gain_alone:+.3f}"
        gains = [group.gain_in_model for group in groups if group.gain_in_model is not None]
        gain = f"{sum(gains) / len(gains):+.3f}" if gains else ""
        rows.append((" ".join([first.nodes[0], *more]), first.scheme or "", alone, gain, first.why))
    table = table_of(("group", "scheme", "alone", "in model", "verdict"), rows)
    for words, least in ((0, 24), (1, 0), (4, 20)):
        table.columns[words].no_wrap, table.columns[words].min_width = False, least or None
    rest = len(together) - len(rows)
    more_kinds = f"; {rest} more kinds in summary.json" if rest > 0 else ""
    table.caption = "the largest groups: ms that each saves alone, and in the model with its conversions" + more_kinds
    return table


def result_line(result: Result, final: Path) -> str:
    """A line that names the file to use and says what it is."""
    if result.improved:
        kind = "tuned" if result.placement else "rewritten float"
        return f"{final} is the {kind} model"
    copied = "the baseline" if result.shipped == "baseline" else "a copy of the model that you gave"
    untried = "no improvement found" if result.history else "nothing was tried"
    outcome = "nothing faster holds the limits on accuracy" if result.unmet else untried
    return f"{outcome}: {final} is {copied}"


def comparison_table(first: str, rows: Sequence[Row], samples: str) -> Table:
    """Every file against the first; the row of a file that failed is empty. `samples` says what the SQNR is of; if it
    is empty there is no such column."""
    cells = []
    for row in rows:
        if row.ratio is None or row.ms is None or row.first_ms is None:
            cells.append((row.name, "", "", "", "failed", ""))
            continue
        sqnr = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
        times = f"{row.first_ms:.3f}", f"{row.ms:.3f}"
        cells.append((row.name, *times, row.ratio.speedup, row.words, sqnr))
        for part in row.workloads:
            times = f"{part.first_ms:.3f}", f"{part.ms:.3f}"
            cells.append((f"  {part.name}, {part.share:.0%} of the calls", *times, part.ratio.speedup, "", ""))
    columns = ("file", "first, ms", "ms", "speedup [interval]", "verdict", "SQNR, dB")
    told = len(columns) if samples else -1
    table = table_of(columns[:told], [row[:told] for row in cells])
    table.title, table.title_justify = f"first: {escape(first)}", "left"
    table.caption = f"output SQNR over {samples}" if samples else None
    return table


def estimate_lines(estimate: Estimate) -> str:
    """The estimate of a run, in four lines."""
    spent = builds(estimate.builds - estimate.rewrite_builds, estimate.rewrite_builds)
    each = "" if estimate.processes is None else f", {estimate.processes} starts of {estimate.start_seconds:.1f} s"
    return (
        f"regions: {estimate.regions}\npatterns: {estimate.patterns}\n"
        f"builds: at most {spent}, without the proof\n"
        f"time: about {duration(estimate.seconds)} (float model: {estimate.latency * 1e3:.3f} ms{each})"
    )


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ("verdict",)) -> Table:
    """A table that folds its widest columns on a narrow terminal: nothing is cut, short words stay whole. The first
    column and those of `left` are aligned left."""
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", title_style="", caption_style="", pad_edge=False)
    for number, column in enumerate(columns):
        justify: JustifyMethod = "left" if number == 0 or column in left else "right"
        least = min(SHORT, max(map(len, " ".join([column, *(row[number] for row in rows)]).split()), default=0))
        table.add_column(Text(column), justify=justify, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(escaped(cell)) for cell in row))  # names may hold anything
    return table


def to_exclude(nodes: Sequence[str]) -> str:
    """The options of `quantize` that keep these nodes in float, quoted for a shell."""
    return " ".join(f"--nodes-to-exclude {shlex.quote(glob.escape(node))}" for node in nodes)
