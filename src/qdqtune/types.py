"""Values that all folders share. All are frozen; invalid combinations are refused when they are created."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from qdqtune.errors import Failure


class Edge(NamedTuple):
    """One use of a tensor: input number `index` of a node, or with `node` empty graph output number `index`."""

    # Searches sort millions of edges: a tuple is several times as fast there as a dataclass.

    tensor: str
    node: str = ""
    index: int = 0  # type: ignore[assignment]  # a tuple has a method of this name

    @property
    def is_graph_output(self) -> bool:
        return not self.node

    def __str__(self) -> str:
        return f"{self.tensor} -> " + (f"{self.node}[{self.index}]" if self.node else f"output {self.index}")


WEIGHT_FORMAT = re.compile(r"(?P<kind>[wd])(?P<bits>[478])(b(?P<block>\d+))?(?P<asymmetric>a)?")
"""How a weight format is written: w8, w8b128, w4b32, w4b32a, d8, d7."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weight-only quantization stores a weight: integers of 4 or 8 bits, which the kernel converts to floats.

    There is one scale for each `block` of weights that are summed into one output, or without `block` for each output
    channel. Integers are signed; if not `symmetric`, unsigned with a zero point for each scale. If `dynamic`,
    activations get 8 bits at run time; 7-bit weights avoid the overflow of 8-bit ones on CPUs without VNNI.
    """

    bits: int
    block: int | None = None
    symmetric: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.dynamic and (self.bits not in (7, 8) or self.block is not None or not self.symmetric):
            raise ValueError("weights of dynamic quantization are signed, of 7 or 8 bits, with scales for channels")
        if (self.bits not in (4, 8) and not self.dynamic) or (self.block is None and self.bits == 4):
            raise ValueError("weights are stored in 8 bits, or in 4 bits in blocks")
        if self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise ValueError("blocks hold 16, 32, 64 or another power of two")

    @property
    def name(self) -> str:
        """The name that users see: w8, w8b128, w4b32, w4b32a (asymmetric), d8 and d7 (dynamic)."""
        return f"{self.family}{f'b{self.block}' if self.block else ''}{'' if self.symmetric else 'a'}"

    @property
    def family(self) -> str:
        """The name without block size and symmetry: w8, w4, d8 or d7."""
        return f"{'d' if self.dynamic else 'w'}{self.bits}"

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight: its integer, and its part of the scale (float32) and zero point of a block."""
        own = 0.5 if self.bits == 4 else 1.0
        return own + (0.0 if self.block is None else (4 + (0 if self.symmetric else own)) / self.block)

    @property
    def opset(self) -> int:
        """The lowest opset that supports the format: 21 for blocks, else 13."""
        return 13 if self.block is None else 21

    @staticmethod
    def named(name: str) -> WeightFormat:
        """The weight format of a name such as w4b32. Raises ValueError if there is none."""
        match = WEIGHT_FORMAT.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is no weight format: write w8, w8b128, w4b32, w4b32a, d8 or d7")
        block = match["block"] and int(match["block"])
        return WeightFormat(int(match["bits"]), block or None, match["asymmetric"] is None, match["kind"] == "d")


