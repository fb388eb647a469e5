"""What a finished run says of each node: true of what shipped, in every mode, with a number or the reason for none."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from models import build, normal
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.engines import EngineSpec
from qdqtune.explanation.facts import facts_of
from qdqtune.explanation.reasons_by_measurement import Explanation, headline, tallied, tally, total
from qdqtune.placement.files import PlacementFile, write_placement
from qdqtune.search.cut import CutSearch
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.types import Placement
from runs import hopeless, mixed, settings, write
from runs import rows as lines
from workers import in_process


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a run in cut mode, and its result."""
    model = write(mixed(), tmp_path_factory.mktemp("explained"))
    with in_process():
        return model.parent / "out", tune(settings(model, mode="cut", builds=8))


def run(folder: Path, **changes: object) -> Explained:
    with in_process():
        tune(settings(write(mixed(), folder), **changes))
    return explain_run(folder / "out")


def by_name(explained: Explained) -> dict[str, Explanation]:
    return {row.node: row for row in explained.rows}


def test_prices_decide_and_are_told(tuned: tuple[Path, Result]) -> None:
    explained = explain_run(tuned[0])
    rows = by_name(explained)
    assert list(rows) == [n.name for n in mixed().nodes]
    assert "the cut of the prices" in explained.headline
    assert {name for name, row in rows.items() if row.quantized} == {"first", "relu", "second", "skip"}
    assert (rows["second"].why, rows["second"].precision) == ("faster", "int8")
    assert (rows["third"].why, rows["third"].precision) == ("slower", "fp32")
    assert rows["first"].unit == rows["relu"].unit == ("first", "relu")
    assert all(row.margin_ms is not None and row.margin_ms > 0 for row in rows.values() if row.why != "no kernel")
    assert all(row.margin_ms is None for row in rows.values() if row.why == "no kernel")
    second = rows["second"]
    assert f"{second.ms:.3g} ms" in second.reason
    assert f"in the float model {second.float_ms:.3g} ms" in second.reason
    assert rows["softmax"].why == "no kernel"


def test_a_rule_that_won_is_not_told_as_the_prices_decision(tuned: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(tuned[0], folder)
    compute = next(t.placement for t in tuned[1].history if t.proposal.origin == "compute")
    write_placement(folder / "placement.yaml", PlacementFile(compute, "int8", "fake", {}), "model.onnx")
    explained = explain_run(folder)
    rows = by_name(explained)
    assert "the rule 'compute'" in explained.headline
    assert rows["relu"].why == "placement"
    assert "part of the rule 'compute'" in rows["relu"].reason
    assert (rows["relu"].margin_ms or 0.0) < 0
    assert not rows["skip"].quantized
    assert explained.tallies[0].nodes == sum(
        (row.quantized, row.why) == (explained.tallies[0].quantized, explained.tallies[0].why) for row in explained.rows
    )


def test_damage_to_the_outputs_is_told_with_the_limit(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="cut", min_sqnr=45.0))
    assert rows["second"].why == "inaccurate"
    assert "the limit is 45 dB" in rows["second"].reason
    assert (rows["second"].margin_ms or 0.0) < 0
    keys = [row["kind"] for row in lines(tmp_path / "out" / "autotuner_state.yaml")]
    assert keys.index("trial") < keys.index("noise")  # what is built first waits for no noise of single tensors


def test_nothing_faster_is_told_of_the_float_model(tmp_path: Path) -> None:
    with in_process():
        tune(settings(write(hopeless(), tmp_path), mode="cut", builds=6))
    explained = explain_run(tmp_path / "out")
    assert explained.headline.startswith("the float model ships")
    assert not any(row.quantized for row in explained.rows)
    assert {row.why for row in explained.rows} <= {"slower", "no kernel"}


def test_a_search_without_layers_tells_what_candidates_took(tmp_path: Path) -> None:
    explained = run(tmp_path, mode="region", engine=EngineSpec("fake", {"hide_times": True}))
    rows = by_name(explained)
    assert all(row.margin_ms is None for row in explained.rows)
    assert "no layer times" in explained.table().caption
    assert rows["second"].quantized
    assert "x as fast as float" in rows["second"].reason
    assert rows["softmax"].why == "slower"
    assert "x as fast as its opponent" in rows["softmax"].reason
    assert explained.tallies[0].ms is None


