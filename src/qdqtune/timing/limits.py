"""The user's limits on accuracy, and whether a candidate meets them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from qdqtune.errors import BadOption, EngineRefused, Failure
from qdqtune.numerics.accuracy import loss_of_slice, of_other_shapes
from qdqtune.numerics.scores import Score, Scores, agrees, can_tell, loss_high
from qdqtune.timing.ratios import Plan, Verdict, judge, with_ratios
from qdqtune.types import Accuracy, CostsByRule, Placement, Trial, noise_of


@dataclass(frozen=True)
class Limits:
    """Limits on accuracy. A limit that is None does not apply.

    `min_sqnr` is the least output SQNR in dB of all samples together; with it, an output that has lost a slice fails in
    any case (`loss_of_slice`). `min_sqnr_worst` is the least SQNR in dB of the worst sample. `max_drop` is the most
    that the user's metric may fall below `before`, the float model's. `min_agreement` is the least share of equal
    elements in integer outputs, and of equal top-1 classes in outputs with class scores.

    For a metric over labels, the upper end of the loss's 95 % interval decides (`scores.loss_high`), so a candidate
    that may have lost more than `max_drop` is refused. With too few samples for that, the measured loss decides.
    """

    min_sqnr: float | None = None
    max_drop: float | None = None
    before: Score | None = None
    min_agreement: float | None = None
    min_sqnr_worst: float | None = None

    @property
    def are_set(self) -> bool:
        limits = self.min_sqnr, self.max_drop, self.min_agreement, self.min_sqnr_worst
        return any(limit is not None for limit in limits)

    @property
    def max_noise(self) -> float | None:
        """The error power relative to the signal that the least SQNR allows: 10^(-dB/10); None without that limit."""
        return None if self.min_sqnr is None else noise_of(self.min_sqnr)

    def check(self, kinds: Collection[str], scores: Scores) -> None:
        """Raise if a limit is about outputs that the model lacks; `kinds` are its outputs' `dtype.kind`."""
        if self.min_sqnr is not None and "f" not in kinds:
            other = "use `min_agreement` or `evaluate`"
            raise BadOption(f"`min_sqnr` is about float outputs, and the model has none: {other}")
        if self.min_agreement is not None and set(kinds) == {"f"} and not scores.axis:
            raise BadOption(f"`min_agreement` cannot be checked: no output holds integers, and {scores.told}")

    def is_exact_enough(self, accuracy: Accuracy | None) -> bool:
        """Whether outputs meet the limits on them. A failed candidate has no accuracy (None), and passes."""
        return accuracy is None or self.missed(accuracy) is None

    def is_surely_missed(self, accuracy: Accuracy) -> bool:
        """Whether the first samples already prove that the SQNR of all samples will miss the limit."""
        most, floor = accuracy.at_most_db, self.min_sqnr
        return most is not None and floor is not None and most < floor

    def missed(self, accuracy: Accuracy) -> str | None:
        """A message about the first limit on outputs that is missed; None if all are met."""
        told = self._missed(accuracy)
        return told and "; ".join(filter(None, (told, of_other_shapes(accuracy))))

    def _missed(self, accuracy: Accuracy) -> str | None:
        if self.is_surely_missed(accuracy):
            shown = "as the first one shows" if accuracy.samples == 1 else f"as the first {accuracy.samples} show"
            told = f"at most {_below(accuracy.at_most_db or 0.0, self.min_sqnr or 0.0)} dB, {shown}"
            return f"the output SQNR of all samples is {told}, and {self.min_sqnr:g} dB are asked for"
        of_all, of_worst = (accuracy.sqnr_db, self.min_sqnr), (accuracy.lowest_db, self.min_sqnr_worst)
        for whose, (db, floor) in (("all samples", of_all), ("the worst sample", of_worst)):
            if db is not None and floor is not None and db < floor:
                which = accuracy.worst_output and f" ({accuracy.worst_output}, the worst output)"
                return f"the output SQNR of {whose} is {_below(db, floor)} dB{which}, and {floor:g} dB are asked for"
        if self.min_sqnr is not None and (part := loss_of_slice(accuracy)) is not None:
            return part
        if self.min_agreement is None or agrees(accuracy, self.min_agreement):
            return None
        equal, of = accuracy.agreement, "integers in outputs"
        if equal is None or equal >= self.min_agreement:
            equal, of = accuracy.top1, "best classes"
        return f"{equal:.1%} of the {of} are as in float, and {100 * self.min_agreement:.4g}% are asked for"

    def why_refused(self, trial: Trial) -> str | None:
        """A message about the limit that a judged trial misses; None if it misses none."""
        if trial.holds is not False:
            return None
        if trial.accuracy is not None and (missed := self.missed(trial.accuracy)) is not None:
            return missed
        if trial.metric is None or self.before is None or self.max_drop is None:
            return f"{'its outputs' if trial.accuracy is None else 'the metric'} cannot be computed"
        by = " with the interval of its loss" if can_tell(self.before, self.max_drop) else ""
        return f"the metric is {trial.metric:g}, float has {self.before.value:g}, and may lose {self.max_drop:.2g}{by}"

    def is_good_enough(self, metric: Score) -> bool:
        if self.max_drop is None:
            return True
        if self.before is None:
            return False
        high = loss_high(self.before, metric) if can_tell(self.before, self.max_drop) else None
        return (self.before.value - metric.value if high is None else high) <= self.max_drop

    def on_outputs(self, accuracy: Accuracy | None) -> bool | None:
        """Whether the outputs meet the limits on them; None if they do and the metric is still to decide."""
        if not self.is_exact_enough(accuracy):
            return False
        return True if self.max_drop is None else None

    def judged(self, trial: Trial, rivals: Sequence[Trial], plan: Plan, metric: Callable[[Placement], Score]) -> Trial:
        """The trial with `holds`: whether it meets the limits, None if only the metric could tell and was not computed.

        The metric takes time, so it is computed only for a trial that is faster than its opponent, and than all
        accurate `rivals`. Rivals must have been timed against the same opponent.
        """
        trial = replace(trial, holds=self.on_outputs(trial.accuracy))
        ratio = judge(trial, plan)
        best = min((r.median for t, r in with_ratios(rivals, plan) if r.verdict == "faster" and t.holds), default=inf)
        if ratio is None or ratio.verdict != "faster" or best <= ratio.median:
            return trial
        return self.with_metric(trial, metric)

    def with_metric(self, trial: Trial, metric: Callable[[Placement], Score]) -> Trial:
        """The trial with the user's metric, and `holds` by that metric: false if it cannot be computed. A trial whose
        `holds` is known already is returned unchanged."""
        if trial.holds is not None:
            return trial
        try:
            value = metric(trial.placement)
        except EngineRefused:
            return replace(trial, holds=False)
        return replace(trial, metric=value.value, holds=self.is_good_enough(value))

    def summary(self, history: Sequence[Trial], plan: Plan, after: Score | None, *, is_tuned: bool) -> dict[str, Any]:
        """The rows of summary.json about the limits and whether they were met. `after` is the metric of the model that
        ships; with `is_tuned`, that model meets the limits."""
        unmet = not is_tuned and not any(t.accepted for t in history) and is_unmet(history, plan)
        over_labels: dict[str, Any] = {}
        if self.before is not None and self.before.by_sample:
            over_labels = {"metric": self.before.name, "metric_samples": len(self.before.by_sample)}
            over_labels["metric_loss_high"] = None if after is None else loss_high(self.before, after)
        return {
            "min_sqnr_db": self.min_sqnr,
            "min_sqnr_worst_db": self.min_sqnr_worst,
            "min_agreement": self.min_agreement,
            "max_drop": self.max_drop,
            "metric_before": None if self.before is None else self.before.value,
            "metric_after": None if after is None else after.value,
            **over_labels,
            "constraint_met": not unmet if self.are_set else None,
        }


