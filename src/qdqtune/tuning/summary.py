"""The content of summary.json and run.json, validated by msgspec when read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

import msgspec

from qdqtune.engines import EngineSpec
from qdqtune.engines.fallback import Fallback
from qdqtune.engines.machine import MachineFacts
from qdqtune.errors import BadOption, check_file, reading
from qdqtune.timing.ratios import Plan, Verdict
from qdqtune.tuning.folder import SUMMARY
from qdqtune.tuning.options import Mode
from qdqtune.tuning.store import Shipped
from qdqtune.types import Accuracy

FORMAT = 1

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


class Figures(TypedDict):
    """The final model compared with the float model, on fresh builds."""

    ratio: Positive
    low: Positive | None
    high: Positive | None
    verdict: Verdict
    baseline_ms: Positive
    final_ms: Positive


class AtThreads(Figures):
    """A comparison at a number of threads."""

    threads: int


class OnWorkload(Figures):
    """A comparison on one of several workloads."""

    name: str
    share: float


class FrontPoint(TypedDict):
    """A point of the front: its file compared with the float model."""

    name: str
    file: str
    ratio: Positive
    low: Positive | None
    high: Positive | None
    sqnr_db: float | None
    agreement: float | None
    metric: float | None
    pairs: Count
    weights: dict[str, Count]
    baseline_ms: Positive
    ms: Positive
    holds_limits: bool
    shipped: bool
    by_threads: list[AtThreads]


class Rewritten(TypedDict):
    """The rewrites of the float model; `gave` is the ratio due to them, `placement_gave` that due to the pairs."""

    folded: bool
    names: list[str]
    gave: NotRequired[Positive]
    placement_gave: NotRequired[Positive]


class WithoutLimits(TypedDict):
    """The fastest candidate that misses the accuracy limits, and a message about the limit `missed`."""

    ratio: Positive
    sqnr_db: float | None
    agreement: float | None
    missed: str | None


class Bits(TypedDict):
    """The number of activations with a pair, and how many activations and weights are in 16 bits."""

    tensors: int
    tensors_16: int
    weights_16: int


class Summary(TypedDict):
    """The content of summary.json.

    Times, ratio, pairs and accuracy are those of the shipped file, also if it is the user's own. `final_ms` and `ratio`
    are None if that is the user's Q/DQ file and was not timed. `accuracy` says whether outputs were compared on the
    user's samples, `unchecked` that the shipped file's outputs were not compared. On a simulator `timed` is False, and
    all times are None. `bits` is there where the engine has 16 bits, `timed_at` (shapes by name) where inputs have open
    sizes.
    """

    format: int
    model: str
    engine: dict[str, str]
    tuned_for: str | None
    mode: Mode
    state_file: str | None
    rewrites: Rewritten
    shipped: Shipped
    timed: bool
    timed_at: NotRequired[dict[str, list[Count]]]
    accuracy: Literal["measured", "not measured"]
    unchecked: bool
    baseline_ms: Positive | None
    final_ms: Positive | None
    ratio: Positive | None
    ratio_low: Positive | None
    ratio_high: Positive | None
    ratio_to_given: Positive | None
    by_threads: list[AtThreads]
    workloads: NotRequired[list[OnWorkload]]
    file_bytes: NotRequired[dict[Literal["baseline", "final"], Count]]
    percentiles_ms: NotRequired[dict[str, dict[Literal["p50", "p90", "p99"], Positive]]]
    percentiles_missing: NotRequired[str]
    builds: Count
    proof_builds: Count
    trials: Count
    pairs: Count
    weights: NotRequired[dict[str, Count]]
    edges: Count
    output_sqnr_db: float | None
    output_accuracy: Accuracy | None
    fastest_without_limits: WithoutLimits | None
    accuracy_samples: Count
    accuracy_held_out: bool
    calibration_cut_short: NotRequired[list[str]]
    scores: NotRequired[list[dict[str, str | int | None]]]
    scores_told: NotRequired[str]
    seed: int
    versions: dict[str, str]
    min_sqnr_db: float | None
    min_sqnr_worst_db: float | None
    min_agreement: float | None
    max_drop: float | None
    metric_before: float | None
    metric_after: float | None
    metric: NotRequired[str]
    metric_samples: NotRequired[Count]
    metric_loss_high: NotRequired[float | None]
    constraint_met: bool | None
    fallback: NotRequired[Fallback]
    bits: NotRequired[Bits]
    front: NotRequired[list[FrontPoint]]
    seconds: float


class LoggedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial as judged in the search, and when it ended, in seconds since the session began. Its rounds are in the
    state file, under the key `trial:` and the same `of`."""

    of: str
    accepted: bool
    holds: bool | None
    metric: float | None
    seconds: float | None


class RunLog(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. Seconds count from the beginning of the session; `machine` is the one that measured."""

    format: int = FORMAT
    begun: str
    command: tuple[str, ...]
    calibration_data: str | None
    engine: EngineSpec
    calibration: str
    machine: MachineFacts
    plan: Plan
    proof: tuple[int, ...]
    trials: tuple[LoggedTrial, ...]
    notes: tuple[str, ...]
    seconds: float
    ended: str = ""
    """Why the search ended."""


def keeps_own_pairs(summary: Mapping[str, Any]) -> bool:
    """Whether the shipped file is the user's own Q/DQ file."""
    return summary["shipped"] == "given" and bool(summary["edges"] or summary.get("weights"))


def read_summary(folder: Path) -> Summary:
    summary = read_json(folder / SUMMARY, Summary)
    if summary is None:
        raise BadOption(f"{folder} holds no finished run: name a folder where qdqtune tune came to its end")
    return summary


def read_json(path: Path, form: type[T]) -> T | None:
    """The content of a JSON file that a run wrote; None if there is no such file."""
    if not path.exists():
        return None
    try:
        with reading(path):
            check_file(path)
            return msgspec.json.decode(path.read_bytes(), type=form)
    except (ValueError, RecursionError) as error:
        raise BadOption(f"{path} is not what a run has written: tune again with `restart`, or restore it") from error