@dataclass(frozen=True)
class Placement:
    """The edges with a Q/DQ pair; a constant bias has none, since its scale follows from other inputs.

    `weight_only` holds the uses of weights that are quantized without their activation, with their weight formats. An
    edge has a pair or a weight format, not both. `wide` are those of `edges` that are read in 16 bits instead of 8: of
    activations, and of weights next to them. A node writes as many bits as it reads (`placement.possible`). `in`, `len`
    and iteration are about pairs only; a placement with weight formats alone is true. In `a | b`, a pair replaces a
    weight format, and a format of `a` one of `b`.
    """

    edges: frozenset[Edge] = frozenset()
    weight_only: frozenset[tuple[Edge, WeightFormat]] = frozenset()
    wide: frozenset[Edge] = frozenset()

    def __post_init__(self) -> None:
        if not self.wide <= self.edges:
            raise ValueError("only an edge with a pair is read in 16 bits")
        if self.weight_only:
            uses = [edge for edge, _ in self.weight_only]
            if len(set(uses)) < len(uses) or not self.edges.isdisjoint(uses):
                raise ValueError("a weight has one weight format or a pair")

    def __contains__(self, edge: object) -> bool:
        return edge in self.edges

    def __iter__(self) -> Iterator[Edge]:
        return iter(self._ordered)

    @cached_property
    def _ordered(self) -> tuple[Edge, ...]:
        return tuple(sorted(self.edges))

    def __len__(self) -> int:
        return len(self.edges)

    def __bool__(self) -> bool:
        return bool(self.edges or self.weight_only)

    def __or__(self, other: Placement) -> Placement:
        edges = self.edges | other.edges
        kept = {e: s for e, s in (*other.weight_only, *self.weight_only) if e not in edges}
        return Placement(edges, frozenset(kept.items()), self.wide | other.wide)

    def __sub__(self, other: Placement) -> Placement:
        return Placement(self.edges - other.edges, self.weight_only - other.weight_only, self.wide - other.edges)

    def paired(self, edges: Iterable[Edge]) -> Placement:
        """The placement with pairs on exactly these edges. Other edges keep their weight format."""
        fresh = frozenset(edges)
        kept = frozenset(pair for pair in self.weight_only if pair[0] not in fresh)
        return Placement(fresh, kept, self.wide & fresh)

    @staticmethod
    def of(
        edges: Iterable[Edge], weight_only: Iterable[tuple[Edge, WeightFormat]] = (), wide: Iterable[Edge] = ()
    ) -> Placement:
        """A placement of pairs on `edges`, of weight formats, and of edges that are read in 16 bits."""
        return Placement(frozenset(edges), frozenset(weight_only), frozenset(wide))

    @cached_property
    def weight_formats(self) -> dict[Edge, WeightFormat]:
        """The weight format of each edge that has one, sorted by edge."""
        return dict(sorted(self.weight_only, key=itemgetter(0)))

    @property
    def digest(self) -> str:
        rows: list[tuple[object, ...]] = [*self]
        rows += [(*edge, weight_format.name) for edge, weight_format in self.weight_formats.items()]
        rows += [(*edge, "16 bits") for edge in sorted(self.wide)]
        return hashlib.sha256("\n".join("\t".join(map(str, row)) for row in rows).encode()).hexdigest()[:16]


class QType(Enum):
    """The element type of quantized values."""

    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    UINT16 = "uint16"
    FP8 = "float8_e4m3fn"

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)
        info = (ml_dtypes.finfo if "float" in name else ml_dtypes.iinfo)(name)
        self.low, self.high = int(info.min), int(info.max)


@dataclass(frozen=True)
class FixedScale:
    """What an engine requires of results of operator `op` in 16 bits: this scale and zero point; without a zero point,
    a scale of at least `scale`."""

    op: str
    scale: float
    zero_point: int | None = None


@dataclass(frozen=True)
class NumericFormat:
    """The number formats of an engine's Q/DQ pairs, which `insert` follows.

    `unsigned`: in an otherwise symmetric format, tensors without negative values are uint8, and an input of a
    convolution that comes from a Concat has zero point 128. `reduced_weights`: weights have 7 bits, because u8 x s8
    products saturate on x86 without VNNI. `bias`: constant biases become int32, or stay float. `drop_clamps`: a Relu or
    Clip is removed if saturation of the next pair does the same. `shared_scale_ops`: operators that need one scale for
    input and output to run in integers. `float_weights`: constants stay float with a Q and a DQ, for engines that
    accept no integers there (nor float16 scales). `wide`: the type of 16-bit activations, None if the engine has none;
    their weights have 8 or 16 bits. `wide_scales`: what it requires of the scales of some operators' 16-bit results.
    """

    activation: QType
    weight: QType
    symmetric: bool
    per_channel: bool = True
    reduced_weights: bool = False
    unsigned: bool = False
    bias: Literal["int32", "float"] = "float"
    drop_clamps: bool = False
    shared_scale_ops: frozenset[str] = frozenset()
    float_weights: bool = False
    wide: QType | None = None
    wide_scales: tuple[FixedScale, ...] = ()

    def __post_init__(self) -> None:
        if self.wide is not None and (self.symmetric or self.wide is not QType.UINT16):
            raise ValueError("16-bit activations are uint16, beside asymmetric ones of 8 bits")
        if (self.activation is QType.FP8) != (self.weight is QType.FP8):
            raise ValueError("FP8 activations go with FP8 weights only")
        if self.symmetric and self.activation is QType.UINT8:
            raise ValueError("symmetric activations have zero point 0: use int8, not uint8")
        if self.unsigned and not (self.symmetric and self.activation is QType.INT8):
            raise ValueError("unsigned goes with symmetric int8 activations")
        if self.weight not in (QType.INT8, QType.FP8):
            raise ValueError("weights are int8 or FP8")
        if self.weight is QType.FP8 and (self.per_channel or self.reduced_weights or self.bias == "int32"):
            raise ValueError("FP8 weights are per tensor, full range, with a float bias")

    @property
    def opset(self) -> int:
        """The lowest opset that supports such pairs: 13 for per-channel scales, 19 for FP8."""
        return 19 if self.activation is QType.FP8 else 13


LOW_PRECISIONS = ("INT8", "FP8", "INT4", "FP4", "UINT8")
"""Values of `Layer.precision` of layers that compute on values of 8 bits or fewer."""

