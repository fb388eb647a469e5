"""The tables of a finished search: its result, its front, and what its mode has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qdqtune.commands.shown import Table
from qdqtune.explanation.formatting import built, counted, duration, rewrite_ratios, samples, title
from qdqtune.numerics.accuracy import closeness, closeness_cell, closeness_of, decibels, integers_differ, slice_cell
from qdqtune.numerics.scores import independent_of, smallest_seen
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import Ratio, speed
from qdqtune.tuning.records import GroupOutcome
from qdqtune.tuning.result import Result
from qdqtune.types import Accuracy

NOT_MEASURED = "not measured"

LARGEST_GROUPS = 20
"""The most rows of the table of groups."""


def result_table(found: Result) -> Table:
    """Latency, speedup, pairs and accuracy of the float and of the tuned model; below, what the search has spent and
    what outputs were compared."""
    summary = found.summary
    failed = sum(failure(trial) is not None for trial in found.history)
    between = sum(trial.proposal.origin == "front" for trial in found.history)  # not shown while the search runs
    besides = (f"{number} {what}" for number, what in ((failed, "failed"), (between, "made for the front")) if number)
    candidates = f"candidates: {summary['trials']}" + (f" ({told})" if (told := ", ".join(besides)) else "")
    caption = f"{candidates}, builds: {built(summary)}, time: {duration(summary['seconds'])}"
    if summary["tuned_for"]:
        caption += f"\ntuned for {summary['tuned_for']}"
    without = summary["fastest_without_limits"]
    if without is not None and (missed := without.get("missed")):
        caption += f"\nthe fastest without limits was not taken: {missed}"
    caption += "".join(f"\ncalibration was cut short: {why}" for why in summary.get("calibration_cut_short", ()))
    if (judged := summary["accuracy_samples"]) and (without is not None or _tells_accuracy(found)):
        is_held_out = summary["accuracy_held_out"]
        seen = "" if is_held_out else ", which calibration saw: of forty or more, every fifth is kept apart"
        caption += f"\noutputs compared on {samples(judged, is_held_out)}{seen}"
        caption += f"\n{summary['scores_told']}" if "scores_told" in summary else ""
    return Table(("", "baseline", "final"), _result_rows(found), caption)


def _result_rows(found: Result) -> list[tuple[str, str, str]]:
    summary = found.summary
    rows = _latency_rows(found) if "by_rule" not in summary else [("latency", "not timed", "not timed")]
    if found.ratio is not None and summary["ratio_to_given"] is not None:
        rows.append((f"speedup over {title(Path(summary['model']))}", "", speed(summary["ratio_to_given"])))
    rows += _rewrite_rows(summary)
    rows.append(("tensors with a Q/DQ pair", "0", str(summary["pairs"])))
    if (bits := summary.get("bits")) and bits["tensors"]:
        rows.append(("  of these activations in 16 bits", "", f"{bits['tensors_16']} of {bits['tensors']}"))
        rows.append(("  of these weights in 16 bits", "", str(bits["weights_16"])))
    if (chosen := next((row for row in _by_rule(summary) if row["shipped"]), None)) is not None:
        rows.append(("nodes that run elsewhere", "", str(chosen["elsewhere"])))
    if weights := summary.get("weights"):
        rows.append(("weights in fewer bits", "0", ", ".join(f"{count} {name}" for name, count in weights.items())))
    if _tells_accuracy(found):
        judged = Accuracy(**(summary["output_accuracy"] or {}))
        if not integers_differ(judged.sqnr_db, judged.agreement):
            rows.append(("output SQNR against float", "", _accuracy_text(summary)))
        if part := slice_cell(judged):
            rows.append(("  of the worst slice", "", part))
        if judged.agreement is not None:
            rows.append(("integers as in float", "", f"{judged.agreement:.1%}"))
        if judged.top1 is not None:
            least = summary["min_agreement"]
            independent = independent_of(judged)
            besides = [] if independent == judged.choices else [f"as good as {independent:.0f} independent ones"]
            if least is not None and (unseen := smallest_seen(independent, least)) > 2 * (1 - least):
                besides.append(f"a loss below {unseen:.0%} would not show")
            few = f" ({'; '.join(besides)})" if besides else ""
            rows.append(("best class as in float", "", f"{judged.top1:.1%} of {judged.choices:,}{few}"))
    elif not is_judged(summary):
        rows.append(("output accuracy", "", NOT_MEASURED + (", shipped unchecked" if summary["unchecked"] else "")))
    if (without := summary["fastest_without_limits"]) is not None:
        ratio = f" at {closeness(without['sqnr_db'], without.get('agreement'))}" if is_judged(summary) else ""
        rows.append(("fastest without limits, unproven", "", f"{speed(without['ratio'])}{ratio}"))
    if summary["metric_before"] is not None:
        after = summary["metric_after"]
        unknown = "failed" if found.improved else "unknown"
        count = summary.get("metric_samples")
        name = f"{summary['metric']}, {count} samples" if count else "your metric"
        rows.append((name, f"{summary['metric_before']:g}", unknown if after is None else f"{after:g}"))
        if found.improved and (high := summary.get("metric_loss_high")) is not None:
            rows.append(("  loss at most (95 %)", "", f"{max(high, 0):.2g}"))
        if found.improved and (why := summary.get("metric_loss_unknown")) is not None:
            rows.append(("  loss at most (95 %)", "", f"unknown: {why}"))
    return rows


def _rewrite_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the speedup by rewrites of the float model, if it was measured, and of that by the placement."""
    rewrites = summary.get("rewrites", {})
    if "gave" not in rewrites:
        return []
    gave, placed = rewrite_ratios(summary)
    rows = [(f"speedup by {', '.join(rewrites['names'])}", "1x", speed(gave))]
    return rows if placed is None else [*rows, ("  and by the placement", "1x", speed(placed))]


