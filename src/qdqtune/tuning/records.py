"""The records of a state file: one struct for each kind of line, packed and checked by msgspec.

The key of a record is its kind and its `of`, such as the digest of a placement; `of` is empty where a run has one
record of the kind. A line is refused if a value in it, such as ranges, rounds or layers, is invalid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from operator import or_
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import msgspec

from qdqtune.calibration.scales import Ranges
from qdqtune.errors import EngineRefused, Failure
from qdqtune.numerics.label_metrics import Score
from qdqtune.numerics.scores import Scores
from qdqtune.timing.ratios import Ratio
from qdqtune.types import (
    Accuracy,
    CostsByRule,
    Edge,
    Layer,
    Measurement,
    Placement,
    WeightFormat,
)

Shipped = Literal["tuned", "baseline", "given"]
"""The content of optimized_final.onnx: the tuned model, the float model, or a copy of the user's file."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """A line of the state file; `of` tells records of one kind apart. What `is_cut_short` lacks something, for want of
    time or by an accident: a later session measures it again."""

    of: str = ""
    is_cut_short: bool = False


R = TypeVar("R", bound=Record)


class StoredPlacement(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A placement as JSON: the edges with a pair, the weights with their weight formats, and the edges in 16 bits."""

    pairs: tuple[Edge, ...] = ()
    weights: tuple[tuple[Edge, str], ...] = ()
    wide: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        _ = self.placement  # raises if it is invalid

    @classmethod
    def of(cls, placement: Placement) -> StoredPlacement:
        return cls(
            tuple(placement),
            tuple((edge, weight_format.name) for edge, weight_format in placement.weight_formats.items()),
            tuple(sorted(placement.wide)),
        )

    @cached_property
    def placement(self) -> Placement:
        """The placement.

        Raises:
            ValueError: a weight has two formats, or one that does not exist, or 16 bits are where no pair is.
        """
        formats = ((edge, WeightFormat.named(name)) for edge, name in self.weights)
        return Placement.of(self.pairs, formats, self.wide)


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a comparison: its rounds, or why there are none."""

    samples: Measurement | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _check_one(self.samples, self.failure)

    @classmethod
    def of(cls, result: Measurement | Failure) -> Outcome:
        """Convert a result to its stored form."""
        return cls(failure=result) if isinstance(result, Failure) else cls(samples=result)

    @property
    def result(self) -> Measurement | Failure:
        """The rounds, or the failure."""
        found = self.samples or self.failure
        assert found is not None  # checked when it was made
        return found


class TrialOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a candidate: its rounds, or its costs by rule, or why there are none."""

    samples: Measurement | None = None
    failure: Failure | None = None
    costs: CostsByRule | None = None

    def __post_init__(self) -> None:
        _check_one(self.samples or self.costs, self.failure)

    @classmethod
    def of(cls, result: Measurement | CostsByRule | Failure) -> TrialOutcome:
        """Convert a result to its stored form."""
        if isinstance(result, CostsByRule):
            return cls(costs=result)
        return cls(failure=result) if isinstance(result, Failure) else cls(samples=result)

    @property
    def result(self) -> Measurement | CostsByRule | Failure:
        """The rounds, the costs by rule, or the failure."""
        found = self.samples or self.costs or self.failure
        assert found is not None  # checked when it was made
        return found


def _check_one(value: object, failure: Failure | None) -> None:
    if (value is None) == (failure is None):
        raise ValueError("there is either a value or a failure")


class HeadRecord(Record, frozen=True, tag="run"):
    """The first line of the file: its version, that of the code that makes candidates, and the run's fingerprint."""

    version: int
    candidates: int
    fingerprint: dict[str, Any]


# ---------------------------------------------------------------- what was measured


class RangesRecord(Record, frozen=True, tag="ranges"):
    """The ranges that calibration found. `hurried` are notes on what a time budget left out of it."""

    ranges: Ranges
    hurried: tuple[str, ...] = ()


def job_of(placement: str, against: str) -> str:
    """The key `of` of a trial's record: 16 hex digits made of the digests of the candidate's placement and of the
    placement `against` which it was timed. So it does not depend on the order of trials."""
    return hashlib.sha256(f"{placement}:{against}".encode()).hexdigest()[:16]


class TrialRecord(Record, frozen=True, tag="trial"):
    """A candidate compared with another placement, whose digest is `against`; see `Trial`."""

    origin: str
    against: str
    placement: StoredPlacement
    result: TrialOutcome
    pattern: str = ""
    predicted: float | None = None
    accuracy: Accuracy = Accuracy()
    check: Outcome | None = None
    layers: tuple[Layer, ...] | None = None

    def __post_init__(self) -> None:
        if self.of != job_of(self.placement.placement.digest, self.against):
            raise ValueError("it is the record of another placement")


class MetricRecord(Record, frozen=True, tag="metric"):
    """The user's metric of a placement; over labels with its `name`, and the score of each sample."""

    value: float | None = None
    by_sample: tuple[float, ...] = ()
    name: str = ""
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _check_one(self.value, self.failure)

    def score(self) -> Score:
        """The metric.

        Raises:
            EngineRefused: there is none.
        """
        if self.failure is not None:
            raise EngineRefused(self.failure)
        assert self.value is not None  # checked when it was made
        return Score(self.value, self.by_sample, self.name)


class LayersRecord(Record, frozen=True, tag="layers"):
    """The layer report of the placement whose digest is `of`; of the float model where `of` is empty."""

    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None


class MachineRecord(Record, frozen=True, tag="machine"):
    """What the machine calls itself that measures what follows; "" is the one of the run, as without such a record."""

    where: str = ""