LayerKind = Literal["compute", "reformat", "copy", "quantize", "folded", "unknown"]


@dataclass(frozen=True)
class Layer:
    """A layer that an engine ran: its ONNX nodes and its time, None if unknown. With several workloads, `time_ms` is
    the mean over calls, and `parts` has the time of each in ms, if all run the same layers. `elsewhere` is set if the
    execution provider does not run the nodes: it says what does, and why."""

    name: str
    nodes: tuple[str, ...]
    precision: str
    time_ms: float | None
    kind: LayerKind
    parts: tuple[float, ...] = ()
    elsewhere: str = ""


EQUAL_DB = 200.0
"""The SQNR in dB of equal outputs, for ordering: more than float32 can resolve."""


def noise_of(sqnr_db: float) -> float:
    return float(10 ** (-sqnr_db / 10))


def sqnr_of(noise: float) -> float | None:
    """The SQNR in dB of an error with this relative power; None without error."""
    return None if noise == 0 else float(-10 * np.log10(noise))


@dataclass(frozen=True)
class Accuracy:
    """How far a model's outputs are from the float model's, on `samples` samples.

    `sqnr_db` is the SQNR of the worst float output, `lowest_db` and `highest_db` its extremes on single samples; None
    if outputs are equal, or none is float. `by_output` has the SQNR of each of several float outputs. `at_most_db` is
    set if not all samples were run: the SQNR if the others have no error. `slice_name` and `slice_db` are the worst
    slice of a float output; `slice_is_lost`: it is destroyed, and the SQNR of the whole output hides that
    (`numerics.accuracy`). `agreement` is the share of equal elements of the worst integer output. `top1` is the share
    of equal best classes among `choices`. Choices in one sample depend on each other: `independent` is how many
    independent ones tell as much (see `numerics.scores`). `other_shapes` is the number of samples of which an output
    has another shape than in float.
    """

    sqnr_db: float | None = None
    lowest_db: float | None = None
    highest_db: float | None = None
    agreement: float | None = None
    top1: float | None = None
    samples: int = 0
    choices: int = 0
    independent: float | None = None
    at_most_db: float | None = None
    slice_name: str | None = None
    slice_db: float | None = None
    slice_is_lost: bool = False
    by_output: Mapping[str, float | None] = field(default_factory=dict)
    other_shapes: int = 0

    @property
    def worst_output(self) -> str:
        """The name of the output with the SQNR `sqnr_db`; empty if there is only one float output, or none differs."""
        levels = {name: db for name, db in self.by_output.items() if db is not None}
        return min(levels, key=levels.__getitem__, default="")

    @property
    def noise(self) -> float:
        """Power of the error relative to the worst float output, 10^(-SQNR/10); 0 for equal outputs."""
        return 0.0 if self.sqnr_db is None else noise_of(self.sqnr_db)

    def __post_init__(self) -> None:
        if any(share is not None and not 0 <= share <= 1 for share in (self.agreement, self.top1)):
            raise ValueError("shares lie in [0, 1]")


class Measurement(msgspec.Struct, frozen=True, tag=True):
    """Times of two models in a paired comparison, in seconds per inference: `a[i]` and `b[i]` are of round i.
    With several workloads, both are means over calls, and `parts` has the times of each workload.
    """

    a: tuple[float, ...]
    b: tuple[float, ...]
    parts: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        if len(self.a) != len(self.b) or not self.a:
            raise ValueError("a measurement needs the same number of rounds for both sides, at least one")
        if not (np.isfinite(self.a).all() and np.isfinite(self.b).all() and min(*self.a, *self.b) > 0):
            raise ValueError("latency samples are finite and above zero")
        if any(len(part.a) != len(self.a) for part in self.parts):
            raise ValueError("each workload has a part in each round")

    def mean(self, shares: Sequence[float]) -> Measurement:
        """The mean over workloads, without those with a share of 0; `shares` has one for each part and adds up to 1."""
        a, b = (tuple(np.dot(shares, [getattr(part, side) for part in self.parts]).tolist()) for side in "ab")
        parts = tuple(part for part, share in zip(self.parts, shares, strict=True) if share)
        return Measurement(a, b, parts if len(parts) > 1 else ())


