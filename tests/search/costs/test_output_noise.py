"""Noise that is estimated from values, and corrected by builds."""

from dataclasses import replace

import numpy as np
import pytest

from models import build, normal
from qdqtune.graph.model import Model
from qdqtune.search.costs.output_noise import QUIETER_FACTOR, Noise
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial, WeightFormat


def chain() -> Model:
    text = """net (float[4,6] x) => (float[2,12] y) {
        a = Relu(x)
        b = Transpose <perm=[1,0]> (a)
        c = Reshape(b, shape)
        y = MatMul(c, w)
    }"""
    return build(text, {"shape": np.int64([2, 12]), "w": normal(12, 12)})


def on(*tensors: str) -> Placement:
    return Placement.of(Edge(t, "node", i) for i, t in enumerate(tensors))


def trial(placement: Placement, db: float | None = None, metric: float | None = None, holds: bool = True) -> Trial:
    result = Measurement((1.0,), (0.5,))
    return Trial(1, Proposal("", placement), Placement(), result, accuracy=Accuracy(db), metric=metric, holds=holds)


class TestEstimatedNoise:
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
        seed = trial(on("b"), db=6)
        assert noise.allowed([seed, near]) == noise.allowed([near])
        proposal = replace(seed.proposal, predicted=0.8)  # was to hold the limit
        assert noise.allowed([replace(seed, proposal=proposal), near]) == pytest.approx(0.1 * 0.25 / 10**-0.6)
        broken = replace(seed, proposal=proposal, accuracy=Accuracy(-30.0))
        assert noise.allowed([broken, near]) == pytest.approx(0.1 * 0.25)

    def test_pairs_and_stored_weights_are_corrected_apart(self) -> None:
        weight, weight_format = Edge("w", "node", 1), WeightFormat(4, 32)
        paired, stored = on("a"), Placement.of((), [(weight, weight_format)])
        both = Placement(paired.edges, stored.weight_only)
        noise = Noise(
            chain(), {"a": 0.03}, 0.1, simulate=lambda _: 0.04, weight_noise={("w", weight_format.name): 0.01}
        )
        told = noise.corrected([trial(paired, db=4.0), trial(stored, db=14.0)])
        assert told.expected(stored) == pytest.approx(0.04)
        assert told.expected(paired) == pytest.approx(10**-0.4)
        assert told.expected(both) == pytest.approx(0.04 * (0.03 * 10**-0.4 / 0.04 + 0.01) / 0.04)
        assert noise.fits(stored, [trial(paired, db=4.0)])
        assert not noise.fits(paired, [trial(paired, db=4.0)])

    def test_noise_is_bracketed_by_trials_with_a_metric(self) -> None:
        noise = Noise(chain(), {"a": 0.25, "b": 9.0, "w": 0.5, "x": 0.01})
        assert noise.allowed([trial(on("a"), db=10)]) == np.inf
        assert noise.levels([trial(on("a"), db=10)]) == (np.inf,) * 3
        bad, good = trial(on("a", "w"), metric=0.1, holds=False), trial(on("x"), metric=0.9)
        assert noise.levels([bad]) == pytest.approx(
            [0.75 / QUIETER_FACTOR, 0.75 / QUIETER_FACTOR**0.5, 0.75 / QUIETER_FACTOR**0.25]
        )
        assert noise.levels([bad, good])[0] == pytest.approx(np.sqrt(0.75 * 0.01))
        assert max(noise.levels([bad, good])) < noise.allowed([bad, good]) < 0.75

    def test_a_trial_that_misses_another_limit_than_that_of_all_samples_lowers_what_is_allowed(self) -> None:
        noise = Noise(chain(), {"a": 0.02, "w": 0.05, "x": 0.001}, limit=0.1)
        missed, held = trial(on("a", "w"), db=12.0, holds=False), trial(on("x"), db=30.0)
        assert noise.allowed([held]) > 0.07 > noise.allowed([missed, held])
        assert 0.001 < noise.levels([missed, held])[0] < 0.07
        too_noisy = trial(on("a", "w"), db=3.0, holds=False)  # that limit says so by itself
        assert noise.allowed([too_noisy]) == pytest.approx(0.1 * 0.07 / 10**-0.3)
