"""`qdqtune check`: which pairs of a Q/DQ model an engine does not fuse; with `--layers`, the layers that it runs."""

from __future__ import annotations

import glob
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.calibration.options import DataOptions
from qdqtune.commands.inputs import FIXED, ModelOption, execution_of, prepared_for
from qdqtune.commands.shown import Shown, Table, milliseconds
from qdqtune.engines.facts import SYMMETRIC, facts_of
from qdqtune.engines.fallback import Fallback, fallback
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.machine import simulated
from qdqtune.engines.options import ON, EngineOptions, machine_of, on_device
from qdqtune.engines.runner import temporary_runner
from qdqtune.engines.tensorrt.options import built_for_sample
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import BadOption, ConstraintUnmet, InputError, rewording
from qdqtune.explanation import unfused
from qdqtune.explanation.formatting import counted, placed, shortened
from qdqtune.explanation.unfused import Finding, allow, is_low
from qdqtune.explanation.units import total
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load, read
from qdqtune.graph.model import Model
from qdqtune.options import COUNT, FILE, WORDS, MaybeFile, Names, ValuesByInput
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.reading import is_quantized, placement_in
from qdqtune.placement.stripping import strip_pairs
from qdqtune.tuning.folder import BASELINE, PLACEMENT
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.summary import read_summary
from qdqtune.types import Layer, NumericFormat, QuantType


class LayersOptions(EngineOptions, DataOptions, ModelOption):
    runs: int = COUNT("Inferences to take the times of.", "Engine", "inferences to time", default=20)
    graph_json: MaybeFile = FILE("Read what trtexec --exportLayerInfo wrote of MODEL, and run nothing.", "Engine")
    profile_json: MaybeFile = FILE("The times to it: what trtexec --exportProfile wrote.", "Engine")
    on: str | None = ON
    fix_inputs: ValuesByInput = FIXED

    def __post_init__(self) -> None:
        if self.profile_json is not None and self.graph_json is None:
            raise BadOption("`profile_json` goes with `graph_json`")