@dataclass(frozen=True)
class Times:
    """Times of models that ran in the same rounds, in seconds per inference: `seconds[model][round][call]`. A model
    that was eliminated has fewer rounds. A call is a workload at a number of threads; their `shares` add up to 1."""

    seconds: tuple[tuple[tuple[float, ...], ...], ...]
    shares: tuple[float, ...] = (1.0,)

    def pair(self, a: int, b: int) -> Measurement:
        """The rounds in which both models ran; `a` and `b` are indices."""
        count = min(len(self.seconds[a]), len(self.seconds[b]))
        both = np.array([self.seconds[a][:count], self.seconds[b][:count]])  # [model, round, call]
        means = np.tensordot(both, self.shares, axes=([2], [0])).tolist()
        calls = both.transpose(2, 0, 1).tolist()
        parts = [Measurement(tuple(of_a), tuple(of_b)) for of_a, of_b in calls]
        return Measurement(tuple(means[0]), tuple(means[1]), tuple(parts) if len(parts) > 1 else ())

    def extended(self, later: Times, models: Sequence[int]) -> Times:
        """These times with later rounds, in which only some `models` ran."""
        seconds = list(self.seconds)
        for number, rounds in zip(models, later.seconds, strict=True):
            seconds[number] += rounds
        return Times(tuple(seconds), self.shares)


class CostsByRule(msgspec.Struct, frozen=True, tag=True):
    """Costs by rule (`search.costs.rule_costs`) of a candidate (`b`) and of the placement that it is compared with
    (`a`): they replace a `Measurement` where an engine's times mean nothing."""

    a: float
    b: float

    def __post_init__(self) -> None:
        if not (np.isfinite([self.a, self.b]).all() and min(self.a, self.b) > 0):
            raise ValueError("costs are finite and above zero")


@dataclass(frozen=True)
class Proposal:
    """A placement that a search wants to be measured; `origin` says how it was found.

    `pattern` is the digest of the pattern that it changes, `predicted` the estimated ratio to the float model, if any.
    `wants_layers`: the search needs the engine's layers of the build.
    """

    origin: str
    placement: Placement
    pattern: str = ""
    predicted: float | None = None
    wants_layers: bool = False


@dataclass(frozen=True)
class Trial:
    """A candidate: the proposal, the placement that it was compared with, and the results.

    `result` compares the candidate (side b) with the best placement at that time (side a, `against`), by times or by
    rule. `accuracy` is None if the trial failed. `metric` is the user's, measured only if all else is good enough.
    """

    number: int
    proposal: Proposal
    against: Placement
    result: Measurement | CostsByRule | Failure
    accuracy: Accuracy | None = None
    layers: tuple[Layer, ...] | None = None
    metric: float | None = None
    holds: bool | None = None
    """Whether the candidate is within the user's limits; None if that was not measured, and then it never ships."""
    accepted: bool = False

    @property
    def sqnr_db(self) -> float | None:
        """Output SQNR; None if the trial failed, or outputs equal those of the float model."""
        return None if self.accuracy is None else self.accuracy.sqnr_db

    @property
    def exactness(self) -> float:
        """Output SQNR in dB to order candidates by; `EQUAL_DB` for equal outputs, and for failed trials."""
        return EQUAL_DB if self.sqnr_db is None else self.sqnr_db

    @property
    def placement(self) -> Placement:
        return self.proposal.placement


Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]
"""Arrays by the name of a graph input or output."""


@dataclass(frozen=True, eq=False)
class Workload:
    """Inputs of one kind of call, its number of threads, and its share of all calls. The shares of a `Mix` add up to 1.
    `threads` is None for the number that the engine was opened with."""

    inputs: Tensors
    share: float = 1.0
    name: str = ""
    threads: int | None = None


Mix = tuple[Workload, ...]
"""The workloads of a model, each at every number of threads. The latency of a model is their mean, weighted by
shares."""

QuantType = Literal["int8", "fp8"]
Sample = dict[str, Array]


LONG_INFERENCE = 0.04
"""Inferences of this many seconds or more get one turn in a round, as disturbances average out. Chosen, not
measured."""


@dataclass(frozen=True)
class Turn:
    """How long a model runs before the next one: `runs` inferences in a row, each of `seconds` on the slowest model. In
    a round each model has `per_round` turns: two, as A B C C B A, against drift; one for long inferences, or if turns
    start a process."""

    runs: int
    per_round: int
    seconds: float
    start: float = 0.0  # seconds to start the process of a turn; 0 if turns start none

    @classmethod
    def of(cls, seconds: float, least: float, start: float = 0.0) -> Turn:
        """A turn of at least `least` seconds, where one inference takes `seconds` and starting a process `start`."""
        runs = max(1, math.ceil(least / (seconds or 1)))
        per_round = 1 if start or seconds >= LONG_INFERENCE else 2
        return cls(runs, per_round, seconds, start)

    @property
    def round_seconds(self) -> float:
        """Seconds that a model takes in one round, where one inference takes `seconds`."""
        return self.per_round * (self.runs * self.seconds + self.start)


class Listener(Protocol):
    """Receives the progress of long work."""

    def stage(self, text: str) -> None:
        return

    def progress(self, done: int, total: int | None) -> None:
        """`done` steps of the stage are finished; `total` is None if their number is unknown."""
        return


class Deaf(Listener):
    """A listener that ignores everything."""
