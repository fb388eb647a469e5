"""Candidates, bench and proof against an engine whose every build and round is scripted."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models import feeds, ranges
from qdqtune.engines import formats
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BaselineFailed, EngineFailure, EngineRefused, EngineUnavailable, Failure
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.system.writing import Scratch
from qdqtune.timing.ratios import Plan, judge
from qdqtune.tuning import file_race
from qdqtune.tuning.bench import UNTIMED, Bench, Candidates, Conditions, TrialWorker, profiled_runs
from qdqtune.tuning.contexts import View
from qdqtune.tuning.file_race import Racer, Tail
from qdqtune.tuning.store import Store, job_of
from qdqtune.types import Measurement, Mix, Placement, Proposal, Times, Trial, Turn, Workload
from refusals import or_raise
from runs import hopeless, mixed, write

FLOAT = Placement()
SAMPLES = feeds(mixed(), 2)


@dataclass
class Script:
    """Stands in for the runner. `speed(file, build)` is what one build of a file takes, in seconds; calls of `rounds`
    fail with `failures`, one after the other, and all in which a file with the stem `broken` runs."""

    speed: Callable[[str, int], float] = lambda _file, _build: 1.0
    refused: Callable[[str, int], Failure | None] = lambda _file, _build: None
    spoiled: float | Failure = 0.01
    """The error of the outputs of all builds but the first, or the failure in their place."""
    failures: list[Failure | None] = field(default_factory=list)
    broken: str = ""
    builds: list[Path] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    present: set[Handle] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    """How many builds ran in each call of `rounds`."""
    rounds_taken: int = 0
    memory = None
    mix: Mix = (Workload({}),)
    starts_processes = False
    start_seconds = 0.0

    def load(self, path: Path, log_name: str = "", *, fresh: bool = False) -> Handle:
        kept = [handle for handle in self.present if handle.path == path]
        if kept and not fresh:
            return kept[0]
        handle = Handle(path, len(self.builds), path, 0.0)
        self.builds.append(path)
        self.logs.append(log_name)
        or_raise(self.refused(path.stem, handle.build))
        self.present.add(handle)
        return handle

    loaded = Runner.loaded

    def unload(self, handle: Handle) -> None:
        self.present.remove(handle)

    def outputs(self, handle: Handle, samples: Any) -> list[dict[str, Any]]:
        assert handle in self.present
        error = self.spoiled if len(self.builds) > 1 else 0.0
        or_raise(error)
        return [{"y": np.array([1.0, -1.0]) + error} for _ in samples]

    def turns(self, handles: Sequence[Handle], _: float) -> list[Turn]:
        assert set(handles) <= self.present
        return [Turn(1, 1, 1.0)]

    def rounds(self, handles: Sequence[Handle], numbers: range, **_: Any) -> Times:
        assert set(handles) <= self.present
        self.held.append(len(handles))
        self.rounds_taken += len(numbers)
        or_raise(Failure("run", "no") if self.broken in [one.path.stem for one in handles] else None)
        or_raise(self.failures.pop(0) if self.failures else None)
        return Times(tuple(((self.speed(one.path.stem, one.build),),) * len(numbers) for one in handles))

    def timed(self, handle: Handle, count: int, _: float) -> Times:
        return self.rounds([handle], range(count))


@dataclass
class Setup:
    runner: Script
    candidates: Candidates
    store: Store
    bench: Bench
    placements: list[Placement]

    def measure(self, number: int, candidate: Placement, against: Placement = FLOAT) -> Any:
        return next(self.bench.measured(number, [Proposal("test", candidate)], against))


Open = Callable[..., Setup]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Makes benches over one state file; the earlier one is closed first."""
    model = mixed()
    possible = possible_edges(model, ranges(model))
    placements = list(start_placements.placements(model, possible).values())
    with ExitStack() as stack:

        def make(plan: Plan = Plan(turn_seconds=0.0), **script: Any) -> Setup:  # noqa: B008 (it is frozen)
            stack.close()
            runner = Script(**script)
            store = stack.enter_context(Store(tmp_path / "state.yaml", {"model": "m"}))
            inserter = Inserter(model, ranges(model), formats.numeric_format("fake", "int8"))
            folder = stack.enter_context(Scratch(tmp_path))
            candidates = Candidates(inserter, stack.enter_context(ConstantFile(folder / CONSTANTS)))
            conditions = Conditions(plan, SAMPLES, seed=7, model_bytes=1)
            worker = TrialWorker(runner, candidates, conditions)
            bench = Bench(WorkerPool([worker]), store, conditions)
            return Setup(runner, candidates, store, bench, placements)

        yield make


