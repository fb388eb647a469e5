"""Noise that is foretold, and the cut that keeps within it, against all placements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from models import attention, build, normal
from qdqtune.graph.model import Model
from qdqtune.search.costs.noise import DOUBT, QUIETER_FACTOR, Noise
from qdqtune.search.costs.optimum import cut, cut_holding, cut_within
from qdqtune.search.costs.prices import Costs, Price
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial, WeightFormat
from runs import mixed

CHAIN = """net (float[4,6] x) => (float[2,12] y) {
    a = Relu(x)
    b = Transpose <perm=[1,0]> (a)
    c = Reshape(b, shape)
    y = MatMul(c, w)
}"""


def chain() -> Model:
    return build(CHAIN, {"shape": np.int64([2, 12]), "w": normal(12, 12)})


def on(*tensors: str) -> Placement:
    return Placement.of(Edge(t, "node", i) for i, t in enumerate(tensors))


def trial(placement: Placement, db: float | None = None, metric: float | None = None, holds: bool = True) -> Trial:
    result = Measurement((1.0,), (0.5,))
    return Trial(1, Proposal("", placement), Placement(), result, accuracy=Accuracy(db), metric=metric, holds=holds)


class TestWhatIsForetold:
    def test_values_that_are_only_moved_count_once(self) -> None:
        noise = Noise(chain(), {"a": 0.25, "w": 0.5})
        assert noise.value("c") == noise.value("b") == noise.value("a") == "a"
        assert noise.summed(on("b", "c", "w")) == 0.75
        assert noise.summed(on("x")) == 0

    def test_the_build_nearest_to_the_limit_corrects_the_sum(self) -> None:
        noise = Noise(chain(), {"a": 0.25, "w": 0.5}, limit=0.1)
        assert noise.allowed([]) == pytest.approx(0.1)
        far, near = trial(on("a", "w"), db=0.0), trial(on("a"), db=10 * np.log10(1 / 0.05))
        assert noise.allowed([far]) == pytest.approx(0.1 * 0.75)
        assert noise.allowed([far, near]) == noise.allowed([near, far]) == pytest.approx(0.1 * 0.25 / 0.05)

    def test_what_pairs_bring_beyond_what_is_foretold_is_not_held_against_stored_weights(self) -> None:
        weight, weight_format = Edge("w", "node", 1), WeightFormat(4, 32)
        paired, stored = on("a"), Placement.of((), [(weight, weight_format)])
        both = Placement(paired.edges, stored.compressed)
        noise = Noise(chain(), {"a": 0.03}, 0.1, lambda _: 0.04, {("w", weight_format.name): 0.01})
        told = noise.corrected([trial(paired, db=4.0), trial(stored, db=14.0)])
        assert told.expected(stored) == pytest.approx(0.04)
        assert told.expected(paired) == pytest.approx(10**-0.4)
        assert told.expected(both) == pytest.approx(0.04 * (0.03 * 10**-0.4 / 0.04 + 0.01) / 0.04)
        assert noise.fits(stored, [trial(paired, db=4.0)])
        assert not noise.fits(paired, [trial(paired, db=4.0)])

    def test_the_metric_is_bracketed(self) -> None:
        noise = Noise(chain(), {"a": 0.25, "b": 9.0, "w": 0.5, "x": 0.01})
        assert noise.allowed([trial(on("a"), db=10)]) == np.inf
        assert noise.levels([trial(on("a"), db=10)]) == (np.inf,) * 3
        bad, good = trial(on("a", "w"), metric=0.1, holds=False), trial(on("x"), metric=0.9)
        assert noise.levels([bad]) == pytest.approx(
            [0.75 / QUIETER_FACTOR, 0.75 / QUIETER_FACTOR**0.5, 0.75 / QUIETER_FACTOR**0.25]
        )
        assert noise.levels([bad, good])[0] == pytest.approx(np.sqrt(0.75 * 0.01))
        assert max(noise.levels([bad, good])) < noise.allowed([bad, good]) < 0.75

    def test_the_tighter_of_both_limits_counts(self) -> None:
        noise = Noise(chain(), {"a": 0.25, "w": 0.5}, limit=0.1)
        history = [trial(on("w"), db=3.0, metric=0.1, holds=False)]
        bound = 0.1 * 0.5 / 10**-0.3
        assert noise.allowed(history) == pytest.approx(bound)
        assert max(noise.levels(history)) <= bound * (1 + 1e-9)
        assert max(noise.levels(history[:0])) == pytest.approx(0.1 * DOUBT)


def made_up(model: Model) -> tuple[Costs, Noise]:
    """Arbitrary prices and noise."""
    possible = frozenset(Edge(t, n.name, i) for n in model.nodes for i, t in enumerate(n.inputs)
                         if t in model.tensors and model.tensors[t].is_float)  # fmt: skip
    parts = partition(model, possible, [])
    random = np.random.default_rng(3)
    prices = tuple(Price(*((1, 0, 0, 0, 0) + random.random(5) / 4).tolist()) for _ in parts.units)
    q, d = ({t: float(random.random()) / 4 for t in parts.edges} for _ in range(2))
    alone = {t: float(random.lognormal(sigma=2)) for t in sorted({e.tensor for e in possible})}
    return Costs(parts, prices, q, d), Noise(model, alone)


@pytest.mark.parametrize("make", [mixed, attention])
class TestACutWithinLimits:
    def test_no_price_on_noise_gives_the_cut_and_no_room_gives_the_float_model(self, make) -> None:
        costs, noise = made_up(make())
        assert cut_within(costs, noise, np.inf) == cut(costs)
        silent = costs.partition.placement(cut_within(costs, noise, 1e-12))
        assert noise.summed(silent) == 0

    def test_less_room_takes_longer_and_is_kept_to(self, make) -> None:
        costs, noise = made_up(make())
        whole = noise.summed(costs.partition.placement(cut(costs)))
        times: list[float] = []
        for share in (1.0, 0.8, 0.5, 0.3, 0.1, 0.03):
            decision = cut_within(costs, noise, share * whole)
            assert noise.summed(costs.partition.placement(decision)) <= share * whole
            times.append(costs.total(decision))
        assert times == sorted(times)
        assert times[0] < times[-1]

    def test_no_placement_with_as_little_noise_is_faster(self, make) -> None:
        """The cut lies on the convex front: whatever beats it in time makes more noise."""
        costs, noise = made_up(make())
        parts = costs.partition
        whole = noise.summed(parts.placement(cut(costs)))
        found = [cut_within(costs, noise, share * whole) for share in (0.7, 0.4, 0.2)]
        for other in _random_decisions(parts, 2000):
            for decision in found:
                if noise.summed(parts.placement(other)) <= noise.summed(parts.placement(decision)):
                    assert costs.total(other) >= costs.total(decision) - 1e-6


def test_of_what_takes_about_as_long_the_cut_takes_what_brings_less_noise() -> None:
    """A limit that the fastest holds as well is no reason to use it up."""
    model = build("net (float[4,6] x) => (float[4,6] y) { [a] b = MatMul(x, v) [c] y = MatMul(b, w) }",
                  {"v": normal(6, 6), "w": normal(6, 6, seed=1)})  # fmt: skip
    loud, quiet = WeightFormat(4, 32), WeightFormat(8)
    ways = {Edge("v", "a", 1): {loud: 0.5, quiet: 0.5}, Edge("w", "c", 1): {loud: 0.5, quiet: 0.5}}
    parts = partition(model, frozenset(), [], ways)
    prices = tuple(Price(1.0, 1.0, stored={loud: 0.5, quiet: ms}) for ms in (0.505, 0.7))
    noise = Noise(
        model, {}, 0.1, weight_noise={(t, s.name): n for t in "vw" for s, n in ((loud, 0.03), (quiet, 0.001))}
    )
    found = cut_holding(Costs(parts, prices, {}, {}), noise, 0.1)
    assert dict(found.weight_formats) == {0: quiet, 1: loud}


def test_nothing_is_quantized_where_noise_comes_from_no_value_that_is_known() -> None:
    costs, noise = made_up(mixed())
    unknown = Noise(noise.model, {}, limit=0.1, simulate=lambda placement: 0.5 if placement else 0.0)
    assert cut_holding(costs, unknown, 0.1) == Decision()


def _random_decisions(parts: Partition, count: int) -> Sequence[Decision]:
    random = np.random.default_rng(4)
    found = []
    for _ in range(count):
        quantized = frozenset(u.number for u in parts.units if u.inputs and random.random() < 0.5)
        mine = [t for t in parts.edges if parts.producer.get(t) in quantized]
        found.append(Decision(quantized, frozenset(t for t in mine if random.random() < 0.8)))
    return found
