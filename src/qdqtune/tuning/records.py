"""What a run writes to its state file: one struct for each kind of line, packed and checked by msgspec.

A struct is found by its kind and by `of`, which says what it is about where a run has several of the kind. Ranges,
rounds, layers and other values are stored as they are, and a line is refused where one of them cannot be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import msgspec

from qdqtune.calibration.scales import Ranges
from qdqtune.search.costs.decisions import UnitPrice
from qdqtune.search.costs.priors import Prices
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.modes.mode import GroupOutcome
from qdqtune.types import (
    TRANSIENT,
    Accuracy,
    Edge,
    Failure,
    Layer,
    Measurement,
    Placement,
    WeightFormat,
)

Shipped = Literal["tuned", "baseline", "given"]
"""What optimized_final.onnx is: the tuned model, the float model, or a copy of the user's file."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A line of the state file."""

    of: str = ""


R = TypeVar("R", bound=Record)


class StoredPlacement(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A placement as JSON: the edges with a pair, and the weights stored in fewer bits with the name of how."""

    pairs: tuple[Edge, ...] = ()
    weights: tuple[tuple[Edge, str], ...] = ()

    def __post_init__(self) -> None:
        _ = self.placement  # refuses what no placement can hold

    @classmethod
    def of(cls, placement: Placement) -> StoredPlacement:
        """Pack a placement."""
        return cls(
            tuple(placement),
            tuple((edge, weight_format.name) for edge, weight_format in placement.weight_formats.items()),
        )

    @cached_property
    def placement(self) -> Placement:
        """The placement.

        Raises:
            ValueError: a weight is stored in two ways, or in one that does not exist.
        """
        return Placement.of(self.pairs, ((edge, WeightFormat.named(name)) for edge, name in self.weights))


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a comparison gave: its rounds, or why there are none."""

    samples: Measurement | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _insist_on_one(self.samples, self.failure)

    @classmethod
    def of(cls, result: Measurement | Failure) -> Outcome:
        """Pack a result."""
        return cls(failure=result) if isinstance(result, Failure) else cls(samples=result)

    @property
    def result(self) -> Measurement | Failure:
        """The result."""
        found = self.samples or self.failure
        assert found is not None  # as was checked when it was made
        return found


def _insist_on_one(value: object, failure: Failure | None) -> None:
    """Refuse a record that holds neither a value nor a failure, or both."""
    if (value is None) == (failure is None):
        raise ValueError("there is either a value or a failure")


class HeadRecord(Record, frozen=True, tag="run"):
    """The first line: the version of the file, that of what makes candidates, and the fingerprint of the run."""

    version: int
    candidates: int
    fingerprint: dict[str, Any]


# ---------------------------------------------------------------- what was measured


class RangesRecord(Record, frozen=True, tag="ranges"):
    """What calibration found."""

    ranges: Ranges


class TrialRecord(Record, frozen=True, tag="trial"):
    """A candidate against another placement, whose digest `against` is; see `Trial`."""

    origin: str
    against: str
    placement: StoredPlacement
    result: Outcome
    pattern: str = ""
    predicted: float | None = None
    accuracy: Accuracy = Accuracy()
    check: Outcome | None = None
    layers: tuple[Layer, ...] | None = None


class MetricRecord(Record, frozen=True, tag="metric"):
    """The user's metric of a placement."""

    value: float | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _insist_on_one(self.value, self.failure)

    @property
    def result(self) -> float | Failure:
        """The value, or why there is none."""
        found = self.value if self.failure is None else self.failure
        assert found is not None  # as was checked when it was made
        return found


class LayersRecord(Record, frozen=True, tag="layers"):
    """The layer report of a placement, that of the float model without `of`."""

    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None


class RepeatabilityRecord(Record, frozen=True, tag="repeatability"):
    """The outputs of the float model against those of the same build once more."""

    accuracy: Accuracy


class RewriteRecord(Record, frozen=True, tag="rewrite"):
    """A rewritten model against the one before, and the builds that it took."""

    result: Outcome
    builds: int


Form = Literal["float", "pairs"]
"""How two models meet: both in float, or both with pairs where the engine's rules place them."""


@dataclass(frozen=True)
class Tried:
    """A rewrite, on top of those kept before it, and its ratio to the model without it; None where it failed."""

    name: str
    form: Form
    ratio: Ratio | None
    kept: bool

    @property
    def row(self) -> dict[str, Any]:
        """The row of summary.json."""
        ends = self.ratio or Ratio(1.0, None, None)
        known = {"ratio": ends.median, "low": ends.low, "high": ends.high} if self.ratio else {"ratio": None}
        return {"name": self.name, "form": self.form, **known, "kept": self.kept}


@dataclass(frozen=True)
class Found:
    """The rewrites that were tried before the search, in the order in which they are made."""

    tried: tuple[Tried, ...] = ()
    builds: int = 0
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are kept."""
        return tuple(one.name for one in self.tried if one.kept)

    @property
    def gave(self) -> float:
        """The ratio of the rewritten model to the user's, as each was measured."""
        return prod(one.ratio.median for one in self.tried if one.kept and one.ratio)


NO_REWRITES = Found()


class RewritesRecord(Record, frozen=True, tag="rewrites"):
    """What the rewrites gave."""

    found: Found


class BatchRecord(Record, frozen=True, tag="batch"):
    """How many candidates are proposed at a time; see `Run`."""

    width: int
    learning: int


class PricesRecord(Record, frozen=True, tag="prices"):
    """What the price cache knew when the run began, and the placement that an earlier run has found."""

    prices: Prices
    found: StoredPlacement | None = None


class NoiseRecord(Record, frozen=True, tag="noise"):
    """The power that rounding each tensor alone adds to the outputs; all alike where measuring it failed."""

    alone: dict[str, float]
    failure: Failure | None = None


class WeightNoiseRecord(Record, frozen=True, tag="weight noise"):
    """The same of weights, by tensor and name of the weight format."""

    stored: tuple[tuple[str, str, float], ...]
    failure: Failure | None = None


class PredictionRecord(Record, frozen=True, tag="prediction"):
    """How exact a placement is by simulation."""

    accuracy: Accuracy | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _insist_on_one(self.accuracy, self.failure)


class ComparisonRecord(Record, frozen=True, tag="comparison"):
    """Two files on fresh builds, and digests of what the files held."""

    result: Outcome
    files: tuple[str, str]


class PointRecord(Record, frozen=True, tag="point"):
    """How exact a build for the front is, and its layers."""

    accuracy: Accuracy | None = None
    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _insist_on_one(self.accuracy, self.failure)


class PartRecord(Record, frozen=True, tag="part"):
    """The layers of a group built alone in float."""

    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None


class SchemeRecord(Record, frozen=True, tag="scheme"):
    """A scheme of a group against its float form; `result` is None where its layers leave no hope."""

    result: Outcome | None = None
    layers: tuple[Layer, ...] = ()


class WeightFormatsRecord(Record, frozen=True, tag="weight formats"):
    """The share of a float product's time that each weight format of its weight takes, by the size of the product."""

    shares: dict[str, dict[str, float]]


# ---------------------------------------------------------------- what a finished run answered


class AnsweredTrial(msgspec.Struct, frozen=True):
    """A trial of a finished run: `of` its record, what was proposed, and what the record does not know."""

    of: str
    origin: str
    pattern: str
    predicted: float | None
    wants_layers: bool
    metric: float | None
    holds: bool | None
    accepted: bool


class AnswerRecord(Record, frozen=True, tag="finished"):
    """The result of a finished run, with digests of summary.json and of the files that it has left."""

    shipped: Shipped
    placement: StoredPlacement
    ratio: Ratio | None
    notes: tuple[str, ...]
    trials: tuple[AnsweredTrial, ...]
    summary: str
    files: dict[str, str]
    units: tuple[UnitPrice, ...] = ()
    groups: tuple[GroupOutcome, ...] = ()


# ---------------------------------------------------------------- the interface of ModelOpt's autotuner


class TimedPlacement(msgspec.Struct, frozen=True):
    """A placement and its latency in ms, None where it failed."""

    placement: StoredPlacement
    ms: float | None


class ConversationRecord(Record, frozen=True, tag="conversation"):
    """Where a script that measures by itself has come to: latencies by digest of the placement, and by digest of the
    pattern the schemes that were tried."""

    baseline_ms: float | None
    best: TimedPlacement
    measured: dict[str, float | None]
    patterns: dict[str, tuple[TimedPlacement, ...]]


RECORDS = (
    HeadRecord
    | RangesRecord
    | TrialRecord
    | MetricRecord
    | LayersRecord
    | RepeatabilityRecord
    | RewriteRecord
    | RewritesRecord
    | BatchRecord
    | PricesRecord
    | NoiseRecord
    | WeightNoiseRecord
    | PredictionRecord
    | ComparisonRecord
    | PointRecord
    | PartRecord
    | SchemeRecord
    | WeightFormatsRecord
    | AnswerRecord
    | ConversationRecord
)
DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(RECORDS)


def parsed(line: bytes) -> Record:
    """The record that a JSON text holds.

    Raises:
        ValueError: it holds none.
    """
    try:
        return DECODER.decode(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def plain(value: object, order: Literal["deterministic"] | None = None) -> Any:
    """A struct or another value as JSON values; "deterministic": equal values give equal ones, maps and sets sorted."""
    return msgspec.to_builtins(value, enc_hook=_plain, order=order)


def _plain(value: Any) -> object:
    """What msgspec does not know: other maps than dictionaries, paths, and numbers of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value.item()


def is_transient(record: Record) -> bool:
    """Whether a record holds a failure that another try may not have."""
    parts = (record, getattr(record, "result", None), getattr(record, "check", None))
    failures: Iterable[Failure | None] = (getattr(part, "failure", None) for part in parts)
    return any(failure is not None and failure.stage in TRANSIENT for failure in failures)
