"""Limits on accuracy: what is taken, what ships, and what is measured for it."""

from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest

from models import build, normal
from observers import Log
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, BaselineFailed, EngineRefused, Failure
from qdqtune.numerics.scores import Score, equal_share
from qdqtune.search.region import WITHIN_LIMITS
from qdqtune.timing.limits import Limits, is_unmet, outcome
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.run import Budget
from qdqtune.tuning.settings import Settings
from qdqtune.types import Accuracy, Measurement, Placement, Proposal, Trial
from refusals import or_raise
from runs import settings, write

pytestmark = pytest.mark.usefixtures("workers")

PLAN = Plan((12,))
BEST = {36.0: 0.50066, 38.0: 0.70973}
"""By the least output SQNR in dB, the least ratio to float that any of the 127 placements of the mixed model has."""

METRIC = """import numpy as np
from pathlib import Path
from workers import Workers
HERE = Path(__file__).parent
SAMPLE = np.load(HERE / "model.npz")["x"][0]
def score(predict):
    y = predict({"x": SAMPLE})["y"]
    if not (HERE / "y.npy").exists():
        np.save(HERE / "y.npy", y)
    with (HERE / "calls").open("a") as calls:
        print(file=calls)
    return -float(np.abs(y - np.load(HERE / "y.npy")).mean() / np.abs(y).mean())
"""


def trial(ratio: float, number: int = 1, **given) -> Trial:
    return Trial(number, Proposal("", Placement()), Placement(), Measurement((1.0,) * 12, (ratio,) * 12), **given)


def never(_: Placement) -> Score:
    raise AssertionError("nobody needs the metric")


class TestOneTrial:
    def test_the_metric_is_asked_for_what_would_be_taken_only(self) -> None:
        limits = Limits(min_sqnr=20, max_drop=0.1, before=Score(0.9))
        best = trial(0.6, accuracy=Accuracy(30.0), metric=0.9, holds=True)
        for other in (trial(1.0), trial(1.5), trial(0.7), trial(0.5, accuracy=Accuracy(10.0))):
            assert limits.judged(other, [best], PLAN, never).holds is not True
        assert limits.judged(trial(0.5), [best], PLAN, lambda _: Score(0.81)).holds is True
        assert limits.judged(trial(0.7), [replace(best, holds=False)], PLAN, lambda _: Score(0.81)).holds is True

    @pytest.mark.parametrize(
        ("metric", "holds"),
        [(Score(0.95), True), (Score(0.8), True), (Score(0.79), False), (Failure("run", ""), False)],
    )
    def test_the_metric_may_fall_so_far(self, metric: Score | Failure, holds: bool) -> None:
        def measured(_: Placement) -> Score:
            if isinstance(metric, Failure):
                raise EngineRefused(metric)
            return metric

        judged = Limits(max_drop=0.1, before=Score(0.9)).judged(trial(0.5), [], PLAN, measured)
        assert judged.holds is holds
        assert judged.metric == (None if isinstance(metric, Failure) else metric.value)

    def test_without_the_float_models_metric_nothing_is_good_enough(self) -> None:
        assert not Limits(max_drop=0.1).is_good_enough(Score(1.0))

    def test_outputs_that_hold_their_limits_leave_it_to_the_metric(self) -> None:
        limits = Limits(min_sqnr=20, max_drop=0.1, before=Score(0.9))
        assert [limits.on_outputs(Accuracy(db)) for db in (19.0, 21.0)] == [False, None]
        assert limits.judged(trial(1.0, accuracy=Accuracy(21.0)), [], PLAN, never).holds is None
        known = trial(1.0, holds=False)
        assert limits.with_metric(known, never) == known
        said = [limits.why_refused(trial(1.0, holds=False, accuracy=a)) for a in (None, Accuracy(21.0), Accuracy(19.0))]
        assert said[:2] == ["its outputs cannot be computed", "the metric cannot be computed"]
        assert str(said[2]).startswith("the output SQNR of all samples is 19")

    def test_verdicts(self) -> None:
        assert outcome(trial(0.5), PLAN) == "faster"
        assert outcome(trial(0.5, holds=None), PLAN) == "faster"
        assert outcome(trial(0.5, holds=False), PLAN) == "inaccurate"
        assert outcome(replace(trial(0.5), result=Failure("run", "")), PLAN) == "failed"

    def test_limits_are_unmet_if_only_inaccurate_candidates_are_faster(self) -> None:
        assert is_unmet([trial(0.5, holds=False), trial(1.2)], PLAN)
        assert not is_unmet([trial(1.2, holds=False)], PLAN)
        assert not is_unmet([trial(0.5, holds=False), trial(0.8)], PLAN)
        assert not is_unmet([], PLAN)
        # Noise does not decide whether the only candidate missed a limit.
        assert is_unmet([trial(1.0, holds=False), trial(1.2)], PLAN)
        assert is_unmet([trial(0.5, holds=False), trial(1.0)], PLAN)
        assert not is_unmet([trial(1.0, holds=False), trial(1.0)], PLAN)
        assert not is_unmet([trial(1.0, holds=False), trial(1.0, holds=None)], PLAN)
        proven = trial(1.0, holds=False, metric=0.1)  # the proof asked for its metric, as it was faster there
        assert is_unmet([proven, trial(1.0, holds=None)], PLAN)