def test_a_region_search_knows_the_layers_of_float_and_of_what_ships(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="region"))
    assert rows["second"].why == "faster"
    assert (rows["second"].ms or 0.0) < (rows["second"].float_ms or 0.0)
    assert rows["second"].margin_ms is not None
    assert rows["third"].why == "slower"
    assert "a guess: no build ran it so" in rows["third"].reason
    assert "x as fast as its opponent" in rows["third"].reason


def test_what_the_user_excludes_is_excluded(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="cut", builds=4, node_filter=("first",)))
    assert rows["third"].why == "unsupported"
    assert "you have listed" in rows["third"].reason
    assert rows["first"].quantized
    assert (rows["second"].why, rows["second"].precision) == ("no kernel", "fp32")
    assert "its weight w1 does not" in rows["second"].reason


def test_where_no_pair_can_stand_the_reason_is_the_tensors(tmp_path: Path) -> None:
    text = """net (float[8,64] x) => (float[8,64] y, int64[2] s) {
        [big] a = MatMul(x, w) [shape] s0 = Shape(a) [twice] s = Add(s0, s0) [relu] y = Relu(a) }"""
    with in_process():
        tune(settings(write(build(text, {"w": normal(64, 64)}), tmp_path), mode="cut", builds=4))
    rows = by_name(explain_run(tmp_path / "out"))
    assert rows["twice"].why == "unsupported"
    assert "on its input s0: it is not known to be a float tensor" in rows["twice"].reason


def test_a_pick_of_another_placement_needs_no_new_prices(tuned: tuple[Path, Result]) -> None:
    facts = facts_of(read_run(tuned[0]))
    search = CutSearch(facts.model, facts.possible, facts.float_layers, plan=facts.plan)
    assert {t.placement for t in facts.history} == {t.placement for t in tuned[1].history}
    told = [t.proposal.predicted is None for t in facts.history]
    assert told == [t.proposal.predicted is None for t in tuned[1].history]
    assert search.costs(facts.history).prices == search.costs(tuned[1].history).prices
    assert tallied(facts)[0] == explain_run(tuned[0]).rows


def test_where_nothing_was_tried_no_candidate_is_told_and_the_other_way_is_a_guess(tuned: tuple[Path, Result]) -> None:
    known = facts_of(read_run(tuned[0]))
    untried = replace(known, history=(), placement=Placement(), shipped="baseline", in_float={})
    rows, tallies = tallied(untried)
    assert "unproven" in {row.why for row in rows}
    assert not any("a candidate" in row.reason for row in rows)
    table = Explained(tuned[0], headline(untried), rows, tallies).table()
    assert any(row[4].endswith(" ?") for row in table.rows)
    assert "?: a guess in part" in table.caption


ROW = Explanation("a", "MatMul", ("a", "b"), True, "int8", "faster", "", 2.0, 4.0, 1.0, measured=True)


def test_units_count_once_and_the_most_time_comes_first() -> None:
    rows = [ROW, replace(ROW, node="b"), replace(ROW, node="c", unit=("c",), ms=1.0, measured=False)]
    rows.append(replace(ROW, node="d", unit=("d",), quantized=False, why="slower", ms=9.0, margin_ms=None))
    slower, faster = tally(rows, lambda units: float(len(units)))
    assert (slower.runs_in, slower.nodes, slower.ms, slower.margin_ms) == ("float", 1, 9.0, None)
    assert (faster.runs_in, faster.nodes, faster.ms, faster.float_ms) == ("8 bits", 3, 3.0, 8.0)
    assert (faster.margin_ms, faster.measured, faster.example) == (2.0, False, "a")


def test_what_is_not_known_adds_nothing() -> None:
    assert total([1.0, None, 2.0]) == 3.0
    assert total([None]) is None
