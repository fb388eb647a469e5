"""Measurements of `debug`: the noise of some pairs, by ONNX and on an engine, and of parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import helper

from qdqtune.calibration.observe import with_outputs
from qdqtune.engines import EngineSpec
from qdqtune.engines.devices import usable_cores
from qdqtune.engines.runner import Handle, Runner, insist
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.numerics.bisection import Parts
from qdqtune.numerics.scores import NO_SCORES
from qdqtune.numerics.sessions import Session
from qdqtune.numerics.slices import loss_of_slice
from qdqtune.numerics.stripped import check_stripped
from qdqtune.placement.file_pairs import FilePair, with_file_pairs
from qdqtune.placement.switches import SWITCH
from qdqtune.tuning.subgraphs.groups import Resolved, borders, extract
from qdqtune.types import Array, Failure, Sample, noise_of

UNKNOWN_NOISE = 1e3
"""The noise that stands for outputs which are NaN or infinite, have other shapes, or are missing."""

LOUDEST = 999.0
"""The largest noise of finite outputs."""

SWITCHLESS = "ONNX Runtime cannot run the model with a switch at every pair"

Outputs = list[dict[str, Array]]


def reference_spec() -> EngineSpec:
    """ONNX Runtime without optimization, which computes every operator as ONNX defines it."""
    return EngineSpec("onnxruntime", {"threads": usable_cores(), "fuse": False})


def noise(reference: Outputs, found: Outputs | Failure) -> float:
    """The power of the error relative to that of the signal, for the worst output, or for a slice of one that is lost.

    For integer outputs, such as class numbers, the share of values that differ, if that is larger.
    """
    if isinstance(found, Failure) or not is_finite(found):
        return UNKNOWN_NOISE
    shapes = ((r[name].shape, f[name].shape) for r, f in zip(reference, found, strict=True) for name in r)
    if any(a != b for a, b in shapes):
        return UNKNOWN_NOISE
    judged = accuracy(reference, found, NO_SCORES)
    of_slice = noise_of(judged.slice_db) if judged.slice_is_lost and judged.slice_db is not None else 0.0
    wrong = min(max(judged.noise, of_slice), LOUDEST)
    return wrong if judged.agreement is None else max(wrong, 1 - judged.agreement)


@dataclass
class Probe:
    """Measures sets of pairs of a quantized model on samples.

    `engine` is the one under test, `exact` runs as `reference_spec`. Models are written to `folder`. `runs` counts how
    often samples went through a model.
    """

    float_model: Model
    quantized: Model
    pairs: Sequence[FilePair]
    samples: Sequence[Sample]
    engine: Runner
    exact: Runner
    folder: Path
    runs: int = 0
    failures: list[Failure] = field(default_factory=list)
    """Failures of the engine under test, in order."""
    _built: dict[Parts, float] = field(default_factory=dict)
    _constants: ConstantFile | None = None
    _switched: Handle | None = None
    _reference: Outputs | None = None
    _last: Outputs | Failure = field(default_factory=list)

    def reference(self) -> Outputs:
        """Outputs of the float model.

        Raises:
            EngineFailure: ONNX Runtime does not run it, or its outputs are not finite.
        """
        if self._reference is None:
            self._reference = self._outputs_as_defined(())
            if not is_finite(self._reference):
                raise EngineFailure(
                    "outputs of the float model are NaN or infinite on ONNX Runtime without "
                    "optimization: nothing can be compared with them"
                )
        return self._reference

    def check_stripped(self, file: Path) -> None:
        """Check that the float model was rightly made of the quantized one, in `file`; raises BadModel if not."""
        with ConstantFile(self.folder / "check.bin") as constants:
            session, instead = Session(self.exact, constants), "give the float model first, and this file second"
            check_stripped(self.float_model, self.quantized, session, self.samples[0], str(file), instead)

    def by_numbers(self, on: Parts) -> float:
        """The noise of some pairs as ONNX defines them."""
        return 0.0 if not on else noise(self.reference(), self._outputs_as_defined(on))

    def on_engine(self, on: Parts) -> float:
        """The noise of the float model with some pairs on the engine under test; takes a build."""
        if on in self._built:
            return self._built[on]
        path = self.folder / f"part_{self.runs}.onnx"
        self._save(with_file_pairs(self.float_model, [self.pairs[i] for i in on], self.quantized), path)
        self._built[on] = self.of_file(path)
        path.unlink()
        return self._built[on]

    def of_file(self, path: Path) -> float:
        """The noise of a model file on the engine under test."""
        self.runs += 1
        outputs = self.engine.outputs_of(path, self.samples)
        if isinstance(outputs, Failure):
            self.failures.append(outputs)
        elif missing := self.reference()[0].keys() - outputs[0].keys():
            raise EngineFailure(f"{path.name} has no output {sorted(missing)[0]!r} as the float model has")
        else:  # outputs that only the file has are ignored
            outputs = [{name: found[name] for name in self.reference()[0]} for found in outputs]
        self._last = outputs
        return noise(self.reference(), outputs)

    def narrow(self, most: int, limit: float) -> float:
        """Keep only the `most` samples with the largest error in the last call of `of_file`, if the noise on these is
        above `limit`. The noise on the samples that are kept."""
        reference, outputs = self.reference(), self._last
        if isinstance(outputs, Failure):
            self.samples, self._reference = self.samples[:most], reference[:most]
            return noise(reference, outputs)
        single = [noise([r], [o]) for r, o in zip(reference, outputs, strict=True)]
        worst = sorted(sorted(range(len(single)), key=lambda i: -single[i])[:most])
        kept, those = [reference[i] for i in worst], [outputs[i] for i in worst]
        if (there := noise(kept, those)) <= limit:
            return noise(reference, outputs)
        self.samples, self._reference = [self.samples[i] for i in worst], kept
        return there

    def lost_part(self) -> str | None:
        """A slice of an output that is lost in the last call of `of_file`, in words; None if none is."""
        reference, outputs = self.reference(), self._last
        if noise(reference, outputs) == UNKNOWN_NOISE or isinstance(outputs, Failure):
            return None
        return loss_of_slice(accuracy(reference, outputs, NO_SCORES))

    def _outputs_as_defined(self, on: Parts) -> Outputs:
        self.runs += 1
        if self._switched is None:
            path = self.folder / "switched.onnx"
            self._save(with_file_pairs(self.float_model, self.pairs, self.quantized, switched=True), path)
            self._switched = insist(self.exact.load(path), SWITCHLESS)
        chosen = set(on)
        switches = {f"{SWITCH}{i}": np.asarray(i in chosen) for i in range(len(self.pairs))}
        return insist(self.exact.outputs(self._switched, [sample | switches for sample in self.samples]), SWITCHLESS)

    def _save(self, model: Model, path: Path) -> None:
        if self._constants is None:
            self._constants = ConstantFile(self.folder / "constants.bin")
        self._constants.save(model, path)


MOST_WRONG_PARTS = 8
"""Most wrong parts that are looked for in one model. Chosen, not measured."""


@dataclass(frozen=True)
class WrongPart:
    """A smallest run of neighbouring nodes that the engine computes wrongly.

    `noise` is that of its results, given exact inputs. `reason` is the engine's, if it refuses the part.
    """

    nodes: tuple[str, ...]
    noise: float
    reason: str = ""


@dataclass
class CutOff:
    """Measures parts of a model, nodes [start, stop) in graph order, on an engine under test."""

    model: Model
    samples: Sequence[Sample]
    engine: Runner
    exact: Runner
    folder: Path
    runs: int = 0
    reason: str = ""
    """The reason that the engine gave for refusing the last part that it refused."""

    def noise(self, start: int, stop: int) -> float:
        """The noise that the engine makes in the results of nodes [start, stop), if their inputs are exact."""
        nodes = range(start, stop)
        reads, writes = borders(self.model, nodes)
        if not writes:
            return 0.0
        values = self._exact_values(dict.fromkeys((*reads, *writes)))
        expected = [{t: sample[t] for t in writes} for sample in values]
        judged = [t for t in writes if all(_is_usable(sample[t]) for sample in expected)]
        self.runs += 1
        sizes = {t: values[0][t].shape for t in reads}
        path = self.folder / f"part_{start}_{stop}.onnx"
        with ConstantFile(self.folder / f"part_{start}_{stop}.bin") as constants:
            constants.save(extract(self.model, nodes, Resolved(sizes), {}), path)
        computed = self.engine.outputs_of(path, [{t: sample[t] for t in reads} for sample in values])
        path.unlink()
        constants.path.unlink()
        if isinstance(computed, Failure):
            self.reason = computed.reason
            return UNKNOWN_NOISE
        return noise([{t: s[t] for t in judged} for s in expected], [{t: s[t] for t in judged} for s in computed])

    def _exact_values(self, tensors: Sequence[str] | dict[str, None]) -> Outputs:
        """Values of some tensors, sample by sample, on ONNX Runtime without optimization."""
        self.runs += 1
        names = {tensor: f"__value_{i}" for i, tensor in enumerate(tensors)}
        nodes = [helper.make_node("Identity", [tensor], [name], name) for tensor, name in names.items()]
        shown = with_outputs(self.model, nodes)  # a graph input needs an Identity to be an output
        path = self.folder / "shown.onnx"
        with ConstantFile(self.folder / "shown.bin") as constants:
            constants.save(shown, path)
        values = insist(self.exact.outputs_of(path, self.samples), "ONNX Runtime cannot run the float model")
        return [{tensor: sample[name] for tensor, name in names.items()} for sample in values]


def wrong_parts(cut: CutOff, limit: float) -> tuple[WrongPart, ...]:
    """The parts that an engine computes with more noise than `limit`, at most `MOST_WRONG_PARTS`, found by bisection.

    Each takes two searches: for the earliest end at which results are wrong, then for the latest start. One wrong part
    among n nodes takes about 2 log2(n) builds, and the exact values around each.
    """
    start, stop = 0, len(cut.model.nodes)
    wrong: list[WrongPart] = []
    while start < stop and len(wrong) < MOST_WRONG_PARTS and cut.noise(start, stop) > limit:
        start, end = _narrowed(cut, start, stop, limit)
        loud = cut.noise(start, end)
        names = tuple(node.name for node in cut.model.nodes[start:end])
        wrong.append(WrongPart(names, loud, cut.reason if loud == UNKNOWN_NOISE else ""))
        start = end
    return tuple(wrong)


def _narrowed(cut: CutOff, start: int, stop: int, limit: float) -> tuple[int, int]:
    """The smallest wrong part with the earliest end within nodes [start, stop), which are wrong."""
    end = _first(start + 1, stop, lambda e: cut.noise(start, e) > limit)
    return end - _first(1, end - start, lambda size: cut.noise(end - size, end) > limit), end


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The number from `low` on at which `holds` begins to be true, by bisection; it is true for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _is_usable(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
