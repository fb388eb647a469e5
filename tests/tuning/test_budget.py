"""A time budget bounds the whole run, whatever an inference takes. The clock is the test's: inferences move it."""

import json
import re
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from models import build, feeds, normal
from observers import Log
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.scales import DEFAULT_CALIBRATION
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, EngineFailure, EngineRefused, Failure
from qdqtune.explanation.result_rows import result_rows
from qdqtune.numerics.scores import Score
from qdqtune.search import ratios_to_float
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.bench import BRIEF_LOOKS
from qdqtune.tuning.estimate import estimate
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.loop import search, slowdown, tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.result import Result
from qdqtune.tuning.run import Budget
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.shipping import GOES_ON
from qdqtune.tuning.subject import SamplesInTime
from qdqtune.types import Edge, Measurement, Placement, Proposal, Sample, Trial
from runs import cost, mixed, settings, write
from workers import Workers

pytestmark = pytest.mark.usefixtures("clock")

SAMPLES = 40


class Clock:
    """Seconds that inferences have taken."""

    def __init__(self) -> None:
        self.now = 1000.0

    def spend(self, seconds: float) -> None:
        """Go on."""
        self.now += seconds


@pytest.fixture
def clock(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """In place of the real one; inferences move it, on whichever engine."""
    clock = Clock()
    workers.spend = clock.spend
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: clock.now)
        patch.setattr("qdqtune.calibration.user_code.monotonic", lambda: clock.now)  # it reads samples until then
        yield clock


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with more samples than a slow calibration has time for."""
    return write(mixed(), tmp_path, count=SAMPLES)


def slow_run(model: Path, workers: Workers, each: float, budget: float, **more: Any) -> tuple[Result, Log]:
    """A run, of cut mode unless told otherwise, whose float model takes `each` seconds an inference."""
    workers.drift, workers.untimed, notes = each / cost(model), each, Log()
    usual: dict[str, Any] = {"mode": "cut", "builds": 12, "calibration": DEFAULT_CALIBRATION, "accuracy_samples": 8}
    return tune(settings(model, **usual | more, time_budget=budget), notes), notes


@pytest.mark.parametrize(("each", "budget"), [(0.01, 120.0), (0.2, 120.0), (1.0, 120.0), (3.8, 120.0), (3.8, 1200.0)])
def test_a_time_budget_bounds_the_whole_run(model, clock, workers, each, budget):
    result, _ = slow_run(model, workers, each, budget)
    assert clock.now - 1000.0 <= 1.1 * budget
    assert bool(result.history) == (budget / each >= 100)


FRONT = {"front": True, "builds": 20}
THREADS = {"engine": EngineSpec("fake", {"threads": 1}), "threads": (1, 4)}


@pytest.mark.parametrize("more", [{"min_sqnr": 45.0}, {"mode": "region"}, FRONT, THREADS, THREADS | FRONT])
@pytest.mark.parametrize("budget", [60.0, 150.0])
def test_a_time_budget_bounds_noise_and_other_modes(model, clock, workers, budget, more):
    result, _ = slow_run(model, workers, 0.2, budget, **more)
    assert clock.now - 1000.0 <= 1.15 * budget
    assert result.history or budget == 60.0


def asked(model: Path, **changes: Any) -> QuantizeOptions:
    """What `quantize` is asked for, with a minute for it."""
    data: dict[str, Any] = {"calibration_data": str(model.with_suffix(".npz")), "time_budget": 60.0}
    return QuantizeOptions(model=model, output=model.with_name("q.onnx"), **data | changes)


@pytest.mark.parametrize(("each", "is_short"), [(0.01, False), (0.3, False), (1.5, True)])
def test_quantize_ends_in_time(model: Path, clock: Clock, workers: Workers, each: float, is_short: bool) -> None:
    workers.drift = workers.untimed = each
    done = quantize(asked(model, metric="cosine"), begun=clock.now)
    assert clock.now - 1000.0 <= 1.1 * 60.0
    assert any("calibration was cut short" in note for note in done.notes) == is_short
    before, after = done.measured
    assert len(before.by_sample) == len(after.by_sample)
    assert any("compute the metric on all samples: only " in note for note in done.notes) == (each > 0.1)


def test_a_metric_that_takes_longer_than_quantize_may_is_left_out(model, clock, monkeypatch):
    def late(*_: object) -> Score:
        raise EngineRefused(Failure("timeout", "`time_budget` has ended"))

    monkeypatch.setattr("qdqtune.commands.quantize.measure", late)
    done = quantize(asked(model, metric="cosine"), begun=clock.now)
    assert done.measured is None
    assert any(note.endswith(" was not computed: `time_budget` has ended") for note in done.notes)
    with pytest.raises(EngineFailure):
        quantize(asked(model, metric="cosine", time_budget=None))


def test_calibration_ends_if_a_pass_takes_longer_than_expected(clock: Clock) -> None:
    def produce() -> Iterator[Sample]:
        for sample in feeds(mixed(), SAMPLES):
            clock.spend(1.0)
            yield sample

    prepared, notes = prepare(mixed(), Data(), most=0), Log()
    prepared = replace(prepared, calibration=Samples("slow", "", False, produce))
    in_time = SamplesInTime.of(prepared, clock.now + 40.0, notes)
    assert 14 <= sum(1 for _ in in_time()) <= 16  # few, which get more than their share of the time
    assert in_time.bias_samples(each=0.5) == 12, "a share of what calibration leaves"
    assert not in_time.bias_samples(each=2.0)
    assert not in_time.bias_samples(each=3.0)
    few, biases = in_time.calibration_notes()
    assert few.startswith("`time_budget` has no room to calibrate on all samples: ")
    assert biases.startswith("`time_budget` has no room to correct biases: ")
    assert notes.notes == [few, biases]
    clock.spend(40.0)
    assert in_time.calibration_notes() == (few, biases), "it was not cut short"
    assert notes.notes[4].startswith("`time_budget` ended during calibration, which takes 4 samples in any case")


def test_biases_get_their_samples_where_calibration_took_longer_than_its_share(clock: Clock) -> None:
    prepared, notes = prepare(mixed(), Data(), most=0), Log()
    samples = replace(prepared.calibration, produce=lambda: (clock.spend(0.2) or s for s in feeds(mixed(), SAMPLES)))
    in_time = SamplesInTime.of(replace(prepared, calibration=samples), clock.now + 40.0, notes)
    list(zip(range(8), in_time(), strict=False))
    clock.spend(20.0)
    count = in_time.bias_samples(each=0.5)
    assert count > 4
    assert sum(1 for _ in zip(range(count), in_time(), strict=False)) == count
    assert in_time.calibration_notes() == ()


@pytest.mark.parametrize("declared", ["double[2,8]", "float[0,8]"])
def test_a_model_without_values_to_calibrate_on_has_time_for_them(clock: Clock, declared: str) -> None:
    dtype = np.float64 if "double" in declared else np.float32
    model = build(f"net ({declared} x) => ({declared} y) {{ y = MatMul(x, w) }}", {"w": normal(8, 8).astype(dtype)})
    in_time = SamplesInTime.of(prepare(model, Data(), most=0), clock.now + 40.0, Log())
    assert len([*in_time()]) >= 1


def test_a_large_gain_is_proven_in_the_last_of_the_time(tmp_path: Path, clock: Clock, workers: Workers) -> None:
    steps = " ".join(f"x{n + 1} = MatMul(x{n}, w)" for n in range(8))
    products = f"net (float[64, 256] x0) => (float[64, 256] x8) {{ {steps} }}"
    model = build(products, {"w": normal(256, 256, scale=0.1)})
    result, _ = slow_run(write(model, tmp_path, count=SAMPLES), workers, 0.2, 15.0)
    (trial,) = result.history
    assert len(trial.result.a) == BRIEF_LOOKS[0]
    assert (result.shipped, clock.now - 1000.0 <= 1.1 * 15.0) == ("tuned", True)
    assert result.summary["proof_builds"] == 2


def test_a_search_that_learns_nothing_from_layers_keeps_those_of_float_for_the_report(model, workers):
    result, _ = slow_run(model, workers, 0.2, 40.0)
    assert not any(trial.layers for trial in result.history)
    assert read_run(model.parent / "out").float_layers


def test_nothing_is_proven_if_nothing_was_tried(model: Path, workers: Workers) -> None:
    result, notes = slow_run(model, workers, 3.8, 120.0)
    assert (result.shipped, result.history, result.summary["proof_builds"]) == ("baseline", (), 0)
    assert result.summary["baseline_ms"] == pytest.approx(3800, rel=0.01)
    (ended,) = (note for note in result.notes if note.startswith("`time_budget` is too short for this model: give "))
    assert ended in json.loads((model.parent / "out" / "run.json").read_text()).values(), "the end of the search"
    assert not any("biases" in note for note in notes.notes), "no layer of this model has one"
    assert len([note for note in notes.notes if "no room to calibrate on all samples" in note]) == 1
    shipped = onnx.load(model.parent / "out" / "optimized_final.onnx")
    assert {node.op_type for node in shipped.graph.node}.isdisjoint({"QuantizeLinear", "DequantizeLinear"})


def test_a_session_with_less_time_leaves_what_an_earlier_one_has_proven(model: Path, workers: Workers) -> None:
    first, _ = slow_run(model, workers, 0.2, 200.0)
    assert first.shipped == "tuned"
    out = model.parent / "out"
    files = {
        path: path.read_bytes()
        for path in out.iterdir()
        if path.suffix in (".onnx", ".json") or path.stem == "placement"
    }
    state = out / "autotuner_state.yaml"
    lines = state.read_bytes().splitlines(keepends=True)
    state.write_bytes(b"".join(line for line in lines if b'"key": "proposed:' not in line))  # as of earlier versions
    second, _ = slow_run(model, workers, 3.8, 60.0)
    assert second.notes[-1] == GOES_ON
    assert second.notes[-2].startswith("what ships is what an earlier session has proven: in its time this one")
    assert (second.shipped, second.placement, second.ratio) == ("tuned", first.placement, first.ratio)
    assert {path: path.read_bytes() for path in files} == files
    strict, _ = slow_run(model, workers, 3.8, 60.0, min_sqnr=150.0)
    assert strict.shipped == "baseline", "a limit that the earlier result does not hold"


def test_a_session_with_another_budget_begins_with_all_that_was_measured(model: Path, workers: Workers) -> None:
    """A short budget is content with fewer rounds, and builds what a hurried search proposes; both stay."""
    few = Plan((7, 20), 0.02)
    first, _ = slow_run(model, workers, 0.2, 40.0, plan=few)
    longer, _ = slow_run(model, workers, 0.2, 600.0)
    assert 0 < len(first.history) < len(longer.history)
    assert longer.history[: len(first.history)] == first.history
    shorter, _ = slow_run(model, workers, 0.2, 20.0, plan=few)
    assert shorter.history[: len(longer.history)] == longer.history


def test_what_is_proven_better_replaces_a_luckier_result(model: Path, workers: Workers) -> None:
    slow_run(model, workers, 0.2, 35.0)
    file = model.parent / "out" / "summary.json"
    lucky = json.loads(file.read_text()) | {"ratio": 0.1, "ratio_low": 0.1, "ratio_high": 0.99}
    file.write_text(json.dumps(lucky))
    second, _ = slow_run(model, workers, 0.2, 35.0)
    assert [note for note in second.notes if note.startswith("`time_budget` has ended the search")]
    assert second.ratio.median > 0.1


def test_a_candidate_without_time_for_its_proof_is_told_of(model, workers, monkeypatch):
    monkeypatch.setattr(Budget, "provable", lambda *_: 0)
    result, _ = slow_run(model, workers, 0.01, 1200.0)
    assert result.shipped == "baseline"
    (told,) = (note for note in result.notes if "too short to prove" in note)
    assert re.fullmatch(r"`time_budget` is too short to prove the best candidate \([\d.]+x the speed .*\)", told)
    assert result.notes[-1] == GOES_ON


@pytest.mark.parametrize("each", [0.01, 0.2, 3.8])
def test_the_estimate_covers_the_whole_run(model: Path, clock: Clock, workers: Workers, each: float) -> None:
    usual: dict[str, Any] = {"mode": "cut", "builds": 6, "accuracy_samples": 8}
    workers.drift, workers.untimed = each / cost(model), each
    expected = estimate(settings(model, **usual, output_dir=model.parent / "dry"))
    begun = clock.now
    tune(settings(model, **usual))
    assert 0.5 < expected.seconds / (clock.now - begun) < 2  # candidates of this model take a third of its time


def test_a_dry_run_tells_the_builds_that_fit_into_the_time(model: Path, workers: Workers) -> None:
    workers.drift, workers.untimed = 0.2 / cost(model), 0.2
    whole = estimate(settings(model, builds=40, output_dir=model.parent / "dry"))
    short = estimate(settings(model, builds=40, time_budget=60.0, output_dir=model.parent / "dry"))
    assert 1 < short.builds < whole.builds
    for scores, why in (("other", "names no output"), ("y:7", r"y: float32\[.*no scores of classes along axis 7")):
        with pytest.raises(BadOption, match=why):
            estimate(settings(model, scores=(scores,), output_dir=model.parent / "dry"))
        with pytest.raises(BadOption, match=why):
            tune(settings(model, scores=(scores,)), log := Log())
        assert not any("calibrating" in stage for stage in log.stages)


def test_a_search_that_ran_out_of_time_notes_it(model: Path, workers: Workers) -> None:
    result, _ = slow_run(model, workers, 0.2, 40.0, builds=12)
    spent = 1 + len(result.history)
    assert 1 < spent < 8
    told = f"`time_budget` has ended the search after {spent} of 12 builds"
    assert [note for note in result.notes if note.startswith(told)]
    result, notes = slow_run(model, workers, 0.01, 1200.0, output_dir=model.parent / "enough")
    assert not [note for note in result.notes if note.startswith("`time_budget` has ended")]
    assert [note for note in result.notes if note.startswith("the search ended after")]
    assert notes.notes == []  # all samples were seen


def test_percentiles_are_left_out_before_a_build_where_time_is_over(model, workers, monkeypatch):
    asked: list[Sequence[Path]] = []
    monkeypatch.setattr("qdqtune.tuning.file_race.Racer.tails", lambda _, files, __: asked.append(files) or ())
    result, _ = slow_run(model, workers, 0.2, 60.0)
    assert result.shipped == "tuned"
    assert not asked
    assert ("p50, p90, p99 of single inferences", "", "not measured (no time was left)") in [
        row.cells for row in result_rows(result.summary)
    ]
    for _ in range(2):  # what cannot be told is not asked for again
        result, _ = slow_run(model, workers, 0.01, 1200.0, output_dir=model.parent / "enough")
        assert len(asked) == 1
        assert result.summary["percentiles_missing"] == "a hundred inferences take too long"


def budget(seconds: float | None, latency: float, build: float = 1.0, *, has_other_float: bool = False) -> Budget:
    first = build + 4 * max(latency, 0.02) * 12
    bench = SimpleNamespace(
        floats=SimpleNamespace(turn_seconds=latency, build_seconds=build, start_seconds=0.0),
        trial_seconds=first,
        brief_seconds=first,
        model_bytes=0,
    )
    settings = Settings(Path("m"), time_budget=seconds, threads=(1,))
    ends = None if seconds is None else time.monotonic() + seconds
    return Budget.of(settings, bench, ends, has_other_float=has_other_float)


def test_a_small_gain_is_left_time_for_further_blocks_of_its_proof_and_a_large_one_less(clock: Clock) -> None:
    ample, tight = budget(3600, 0.001), budget(120, 0.5)
    usual = ample.proof_seconds(1)
    assert ample.reserve(0.85) == pytest.approx(4 * ample.proof_seconds(1, 0.85) - usual)
    assert ample.reserve(0.5) == pytest.approx(ample.proof_seconds(1, 0.5) - usual)
    assert ample.reserve(0.5) < 0
    assert ample.reserve(0.5, stale=3) == ample.reserve(0.5)
    assert ample.reserve(0.5, stale=4) == pytest.approx(2 * ample.proof_seconds(1, 0.5) - usual), "a further block"
    assert budget(None, 0.5).reserve(0.8) == 0
    assert ample.reserve(1.0) == pytest.approx(replace(ample, copies=1).proof_seconds(1) - usual)  # nothing to prove
    with_other = budget(3600, 0.001, has_other_float=True)
    assert with_other.reserve(1.0) == 0, "a rewritten float model is proven alone"
    assert (ample.opponents, with_other.opponents) == (1, 2)
    assert with_other.proof_seconds(1) > ample.proof_seconds(1)
    assert tight.copies == 1
    assert tight.reserve(0.45) == pytest.approx(tight.proof_seconds(1, 0.45) - tight.proof_seconds(1))
    blocks = (tight.reserve(0.7) + tight.proof_seconds(1)) / tight.proof_seconds(1, 0.7)
    assert blocks == pytest.approx(2)
    front = replace(ample, points=6)
    assert front.reserve(0.5) == front.reserve(1.0) == 0  # its other points may gain less
    clock.now += ample.seconds_left - 30.0
    assert (ample.room([], 6.0), ample.room([], 6.0, ample.reserve(0.85))) == (4, 0)


@pytest.mark.parametrize(("ratio", "is_repeated"), [(1.0, False), (0.8, False), (0.4, False), (0.4, True)])
def test_proposing_that_takes_long_once_does_not_end_a_search(clock: Clock, ratio: float, is_repeated: bool) -> None:
    """As it measures what rounding does to outputs. Candidates take 2 s each, and the proof of this model 7 s, as long
    as the further blocks that a small gain is left time for. A large gain leaves the search more time, in which
    candidates are no briefer, but not if an earlier session had the same time. What time has ended is told in all
    cases."""
    bench = SimpleNamespace(floats=SimpleNamespace(seconds=1.0))
    limit, was_brief = replace(budget(60, 0.02), builds=30), list[bool]()

    class Learning:
        def propose(self, history: Sequence[Trial]) -> list[Proposal]:
            clock.now += 20.0 if len(history) == 1 else 0.0
            return [Proposal("cut", Placement(frozenset({Edge("x", "n", len(history))})))]

    def measured(
        number: int, batch: Sequence[Proposal], _: Placement, *, is_brief: bool, is_recorded: bool
    ) -> Generator[tuple[Trial, bool]]:
        was_brief.append(is_brief)
        for place, proposal in enumerate(batch, number):
            clock.now += 2.0
            against = Placement() if place == 1 else Placement(frozenset({Edge("x", "n", 0)}))
            times = Measurement((1.0 if place == 1 else ratio,) * 12, (ratio,) * 12)
            yield Trial(place, proposal, against, times, holds=True), is_repeated and place == 1

    run = SimpleNamespace(
        settings=Settings(Path("m")),
        budget=limit,
        bench=bench,
        limits=SimpleNamespace(judged=lambda trial, *_: trial, why_refused=lambda _: None),
        store=SimpleNamespace(values=lambda *_: {}, put=lambda *_, **__: None, has_lost=False),
        slower=lambda _: frozenset(),
        subject=SimpleNamespace(shaped=None),
    )
    bench.measured, bench.keep_only, bench.metric = measured, lambda _: None, None
    history, shortfall = search(Learning(), run, Silent())
    assert {1.0: 10, 0.8: 5, 0.4: 9}[ratio] <= len(history) <= 16
    assert shortfall is not None
    assert not any(was_brief)
    reserve = limit.reserve(ratio, stale=len(history) - 1)
    assert bench.deadline == limit.deadline - (max(0.0, reserve) if is_repeated else reserve)
    proof = limit.in_haste.proof_seconds(1) if ratio == 1 else limit.proof_seconds(1, ratio)
    assert clock.now < limit.ends - proof + 2.0


def test_a_machine_that_got_busy_leaves_the_search_less_time_and_the_proof_more(clock: Clock) -> None:
    quiet, bench = budget(60, 0.5), SimpleNamespace(floats=SimpleNamespace(seconds=1.0))
    fast, other = (Proposal("cut", Placement.of([Edge("x", "n", place)])) for place in (0, 1))
    first = Trial(1, fast, Placement(), Measurement((1.0,) * 12, (0.5,) * 12))
    later = Trial(2, other, fast.placement, Measurement((1.5,) * 12, (1.6,) * 12))
    histories = [], [first], [first, later]
    assert [slowdown(one, ratios_to_float(one, Plan()), bench) for one in histories] == [1.0, 1.0, 3.0]
    assert quiet.slowed(3.0).proof_seconds(1) == pytest.approx(3 * quiet.proof_seconds(1))


def test_a_run_that_goes_on_says_again_that_calibration_was_cut_short(model: Path, workers: Workers) -> None:
    slow_run(model, workers, 0.2, 20.0)
    _, notes = slow_run(model, workers, 0.2, 60.0)
    told = [note for note in notes.notes if "`restart` with more time calibrates anew" in note]
    assert [note.split(":")[0] for note in told] == ["`time_budget` has no room to calibrate on all samples"]
