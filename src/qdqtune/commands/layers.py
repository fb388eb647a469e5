"""`qdqtune check --layers`: the layers that an engine runs for a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from qdqtune.calibration.options import DataOptions, samples_option
from qdqtune.commands.inputs import ModelOption, SamplesLike, execution_of
from qdqtune.commands.shown import Shown, Table, milliseconds
from qdqtune.commands.source import data_of, prepared_for
from qdqtune.engines.machine import MachineFacts, is_simulated
from qdqtune.engines.options import EngineOptions, on_device, on_option
from qdqtune.engines.runner import Runner, insist, temporary_runner
from qdqtune.engines.tensorrt.options import built_for_sample
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption
from qdqtune.explanation.reasons_by_graph import is_low
from qdqtune.graph.loading import load, read
from qdqtune.options import FILE, MaybeFile, MaybeText, Option, option
from qdqtune.types import Layer, Sample


@dataclass(kw_only=True)
class ProfileOptions(EngineOptions, DataOptions):
    """Options about the source of layers: an engine that runs the model, or an exported report."""

    calibration_data: Option[SamplesLike | None, SamplesLike | None] = samples_option()
    runs: Option[int, int] = option(
        click.IntRange(1), 20, "Inferences to take the times of.", "Engine", short="inferences to time"
    )
    graph_json: MaybeFile = option(
        FILE,
        None,
        "Read what trtexec --exportLayerInfo wrote of MODEL, and run nothing.",
        "Engine",
        metavar="FILE",
    )
    profile_json: MaybeFile = option(
        FILE,
        None,
        "The times to it: what trtexec --exportProfile wrote.",
        "Engine",
        metavar="FILE",
    )
    on: MaybeText = on_option()


@dataclass(kw_only=True)
class LayersOptions(ProfileOptions, ModelOption):
    """The options of `layers`."""


@dataclass(frozen=True, repr=False)
class Layers(Shown):
    """The layers of an engine, in the order in which they run; `machine` is the other one that ran them, if any."""

    engine: str
    layers: tuple[Layer, ...]
    machine: str | None = None

    @property
    def time_ms(self) -> float | None:
        """The sum of the layers' times; None if the engine gives none."""
        times = [layer.time_ms for layer in self.layers if layer.time_ms is not None]
        return sum(times) if times else None

    def in_words(self) -> str:
        """How many layers, how many of them in 8 bits, and their time."""
        low = sum(is_low(layer.precision) for layer in self.layers)
        on = " on ".join(filter(None, (self.engine, self.machine)))
        return f"{len(self.layers)} layers on {on}, {low} in 8 bits, {milliseconds(self.time_ms) or '?'} ms"

    def table(self) -> Table:
        """The layers, the longest first."""
        ordered = sorted(self.layers, key=lambda layer: -(layer.time_ms or 0.0))
        rows = [
            (", ".join(x.nodes), x.kind, x.precision, milliseconds(x.time_ms), x.elsewhere, x.name) for x in ordered
        ]
        has_others = any(layer.elsewhere for layer in self.layers)
        columns = ("nodes", "kind", "precision", "ms", "runs elsewhere", "layer")
        keep = [n for n, name in enumerate(columns) if has_others or name != "runs elsewhere"]
        return Table([columns[n] for n in keep], [[row[n] for n in keep] for row in rows], left=("nodes", columns[4]))

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "engine": self.engine,
            **({} if self.machine is None else {"machine": self.machine}),
            "layers": [{k: v for k, v in asdict(layer).items() if k != "parts"} for layer in self.layers],
        }


def layers(options: LayersOptions) -> Layers:
    """The layers of a model. Model and samples lie in files (see `on_disk`).

    Raises:
        BadOption: options exclude each other.
        QdqtuneError: the engine cannot run the model, or has no layers of it.
    """
    model = Path(str(options.model))
    if options.graph_json is not None:
        return Layers("tensorrt", read_report(options.graph_json, options.profile_json, read(model)))
    if options.profile_json is not None:
        raise BadOption("`profile_json` goes with `graph_json`")
    spec = options.spec(options.input_shapes)
    execution = execution_of(options)
    graph = load(model)
    (sample,) = prepared_for(graph, spec, data_of(options, execution, model), execution, 0).samples.first(1)
    spec = built_for_sample(spec, graph, sample)
    with on_device(options.on, execution) as (there, machine), temporary_runner(spec, there) as runner:
        refusal = f"{spec.name} has no layers of {model}"
        found = profiled(runner, model, sample, options.runs, refusal=refusal, machine=machine)
        return Layers(spec.name, found, None if machine is None else machine.where)


def profiled(
    runner: Runner, model: Path, sample: Sample, runs: int, *, refusal: str, machine: MachineFacts | None = None
) -> tuple[Layer, ...]:
    """The layers of a model with their times, without where these mean nothing on the `machine` that runs it.

    Raises:
        EngineFailure: the engine fails; the message is `refusal`, and the reason.
    """
    found = insist(runner.report(model, sample, runs, "layers"), refusal)
    if is_simulated(runner.describe()["engine"], machine):
        return tuple(replace(layer, time_ms=None, parts=()) for layer in found)
    return found