def _below(db: float, floor: float) -> str:
    """`db` with just enough decimals to be seen to lie below `floor`."""
    return next((text for digits in range(1, 6) if float(text := f"{db:.{digits}f}") < floor), f"{db:g}")


def failure(trial: Trial) -> Failure | None:
    return trial.result if isinstance(trial.result, Failure) else None


def outcome(trial: Trial, plan: Plan) -> Verdict | Literal["failed", "inaccurate"]:
    """The result of a judged trial in one word. A timed one that is slower and misses the limits is called slower."""
    ratio = judge(trial, plan)
    if ratio is None:
        return "failed"
    is_timed = not isinstance(trial.result, CostsByRule)
    return "inaccurate" if trial.holds is False and (ratio.verdict != "slower" or not is_timed) else ratio.verdict


def is_unmet(history: Sequence[Trial], plan: Plan) -> bool:
    """Whether candidates were faster than float, but all of them miss the limits. If none was faster, undecided ones
    count, so that noise does not change the message. (A trial with a metric was faster, in the search or in the
    proof.)"""
    compared = with_ratios(history, plan)
    faster = [t for t, ratio in compared if ratio.verdict == "faster" or t.metric is not None]
    first = faster or [t for t, ratio in compared if ratio.verdict == "undecided"]
    return bool(first) and all(t.holds is False for t in first)