def _latency_rows(found: Result) -> list[tuple[str, str, str]]:
    """Rows of latency and speedup, for each number of threads and each workload if there are several."""
    summary = found.summary
    mean = "latency of a call, on average" if summary.get("workloads") else "latency"
    final = "not timed" if summary["final_ms"] is None else f"{summary['final_ms']:.3f} ms"
    times = f"{summary['baseline_ms']:.3f} ms", final
    if found.ratio is None:
        has_speed = (summary["pairs"] or summary.get("weights")) and summary["ratio"] is not None
        return [(mean, *times), *([("  in the search, unproven", "1x", speed(summary["ratio"]))] if has_speed else [])]
    by_threads = summary.get("by_threads", [])
    rows = [(mean, *times), ("speedup [interval]", "1x", found.ratio.speedup)]
    if len(by_threads) > 1:
        rows = []
        for row in by_threads:
            rows += _comparison_rows(f"latency, {row['threads']} thread{'s' * (row['threads'] > 1)}", row)
    for row in summary.get("workloads", []):
        rows += _comparison_rows(f"{row['name']}, {row['share']:.0%} of the calls", row)
    return rows


def _comparison_rows(name: str, row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Two rows: the latencies, and the speedup with its interval."""
    times = f"{row['baseline_ms']:.3f} ms", f"{row['final_ms']:.3f} ms"
    return [(name, *times), ("  speedup [interval]", "1x", Ratio(row["ratio"], row["low"], row["high"]).speedup)]


def _accuracy_text(summary: Mapping[str, Any]) -> str:
    """Output SQNR with its spread over single samples."""
    accuracy = summary["output_accuracy"] or {}
    lost = summary["output_sqnr_db"]
    is_told = bool(accuracy) and lost is not None
    return closeness_of(Accuracy(**{**accuracy, "agreement": None, "top1": None})) if is_told else decibels(lost)


def _tells_accuracy(found: Result) -> bool:
    """Whether outputs of what ships were compared with those of the float model, on samples."""
    return is_judged(found.summary) and (found.improved or found.summary["output_accuracy"] is not None)


def is_judged(summary: Mapping[str, Any]) -> bool:
    """Whether outputs were compared on samples, not on random inputs."""
    return bool(summary["accuracy_samples"])


def _mark(row: Mapping[str, Any]) -> str:
    """Whether a candidate ships, or why it may not."""
    if row["shipped"]:
        return "ships"
    return {True: "", False: "below the limits", None: "metric not computed"}[row["holds_limits"]]


def front_table(summary: Mapping[str, Any]) -> Table:
    """A table of the proven points of a front, with a column for each number of threads if there are several."""
    cells, has_accuracy, rows = [], is_judged(summary), summary["front"]
    counts = [at["threads"] for row in rows[:1] for at in row["by_threads"]]
    for row in rows:
        compared = row["by_threads"] if len(counts) > 1 else [row]
        ends = (Ratio(at["ratio"], at["low"], at["high"]).speedup for at in compared)
        metric = "" if row["metric"] is None else f"{row['metric']:g}"
        sqnr, agreement = _db(row, has_accuracy), _share(row["agreement"])
        cells.append((row["name"], *ends, sqnr, agreement, metric, _carry(row), _mark(row)))
    speedups = [f"at {n} thread{'s' * (n != 1)}" for n in counts] if len(counts) > 1 else ["speedup [interval]"]
    columns = ("point", *speedups, "SQNR, dB", "agreement", "metric", "tensors", "")
    caption = "each point is front/NAME.onnx; `pick` NAME makes another one optimized_final.onnx"
    return Table(columns, cells, caption).filled


def met_table(summary: Mapping[str, Any]) -> Table:
    """A table of candidates of the search that no other one beat in both latency and accuracy."""
    cells = [
        (
            str(row["number"]),
            row["origin"],
            speed(row["ratio"]),
            _db(row, is_judged(summary)),
            _share(row["agreement"]),
            _carry(row),
            _mark(row),
        )
        for row in summary["met"]
    ]
    proven = "none proved to be a point of the front" if "front" in summary else "`front` proves such points"
    caption = f"what no other candidate beat in both, as the search measured it; {proven}"
    return Table(("candidate", "from", "speedup", "SQNR, dB", "agreement", "tensors", ""), cells, caption).filled


def rule_table(summary: Mapping[str, Any]) -> Table:
    """A table of the candidates of a search by rule, which times nothing."""
    cells = [
        (
            str(row["number"]),
            row["origin"],
            "failed" if row["elsewhere"] is None else str(row["elsewhere"]),
            f"{row['tensors_16']} of {row['tensors']}",
            str(row.get("weights_16") or ""),
            str(row["conversions"]),
            _db_by_rule(row, summary),
            _share(row["agreement"]),
            _mark(row),
        )
        for row in _by_rule(summary)
    ]
    caption = "not timed: nodes elsewhere count first, then bytes in 16 bits and of conversions, then those of weights"
    columns = (
        "candidate",
        "from",
        "nodes elsewhere",
        "in 16 bits",
        "weights too",
        "conversions",
        "SQNR, dB",
        "agreement",
        "",
    )
    return Table(columns, cells, caption).filled


def _db_by_rule(row: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The SQNR of a candidate, with the number of samples where these are not all."""
    if row["elsewhere"] is None:
        return ""
    samples, db = row.get("samples", summary["accuracy_samples"]), _db(row, is_judged(summary))
    return db if samples == summary["accuracy_samples"] else f"{db} ({counted(samples, 'sample')})"


def _by_rule(summary: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    candidates: Sequence[Mapping[str, Any]] = summary.get("by_rule", {}).get("candidates", ())
    return candidates


def _share(equal: float | None) -> str:
    return "" if equal is None else f"{equal:.1%}"


def _carry(row: Mapping[str, Any]) -> str:
    """How many tensors have a pair, and how many weights have a weight format (a count, or counts by format)."""
    weights = row.get("weights") or 0
    count = weights if isinstance(weights, int) else sum(weights.values())
    return str(row["pairs"]) + (f" + {count} weights" if count else "")


def _db(row: Mapping[str, Any], has_accuracy: bool) -> str:
    return closeness_cell(row["sqnr_db"], row["agreement"]) if has_accuracy else NOT_MEASURED


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
    rest = len(together) - len(rows)
    caption = "the largest groups: ms that each saves alone, and in the model with its conversions"
    caption += f"; {rest} more kinds in summary.json" if rest > 0 else ""
    widths = {"group": 24, "scheme": 0, "verdict": 20}
    return Table(("group", "scheme", "alone", "in model", "verdict"), rows, caption, least_widths=widths)
