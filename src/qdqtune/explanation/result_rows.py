"""A finished run's result: a sentence, and rows with latency, speedup, pairs and accuracy of float and tuned model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from qdqtune.explanation.formatting import counted, samples, size, title
from qdqtune.numerics.accuracy import APART_DB, closeness, decibels, integers_differ, spread_of
from qdqtune.numerics.scores import ERROR
from qdqtune.timing.ratios import Ratio, speed
from qdqtune.tuning.folder import FINAL
from qdqtune.tuning.summary import keeps_own_pairs
from qdqtune.types import Accuracy, WeightFormat

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Headline:
    """The result in one sentence, what it means, and the speedup (float latency divided by the model's)."""

    headline: str
    meaning: str
    good: bool
    speed: Ratio | None = None


def verdict(summary: Mapping[str, Any]) -> Headline:
    name, is_timed, ratio_to_float = title(Path(summary["model"])), summary["timed"], summary["ratio"]
    unchecked = ", accuracy not measured" if summary["unchecked"] else ""
    if is_timed and summary["shipped"] == "tuned" and ratio_to_float is not None:
        measured = Ratio(ratio_to_float, summary["ratio_low"], summary["ratio_high"]).inverse
        meaning = (
            f"Side by side an inference takes {1 - ratio_to_float:.0%} less time; over all rounds the medians are "
            f"{summary['final_ms']:.4g} ms instead of {summary['baseline_ms']:.4g} ms. "
            "Measured on the finished files, on fresh builds that the search never saw."
        )
        return Headline(f"{name} runs {measured.median:.2f} times as fast{unchecked}", meaning, not unchecked, measured)
    engine, without = summary["engine"]["engine"], summary["fastest_without_limits"]
    untimed = "" if is_timed else f" {engine} is a simulator here: nothing was timed, and no speed is claimed."
    if not is_timed and summary["shipped"] == "tuned":
        bits = summary.get("bits")
        wide = f"{bits['tensors_16']} of {bits['tensors']} activations have 16 bits, the others 8. " if bits else ""
        meaning = f"{wide}The cheapest by rule that holds the limits on accuracy.{untimed}"
        return Headline(f"{name} is placed for {engine}{unchecked}", meaning, not unchecked)
    kept, rival = "your own file" if summary["shipped"] == "given" else "the float model", "the float model"
    if keeps_own_pairs(summary):
        kept, rival = "your own Q/DQ file as it is", "your own Q/DQ file"
        if summary["final_ms"] is not None:
            kept += f", which takes {summary['final_ms']:.4g} ms, the float model {summary['baseline_ms']:.4g} ms"
    if not is_judged(summary) and (without is not None or not is_timed):
        headline, why = f"Accuracy was not measured for {name}", "give `calibration_data`, or `min_sqnr` none"
        if without is not None:
            headline = f"{name} may run {1 / without['ratio']:.2f} times as fast, accuracy not measured"
    elif not is_timed or summary["constraint_met"] is False:
        headline = f"Nothing {'faster' if is_timed else 'in 8 or 16 bits'} is exact enough for {name}"
        why = "no candidate keeps the outputs close enough"
    elif not summary["trials"]:
        headline, why = f"Nothing was tried in {name}", "no pair was tried in this run"
    else:
        headline, why = f"Nothing faster was found for {name}", f"nothing proved faster than {rival} beyond noise"
    return Headline(headline, f"{FINAL} is {kept}: {why}.{untimed}", False)


def _weights_in_words(name: str, count: int) -> str:
    stored = WeightFormat.named(name)
    return f"{count} in {stored.bits} bits{', activations at run time' if stored.dynamic else ''} ({name})"


class Row(NamedTuple):
    """A property with its value for the float model and for the file that ships, and small print on the latter."""

    name: str
    before: str
    final: str
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        return self.name, self.before, self.final + (f" ({self.note})" if self.note else "")


def result_rows(summary: Mapping[str, Any]) -> list[Row]:
    """The rows, from the content of summary.json."""
    improved = summary["shipped"] == "tuned"
    bits, weights, without = summary.get("bits"), summary.get("weights"), summary["fastest_without_limits"]
    rows = _latency_rows(summary) if summary["timed"] else [Row("latency", "not timed", "not timed")]
    if improved and summary["ratio_to_given"] is not None:
        rows.append(Row(f"speedup over {title(Path(summary['model']))}", "", speed(summary["ratio_to_given"])))
    rewrites = summary["rewrites"]
    if "gave" in rewrites:
        has_pairs = summary["edges"] or weights
        gave = rewrites["gave"] if has_pairs else summary["ratio"]
        rows.append(Row(f"speedup by {', '.join(rewrites['names'])}", "1x", speed(gave)))
        if has_pairs:
            rows.append(Row("  and by the placement", "1x", speed(rewrites["placement_gave"])))
    rows.append(Row("tensors with a Q/DQ pair", "0", str(summary["pairs"])))
    if bits and bits["tensors"]:
        rows.append(Row("  of these activations in 16 bits", "", f"{bits['tensors_16']} of {bits['tensors']}"))
    if weights:
        rows.append(Row("weights in fewer bits", "0", "; ".join(starmap(_weights_in_words, weights.items()))))
    if file_bytes := summary.get("file_bytes"):
        rows.append(Row("file size", size(file_bytes["baseline"]), size(file_bytes["final"])))
    if tells_accuracy(summary):
        judged = Accuracy(**(summary["output_accuracy"] or {}))
        if not integers_differ(judged.sqnr_db, judged.agreement):
            which = judged.worst_output and f"of {judged.worst_output}, the worst of {len(judged.by_output)} outputs"
            note = "; ".join(filter(None, (spread_of(judged), which)))
            rows.append(Row("output SQNR against float", "", decibels(judged.sqnr_db), note))
        if judged.slice_name is not None:
            lost = f"{decibels(judged.slice_db)}{', lost' * judged.slice_is_lost}"
            rows.append(Row("  of the worst slice", "", lost, judged.slice_name))
        if judged.agreement is not None:
            rows.append(Row("integers as in float", "", f"{judged.agreement:.1%}"))
        if judged.top1 is not None:
            few = ""
            if judged.independent is not None:
                few = f"limits count them as {judged.independent:.0f}, since those of one sample change together"
            rows.append(Row("best class as in float", "", f"{judged.top1:.1%} of {judged.choices:,}", few))
    elif not is_judged(summary):
        rows.append(Row("output accuracy", "", NOT_MEASURED + (", shipped unchecked" if summary["unchecked"] else "")))
    if without is not None:
        ratio = f" at {closeness(without['sqnr_db'], without['agreement'])}" if is_judged(summary) else ""
        rows.append(Row("fastest without limits, unproven", "", f"{speed(without['ratio'])}{ratio}"))
    if summary["metric_before"] is not None:
        after = summary["metric_after"]
        unknown = "failed" if improved else "unknown"
        count = summary.get("metric_samples")
        name = f"{summary['metric']}, {count} samples" if count else "your metric"
        rows.append(Row(name, f"{summary['metric_before']:g}", unknown if after is None else f"{after:g}"))
        if improved and summary.get("metric_loss_high") is not None:
            rows.append(Row("  loss at most (95 %)", "", f"{max(summary['metric_loss_high'], 0):.2g}"))
    return rows


def remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Notes below the rows: what the model was tuned for, what was rejected and why, which outputs were compared."""
    if summary["tuned_for"]:
        yield f"tuned for {summary['tuned_for']}"
    if shapes := summary.get("timed_at"):
        told = (f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        yield f"timed at {', '.join(told)}"
    without, judged = summary["fastest_without_limits"], summary["accuracy_samples"]
    if without is not None and without["missed"]:
        yield f"the fastest without limits was not taken: {without['missed']}"
    for why in summary.get("calibration_cut_short", ()):
        yield f"calibration was cut short: {why}"
    if judged and (without is not None or tells_accuracy(summary)):
        is_held_out = summary["accuracy_held_out"]
        seen = ", which calibration saw: of forty or more, every fifth is kept apart"
        yield f"outputs compared on {samples(judged, is_held_out)}{_how_sure(summary) if is_held_out else seen}"
        if "scores_told" in summary:
            yield summary["scores_told"]


def _how_sure(summary: Mapping[str, Any]) -> str:
    """How near the worst sample is to its limit, and if it is near, how many inputs may miss it: if less than a share p
    held it, all n samples would with a probability below p^n. Empty without that limit, or if outputs are equal or miss
    it."""
    floor, lowest = summary["min_sqnr_worst_db"], (summary["output_accuracy"] or {}).get("lowest_db")
    if floor is None or lowest is None or lowest < floor:
        return ""
    share = int(100 * ERROR ** (1 / summary["accuracy_samples"]))
    may_miss = f"; of other inputs up to {100 - share}% may miss it" if lowest < floor + APART_DB else ""
    return f", the worst with {lowest:.1f} dB (limit: {floor:g}){may_miss}"


def _latency_rows(summary: Mapping[str, Any]) -> list[Row]:
    mean = "latency of a call, on average" if summary.get("workloads") else "latency"
    final = "not timed" if summary["final_ms"] is None else f"{summary['final_ms']:.3f} ms"
    rows, by_threads = [Row(mean, f"{summary['baseline_ms']:.3f} ms", final)], summary.get("by_threads", [])
    if summary["shipped"] != "tuned" or summary["ratio"] is None:
        if (summary["pairs"] or summary.get("weights")) and summary["ratio"] is not None:
            rows.append(Row("  in the search, unproven", "1x", speed(summary["ratio"])))
        return rows
    if len(by_threads) > 1:
        rows = []
        for row in by_threads:
            rows += _comparison_rows(f"latency, {counted(row['threads'], 'thread')}", row)
    else:
        ratio = Ratio(summary["ratio"], summary["ratio_low"], summary["ratio_high"])
        rows.append(Row("speedup [interval]", "1x", ratio.speedup))
    if percentiles := summary.get("percentiles_ms"):
        both = percentiles["baseline"], percentiles["final"]
        cells = [f"{one['p50']:.3f}, {one['p90']:.3f}, {one['p99']:.3f} ms" for one in both]
        rows.append(Row("p50, p90, p99 of single inferences", *cells))
    elif why := summary.get("percentiles_missing"):
        rows.append(Row("p50, p90, p99 of single inferences", "", NOT_MEASURED, why))
    for row in summary.get("workloads", []):
        rows += _comparison_rows(f"{row['name']}, {row['share']:.0%} of the calls", row)
    return rows


def _comparison_rows(name: str, row: Mapping[str, Any]) -> list[Row]:
    times = f"{row['baseline_ms']:.3f} ms", f"{row['final_ms']:.3f} ms"
    return [Row(name, *times), Row("  speedup [interval]", "1x", Ratio(row["ratio"], row["low"], row["high"]).speedup)]


def tells_accuracy(summary: Mapping[str, Any]) -> bool:
    """Whether outputs of the file that ships were compared with the float model's on samples."""
    return is_judged(summary) and (summary["shipped"] == "tuned" or summary["output_accuracy"] is not None)


def is_judged(summary: Mapping[str, Any]) -> bool:
    """Whether outputs were compared on samples, not on random inputs."""
    return bool(summary["accuracy_samples"])
