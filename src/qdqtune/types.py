"""The values that pass between the stages. All are frozen; bad combinations are rejected when they are made."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class Edge(NamedTuple):
    """One use of a tensor: input `index` of node `node`, or, with `node` empty, graph output number `index`.

    A tuple, since searches put edges in sets and sort them by the million: tuples hash and compare several times as
    fast as dataclasses.
    """

    tensor: str
    node: str = ""
    index: int = 0  # type: ignore[assignment]  # a tuple has a method of this name

    @property
    def is_graph_output(self) -> bool:
        """Whether the user of the tensor is the graph itself."""
        return not self.node

    def __str__(self) -> str:
        return f"{self.tensor} -> " + (f"{self.node}[{self.index}]" if self.node else f"output {self.index}")


STORAGE = re.compile(r"w(?P<bits>[48])(b(?P<block>\d+))?(?P<asymmetric>a)?")
"""How a weight format is written: w8, w8b128, w4b32, w4b32a."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight is kept where it alone is quantized: integers of 4 or 8 bits, which the kernel turns into floats.

    One scale serves `block` weights that are summed into one output, or without `block` all of an output channel.
    Integers are signed around zero, or if not `symmetric` unsigned with a zero point for each scale.
    """

    bits: int
    block: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError("weights are stored in 4 or 8 bits")
        if self.block is None and self.bits == 4:
            raise ValueError("weights of 4 bits come in blocks")
        if self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise ValueError("blocks hold 16, 32, 64 or another power of two")

    @property
    def name(self) -> str:
        """As users write it: w8, w8b128, w4b32, w4b32a (asymmetric)."""
        return f"w{self.bits}{f'b{self.block}' if self.block else ''}{'' if self.symmetric else 'a'}"

    @property
    def family(self) -> str:
        """What it has in common with others of as many bits: w8 or w4."""
        return f"w{self.bits}"

    @property
    def bytes_per_weight(self) -> float:
        """Of integers, and of a float32 scale with a zero point for each block."""
        own = self.bits / 8
        return own + (0.0 if self.block is None else (4 + (0 if self.symmetric else own)) / self.block)

    @property
    def opset(self) -> int:
        """The opset that it needs at least: blocks and 4 bits 21."""
        return 13 if self.block is None else 21

    @staticmethod
    def named(name: str) -> WeightFormat:
        """The weight format of that name.

        Raises:
            ValueError: there is none.
        """
        match = STORAGE.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no way to store weights: write w8, w8b128, w4b32 or w4b32a")
        block = match["block"] and int(match["block"])
        return WeightFormat(int(match["bits"]), block or None, match["asymmetric"] is None)


@dataclass(frozen=True)
class Placement:
    """The edges that carry a Q/DQ pair, activations and constants alike; an int32 bias follows from the other two.

    `compressed` are uses of weights that are stored in fewer bits while what they meet stays in float. They carry no
    pair, and no edge is in both.
    """

    edges: frozenset[Edge] = frozenset()
    compressed: frozenset[tuple[Edge, WeightFormat]] = frozenset()

    def __post_init__(self) -> None:
        if self.compressed:
            uses = [edge for edge, _ in self.compressed]
            if len(set(uses)) < len(uses) or not self.edges.isdisjoint(uses):
                raise ValueError("a weight is stored in one way, or carries a pair")

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
        return bool(self.edges or self.compressed)

    def __or__(self, other: Placement) -> Placement:
        edges = self.edges | other.edges
        kept = {e: s for e, s in (*other.compressed, *self.compressed) if e not in edges}
        return Placement(edges, frozenset(kept.items()))

    def __sub__(self, other: Placement) -> Placement:
        return Placement(self.edges - other.edges, self.compressed - other.compressed)

    def paired(self, edges: Iterable[Edge]) -> Placement:
        """The same with pairs on these edges instead; weights among them have no other weight format any more."""
        fresh = frozenset(edges)
        return Placement(fresh, frozenset(pair for pair in self.compressed if pair[0] not in fresh))

    @staticmethod
    def of(edges: Iterable[Edge], compressed: Iterable[tuple[Edge, WeightFormat]] = ()) -> Placement:
        """A placement of any iterable of edges."""
        return Placement(frozenset(edges), frozenset(compressed))

    @cached_property
    def weight_formats(self) -> dict[Edge, WeightFormat]:
        """The weight format of each use of a weight that has one, in the order of `__iter__`."""
        return dict(sorted(self.compressed, key=itemgetter(0)))

    @property
    def digest(self) -> str:
        """16 hex digits that are equal exactly for equal placements."""
        lines = [f"{e.tensor}\t{e.node}\t{e.index}" for e in self]
        lines += [f"{e.tensor}\t{e.node}\t{e.index}\t{s.name}" for e, s in self.weight_formats.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class QType(Enum):
    """The element type of quantized values."""

    UINT8 = "uint8"
    INT8 = "int8"
    FP8 = "float8e4m3fn"

    @property
    def low(self) -> int:
        """Smallest value."""
        return {"uint8": 0, "int8": -128, "float8e4m3fn": -448}[self.value]

    @property
    def high(self) -> int:
        """Largest value."""
        return {"uint8": 255, "int8": 127, "float8e4m3fn": 448}[self.value]


@dataclass(frozen=True)
class NumericFormat:
    """How an engine wants its numbers: what `insert` obeys.

    `unsigned` gives tensors without negative values all 256 steps of uint8, in a format that is symmetric otherwise,
    and zero point 128 to what a convolution reads from a Concat; `shared_scale_ops` are the operators whose input and
    output must carry one scale to stay in integers;
    `reduced_weights` limits weights to 7 bits, because u8 x s8 products saturate on x86 without VNNI; `float_weights`
    leaves constants in float in front of a Q and a DQ, for engines that take no integers there (nor float16 scales).
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

    def __post_init__(self) -> None:
        if (self.activation is QType.FP8) != (self.weight is QType.FP8):
            raise ValueError("FP8 activations go with FP8 weights only")
        if self.symmetric and self.activation is QType.UINT8:
            raise ValueError("symmetric activations have zero point 0: use int8, not uint8")
        if self.unsigned and not (self.symmetric and self.activation is QType.INT8):
            raise ValueError("unsigned goes with symmetric int8 activations")
        if self.weight is QType.UINT8:
            raise ValueError("weights are int8 or FP8")
        if self.weight is QType.FP8 and (self.per_channel or self.reduced_weights or self.bias == "int32"):
            raise ValueError("FP8 weights are per tensor, full range, with a float bias")

    @property
    def opset(self) -> int:
        """The opset that the pairs need at least (per-channel scales 13, FP8 19)."""
        return 19 if self.activation is QType.FP8 else 13