def by_digest(speeds: dict[str, float]) -> Callable[[str, int], float]:
    return lambda file, _build: speeds.get(file, 1.0)


def test_a_trial_holds_what_was_compared_and_is_stored(opened: Open) -> None:
    setup = opened()
    candidate = setup.placements[0]
    trial, was_known = setup.measure(3, candidate)
    assert (trial.number, trial.placement, trial.against, was_known) == (3, candidate, FLOAT, False)
    assert trial.result == Measurement((1.0,) * 12, (1.0,) * 12)
    assert trial.sqnr_db == pytest.approx(40)
    assert not trial.accepted
    again, was_known = setup.measure(3, candidate)
    assert (again, was_known) == (trial, True)
    assert setup.runner.rounds_taken == 12  # one look
    one, other = setup.placements[:2]
    assert len({job_of(Trial(0, Proposal("", p), a, UNTIMED)) for p in (one, other) for a in (FLOAT, one)}) == 4
    _, was_known = setup.measure(4, one, other)
    assert not was_known, "against another opponent it is another job"


def test_a_trial_with_fewer_rounds_than_a_first_look_is_measured_again(opened: Open) -> None:
    """Time was short."""
    first = opened(plan=Plan((7,), 0.02, turn_seconds=0.0))
    few, _ = first.measure(1, first.placements[0])
    assert len(few.result.a) == 7
    later = opened()
    enough, was_known = later.measure(1, later.placements[0])
    assert not was_known
    assert len(enough.result.a) >= 12


def test_a_file_that_another_worker_has_deleted_is_written_again(opened: Open) -> None:
    """A worker that was lost still holds builds when it goes on alone; its engine builds them again."""
    setup = opened()
    how, placement = (setup.candidates, Conditions(Plan(), SAMPLES, 7)), setup.placements[0]
    lost, other = (TrialWorker(Script(), *how) for _ in range(2))
    held = lost.load(placement, "metric")
    other.load(placement, "trial")
    other.drop(placement)
    assert not held.path.exists()
    assert lost.load(placement, "metric") == held
    assert held.path.exists()


def second_build(stage: Any) -> dict[str, Any]:
    return {"refused": lambda _path, build: Failure(stage, "no", "log") if build == 1 else None}


@pytest.mark.parametrize(
    ("script", "stage", "is_kept"),
    [
        (second_build("build"), "build", True),
        ({"spoiled": Failure("run", "bad shape")}, "run", True),
        ({"spoiled": float("nan")}, "output", True),
        ({"spoiled": float("inf")}, "output", True),
        *((second_build(stage), stage, False) for stage in ("crash", "timeout", "resources")),
    ],
)
def test_a_failure_is_a_reasoned_result_that_the_next_run_knows_unless_it_is_transient(opened, script, stage, is_kept):
    setup = opened(**script)
    trial, _ = setup.measure(1, setup.placements[0])
    assert trial.result.stage == stage
    assert judge(trial, Plan()) is None
    assert {h.path.stem for h in setup.runner.present} == {FLOAT.digest}
    assert setup.measure(1, setup.placements[0]) == (trial, True)
    later = opened()
    again, was_known = later.measure(1, later.placements[0])
    assert (was_known, again == trial) == (is_kept, is_kept)
    assert isinstance(later.measure(2, later.placements[1])[0].result, Measurement)


def test_a_candidate_is_not_blamed_when_its_opponent_fails(opened: Open) -> None:
    setup = opened()
    best, candidate = setup.placements[:2]
    setup = opened(refused=lambda file, _build: Failure("crash", "gone") if file == best.digest else None)
    with pytest.raises(EngineFailure, match="gone"):
        setup.measure(1, candidate, best)
    later = opened()
    assert not later.measure(1, candidate, best)[1]