@pytest.fixture
def metric(model: Path) -> Callable[[], int]:
    """A metric in metric.py beside the model; tells how often it was asked."""
    (model.parent / "metric.py").write_text(METRIC)
    calls = model.parent / "calls"
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


def evaluated(model: Path, /, **changes) -> Settings:
    return settings(model, evaluate=f"{model.parent / 'metric.py'}:score", **changes)


@pytest.mark.parametrize(("is_over", "kind"), [(True, BadOption), (False, BaselineFailed)])
def test_a_metric_of_the_float_model_that_the_time_budget_cuts_is_no_failure_of_the_engine(
    is_over, kind, model, metric, monkeypatch
):
    monkeypatch.setattr("qdqtune.tuning.run.measure", lambda *_: or_raise(Failure("timeout", "took too long")))
    with pytest.raises(kind, match="fails on the float model: took too long"):
        tune(evaluated(model, time_budget=1e-3 if is_over else None))


WITHOUT_TIMES = {"mode": "cut", "engine": EngineSpec("fake", {"hide_times": True})}


@pytest.mark.parametrize(
    ("limit", "other"),
    [(38.0, {"mode": "region"}), (38.0, {"mode": "cut"}), (36.0, {"mode": "subgraph"}), (38.0, WITHOUT_TIMES)],
)
def test_the_fastest_that_holds_a_limit_ships(model: Path, limit: float, other: dict) -> None:
    result = tune(settings(model, min_sqnr=limit, **other))
    assert result.improved
    assert result.summary["ratio"] == pytest.approx(BEST[limit], rel=1e-3)
    assert result.summary["output_sqnr_db"] >= limit
    assert (result.summary["constraint_met"], result.summary["min_sqnr_db"]) == (True, limit)
    if other is WITHOUT_TIMES:
        assert any(t.proposal.origin.startswith(WITHIN_LIMITS) for t in result.history)


@pytest.mark.parametrize("mode", ["region", "cut"])
def test_the_metric_is_a_limit_as_well(model: Path, metric: Callable[[], int], mode: str) -> None:
    free = tune(evaluated(model, mode=mode, max_drop=None))
    assert free.summary["metric_before"] == 0
    lost = -free.summary["metric_after"]
    assert lost > 0
    assert metric() == 2  # the float model and the result
    allowed = {"region": 1.5, "cut": 0.7}[mode] * lost  # less than what the first candidates lose
    limited = evaluated(model, mode=mode, max_drop=allowed)
    result = tune(limited)
    assert result.improved
    assert any(t.holds is False for t in result.history)
    assert -allowed <= result.summary["metric_after"] < 0
    assert metric() < 2 + len(result.history)
    asked = metric()
    assert tune(limited).placement == result.placement
    assert metric() == asked


UNDECIDED = Plan((2,), turn_seconds=0.0)
"""So few rounds that no candidate of the search is clearly faster: the proof decides."""


