"""What ranges and biases do to the outputs of one placement: the model is built once for all that are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np

from qdqtune.calibration.observe import MOST_OPTIMIZED
from qdqtune.calibration.scales import Ranges
from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Handle, Runner
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile, constants_to_share
from qdqtune.numerics.adjustable import CHANNELS, MOVES, Adjustable, Mode, feeds
from qdqtune.numerics.criterion import judged
from qdqtune.placement.bias_correction import by_layer, layers, shrunk_mean
from qdqtune.placement.insertion import Inserter
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Array, Edge, Failure, Listener, NumericFormat, Placement, Sample


@dataclass(frozen=True, eq=False)
class Outcome:
    """Signal and noise power, [samples, judged values]; noise is infinite where values are not finite. The values of
    each output stand together: `parts` of them."""

    signal: Array
    noise: Array
    parts: tuple[int, ...]

    def db(self, samples: slice = slice(None)) -> float:
        """SQNR of the worst output over some of the samples, the mean of its values' ones; infinite where nothing is
        lost."""
        signal, noise = (a[samples].sum(axis=0) for a in (self.signal, self.noise))
        with np.errstate(divide="ignore", invalid="ignore"):
            single = 10 * np.log10(np.maximum(signal, np.finfo(np.float64).tiny) / noise)
        return min(float(np.mean(part)) for part in np.split(single, np.cumsum(self.parts)[:-1]))


@dataclass
class Steps:
    """Tells how many inferences were made, of so many at most."""

    listener: Listener
    most: int
    done: int = 0

    def took(self, count: int) -> None:
        """So many more."""
        self.done = min(self.done + count, self.most)
        self.listener.progress(self.done, self.most)


class CannotJudgeError(Exception):
    """ONNX Runtime does not run the model with pairs."""


class Judge:
    """See `judging`. Numbers are those of `ranges`; `moves` are what each sample asks of the biases, by channel of all
    `layers` that can have one."""

    def __init__(
        self, runner: Runner, constants: ConstantFile, model: Model, placement: Placement, numbers: NumericFormat,
        ranges: Ranges, samples: Sequence[Sample], ran: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.layers = layers(model, placement)
        self._runner, self._file, self._ran = runner, constants, ran
        self._model, self._placement, self._samples = model, placement, samples
        groups = judged(model)
        self._shown, self._parts = list(chain.from_iterable(groups)), tuple(map(len, groups))
        self._inserter = Inserter(model, ranges, numbers)
        self._activations, self._constants = self._inserter.scales(placement)
        self._built: dict[Mode, Handle] = {}
        self._exact = self._run("means", [{}] * len(samples))
        self._means = [outputs.pop(MOVES) for outputs in self._exact] if self.layers else []
        runner.unload(self._built.pop("means"))

    @property
    def can_tell(self) -> bool:
        """Whether there is anything to judge by."""
        return bool(self._shown)

    def outcome(self, ranges: Ranges, moves: Array | None = None, at_most: int | None = None) -> Outcome:
        """What `ranges` do, to `at_most` so many samples. With `moves`, biases are corrected for each sample by those
        of all others."""
        step = 1 if at_most is None else -(-len(self._samples) // at_most)
        given = self._scales(ranges)
        added = [given | {CHANNELS: shift} for shift in self._shifts(moves)]
        found = self._run("shifted", added[::step], step)
        rows = []
        for exact, actual in zip(self._exact[::step], found, strict=True):
            pairs = [(exact[n].astype(np.float64), actual[n].astype(np.float64)) for n in exact]
            with np.errstate(all="ignore"):
                rows.append([(np.square(e).sum(), np.square(e - a).sum()) for e, a in pairs])
        signal, noise = np.moveaxis(np.array(rows), 2, 0)
        return Outcome(signal, np.where(np.isfinite(noise), noise, np.inf), self._parts)

    def moves(self, ranges: Ranges) -> Array:
        """What the biases miss with `ranges`, [samples, channels]."""
        if not self.layers:
            return np.zeros((len(self._samples), 0), np.float32)
        given = self._scales(ranges)
        return np.stack([o[MOVES] for o in self._run("centred", [given | {CHANNELS: m} for m in self._means])])

    def shifts(self, moves: Array) -> dict[str, tuple[float, ...]]:
        """What `moves` of all samples say, as `Ranges` hold it."""
        found = shrunk_mean(moves.astype(np.float64)).astype(np.float32)
        parts = by_layer(self.layers, found)
        return {layer.node: tuple(part.tolist()) for layer, part in parts if np.isfinite(part).all()}

    def _shifts(self, moves: Array | None) -> list[Array]:
        count = len(self._samples)
        if moves is None:
            return [np.zeros(sum(layer.channels for layer in self.layers), np.float32)] * count
        exact = moves.astype(np.float64)
        others = [np.delete(exact, i, axis=0) if count > 1 else exact for i in range(count)]
        return [np.nan_to_num(shrunk_mean(o)).astype(np.float32) for o in others]

    def _scales(self, ranges: Ranges) -> dict[str, Array]:
        activations, _ = self._inserter.with_ranges(ranges).scales(self._placement)
        return feeds({tensor: activations[tensor] for tensor in self._activations})

    def _run(self, mode: Mode, added: Sequence[dict[str, Array]], step: int = 1) -> list[dict[str, Array]]:
        if mode not in self._built:
            self._built[mode] = self._build(mode)
        given = [sample | more for sample, more in zip(self._samples[::step], added, strict=True)]
        found = self._runner.outputs(self._built[mode], given)
        if isinstance(found, Failure):
            raise CannotJudgeError(found.reason)
        self._ran(len(given))
        return found

    def _build(self, mode: Mode) -> Handle:
        is_float = mode == "means"
        paired = frozenset[Edge]() if is_float else self._placement.edges
        activations = {} if is_float else self._activations
        shown = () if mode == "centred" else self._shown
        written = Adjustable(self._model, activations, self._constants, paired, self.layers, mode)
        handle = self._runner.load(self._file.write(written.written(shown), mode))
        if isinstance(handle, Failure):
            raise CannotJudgeError(handle.reason)
        return handle


@contextmanager
def judging(
    model: Model,
    placement: Placement,
    numbers: NumericFormat,
    ranges: Ranges,
    samples: Sequence[Sample],
    ran: Callable[[int], None] = lambda _: None,
) -> Iterator[Judge]:
    """A judge of `placement` on some samples; `ranges` decide nothing but how constants are rounded. `ran` hears how
    many inferences it has taken, whenever it has."""
    written = len(model.nodes) + 2 * len(placement)
    spec = EngineSpec("onnxruntime", {"threads": cores(), "fuse": written <= MOST_OPTIMIZED, "fuse_pairs": False})
    memory = MemoryBudget.for_model(sum(constant.nbytes for constant in model.large.values()))
    with (
        temporary_folder() as folder,
        constants_to_share() as constants,
        Runner(spec, log_dir=folder, memory=memory) as runner,
    ):
        yield Judge(runner, constants, model, placement, numbers, ranges, samples, ran)