def test_a_float_model_that_fails_or_has_nan_outputs_ends_the_run(opened: Open) -> None:
    with pytest.raises(BaselineFailed, match="unsupported operator Foo"):
        assert opened(refused=lambda *_: Failure("build", "unsupported operator Foo")).bench.floats
    setup = opened()
    setup.runner.__dict__["outputs"] = lambda *_: [{"y": np.array([np.nan])}]
    with pytest.raises(BaselineFailed, match="NaN"):
        assert setup.bench.floats


def test_candidates_race_together_and_leave_once_they_are_decided(opened: Open) -> None:
    setup = opened()
    slower, faster, refused = setup.placements[:3]
    setup = opened(
        speed=by_digest({slower.digest: 1.1, faster.digest: 0.9}),
        refused=lambda file, _build: Failure("build", "no kernel") if file == refused.digest else None,
    )
    assert setup.bench.floats
    setup.runner.rounds_taken = 0
    proposals = [Proposal("test", placement) for placement in (slower, refused, faster)]
    trials = [trial for trial, _ in setup.bench.measured(1, proposals, FLOAT)]
    assert [trial.number for trial in trials] == [1, 2, 3]
    assert [isinstance(trial.result, Failure) for trial in trials] == [False, True, False]
    assert [trial.result.b[0] for trial in trials if isinstance(trial.result, Measurement)] == [1.1, 0.9]
    assert setup.runner.rounds_taken == 12, "one look at all of them"
    assert {h.path.stem for h in setup.runner.present} == {FLOAT.digest, faster.digest}
    assert slower.digest not in {p.stem for p in setup.candidates.folder.glob("*.onnx")}


def test_candidates_that_are_not_built_at_the_deadline_are_left_out(opened: Open) -> None:
    setup = opened()
    assert setup.bench.floats
    setup.bench.deadline = time.monotonic()
    proposals = [Proposal("test", placement, wants_layers=True) for placement in setup.placements[:3]]
    (trial,) = (trial for trial, _ in setup.bench.measured(1, proposals, FLOAT))
    assert (trial.number, trial.placement, trial.layers) == (1, setup.placements[0], None)
    assert len(setup.store.values("trial:", Trial)) == 1
    setup.bench.deadline = None
    proposals = [replace(proposal, wants_layers=False) for proposal in proposals]
    assert [trial.number for trial, _ in setup.bench.measured(1, proposals, FLOAT)] == [1, 2, 3]


def test_where_a_race_fails_each_candidate_races_alone(opened: Open) -> None:
    setup = opened()
    good, bad = setup.placements[:2]
    setup = opened(broken=bad.digest)
    proposals = [Proposal("test", placement) for placement in (good, bad)]
    trials = [trial for trial, _ in setup.bench.measured(1, proposals, FLOAT)]
    assert [isinstance(trial.result, Failure) for trial in trials] == [False, True]


def test_candidates_that_do_not_fit_into_memory_together_are_built_and_stored_one_by_one(opened, monkeypatch):
    monkeypatch.setattr("qdqtune.tuning.bench.TOGETHER", 2)
    setup = opened(speed=lambda file, _: 1.0 if file == FLOAT.digest else 1.1)
    proposals = [Proposal("test", placement) for placement in setup.placements[:3]]
    with closing(setup.bench.measured(1, proposals, FLOAT)) as trials:
        for number, _ in enumerate(trials, 1):
            assert len(setup.runner.present) == 1, "all but the float model are freed"
            assert len(setup.store.values("trial:", Trial)) == number


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.0, 400), (5e-5, 400), (1e-3, 50), (4.1e-3, 13), (0.05, 10), (0.1, 5), (2.0, 4)]
)
def test_short_models_are_profiled_more_often_and_long_ones_less(seconds: float, runs: int) -> None:
    assert profiled_runs(seconds) == runs


def test_the_first_worker_goes_on_alone_even_if_it_was_lost() -> None:
    """On a cluster it finds a place as soon as the others end."""
    closed: list[int] = []
    first, second = (
        SimpleNamespace(runner=SimpleNamespace(close=partial(closed.append, number))) for number in range(2)
    )
    is_lost = Event()

    def work(worker: Any) -> None:
        if worker is first:
            is_lost.set()
            raise EngineUnavailable("its node is gone")
        assert is_lost.wait(60)

    pool = WorkerPool([first, second])
    bench = Bench(pool, None, None)
    assert len(list(pool.results([work, work]))) == 2
    assert [*pool] == [second]
    bench.stand_alone()
    assert closed == [1]
    assert bench._runner is first.runner