LayerKind = Literal["compute", "reformat", "copy", "quantize", "folded", "unknown"]


@dataclass(frozen=True)
class Layer:
    """One layer that an engine ran: the ONNX nodes it covers, and how long it took."""

    name: str
    nodes: tuple[str, ...]
    precision: str
    time_ms: float | None
    kind: LayerKind


TRANSIENT = frozenset({"timeout", "crash", "resources"})
"""Stages of failures that another try may not have."""


@dataclass(frozen=True)
class Failure:
    """Why a build or a run gave no result. `log` holds what the engine printed.

    Stages: "build" and "run", what the engine refused; "output", values that are of no use; "timeout"; "crash", its
    process ended; "resources", memory or disk was short.
    """

    stage: Literal["build", "run", "timeout", "crash", "output", "resources"]
    reason: str
    log: str = ""

    @property
    def is_transient(self) -> bool:
        """Whether it says nothing lasting of the model: what was killed, too slow or short of room may do next time."""
        return self.stage in TRANSIENT


EQUAL_DB = 200.0
"""What counts as the SQNR of outputs that are equal: more than float32 can tell."""


def noise_of(sqnr_db: float) -> float:
    """The power of an error relative to the signal: 10^(-SQNR/10)."""
    return float(10 ** (-sqnr_db / 10))


def sqnr_of(noise: float) -> float | None:
    """The SQNR in dB of an error of such relative power; None where there is no error."""
    return None if noise == 0 else float(-10 * np.log10(noise))


@dataclass(frozen=True)
class Accuracy:
    """How far a model's outputs are from the float model's, on `samples` samples.

    `sqnr_db` is of the worst float output over all samples, `lowest_db` and `highest_db` of that output on single
    samples; None if the outputs are equal, or none is float. `agreement` is the share of equal elements of the worst
    output that holds integers, `top1` the share of samples whose largest class score is the same class; None where the
    model has no such output.
    """

    sqnr_db: float | None = None
    lowest_db: float | None = None
    highest_db: float | None = None
    agreement: float | None = None
    top1: float | None = None
    samples: int = 0

    @property
    def noise(self) -> float:
        """Power of the error over the power of the worst float output, 10^(-SQNR/10); 0 for equal outputs."""
        return 0.0 if self.sqnr_db is None else noise_of(self.sqnr_db)

    def __post_init__(self) -> None:
        if any(share is not None and not 0 <= share <= 1 for share in (self.agreement, self.top1)):
            raise ValueError("shares lie in [0, 1]")

    def __str__(self) -> str:
        """For people: 24.1 dB (18.3 to 31.0 over 16 samples), 99.0 % of the integers equal."""
        parts = [f"{self.agreement:.1%} of the integers equal"] if self.agreement is not None else []
        if self.sqnr_db is None:
            return ", ".join(parts) or "equal outputs"
        spread = ""
        if self.lowest_db is not None and self.highest_db is not None and self.samples > 1:
            spread = f" ({self.lowest_db:.1f} to {self.highest_db:.1f} over {self.samples} samples)"
        return ", ".join([f"{self.sqnr_db:.1f} dB{spread}", *parts])


