"""What a run would take, tells, gives back and writes, and how its summary is read again."""

import json
from pathlib import Path
from typing import Any

import pytest

from models import build
from observers import Log
from qdqtune.errors import BadOption
from qdqtune.explanation.result_rows import remarks
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import best_undecided
from qdqtune.tuning.store import plain
from qdqtune.tuning.summary import read_summary
from qdqtune.types import Edge, Measurement, Placement, Proposal, Trial
from runs import MIXED, cost, mixed, out, settings, write
from workers import Workers


@pytest.mark.usefixtures("workers")
def test_gains_of_fixed_inputs_and_of_pairs_are_reported_apart(tmp_path: Path) -> None:
    text = MIXED.replace("(float[B,ROWS,64] x)", "(float[8,8,64] x, float s0)").replace("B,ROWS", "8,8")
    chain = "".join(f"s{n + 1} = Tanh(s{n})\n" for n in range(12))
    text = text.replace("y = MatMul(g, w3)", f"z = MatMul(g, w3)\n{chain}y = Add(z, s12)")
    model = write(build(text, {name: weight.array() for name, weight in mixed().constants.items()}), tmp_path)
    result = tune(settings(model, fix_inputs={"s0": 1.0}))
    final, folded = cost(out(model, "optimized_final.onnx")), cost(out(model, "baseline.onnx"))
    assert result.improved
    assert folded < 0.9 * cost(model)
    assert result.summary["ratio"] == pytest.approx(final / folded)
    assert result.summary["ratio_to_given"] == pytest.approx(final / cost(model))


def test_the_sizes_that_were_timed_are_told_where_they_are_open(tmp_path: Path, workers: Workers) -> None:
    plan = Plan(turn_seconds=0.0, warmup=7)
    result = tune(settings(write(mixed(batch=None), tmp_path), builds=4, plan=plan))
    assert set(workers.runs) == {1, 7}, "the warm-up is a number of inferences"
    shape = result.summary["timed_at"]["x"]
    assert f"timed at x {'x'.join(map(str, shape))}" in remarks(result.summary)
    assert len(shape) == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ", the worst with 12.3 dB (limit: 10); of other inputs up to 14% may miss it"),
        ({"output_accuracy": {"lowest_db": 28.3}}, ", the worst with 28.3 dB (limit: 10)"),
        ({"accuracy_held_out": False}, ", which calibration saw: of forty or more, every fifth is kept apart"),
        ({"min_sqnr_worst_db": None}, ""),
        ({"min_sqnr_worst_db": 12.4}, ""),
        ({"output_accuracy": {"lowest_db": None}}, ""),
    ],
)
def test_it_is_told_how_near_the_worst_sample_is_to_its_limit(changes: dict[str, Any], told: str) -> None:
    summary: dict[str, Any] = {"tuned_for": None, "shipped": "tuned", "fastest_without_limits": None}
    summary |= {"accuracy_samples": 20, "accuracy_held_out": True, "output_accuracy": {"lowest_db": 12.3}}
    (line,) = remarks(summary | {"min_sqnr_worst_db": 10.0} | changes)
    assert line.partition(" samples" if "calibration" in told else "held-out samples")[2] == told


PLAN = Plan((12,))


def trial(number: int, seconds: list[float], **how: Any) -> Trial:
    placement = Placement.of([Edge("t", "n", number)])
    return Trial(
        number, Proposal(f"no {number}", placement), Placement(), Measurement((1.0,) * 12, tuple(seconds)), **how
    )


def test_the_best_candidate_of_none_that_is_faster_is_named() -> None:
    seeming, slower = trial(1, [0.8] * 11 + [1.2]), trial(2, [1.1] * 12)
    inaccurate = trial(3, [0.5] * 11 + [1.2], holds=False)
    said = best_undecided([seeming, slower, inaccurate], PLAN)
    assert said.startswith("the best candidate, number 1, was 1.25x [0.83x, 1.25x] the speed of float; ")
    assert best_undecided([slower], PLAN) is None
    assert best_undecided([trial(1, [0.5] * 12, accepted=True), slower], PLAN) is None


@pytest.mark.usefixtures("workers")
def test_the_observer_gets_every_trial_in_order(model: Path) -> None:
    log = Log()
    result = tune(settings(model, builds=17), log)
    assert [t.number for t, _, _ in log.trials] == list(range(1, len(result.history) + 1))
    assert [t.placement for t, _, _ in log.trials] == [t.placement for t in result.history]
    assert {verdict for _, verdict, _ in log.trials} == {"faster", "slower"}
    spent = [state.builds for _, _, state in log.trials]
    assert spent == sorted(spent)
    assert spent[-1] == 1 + len(result.history) == result.summary["builds"]
    assert log.trials[-1][2].best_ratio == pytest.approx(result.summary["ratio"])
    assert not any(state.replayed for _, _, state in log.trials)


def test_a_summary_is_read_as_it_was_written(tuned: Path) -> None:
    folder = tuned.parent / "out"
    assert plain(read_summary(folder)) == json.loads((folder / "summary.json").read_text())


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadOption, match="holds no finished run"):
            read_summary(folder)