# Races of files against an engine whose builds and rounds are scripted
PLAN = Plan((12, 20))
FIRST_AGAINST_SECOND = [(0, 1)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write(hopeless(), tmp_path, "slow"), write(mixed(), tmp_path, "fast")]


def racer(runner: Script, **more: Any) -> Racer:
    return Racer(runner, PLAN, 7, (View(None, (1.0,)),), **{"builds": 2, **more})


def twice_as_fast(file: str, _: int) -> float:
    return 2.0 if file.startswith("slow") else 1.0


@pytest.mark.parametrize(("most", "builds"), [(file_race.SIDE_BY_SIDE, 2), (1, 1)])
def test_two_builds_of_each_file_race_and_are_freed_and_one_at_a_time_of_large_files(files, monkeypatch, most, builds):
    monkeypatch.setattr(file_race, "SIDE_BY_SIDE", most)
    runner = Script(twice_as_fast)
    race = racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert (len(race.blocks), race.builds) == (1, 2 * builds)
    assert sorted(runner.logs) == [f"proof_{n}_{name}" for n in range(builds) for name in ("fast", "slow")]
    assert runner.held == [2 * builds], "one look at all of them side by side"
    assert not runner.present
    (compared,) = race.compared(0, 1)
    assert (compared.ratio.verdict, compared.ratio.median) == ("faster", pytest.approx(0.5))


def test_builds_that_differ_as_much_as_the_files_are_followed_by_more(files: list[Path]) -> None:
    def uneven(file: str, build: int) -> float:
        return twice_as_fast(file, build) * (0.6 if build % 3 else 1.4)

    seeds: list[int] = []

    class Seeded(Script):
        def rounds(self, handles: Sequence[Handle], numbers: range, *, seed: int, **more: Any) -> Times:
            seeds.append(seed)
            return super().rounds(handles, numbers, **more)

    runner = Seeded(uneven)
    race = racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert race.builds > 4
    assert sorted(set(seeds)) == [*range(7, 7 + len(race.blocks))], "each block draws an order of its own"
    assert {log.split("_")[1] for log in runner.logs} >= {"0", "1", "2", "3"}
    assert race.builds == 16 or race.compared(0, 1)[0].ratio.verdict != "undecided"
    in_haste = racer(Script(uneven), lacks=lambda _: True)
    assert in_haste.race(files, FIRST_AGAINST_SECOND, "proof").builds == 4


def test_blocks_are_kept_by_the_content_of_the_files(files: list[Path], tmp_path: Path) -> None:
    with Store(tmp_path / "state.yaml", {"model": "m"}) as store:
        first = racer(Script(twice_as_fast), store=store).race(files, FIRST_AGAINST_SECOND, "proof")
        renamed = [path.rename(path.with_stem(f"{path.stem}_again")) for path in files]
        silent = Script(twice_as_fast)
        assert racer(silent, store=store).race(renamed, FIRST_AGAINST_SECOND, "proof") == first
        assert not silent.logs
        changed = [renamed[0], write(mixed(seed=1), tmp_path, "other")]
        other = Script(lambda *_: 1.0)
        racer(other, store=store).race(changed, FIRST_AGAINST_SECOND, "proof")
        assert len(other.logs) == 4
        replace(racer(silent, store=store), plan=Plan((16,))).race(renamed, FIRST_AGAINST_SECOND, "proof")
        assert silent.logs, "rounds of another plan"


