"""The settings of a tuning run, and the presets of `effort`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from types import MappingProxyType

from qdqtune.calibration.prepare import MOST_JUDGED
from qdqtune.calibration.scales import DEFAULT_CALIBRATION, Calibration
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import TIME_LIMIT
from qdqtune.engines.formats import weight_formats_like
from qdqtune.engines.machine import MachineFacts, simulated, this_machine
from qdqtune.errors import BadOption
from qdqtune.graph.rewrites import allowed
from qdqtune.numerics.accuracy import APART_DB, FLOOR_DB, MOST_EQUAL
from qdqtune.numerics.metrics import check_metric
from qdqtune.search.region import Config
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan, least_rounds
from qdqtune.tuning.contexts import counts_of
from qdqtune.tuning.options import Division, FloatType, Mode, SearchOptions

FRONT_LEAST, FRONT_BUILDS = 8, 18
"""Builds of a run for a front (least, default), without those of the proof. Chosen, not measured."""

SEED_BUILDS = 12
"""Builds that mode cut gets at the beginning of mode region: the same for every budget, so that a run with a larger one
continues one with a smaller. Chosen, not measured."""

STATE = "autotuner_state.yaml"


@dataclass(frozen=True)
class Effort:
    """How much a run may spend: schemes per region, builds by mode, and the numbers of rounds (looks) after which
    comparisons in the search and in the proof are judged. A decided comparison of the proof continues until its
    interval is narrow, for up to `precision_seconds`."""

    schemes_per_region: int
    builds: Mapping[Mode, int]
    looks: tuple[int, ...]
    proof: tuple[int, ...]
    precision_seconds: float


EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        "quick": Effort(30, {"region": 24, "cut": 7, "subgraph": 4}, (12, 20), (12, 16, 32), 5.0),
        "default": Effort(50, {"region": 52, "cut": 8, "subgraph": 7}, (12, 20, 32, 48), (12, 24, 48, 96), 20.0),
        "extensive": Effort(
            200, {"region": 400, "cut": 60, "subgraph": 24}, (12, 24, 48, 96), (13, 24, 48, 96, 192), 60.0
        ),
    }
)


BY_RULE_BUILDS: Mapping[str, int] = MappingProxyType({"quick": 8, "default": 25, "extensive": 60})
"""Builds by effort on a simulator, where a candidate runs on a few samples and is not timed. Chosen, not measured."""

SIMULATOR_SLOWNESS = 40.0
"""How much longer a simulator takes than a CPU to compute outputs. With QNN: 0.1 to 0.2 s for a sample of resnet20."""


def usual_builds() -> str:
    modes = sorted(EFFORTS["default"].builds)
    return "; ".join(f"{mode} {', '.join(str(effort.builds[mode]) for effort in EFFORTS.values())}" for mode in modes)


def looks_until(last: int, looks: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of rounds in `looks` up to `last`, and `last`."""
    return (*(n for n in looks if n < last), last)


def builds_for(schemes: int, patterns: int) -> int:
    """Builds that give every pattern so many schemes, and a fifth more for trying wins together."""
    return 16 + ceil(1.2 * schemes * patterns)