class FloatRecord(Record, frozen=True, tag="float"):
    """The float model: the seconds of one inference (roughly), of its build, and of starting a process, if each turn of
    a round starts one; the kinds of its outputs (NumPy's `dtype.kind`); and those that hold scores of classes, with the
    axis and the number of the classes.

    `turn_seconds` is a fourth of a round of two such builds: one inference of each workload at each number of threads;
    and half as much again with several workloads, because the shapes change.
    """

    seconds: float
    turn_seconds: float
    build_seconds: float
    start_seconds: float
    kinds: tuple[str, ...]
    axis: dict[str, int]
    classes: dict[str, int]
    why_no_scores: str = ""

    @property
    def scores(self) -> Scores:
        """The outputs that hold scores of classes, without the best class at each position."""
        return Scores(self.axis, self.classes, {}, why_not=self.why_no_scores)


class RepeatabilityRecord(Record, frozen=True, tag="repeatability"):
    """The outputs of the float model compared with those of a second run of the same build."""

    accuracy: Accuracy


class RewriteRecord(Record, frozen=True, tag="rewrite"):
    """A model with one more rewrite compared with the model without it, and the builds that this took."""

    result: Outcome
    builds: int


Form = Literal["float", "pairs"]
"""How two models are compared: both in float, or both with pairs where the engine's rules place them."""


@dataclass(frozen=True)
class Tried:
    """A rewrite tried on top of those kept before. `ratio`: the time with it over that without, None if it failed."""

    name: str
    form: Form
    ratio: Ratio | None
    kept: bool


@dataclass(frozen=True)
class TriedRewrites:
    """The rewrites that were tried before the search, in the order of trying, and the builds that they took."""

    tried: tuple[Tried, ...] = ()
    builds: int = 0
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of rewrites that are kept."""
        return tuple(one.name for one in self.tried if one.kept)

    @property
    def ratio(self) -> float:
        """Time of the rewritten model over that of the user's file: the product of the ratios of the rewrites kept."""
        return prod(one.ratio.median for one in self.tried if one.kept and one.ratio)


NO_REWRITES = TriedRewrites()


class RewritesRecord(Record, frozen=True, tag="rewrites"):
    """The rewrites that were tried, and their results."""

    found: TriedRewrites


class BatchRecord(Record, frozen=True, tag="batch"):
    """How many candidates a search proposes at a time; `learning` is the number for one that learns from each batch."""

    width: int
    learning: int


class NoiseRecord(Record, frozen=True, tag="noise"):
    """The output noise that rounding each tensor alone causes; 1 for every tensor if measuring it failed."""

    alone: dict[str, float]
    failure: Failure | None = None


class WeightNoiseRecord(Record, frozen=True, tag="weight noise"):
    """The output noise that storing each weight alone causes: rows of tensor, name of the weight format, and noise."""

    noise: tuple[tuple[str, str, float], ...]
    failure: Failure | None = None


class PredictionRecord(Record, frozen=True, tag="prediction"):
    """The accuracy of a placement by simulation, or why the simulation failed."""

    accuracy: Accuracy | None = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _check_one(self.accuracy, self.failure)


class ComparisonRecord(Record, frozen=True, tag="comparison"):
    """The rounds of one pair of fresh builds of two files, and digests of the files' content."""

    result: Outcome
    files: tuple[str, str]


class PointRecord(Record, frozen=True, tag="point"):
    """The accuracy and the layers of a build that the search had not made, for the front."""

    accuracy: Accuracy | None = None
    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None

    def __post_init__(self) -> None:
        _check_one(self.accuracy, self.failure)


class PartRecord(Record, frozen=True, tag="part"):
    """The layers of a fusion group built alone in float."""

    layers: tuple[Layer, ...] = ()
    failure: Failure | None = None


class SchemeRecord(Record, frozen=True, tag="scheme"):
    """A scheme of a fusion group compared with float; `result` is None if its layers already show that it is slower."""

    result: Outcome | None = None
    layers: tuple[Layer, ...] = ()


class WeightFormatsRecord(Record, frozen=True, tag="weight formats"):
    """By size of a matrix product and by weight format, its time over that of the float product; and a failure for
    which some are missing, if it may not occur again."""

    shares: dict[str, dict[str, float]]
    failure: Failure | None = None


@dataclass(frozen=True)
class GroupOutcome:
    """A row of subgraph mode's table: one fusion group. Times in ms; those of the group alone leave out the conversions
    between floats and integers at its inputs and outputs.

    `kind` is a number that equal groups share, None if the group was not timed. `scheme` is the one that was accepted,
    or else the best one; None if there is none. `gain_in_model` is the time that the group saves in the whole model,
    conversions included; None where the engine reports no layers.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    kind: int | None
    scheme: str | None
    float_ms: float
    quantized_ms: float | None
    gain_in_model: float | None
    kept: bool
    why: str

    @property
    def gain_alone(self) -> float | None:
        """The ms that the scheme saved alone."""
        return None if self.quantized_ms is None else self.float_ms - self.quantized_ms


class ConversationRecord(Record, frozen=True, tag="conversation"):
    """The state of a script that times models by itself through ModelOpt's interface: latencies in ms (None where a
    model failed), the best placement, latencies by digest of the placement, and the patterns that were begun."""

    baseline_ms: float | None
    best: StoredPlacement
    best_ms: float | None
    measured: dict[str, float | None]
    patterns: tuple[dict[str, Any], ...]


DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(reduce(or_, Record.__subclasses__()))


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
    """Convert a value to JSON values; "deterministic" sorts maps and sets, so that equal values give equal JSON."""
    return msgspec.to_builtins(value, enc_hook=_encoded, order=order)


def _encoded(value: Any) -> object:
    """Convert what msgspec does not know: maps that are no dictionaries, paths, and numbers of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value.item()