def test_what_is_wide_is_made_narrower_in_the_session_that_has_time_for_it_and_not_again(files, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    class Slow(Script):
        def load(self, *arguments: Any, **more: Any) -> Handle:
            clock[0] += 10.0
            return super().load(*arguments, **more)

    for seconds, builds in ((10.0, 6), (1000.0, 48)):
        with Store(tmp_path / f"{seconds}.yaml", {"model": "m"}) as store:
            for is_again in (False, True):
                slow = Slow(lambda file, build: twice_as_fast(file, build) * (1 + 0.03 * (-1) ** build))
                wide = racer(slow, store=store, builds=3, precision_seconds=seconds)
                assert wide.race(files, FIRST_AGAINST_SECOND, "proof").builds == builds
                assert bool(slow.logs) is not is_again


@pytest.mark.parametrize(("stage", "lacks", "tries"), [("crash", False, 3), ("crash", True, 1), ("build", False, 1)])
def test_only_a_transient_failure_is_tried_again_while_there_is_time(files, stage, lacks, tries):
    runner = Script(twice_as_fast, failures=[Failure(stage, "gone")] * 2)
    race = racer(runner, lacks=lambda _: lacks)
    if tries == 3:
        assert race.race(files, FIRST_AGAINST_SECOND, "proof").builds == 4
    else:
        with pytest.raises(EngineRefused, match="gone"):
            race.race(files, FIRST_AGAINST_SECOND, "proof")
    assert len(runner.held) == tries
    assert not runner.present


def test_a_race_that_ended_early_for_want_of_time_is_run_again_by_the_next_session(files, tmp_path):
    class Unsteady(Script):
        """Rounds that the first look does not decide: each sixth is the other way round."""

        def rounds(self, handles: Sequence[Handle], numbers: range, **_: Any) -> Times:
            usual = {"slow": 1.0, "fast": 0.9}
            return Times(
                tuple(
                    tuple((usual[one.path.stem] if number % 6 else 1.0 / usual[one.path.stem],) for number in numbers)
                    for one in handles
                )
            )

    for lacks, rounds in ((True, 12), (False, 20)):
        with Store(tmp_path / "state.yaml", {"model": "m"}) as store:
            script = Unsteady(twice_as_fast)
            race = racer(script, store=store, lacks=lambda _, lacks=lacks: lacks).race(files, FIRST_AGAINST_SECOND, "x")
            assert script.logs
            assert max(len(one) for one in race.blocks[0].times.seconds) == rounds


def test_as_many_files_race_together_as_fit_into_memory(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = files
    for room, count in ((1, 1), (2 * one.stat().st_size + other.stat().st_size, 2)):
        monkeypatch.setattr(file_race, "MOST_BYTES", room)
        assert len(racer(Script(twice_as_fast)).together([one], [other, one, one])) == count


def test_the_file_that_does_not_run_alone_is_to_blame(files: list[Path]) -> None:
    runner = Script(twice_as_fast, broken="fast")
    with pytest.raises(EngineRefused):
        racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert racer(runner).refused(files) == {files[1]: Failure("run", "no")}
    assert not runner.present


def test_percentiles_are_those_of_single_inferences_weighted_by_the_calls_of_a_view(files, monkeypatch):
    seconds = np.array([[n / 1000, 1.0] for n in range(1, 101)])  # [inference, call]
    assert Tail.of(seconds, (1.0, 0.0)) == Tail(*map(pytest.approx, (50.0, 90.0, 99.0)))
    assert Tail.of(seconds, (0.5, 0.5)) == Tail(100.0, 1000.0, 1000.0)
    runner = Script(twice_as_fast)
    assert racer(runner).tails(files) == (), "100 inferences of a second take too long"
    monkeypatch.setattr(file_race, "SINGLES_SECONDS", 600.0)
    assert racer(runner).tails(files) == ((Tail(2000.0, 2000.0, 2000.0),), (Tail(1000.0, 1000.0, 1000.0),))
    assert runner.rounds_taken == 200
    assert racer(Script(broken="fast")).tails(files) == ()
    assert not runner.present
    runner = Script(twice_as_fast)
    runner.starts_processes = True  # in each turn
    assert racer(runner).tails(files) == ()
    assert not runner.builds


def test_a_winner_is_built_once_and_kept_loaded(opened: Open) -> None:
    setup = opened()
    winner = setup.placements[0]
    setup = opened(speed=by_digest({winner.digest: 0.5}))
    setup.measure(1, winner)
    assert [p.stem for p in setup.runner.builds] == [FLOAT.digest, winner.digest]
    assert {h.path.stem for h in setup.runner.present} == {FLOAT.digest, winner.digest}
    setup.bench.keep_only(winner)
    assert {h.path.stem for h in setup.runner.present} == {winner.digest}
    before = len(setup.runner.builds)
    setup.measure(2, setup.placements[1], winner)
    assert len(setup.runner.builds) == before + 1
