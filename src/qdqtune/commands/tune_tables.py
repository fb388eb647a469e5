"""The tables of a finished search: its result, its front, and what its mode has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qdqtune.commands.shown import Table
from qdqtune.explanation.formatting import built, counted, duration
from qdqtune.explanation.result_rows import NOT_MEASURED, by_rule, is_judged, remarks, result_rows
from qdqtune.numerics.accuracy import closeness_cell
from qdqtune.timing.limits import failure
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.records import GroupOutcome
from qdqtune.tuning.result import Result

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
    return Table(("", "baseline", "final"), result_rows(summary), "\n".join([caption, *remarks(summary)]))


def front_table(summary: Mapping[str, Any]) -> Table:
    """A table of the proven points of a front, with a column for each number of threads if there are several."""
    cells, rows = [], summary["front"]
    counts = [at["threads"] for row in rows[:1] for at in row["by_threads"]]
    for row in rows:
        compared = row["by_threads"] if len(counts) > 1 else [row]
        ends = (Ratio(at["ratio"], at["low"], at["high"]).speedup for at in compared)
        metric = "" if row["metric"] is None else f"{row['metric']:g}"
        cells.append((row["name"], *ends, metric, _tensors(row), *_judged(row, summary)))
    speedups = [f"at {counted(n, 'thread')}" for n in counts] if len(counts) > 1 else ["speedup [interval]"]
    caption = "each point is front/NAME.onnx; `pick` NAME makes another one optimized_final.onnx"
    return Table(("point", *speedups, "metric", "tensors", *JUDGED), cells, caption).filled


def rule_table(summary: Mapping[str, Any]) -> Table:
    """A table of the candidates of a search by rule, which times nothing."""
    cells = [
        (
            str(row["number"]),
            row["origin"],
            "failed" if row["elsewhere"] is None else str(row["elsewhere"]),
            f"{row['tensors_16']} of {row['tensors']}",
            str(row["weights_16"] or ""),
            str(row["conversions"]),
            *(_judged(row, summary) if row["elsewhere"] is not None else ("", "", _mark(row))),
        )
        for row in by_rule(summary)
    ]
    caption = "not timed: nodes elsewhere count first, then bytes in 16 bits and of conversions, then those of weights"
    columns = ("candidate", "from", "nodes elsewhere", "in 16 bits", "weights too", "conversions")
    return Table((*columns, *JUDGED), cells, caption).filled


JUDGED = ("SQNR, dB", "agreement", "")
"""The last columns of these tables: how close the outputs are, and what that means."""


def _judged(row: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, str, str]:
    agreement = "" if row["agreement"] is None else f"{row['agreement']:.1%}"
    if not is_judged(summary):
        return NOT_MEASURED, agreement, _mark(row)
    db, judged = closeness_cell(row["sqnr_db"], row["agreement"]), row.get("samples", summary["accuracy_samples"])
    few = "" if judged == summary["accuracy_samples"] else f" ({counted(judged, 'sample')})"
    return f"{db}{few}", agreement, _mark(row)


def _mark(row: Mapping[str, Any]) -> str:
    """Whether a candidate ships, or why it may not."""
    if row["shipped"]:
        return "ships"
    return {True: "", False: "below the limits", None: "metric not computed"}[row["holds_limits"]]


def _tensors(row: Mapping[str, Any]) -> str:
    """How many tensors have a pair, and how many weights have a weight format (a count, or counts by format)."""
    weights = row.get("weights") or 0
    count = weights if isinstance(weights, int) else sum(weights.values())
    return str(row["pairs"]) + (f" + {count} weights" if count else "")


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
