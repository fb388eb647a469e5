"""What proposing several candidates at a time does to the cut: the finals after so many builds, and how many batches
they take, by the number of workers. Nothing is built: times are those of the fake engine's cost model, with a hidden
factor for each kind of layer in float and in 8 bits (--apart: for each layer); builds differ a bit.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zoo

from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.inputs import input_specs, random_samples
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.fake import Fake, FakeOptions
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search.cut import CutSearch
from qdqtune.timing.ratios import Plan
from qdqtune.types import Layer, Measurement, Placement, Trial

JITTER = 0.03
"""By how much a layer differs from build to build."""


class World:
    """One network on an engine whose times nobody knows."""

    def __init__(self, entry: zoo.Entry, seed: int, folder: Path, spread: float, *, apart: bool = False) -> None:
        model = load(entry.path)
        sizes = {s.name: tuple(size or 1 for size in s.shape) for s in input_specs(model)}
        model = with_input_shapes(model, sizes)
        self.model, self._seed, self._folder, self._spread, self._apart = model, seed, folder, spread, apart
        ranges = Ranges(dict.fromkeys(candidate_tensors(model), Range(-1.0, 1.0)))
        self.possible = possible_edges(model, ranges)
        self._inserter = Inserter(model, ranges, numeric_format("fake", "int8"))
        self._sample = next(iter(random_samples(model, input_specs(model), 0, 1)()))
        self._known: dict[Placement, tuple[Layer, ...]] = {}

    def true_layers(self, placement: Placement) -> tuple[Layer, ...]:
        """The layers of a placement with their true times."""
        if placement not in self._known:
            path = self._folder / "m.onnx"
            save(self._inserter.insert(placement), path)
            layers = Fake(FakeOptions()).build(path, self._folder / "log").layers(self._sample, 1)
            self._known[placement] = tuple(replace(a, time_ms=(a.time_ms or 0.0) * self._factor(a)) for a in layers)
        return self._known[placement]

    def _factor(self, layer: Layer) -> float:
        nodes = [self.model.nodes[self.model.index_of[n]] for n in layer.nodes if n in self.model.index_of]
        kind = ",".join(sorted({node.name if self._apart else node.op for node in nodes}))
        text = f"{self._seed}:{kind}:{layer.precision}".encode()
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))
        return float(np.exp(self._spread * rng.standard_normal()))

    def ms(self, placement: Placement) -> float:
        """The true time of a placement."""
        return sum(layer.time_ms or 0.0 for layer in self.true_layers(placement))

    def built(self, placement: Placement, rng: np.random.Generator) -> tuple[Layer, ...]:
        """The layers as one build shows them."""
        return tuple(
            replace(a, time_ms=(a.time_ms or 0.0) * float(np.exp(JITTER * rng.standard_normal())))
            for a in self.true_layers(placement)
        )


@dataclass(frozen=True)
class Found:
    """The true time of the best candidate to that of the float model, and the number of batches."""

    best: float
    batches: int


def run(world: World, width: int, builds: int, seed: int) -> Found:
    """One search."""
    rng = np.random.default_rng((seed, width))
    seeds = {"static": start_placements.static(world.model, world.possible)}
    seeds["compute"] = start_placements.compute_inputs(world.model, world.possible)
    plan = Plan()
    layers = world.built(Placement(), rng)
    search = CutSearch(world.model, world.possible, layers, seeds=seeds, plan=plan, width=width)
    history: list[Trial] = []
    batches = 0
    best, base = Placement(), world.ms(Placement())
    while len(history) < builds and (batch := search.propose(history)[: min(width, builds - len(history))]):
        batches += 1
        for proposal in batch:
            ratio = world.ms(proposal.placement) / world.ms(best)
            rounds = Measurement((1.0,) * 48, tuple(ratio * np.exp(0.005 * rng.standard_normal(48))))
            layers = world.built(proposal.placement, rng)
            history.append(Trial(len(history) + 1, proposal, best, rounds, layers=layers))
        fresh = history[-len(batch) :]
        fastest = min(fresh, key=lambda trial: world.ms(trial.placement))
        if world.ms(fastest.placement) < 0.995 * world.ms(best):
            best = fastest.placement
            history[history.index(fastest)] = replace(fastest, accepted=True)
    return Found(world.ms(best) / base, batches)


def rows(entries: Sequence[zoo.Entry], given: argparse.Namespace) -> Iterator[list[str]]:
    """A line for each model and number of workers."""
    for entry in entries:
        with tempfile.TemporaryDirectory() as folder:
            finals: dict[int, list[float]] = {width: [] for width in given.widths}
            batches: dict[int, list[int]] = {width: [] for width in given.widths}
            for seed in range(given.worlds):
                world = World(entry, seed, Path(folder), given.spread, apart=given.apart)
                for width in given.widths:
                    found = run(world, width, given.builds, seed)
                    finals[width].append(found.best)
                    batches[width].append(found.batches)
            for width in given.widths:
                to_one = [a / b for a, b in zip(finals[width], finals[given.widths[0]], strict=True)]
                yield [
                    entry.name,
                    str(width),
                    f"{statistics.mean(batches[width]):.1f}",
                    f"{statistics.geometric_mean(finals[width]):.4f}",
                    f"{statistics.geometric_mean(to_one):.4f}",
                    f"{max(to_one):.4f}",
                ]


def main() -> None:
    parser: argparse.ArgumentParser = zoo.parser(__doc__, ())
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--builds", type=int, default=25)
    parser.add_argument("--worlds", type=int, default=10, help="how many hidden times are drawn for each model")
    parser.add_argument("--spread", type=float, default=0.35, help="of the hidden factors, as a logarithm")
    parser.add_argument("--apart", action="store_true", help="a factor of its own for each layer")
    given = parser.parse_args()
    entries = zoo.find(given.models, given.names)
    print(f"\n{given.builds} builds, {given.worlds} worlds a model\n")
    header = ["model", "workers", "batches", "final to float", "to that of one worker", "the worst"]
    zoo.print_table(header, list(rows(entries, given)))


if __name__ == "__main__":
    main()