class Settings(SearchOptions):
    """The settings of a tuning run: the options of a search, and what follows from other options of `tune`.

    Budgets (`builds`, `time_budget`), limits on accuracy and workers may change when a run is resumed.

    `builds` is the most builds of the search, the float model's included; the proof makes further ones. `evaluate`
    names the user's metric (see `numerics.metrics`), in place of `labels` and `metric`. `accuracy_samples` is the most
    samples for comparing outputs. `workloads` are calls with different shapes, timed together by their shares; they are
    the samples if there are no `calibration_data`. `command` is the command line, for the run log only. `threads` are
    the numbers of threads that the model will run with: what ships is slower at none of them, and faster at one. None:
    the user named none, and the `engine`'s default counts. `machine` is the other machine that measures (`on`); None:
    this one, or a cluster. The fields after it are only set by `qdqtune.autotune`, which explains them.
    """

    model: Path = field(kw_only=False)
    engine: EngineSpec = field(default_factory=lambda: EngineSpec("onnxruntime"))
    calibration_data: str | None = None
    accuracy_samples: int = MOST_JUDGED
    calibration: Calibration = DEFAULT_CALIBRATION
    config: Config = field(default_factory=Config)
    plan: Plan = field(default_factory=Plan)
    proof: tuple[int, ...] = EFFORTS["default"].proof
    precision_seconds: float = EFFORTS["default"].precision_seconds
    builds: int = EFFORTS["default"].builds["cut"]
    time_limit: float = TIME_LIMIT
    evaluate: str | None = None
    command: tuple[str, ...] = field(default=(), compare=False)
    workloads: tuple[WorkloadFile, ...] = ()
    threads: tuple[int, ...] | None = None
    machine: MachineFacts = field(default_factory=this_machine, compare=False)
    cut_seed: bool = True
    incremental_validation: bool = True
    graph_json: Path | None = None
    regions: Division = "auto"
    default_dq_dtype: FloatType | None = None
    qdq_baseline: Path | None = None
    pattern_cache: Path | None = None
    state_file: Path | None = None

    def __post_init__(self) -> None:
        least = 2
        if self.builds < least:
            raise BadOption(f"`builds` {self.builds} leaves no candidate: give at least {least}")
        allowed(self.rewrites)
        if self.precision == "bf16":
            raise BadOption("`precision` bf16 is for quantize and apply: a search judges outputs in fp16 or fp32")
        if self.from_qdq and self.qdq_baseline:
            raise BadOption("`from_qdq` and `qdq_baseline` exclude each other")
        if self.from_qdq and self.calibration_cache:
            raise BadOption("`from_qdq` and `calibration_cache` exclude each other: both bring scales")
        if self.portable and self.from_qdq:
            raise BadOption("`portable` chooses the numbers, and `from_qdq` keeps those of the file: leave one out")
        check_metric(self.evaluate, self)
        if isinstance(self.max_drop, float) and not self.has_metric:
            raise BadOption("`max_drop` is about your metric: name it with `labels`, or `evaluate` module:callable")
        if self.front and (self.mode != "cut" or self.from_qdq):
            raise BadOption("`front` is for `mode` cut and float models")
        if self.front and self.builds < FRONT_LEAST:
            raise BadOption(f"`builds` {self.builds} has no room for a front: give at least {FRONT_LEAST}")
        if self.formats is not None:
            if not self.formats:
                raise BadOption("`formats` names nothing: leave it out for all that the engine has")
            for name in self.formats:
                if name != self.quant_type:
                    try:
                        weight_formats_like(self.engine.name, name, narrow=self.has_narrow_products)
                    except BadOption as error:
                        raise BadOption(f"`formats`: {error}, and {self.quant_type} for pairs") from error
        if self.threads is not None:
            counts_of(self.engine, self.threads, None if self.ray else self.machine)
        if not self.is_timed and (self.mode != "cut" or self.front or self.formats is not None or self.from_qdq):
            raise BadOption(
                f"{simulated(self.engine.name, self.machine)}: a search there is by rule, with `mode` cut, for float "
                "models, without `front` and `formats`"
            )
        if self.on is not None and self.ray is not None:
            raise BadOption("`on` and `ray` exclude each other: both say where to measure")
        if self.graph_json is not None and self.mode != "subgraph":
            raise BadOption("`graph_json` is for `mode` subgraph")
        if self.pattern_cache is not None and self.mode != "region":
            raise BadOption("`pattern_cache` is for `mode` region")

    @property
    def is_timed(self) -> bool:
        """Whether candidates are timed; if not (on a simulator), they are judged by estimated costs."""
        return not simulated(self.engine.name, self.machine)

    @property
    def has_narrow_products(self) -> bool:
        """Whether weights have 7 bits, either to be `portable`, or since products would saturate on the machine that
        measures."""
        return self.portable or self.machine.products_saturate

    @property
    def has_metric(self) -> bool:
        """Whether the user asks for a metric: by a function, labels, or the name of one."""
        return self.evaluate is not None or self.is_labelled

    @property
    def has_pairs(self) -> bool:
        if self.formats is not None:
            return self.quant_type in self.formats
        has_given = self.from_qdq or self.qdq_baseline is not None or self.calibration_cache is not None
        return self.engine.facts.has_pair_kernels or has_given or self.mode != "cut"

    @property
    def limits(self) -> Limits:
        """The accuracy limits, still without the float model's metric. Without samples there are none on outputs."""
        drop = None if not self.has_metric or self.max_drop == "auto" else self.max_drop
        on_outputs = self._on_outputs(has_metric=self.has_metric) if self.has_samples else Limits()
        return replace(on_outputs, max_drop=drop)

    @property
    def has_samples(self) -> bool:
        """Whether the user gave inputs; outputs on random ones show no accuracy."""
        return self.calibration_data is not None or bool(self.workloads)

    @property
    def withholds_pairs(self) -> bool:
        """Whether nothing with pairs may ship, as there are limits on outputs but no samples to check them."""
        return not self.has_samples and self._on_outputs(has_metric=self.has_metric).are_set

    @property
    def floor(self) -> Limits:
        """The limits on outputs that apply where there is no metric."""
        return self._on_outputs(has_metric=False) if self.has_samples else Limits()

    def _on_outputs(self, *, has_metric: bool) -> Limits:
        floor, equal = self.min_sqnr, self.min_agreement
        if floor == "auto":
            floor = None if has_metric else FLOOR_DB
        if equal == "auto":
            equal = None if floor is None or has_metric else MOST_EQUAL
        worst = None if floor is None else floor - APART_DB  # a good mean may hide a sample that is broken
        return Limits(floor, min_agreement=equal, min_sqnr_worst=worst)

    @property
    def thread_counts(self) -> tuple[int | None, ...]:
        """The numbers of threads that candidates are timed at, see `contexts.counts_of`."""
        return counts_of(self.engine, self.threads, None if self.ray else self.machine)

    @property
    def proof_plan(self) -> Plan:
        """The rounds of the proof: its first look is at the fewest rounds that can decide. The error probability is
        divided by the number of thread counts, as a file may win at any of them."""
        error, rest = min(self.plan.error, Plan.error) / len(self.thread_counts), self.proof[1:]
        first = max(self.proof[0], least_rounds(error, 1 + len(rest)))
        return replace(self.plan, looks=(first, *(n for n in rest if n > first)), error=error)

    @property
    def seed_builds(self) -> int:
        return SEED_BUILDS if self.cut_seed else 0

    @property
    def search_builds(self) -> int:
        return self.builds - 1

    @property
    def state(self) -> Path:
        return self.state_file or self.output_dir / STATE
