"""What `debug` asks: the outputs that some pairs leave, by the arithmetic of ONNX and on the engine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.runner import Handle, Runner, insist
from qdqtune.errors import EngineFailure
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.numerics.bisection import Parts
from qdqtune.placement.grafting import SWITCH, StandingPair, graft
from qdqtune.types import Array, Failure, Sample

NOT_FINITE = 1e3
"""The noise of outputs that are NaN or infinite, of other shapes, or that an engine does not give at all."""

LOUDEST = 999.0
"""The most that finite outputs count for."""

SWITCHLESS = "ONNX Runtime cannot run the model with a switch at every pair"

Outputs = list[dict[str, Array]]


def reference_spec() -> EngineSpec:
    """ONNX Runtime without optimization: every operator as ONNX defines it."""
    return EngineSpec("onnxruntime", {"threads": cores(), "fuse": False})


def noise(reference: Outputs, found: Outputs | Failure) -> float:
    """Power of the error relative to the signal, for the worst output.

    Outputs that are no floats, such as class numbers, count by the share of them that differ.
    """
    if isinstance(found, Failure) or not is_finite(found):
        return NOT_FINITE
    shapes = ((r[name].shape, f[name].shape) for r, f in zip(reference, found, strict=True) for name in r)
    if any(a != b for a, b in shapes):
        return NOT_FINITE
    judged = accuracy(reference, found)
    wrong = min(judged.noise, LOUDEST)
    return wrong if judged.agreement is None else max(wrong, 1 - judged.agreement)


@dataclass
class Probe:
    """The float model and the pairs of a file, two engines, and how many times samples went through a model.

    `engine` is the one under test, `exact` runs as `reference_spec`. Models are written to `folder`.
    """

    float_model: Model
    quantized: Model
    pairs: Sequence[StandingPair]
    samples: Sequence[Sample]
    engine: Runner
    exact: Runner
    folder: Path
    runs: int = 0
    failures: list[Failure] = field(default_factory=list)
    """What the engine under test refused, in order."""
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
            self._reference = self._exactly(())
            if not is_finite(self._reference):
                raise EngineFailure(
                    "outputs of the float model are NaN or infinite on ONNX Runtime without "
                    "optimization: nothing can be compared with them"
                )
        return self._reference

    def by_numbers(self, on: Parts) -> float:
        """Noise of some pairs as ONNX defines them."""
        return 0.0 if not on else noise(self.reference(), self._exactly(on))

    def on_engine(self, on: Parts) -> float:
        """Noise of a build of the float model with some pairs on the engine under test."""
        if on in self._built:
            return self._built[on]
        path = self.folder / f"part_{self.runs}.onnx"
        self._save(graft(self.float_model, [self.pairs[i] for i in on], self.quantized), path)
        self._built[on] = self.of_file(path)
        path.unlink()
        return self._built[on]

    def of_file(self, path: Path) -> float:
        """Noise of a model file on the engine under test."""
        self.runs += 1
        outputs = self.engine.outputs_of(path, self.samples)
        if isinstance(outputs, Failure):
            self.failures.append(outputs)
        elif missing := self.reference()[0].keys() - outputs[0].keys():
            raise EngineFailure(f"{path.name} has no output {sorted(missing)[0]!r} as the float model has")
        self._last = outputs
        return noise(self.reference(), outputs)

    def narrow(self, most: int, limit: float) -> float:
        """Go on with those samples alone on which the last file loses most, if it loses more than `limit` on them: its
        noise on what remains."""
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

    def _exactly(self, on: Parts) -> Outputs:
        self.runs += 1
        if self._switched is None:
            path = self.folder / "switched.onnx"
            self._save(graft(self.float_model, self.pairs, self.quantized, switched=True), path)
            self._switched = insist(self.exact.load(path), SWITCHLESS)
        chosen = set(on)
        switches = {f"{SWITCH}{i}": np.asarray(i in chosen) for i in range(len(self.pairs))}
        return insist(self.exact.outputs(self._switched, [sample | switches for sample in self.samples]), SWITCHLESS)

    def _save(self, model: Model, path: Path) -> None:
        if self._constants is None:
            self._constants = ConstantFile(self.folder / "constants.bin")
        self._constants.save(model, path)
