"""Advice about busy machines, wide intervals and undecided results."""

from typing import Any

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.machine import MachineFacts
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning import advice
from qdqtune.types import Edge, Measurement, Placement, Proposal, Trial

PLAN = Plan((12,))


@pytest.mark.parametrize(
    ("load", "threads", "is_busy"), [(0.1, 1, False), (1.9, 1, True), (0.0, 2, False), (0.9, 2, True)]
)
def test_a_busy_machine_is_noted_before_the_run(load: float, threads: int, is_busy: bool) -> None:
    note = advice.busy_with(threads, 2, 2, load)
    assert (note is not None) == is_busy
    assert note is None or f"({load:.1f} processes want the 2 cores of this machine beside this run)" in note


def test_a_busy_machine_is_not_noted_where_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "load", lambda: 500.0)
    assert advice.busy(EngineSpec("onnxruntime")) is not None
    assert advice.busy(EngineSpec("fake")) is None
    monkeypatch.setattr(advice, "is_simulated", lambda name, machine: True)
    assert advice.busy(EngineSpec("onnxruntime")) is None


def test_more_threads_than_cores_are_noted() -> None:
    note = advice.busy_with(4, 2, 2, 0.0)
    assert str(note).startswith("`threads` 4 is more than the 2 cores that this process may use:")


def test_advice_about_another_machine_names_it() -> None:
    board = MachineFacts(4, 4, "aarch64", False, "", "Linux", 3.0, "board", "me@board")
    threads = {n: advice.busy(EngineSpec("onnxruntime", {"threads": n}), board) for n in (1, 2, 8)}
    assert threads[1] is None
    assert "(3.0 processes want the 4 cores of me@board beside this run)" in str(threads[2])
    assert "the 4 cores that this process may use on me@board" in str(threads[8])


def test_wide_intervals_and_results_that_prove_nothing() -> None:
    assert advice.wide(Ratio(0.5, 0.48, 0.52)) is None
    assert advice.wide(Ratio(0.5, None, 0.52)) is None
    assert "2.00x [1.67x, 2.86x] is wide" in str(advice.wide(Ratio(0.5, 0.35, 0.6)))
    assert advice.unproven(Ratio(0.8, 0.7, 1.1)).startswith("1.25x [0.91x, 1.43x] the speed of float; a quieter")
    assert advice.unproven(Ratio(2.0, 1.9, 2.1)) == "0.50x [0.48x, 0.53x] the speed of float"


def trial(number: int, seconds: list[float], **how: Any) -> Trial:
    placement = Placement.of([Edge("t", "n", number)])
    return Trial(
        number, Proposal(f"no {number}", placement), Placement(), Measurement((1.0,) * 12, tuple(seconds)), **how
    )


def test_the_best_candidate_of_none_that_is_faster_is_named() -> None:
    seeming, slower = trial(1, [0.8] * 11 + [1.2]), trial(2, [1.1] * 12)
    inaccurate = trial(3, [0.5] * 11 + [1.2], holds=False)
    said = advice.undecided([seeming, slower, inaccurate], PLAN)
    assert said is not None
    assert said.startswith("the best candidate, no 1, was 1.25x [0.83x, 1.25x] the speed of float; ")
    assert advice.undecided([slower], PLAN) is None
    assert advice.undecided([trial(1, [0.5] * 12, accepted=True), slower], PLAN) is None


def test_weight_formats_that_gain_nowhere_are_told() -> None:
    told = advice.no_format(("w8", "w4"), has_pairs=False)
    assert told is not None
    assert told.startswith("`formats` w8,w4: no weight of a product gains by them here; ")
    assert advice.no_format(None, has_pairs=True) is None
    assert advice.no_format(("int8",), has_pairs=True) is None