LONG = 0.04
"""Seconds of an inference that says as much as two that are short: what disturbs it evens out meanwhile."""


@dataclass(frozen=True)
class Slot:
    """`runs` back-to-back inferences of either model, of which the slower takes `seconds` each. In a round each has two
    slots, A B B A, so that a steady drift cancels; one, A B, if inferences are long."""

    runs: int
    turns: int
    seconds: float

    @classmethod
    def of(cls, seconds: float, least: float) -> Slot:
        """That keeps a model busy for at least so many seconds."""
        return cls(max(1, math.ceil(least / seconds)) if seconds else 1, 1 if seconds >= LONG else 2, seconds)

    @property
    def round_seconds(self) -> float:
        """What a round takes, of two models that are as slow."""
        return 2 * self.turns * self.runs * self.seconds


@dataclass(frozen=True)
class Measurement:
    """Samples of one paired comparison, in seconds per inference: `a[i]` and `b[i]` belong to round i.

    Of several workloads they are those of the average call, and `parts` hold those of each workload.
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

    def __add__(self, later: Measurement) -> Measurement:
        """With the rounds that came after it."""
        parts = tuple(first + more for first, more in zip(self.parts, later.parts, strict=True))
        return Measurement(self.a + later.a, self.b + later.b, parts)


@dataclass(frozen=True)
class Proposal:
    """A placement that a strategy wants measured, and where it comes from.

    `pattern` is the digest of the pattern that it varies, `predicted` its ratio to the float model if there is a guess.
    `wants_layers`: the strategy learns from the layers of the build.
    """

    origin: str
    placement: Placement
    pattern: str = ""
    predicted: float | None = None
    wants_layers: bool = False


@dataclass(frozen=True)
class Trial:
    """One candidate: what was proposed, what it was compared with, and what came of it.

    `result` compares the candidate (side b) with the best placement of its time (side a, `against`). Where that is a
    win, `check` repeats it on a second build of both. `accuracy` is None where it failed.
    `metric` is the user's own, measured for what would be taken only.
    """

    number: int
    proposal: Proposal
    against: Placement
    result: Measurement | Failure
    check: Measurement | Failure | None = None
    accuracy: Accuracy | None = None
    layers: tuple[Layer, ...] | None = None
    metric: float | None = None
    holds: bool | None = True
    """Whether it holds the user's limits; None if nobody needs to know."""
    accepted: bool = False

    @property
    def sqnr_db(self) -> float | None:
        """Output SQNR; None if it failed, or if the outputs equal those of the float model."""
        return None if self.accuracy is None else self.accuracy.sqnr_db

    @property
    def exactness(self) -> float:
        """Output SQNR in dB, `EQUAL_DB` where the outputs are equal: what candidates are ordered by."""
        return EQUAL_DB if self.sqnr_db is None else self.sqnr_db

    @property
    def placement(self) -> Placement:
        """The candidate."""
        return self.proposal.placement

    @property
    def builds(self) -> int:
        """Engine builds that it took: one, and two more where a win was checked."""
        return 1 if self.check is None else 3


Array = npt.NDArray[Any]

Tensors = Mapping[str, Array]
"""Arrays by the name of a graph input or output."""


@dataclass(frozen=True, eq=False)
class Workload:
    """What a model is called with, and the share of all calls that are such. The shares of a `Mix` add up to 1."""

    inputs: Tensors
    share: float = 1.0
    name: str = ""


Mix = tuple[Workload, ...]
"""The workloads of a model. What a call takes is the mean over its workloads, by their shares; most models have one."""


QuantType = Literal["int8", "fp8"]

Sample = dict[str, Array]


class Listener(Protocol):
    """Hears how far long work is."""

    def stage(self, text: str) -> None:
        """A new stage begins."""
        return

    def progress(self, done: int, total: int | None) -> None:
        """So many steps of the stage are done; `total` is None where nobody knows how many there are."""
        return


class Deaf(Listener):
    """A listener that does not listen."""
