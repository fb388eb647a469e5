"""Grouped search, for engines without layer times."""

import shutil
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import pytest

from models import INT8, build, normal, ranges
from observers import Log
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import latency
from qdqtune.explanation.report import report_of_run
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.search import best_of
from qdqtune.search.by_latency import LatencySearch
from qdqtune.search.costs.units import Decision
from qdqtune.tuning.loop import tune
from qdqtune.types import Placement
from runs import mixed, settings, write
from search_loop import exact, trials_of

pytestmark = pytest.mark.usefixtures("workers")


DEEP = """net (float[8,64] x) => (float[8,32] y) {
    [first] a = MatMul(x, w0)
    [relu] b = Relu(a)
    [second] c = MatMul(b, w1)
    [skip] d = Add(c, b)
    [third] e = MatMul(d, w2)
    [tanh] f = Tanh(e)
    [last] y = MatMul(f, w3)
}"""


SIXTEEN_BITS = EngineSpec("fake", {"hide_times": True, "asymmetric": True, "wide": True})


def test_an_engine_with_16_bits_gets_them_where_8_miss_the_limit(tmp_path: Path) -> None:
    sizes = ((64, 256, 0.1), (256, 256, 0.1), (256, 128, 0.1), (128, 32, 1.0))
    weights = {f"w{n}": normal(*size, seed=n, scale=scale) for n, (*size, scale) in enumerate(sizes)}
    path = write(build(DEEP, weights), tmp_path)
    found = tune(settings(path, mode="cut", engine=SIXTEEN_BITS, builds=12, min_sqnr=40.0))
    assert found.improved
    assert found.summary["output_sqnr_db"] >= 40
    assert found.summary["bits"]["tensors_16"] > 0
    assert found.summary["bits"]["weights_16"] > 0
    shown = report_of_run(tmp_path / "out").map
    assert shown is not None
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
