"""Which nodes an engine computes wrongly: parts of the model on the engine, fed with what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import helper

from qdqtune.calibration.observe import with_outputs
from qdqtune.commands.probes import NOT_FINITE, Outputs, noise
from qdqtune.engines.runner import Runner, insist
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.tuning.subgraphs.extraction import Resolved, borders, extract
from qdqtune.types import Failure, Sample

MOST = 8
"""Wrong parts that are looked for in one model."""


@dataclass(frozen=True)
class WrongPart:
    """Neighbouring nodes, none of which can be spared, that the engine computes wrongly together.

    `noise` is that of what they give, when they get what they should. `reason` is what the engine says if it refuses.
    """

    nodes: tuple[str, ...]
    noise: float
    reason: str = ""


@dataclass
class CutOff:
    """Parts of a model, nodes [start, stop) in graph order, on an engine under test."""

    model: Model
    samples: Sequence[Sample]
    engine: Runner
    exact: Runner
    folder: Path
    runs: int = 0
    reason: str = ""
    """What the engine said of the last part that it refused."""

    def noise(self, start: int, stop: int) -> float:
        """Noise of what a part gives the rest of the model, the part being fed with exact values."""
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
            return NOT_FINITE
        return noise([{t: s[t] for t in judged} for s in expected], [{t: s[t] for t in judged} for s in computed])

    def _exact_values(self, tensors: Sequence[str] | dict[str, None]) -> Outputs:
        """Values of some tensors, sample by sample, on ONNX Runtime without optimization."""
        self.runs += 1
        names = {tensor: f"__value_{i}" for i, tensor in enumerate(tensors)}
        nodes = [helper.make_node("Identity", [tensor], [name], name) for tensor, name in names.items()]
        shown = with_outputs(self.model, nodes)  # graph inputs cannot be outputs as they are
        path = self.folder / "shown.onnx"
        with ConstantFile(self.folder / "shown.bin") as constants:
            constants.save(shown, path)
        values = insist(self.exact.outputs_of(path, self.samples), "ONNX Runtime cannot run the float model")
        return [{tensor: sample[name] for tensor, name in names.items()} for sample in values]


def wrong_parts(cut: CutOff, limit: float) -> tuple[WrongPart, ...]:
    """The parts that an engine computes with more noise than `limit`, at most `MOST`, by halving.

    Two searches each: the earliest end at which the outputs are wrong, then the latest start. One wrong part among n
    nodes takes about 2 log2(n) parts on the engine, and the exact values around each.
    """
    start, stop = 0, len(cut.model.nodes)
    wrong: list[WrongPart] = []
    while start < stop and len(wrong) < MOST and cut.noise(start, stop) > limit:
        start, end = _narrowed(cut, start, stop, limit)
        loud = cut.noise(start, end)
        names = tuple(node.name for node in cut.model.nodes[start:end])
        wrong.append(WrongPart(names, loud, cut.reason if loud == NOT_FINITE else ""))
        start = end
    return tuple(wrong)


def _narrowed(cut: CutOff, start: int, stop: int, limit: float) -> tuple[int, int]:
    """The wrong part that ends first in a wrong one."""
    end = _first(start + 1, stop, lambda e: cut.noise(start, e) > limit)
    return end - _first(1, end - start, lambda size: cut.noise(end - size, end) > limit), end


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """A number for which `holds`, and not for the one before it, or `low`; it is known to hold for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _is_usable(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
