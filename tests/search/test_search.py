"""What strategies have in common: two in a row, and what one will propose next."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from models import build, normal
from qdqtune.engines.fake import CostModel
from qdqtune.graph.model import Model
from qdqtune.search import TwoStage, products_left_in_float
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.types import Edge, Layer, Measurement, Placement, Proposal, Trial
from runs import settings, write

pytestmark = pytest.mark.usefixtures("workers")

TWO = """net (float[8,64] x) => (float[8,128] y) {
    [first] a = MatMul(x, w0)
    [relu] b = Relu(a)
    [second] c = MatMul(b, w1)
    [skip] y = Add(c, b)
}"""

SAME = Measurement((1.0,) * 12, (1.0,) * 12)


@dataclass(frozen=True)
class Numbered:
    """Proposes placements with numbers of its own, one at a time, until there were so many in all."""

    first: int
    count: int
    wants_layers: bool

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        own = [t for t in history if t.proposal.wants_layers == self.wants_layers]
        name = str(self.first + len(own))
        proposal = Proposal(name, Placement.of([Edge(name)]), wants_layers=self.wants_layers)
        return (proposal,) if len(own) < self.count else ()


@pytest.fixture
def two() -> Model:
    return build(TWO, {"w0": normal(64, 128), "w1": normal(128, 128)})


IN_FRONT = Placement.of([Edge("x", "first"), Edge("b", "second")])
AROUND = IN_FRONT | Placement.of([Edge("c", "skip")])


@pytest.mark.parametrize(
    ("placement", "ratio", "precision", "left"),
    [
        (AROUND, 1.3, "FP32", 2),
        (AROUND, 1.3, "INT8", 0),  # one kernel is enough for pairs to go on
        (AROUND, 1.0, "FP32", 0),  # a candidate that is not slower shows nothing
        (IN_FRONT, 1.3, "FP32", 0),  # nor do products without a pair behind
    ],
)
def test_products_that_are_all_left_in_float_show_that_there_are_no_kernels(
    two: Model, placement: Placement, ratio: float, precision: str, left: int
) -> None:
    layers = tuple(Layer(n.name, (n.name,), precision, 1.0, "compute") for n in two.nodes)
    measured = Measurement((1.0,) * 12, (ratio,) * 12)
    trial = Trial(1, Proposal("static", placement), Placement(), measured, layers=layers)
    assert products_left_in_float(trial, two, Plan()) == left


@pytest.mark.parametrize("mode", ["cut", "region"])
def test_a_run_ends_after_the_batch_that_shows_it(
    two: Model, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "_runs_in_integers", lambda *_: False)
    result = tune(settings(write(two, tmp_path), mode=mode, cut_seed=True))
    assert [(t.placement.edges != frozenset()) for t in result.history].count(True) == 3
    assert any("no 8-bit kernels" in note for note in result.notes)


@pytest.mark.parametrize(
    ("ideas", "builds", "expected"),
    [
        (2, 9, ["0", "1", "10", "11", "12"]),  # no more ideas
        (9, 3, ["0", "1", "2", "10", "11", "12"]),  # its builds are spent
        (0, 9, ["10", "11", "12"]),
        (9, 0, ["10", "11", "12"]),
    ],
)
def test_the_second_search_begins_where_the_first_one_ends(ideas: int, builds: int, expected: list[str]) -> None:
    search = TwoStage(Numbered(0, ideas, wants_layers=True), Numbered(10, 3, wants_layers=False), builds)
    history: list[Trial] = []
    while batch := search.propose(history):
        assert search.propose(tuple(history)) == batch  # nothing but the history counts
        history += [Trial(len(history) + 1, p, Placement(), SAME) for p in batch]
    assert [t.proposal.origin for t in history] == expected
    assert [p.origin for p in search.propose(history[-1:])] == ["11"]  # never back to the first one