class TestAMetricThatTheSearchDidNotAskFor:
    def test_what_it_refuses_does_not_ship(self, model: Path, metric: Callable[[], int]) -> None:
        log = Log()
        result = tune(evaluated(model, mode="cut", builds=3, plan=UNDECIDED, max_drop=0.0), log)
        assert {verdict for _, verdict, _ in log.trials} == {"undecided"}
        assert (result.shipped, result.unmet, result.ratio) == ("baseline", True, None)
        assert result.summary["metric_after"] == result.summary["metric_before"] == 0
        refused = [t for t in result.history if t.holds is False]
        assert len(refused) == metric() - 1  # all others were never asked for
        assert all(t.metric is not None and t.metric < 0 for t in refused)
        assert sum("proved faster, and was not taken: the metric is" in note for note in result.notes) == len(refused)
        assert "the metric is" in result.summary["fastest_without_limits"]["missed"]

    def test_the_first_that_it_lets_pass_ships(self, model: Path, metric: Callable[[], int]) -> None:
        free = tune(evaluated(model, mode="cut", builds=6, plan=UNDECIDED, max_drop=None))
        lost = -free.summary["metric_after"]
        result = tune(evaluated(model, mode="cut", builds=6, plan=UNDECIDED, max_drop=0.9 * lost))
        assert result.shipped == "tuned"
        assert 0 < -result.summary["metric_after"] <= 0.9 * lost
        assert result.summary["constraint_met"] is True

    def test_a_front_has_no_point_that_was_not_asked_for(self, model: Path, metric: Callable[[], int]) -> None:
        result = tune(evaluated(model, mode="cut", builds=14, max_drop=0.0, front=True))
        assert (result.shipped, result.unmet) == ("baseline", True)
        assert result.summary["front"]
        assert not any(row["holds_limits"] for row in result.summary["front"])
        assert not any(t.holds for t in result.history)


def test_a_candidate_that_goes_to_the_proof_at_once_is_judged_by_the_metric(model, metric, monkeypatch):
    monkeypatch.setattr(Budget, "room", lambda *_: 0)
    result = tune(evaluated(model, mode="cut", builds=2))
    assert len(result.history) == 1
    assert (result.shipped, result.unmet) == ("baseline", True)
    assert result.summary["metric_before"] == 0


def test_a_float_model_that_draws_random_numbers_misses_any_limit(tmp_path: Path) -> None:
    net = build("net (float[2,8] x) => (float[2,8] y) { h = MatMul(x, w) n = RandomNormalLike(h) y = Add(h, n) }",
                {"w": normal(8, 8)})  # fmt: skip
    result = tune(settings(write(net, tmp_path), min_sqnr=20.0, builds=4))
    assert result.shipped == "baseline"
    assert any("draws random numbers" in note for note in result.notes)


def test_a_drop_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="`evaluate`"):
        settings(tmp_path / "model.onnx", max_drop=0.1)


@pytest.mark.parametrize(("choices", "most"), [(1, 0), (8, 1), (32, 2), (250, 9), (1000, 28)])
def test_first_choices_are_refused_only_where_too_many_differ_beyond_doubt(choices: int, most: int) -> None:
    """`most` others of so many are what a model that keeps 98 % may have by chance."""

    def holds(others: int) -> bool:
        return Limits(min_agreement=0.98).is_exact_enough(Accuracy(30.0, top1=1 - others / choices, choices=choices))

    assert holds(0)
    assert holds(most)
    assert not holds(most + 1)
    tail = sum(comb(choices, k) * 0.02**k * 0.98 ** (choices - k) for k in range(most + 1, choices + 1))
    assert tail < 0.05


@pytest.mark.parametrize(
    ("limits", "accuracy", "holds"),
    [
        (Limits(), Accuracy(-3.0), True),
        (Limits(min_sqnr=20), Accuracy(19.9), False),
        (Limits(min_sqnr=20), Accuracy(20.0), True),
        (Limits(min_sqnr=20), Accuracy(), True),
        (Limits(min_sqnr=20.0, min_sqnr_worst=10.0), Accuracy(28.4, 17.1, 40.0, samples=32), True),
        (Limits(min_sqnr=20.0, min_sqnr_worst=10.0), Accuracy(28.4, 9.9, 40.0, samples=32), False),
        (Limits(min_agreement=0.98), Accuracy(agreement=0.98), True),
        (Limits(min_agreement=0.98), Accuracy(agreement=0.979), False),
    ],
)
def test_outputs_hold_limits_of_all_samples_of_the_worst_and_of_integers(limits, accuracy, holds):
    assert limits.judged(trial(0.5, accuracy=accuracy), [], PLAN, never).holds is holds


@pytest.mark.parametrize(
    ("accuracy", "told"),
    [
        (Accuracy(agreement=0.9, top1=1.0, choices=1000), "90.0% of the integers in outputs are as in float"),
        (Accuracy(agreement=1.0, top1=0.9, choices=1000), "90.0% of the best classes are as in float"),
        (Accuracy(30.0, top1=0.9, choices=1000), "90.0% of the best classes are as in float"),
    ],
)
def test_what_is_told_of_a_missed_share_is_the_share_that_missed(accuracy: Accuracy, told: str) -> None:
    assert Limits(min_agreement=0.98).missed(accuracy) == f"{told}, and 98% are asked for"
    assert equal_share(accuracy) == 0.9
