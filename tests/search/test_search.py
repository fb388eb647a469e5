"""What strategies have in common: two in a row, what one will propose next; grouped search without layer times."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import pytest

from models import INT8, build, normal, ranges
from observers import Log
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import CostModel, latency
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search import TwoStage, best_of, products_left_in_float
from qdqtune.search.by_latency import LatencySearch
from qdqtune.search.costs.units import Decision
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.types import Edge, Layer, Measurement, Placement, Proposal, Trial
from runs import mixed, settings, write
from search_loop import exact, trials_of

pytestmark = pytest.mark.usefixtures("workers")


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
    text = """net (float[8,64] x) => (float[8,128] y) {
        [first] a = MatMul(x, w0)
        [relu] b = Relu(a)
        [second] c = MatMul(b, w1)
        [skip] y = Add(c, b)
    }"""
    return build(text, {"w0": normal(64, 128), "w1": normal(128, 128)})


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
def test_products_that_are_all_left_in_float_show_that_there_are_no_kernels(two, placement, ratio, precision, left):
    layers = tuple(Layer(n.name, (n.name,), precision, 1.0, "compute") for n in two.nodes)
    measured = Measurement((1.0,) * 12, (ratio,) * 12)
    trial = Trial(1, Proposal("static", placement), Placement(), measured, layers=layers)
    assert products_left_in_float(trial, two, Plan()) == left


@pytest.mark.parametrize("mode", ["cut", "region"])
def test_a_run_ends_after_the_batch_that_shows_it(two, tmp_path, mode, monkeypatch):
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


SIXTEEN_BITS = EngineSpec("fake", {"hide_times": True, "asymmetric": True, "wide": True})


def test_an_engine_with_16_bits_gets_them_where_8_miss_the_limit(tmp_path: Path) -> None:
    sizes = ((64, 256, 0.1), (256, 256, 0.1), (256, 128, 0.1), (128, 32, 1.0))
    weights = {f"w{n}": normal(*size, seed=n, scale=scale) for n, (*size, scale) in enumerate(sizes)}
    text = """net (float[8,64] x) => (float[8,32] y) {
        [first] a = MatMul(x, w0)
        [relu] b = Relu(a)
        [second] c = MatMul(b, w1)
        [skip] d = Add(c, b)
        [third] e = MatMul(d, w2)
        [tanh] f = Tanh(e)
        [last] y = MatMul(f, w3)
    }"""
    path = write(build(text, weights), tmp_path)
    found = tune(settings(path, mode="cut", engine=SIXTEEN_BITS, builds=12, min_sqnr=40.0))
    assert found.improved
    assert found.summary["output_sqnr_db"] >= 40
    assert found.summary["bits"]["tensors_16"] > 0
    assert found.summary["bits"]["weights_16"] > 0
    shown = report_of_run(tmp_path / "out").map
    assert "16 bits" in {group.state for group in shown.groups}
    regions = settings(path, builds=4, min_sqnr=40.0, output_dir=tmp_path / "b", engine=SIXTEEN_BITS)
    tune(regions, log := Log())
    assert any("`mode` region places pairs of 8 bits only" in note for note in log.notes)
    narrow = tune(settings(path, mode="cut", engine=SIXTEEN_BITS, builds=6, min_sqnr=30.0, output_dir=tmp_path / "c"))
    assert narrow.summary["final_ms"] < found.summary["final_ms"]
    assert not narrow.placement.wide
    ours = tmp_path / "wide.onnx"
    shutil.copy(tmp_path / "out" / "optimized_final.onnx", ours)
    shutil.copy(path.with_suffix(".npz"), ours.with_suffix(".npz"))
    again = tune(settings(ours, mode="cut", builds=4, from_qdq=True, min_sqnr=None, output_dir=tmp_path / "d"))
    assert any("no 16 bits: pairs of 16 bits have 8" in note for note in again.notes)


def test_grouped_search_asks_the_largest_first_and_nothing_twice() -> None:
    model = mixed()
    possible = possible_edges(model, ranges(model))
    inserter = Inserter(model, ranges(model), INT8)
    search = LatencySearch(
        model,
        possible,
        {"static": start_placements.static(model, possible), "again": start_placements.static(model, possible)},
    )

    def seconds(placement: Placement) -> float:
        return latency(inserter.insert(placement).to_proto())

    history = trials_of(search, partial(exact, seconds=seconds))
    assert search.propose(history) == ()
    origins = [t.proposal.origin for t in history]
    assert origins[0] == "static"
    asked = [(t.proposal.origin, t.against) for t in history[1:]]
    assert len(set(asked)) == len(asked)
    assert origins[1] == "flip second"
    able = [u.number for u in search.units.units if u.inputs]
    every = (search.units.placement(Decision.of(q, (t for n in q for t in search.units.units[n].outputs)))
             for q in chain.from_iterable(combinations(able, k) for k in range(len(able) + 1)))  # fmt: skip
    assert seconds(best_of(history)) <= 1.02 * min(map(seconds, every))