@dataclass(frozen=True, repr=False)
class Layers(Shown):
    """The layers that an engine runs for a model, in order, with inputs of these `sizes`; `numbers` is the format of
    its pairs. `machine` is the remote machine, if any; `described` is what the engine says of itself (None: read from a
    file)."""

    engine: str
    layers: tuple[Layer, ...]
    machine: str | None = None
    numbers: NumericFormat = SYMMETRIC
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    described: Mapping[str, str] | None = None

    @property
    def time_ms(self) -> float | None:
        return time_of(self.layers)

    @property
    def in_8_bits(self) -> int:
        return sum(is_low(layer.precision) for layer in self.layers)

    @property
    def where(self) -> str:
        return self.engine if self.machine is None else f"{self.engine} on {self.machine}"

    def in_words(self) -> str:
        count = f"{len(self.layers)} layers on {self.where}, {self.in_8_bits} in 8 bits"
        return f"{count}, {milliseconds(self.time_ms) or '?'} ms"

    def table(self) -> Table:
        ordered = sorted(self.layers, key=lambda layer: -(layer.time_ms or 0.0))
        rows = [
            (", ".join(x.nodes), x.kind, x.precision, milliseconds(x.time_ms), x.elsewhere, x.name) for x in ordered
        ]
        columns = ("nodes", "kind", "precision", "ms", "runs elsewhere", "layer")
        return Table(columns, shortened(rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            **({} if self.machine is None else {"machine": self.machine}),
            "layers": [{k: v for k, v in asdict(layer).items() if k != "parts"} for layer in self.layers],
        }


def layers(options: LayersOptions, observer: Observer | None = None) -> Layers:
    """The layers that the engine runs for a model, in order, with their nodes and times.

    Raises:
        BadOption: options exclude each other.
        QdqtuneError: the engine cannot run the model, or has no layers of it.
    """
    return _profile(options, load(options.model))


def _profile(options: LayersOptions, graph: Model) -> Layers:
    """Read the report that `graph_json` names, or run the model on the engine. Times of a simulator are left out."""
    path = options.model
    is_fp8 = any(info.dtype == TensorProto.FLOAT8E4M3FN for info in graph.tensors.values())
    quant_type: QuantType = "fp8" if is_fp8 else "int8"
    if options.graph_json is not None:
        reported = read_report(options.graph_json, options.profile_json, read(path))
        return Layers("tensorrt", reported, numbers=numeric_format("tensorrt", quant_type))
    spec, execution = options.spec(options.input_shapes), execution_of(options)
    fixed = fixed_inputs(path, options.fix_inputs)
    open_inputs = load(path, fix_inputs={name: options.fix_inputs[name] for name in fixed}) if fixed else graph
    prepared = prepared_for(open_inputs, spec, options, execution, [path], fixed=options.fix_inputs, most=0)
    sample = {**prepared.samples.first(1)[0], **fixed}
    spec = built_for_sample(spec, graph, sample)
    there, machine = on_device(options.on, execution), machine_of(options.on)
    with temporary_runner(spec, there) as runner:
        numbers, described = runner.numeric_format(quant_type), runner.describe()
        with rewording(f"{spec.name} has no layers of {path}"):
            layers = runner.report(path, sample, options.runs, "layers")
    if simulated(described["engine"], machine):
        layers = tuple(replace(layer, time_ms=None, parts=()) for layer in layers)
    sizes = {name: np.shape(array) for name, array in sample.items()}
    return Layers(spec.name, layers, machine.where or None, numbers, sizes, described)


DQ = "DequantizeLinear"

ORDER = ("float compute", "standalone pair", "reformat", "elsewhere", "boundary")
"""The order in which findings with one cause are listed, by kind: the cause itself, then its consequences."""

MOST_NOTES = 10
"""The most notes of each kind that the command prints without -v."""


class CheckOptions(LayersOptions):
    allow_boundary: Names = WORDS(
        "Nodes that are meant to stay in float, or conversions that are meant to run: what stands at them does not "
        "fail. Repeatable.",
        "Model",
        "nodes that are meant to be so",
        metavar="WILDCARD",
    )


@dataclass(frozen=True, repr=False)
class Checked(Shown):
    """What an engine does not fuse in a Q/DQ model. `measured`: a search has proven these pairs faster on this engine,
    so no finding counts as a failure. `fallback` has the nodes that an execution provider leaves to others; None for
    other engines. `profile` has no layers if the model has no pairs and `fallback` is None."""

    model: Path
    graph: Model
    profile: Layers
    findings: tuple[Finding, ...]
    measured: bool = False
    notes: tuple[str, ...] = ()
    fallback: Fallback | None = None

    @property
    def passes(self) -> bool:
        return self.measured or not any(finding.fails for finding in self.findings)

    @property
    def running(self) -> list[Layer]:
        return [layer for layer in self.profile.layers if layer.kind != "folded"]

    def in_words(self) -> str:
        if not self.profile.layers:
            return f"{self.model}: no pairs, nothing to check"
        failing = [finding for finding in self.findings if finding.fails]
        running, spent = time_of(self.running), time_of(failing)
        share = f", {spent:.3f} of {running:.3f} ms" if running and spent is not None else ""
        count = f"{self.profile.in_8_bits} of {len(self.running)} layers in 8 bits"
        ran = f"{placed(placement_in(strip_pairs(self.graph), self.graph))}, {count}"
        where = f"{self.model} on {self.profile.where}"
        if self.measured:
            nothing = "nothing to do, as a search on this engine has found these pairs (placement.yaml beside the file)"
            return f"{where}: {nothing}; {ran}, {counted(len(self.findings), 'note')}"
        notes = counted(len(self.findings) - len(failing), "note")
        return f"{where}: {ran}; {counted(len(failing), 'finding')}{share}, {notes}"

    def table(self, most: float = inf) -> Table:
        """The findings, grouped by cause; failures first, then by time. Of the notes of each kind at most `most`; the
        caption counts the others."""
        groups: dict[tuple[bool, str], list[Finding]] = {}
        for finding in sorted(self.findings, key=lambda f: ORDER.index(f.kind)):
            groups.setdefault((not finding.fails, finding.cause or finding.reason), []).append(finding)
        rows, notes = list[tuple[str, ...]](), Counter[str]()
        for key in sorted(groups, key=lambda key: (key[0], -(time_of(groups[key]) or 0.0))):
            reason = None
            for finding in groups[key]:
                is_note = not finding.fails or self.measured
                notes[finding.kind] += is_note
                if is_note and notes[finding.kind] > most:
                    continue
                names = ", ".join(finding.nodes) or finding.layer
                why = "as above" if finding.reason == reason else finding.reason
                reason = reason or finding.reason
                rows.append((finding.kind, "note" if is_note else "failure", milliseconds(finding.time_ms), names, why))
        more = [f"… and {counted(n - int(most), 'more note')} of kind {kind}" for kind, n in notes.items() if n > most]
        columns = ("what", "counts as", "ms", "nodes", "why")
        return Table(columns, shortened(rows), "\n".join([*more, *["-v shows all"] * bool(more)]))

    @property
    def exit_code(self) -> int:
        return 0 if self.passes else ConstraintUnmet.exit_code

    def parts(self, *, every: bool = True) -> Iterator[str | Table]:
        yield self.table(inf if every else MOST_NOTES)
        yield self.in_words()
        if self.fallback is not None:
            yield self.fallback.in_words()
        failing = [finding for finding in self.findings if finding.fails]
        if failing and not self.measured:
            names = (name for finding in failing for name in (finding.cause, *finding.nodes) if name)
            first = next((f" --allow-boundary {shlex.quote(glob.escape(name))}, all of it with" for name in names), "")
            accepted = f"what is meant to be so is accepted with{first} --allow-boundary '*'"
            yield f"{accepted}; `qdqtune tune MODEL --from-qdq` measures which pairs pay"

    def to_dict(self) -> dict[str, Any]:
        findings = [replace(finding, fails=finding.fails and not self.measured) for finding in self.findings]
        return {
            "model": str(self.model),
            "engine": self.profile.engine,
            **({} if self.profile.machine is None else {"machine": self.profile.machine}),
            "pairs": sum(node.op == DQ for node in self.graph.nodes),
            "layers": len(self.running),
            "layers_in_8_bits": self.profile.in_8_bits,
            "time_ms": time_of(self.running),
            "failing": sum(finding.fails for finding in findings),
            "findings": [asdict(finding) for finding in findings],
            "passes": self.passes,
            "measured": self.measured,
            **({} if self.fallback is None else {"fallback": asdict(self.fallback)}),
        }


def time_of(timed: Sequence[Layer] | Sequence[Finding]) -> float | None:
    return total(each.time_ms for each in timed)


def check(options: CheckOptions, observer: Observer | None = None) -> Checked:
    """Find what the engine does not fuse in a Q/DQ model, and why.

    Raises:
        BadOption: options exclude each other.
        QdqtuneError: the engine cannot run the model, for example.
    """
    path = options.model
    graph, is_report = load(path), options.graph_json is not None
    notes = () if is_report else tuple(filter(None, [options.spec(options.input_shapes).facts.unwatched]))
    if not is_quantized(graph) and (is_report or not facts_of(options.engine_name).source):
        nothing = Layers("tensorrt" if is_report else options.engine_name, ())
        return Checked(path, graph, nothing, (), notes=notes)
    profile = _profile(options, graph)
    left = None
    if facts_of(profile.engine).source:
        sizes = {name: shape for name, shape in profile.sizes.items() if name in graph.inputs}
        left = fallback(with_input_shapes(graph, sizes), profile.layers)
    findings = allow(unfused.check(graph, profile.layers, profile.numbers), options.allow_boundary)
    measured = profile.described is not None and _is_measured(path, graph, profile.described)
    return Checked(path, graph, profile, findings, measured, notes, left)


def _is_measured(file: Path, model: Model, engine: Mapping[str, str]) -> bool:
    """Whether `file` is in the folder of a run that has proven the pairs of its `model` faster on this engine. `engine`
    describes the engine: another version, device or setting may fuse otherwise."""
    folder = file.parent
    try:
        summary = read_summary(folder)
        fuses_as = [{k: v for k, v in e.items() if k != "machine"} for e in (summary["engine"], engine)]
        if summary["shipped"] != "tuned" or fuses_as[0] != fuses_as[1]:
            return False
        return read_placement_file(folder / PLACEMENT).placement == placement_in(load(folder / BASELINE), model)
    except InputError:  # tune has not written this folder
        return False
