"""Races of files against an engine whose builds and rounds are scripted."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineRefused, Failure
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import file_race
from qdqtune.tuning.contexts import View
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.store import Store
from qdqtune.types import Times
from runs import hopeless, mixed, write
from scripted import Script

PLAN = Plan((12, 20))
FIRST_AGAINST_SECOND = [(0, 1)]


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


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write(hopeless(), tmp_path, "slow"), write(mixed(), tmp_path, "fast")]


def racer(runner: Script, **more: Any) -> Racer:
    return Racer(cast(Runner, runner), PLAN, 7, (View(None, (1.0,)),), **{"builds": 2, **more})


def twice_as_fast(file: str, _: int) -> float:
    return 2.0 if file.startswith("slow") else 1.0


def test_two_builds_of_each_file_race_and_are_freed(files: list[Path]) -> None:
    runner = Script(twice_as_fast)
    race = racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert race.builds == 4
    assert sorted(runner.logs) == ["proof_0_fast", "proof_0_slow", "proof_1_fast", "proof_1_slow"]
    assert runner.held == [4], "one look at all of them side by side"
    assert not runner.present
    (compared,) = race.compared(0, 1)
    assert (compared.ratio.verdict, compared.ratio.median) == ("faster", pytest.approx(0.5))


def test_a_file_against_itself_is_never_faster(files: list[Path]) -> None:
    runner = Script(lambda _file, _build: 1.0)
    (compared,) = racer(runner).race([files[0], files[0]], FIRST_AGAINST_SECOND, "same").compared(0, 1)
    assert compared.ratio.verdict == "undecided"
    assert set(runner.logs) == {"same_0_slow_0", "same_1_slow_0", "same_0_slow_1", "same_1_slow_1"}


def test_builds_that_differ_as_much_as_the_files_are_followed_by_more(files: list[Path]) -> None:
    def uneven(file: str, build: int) -> float:
        return twice_as_fast(file, build) * (0.6 if build % 3 else 1.4)

    runner = Script(uneven)
    race = racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert race.builds > 4
    assert {log.split("_")[1] for log in runner.logs} >= {"0", "1", "2", "3"}
    assert race.builds == 16 or race.compared(0, 1)[0].ratio.verdict != "undecided"


def test_it_ends_where_time_lacks(files: list[Path]) -> None:
    runner = Script(lambda file, build: twice_as_fast(file, build) * (0.6 if build % 3 else 1.4))
    assert racer(runner, lacks=lambda _: True).race(files, FIRST_AGAINST_SECOND, "proof").builds == 4


def test_large_files_have_one_build_at_a_time(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_race, "SIDE_BY_SIDE", 1)
    runner = Script(twice_as_fast)
    race = racer(runner).race(files, FIRST_AGAINST_SECOND, "proof")
    assert runner.held == [2, 2]
    assert (len(race.blocks), race.builds) == (2, 4)
    assert race.compared(0, 1)[0].ratio.verdict == "faster"


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


@pytest.mark.parametrize(("stage", "lacks", "tries"), [("crash", False, 3), ("crash", True, 1), ("build", False, 1)])
def test_only_a_transient_failure_is_tried_again_while_there_is_time(
    files: list[Path], stage: Any, *, lacks: bool, tries: int
) -> None:
    runner = Script(twice_as_fast, failures=[Failure(stage, "gone")] * 2)
    race = racer(runner, lacks=lambda _: lacks)
    if tries == 3:
        assert race.race(files, FIRST_AGAINST_SECOND, "proof").builds == 4
    else:
        with pytest.raises(EngineRefused, match="gone"):
            race.race(files, FIRST_AGAINST_SECOND, "proof")
    assert len(runner.held) == tries
    assert not runner.present


def test_a_race_that_ended_early_for_want_of_time_is_run_again_by_the_next_session(
    files: list[Path], tmp_path: Path
) -> None:
    for lacks, rounds in ((True, 12), (False, 20)):
        with Store(tmp_path / "state.yaml", {"model": "m"}) as store:
            script = Unsteady(twice_as_fast)
            race = racer(script, store=store, lacks=lambda _, lacks=lacks: lacks).race(files, FIRST_AGAINST_SECOND, "x")
            assert script.logs
            assert max(len(one) for one in race.blocks[0].times.seconds) == rounds


def test_rounds_of_another_plan_are_not_taken_for_those_of_this_one(files: list[Path], tmp_path: Path) -> None:
    with Store(tmp_path / "state.yaml", {"model": "m"}) as store:
        racer(Script(twice_as_fast), store=store).race(files, FIRST_AGAINST_SECOND, "proof")
        script = Script(twice_as_fast)
        replace(racer(script, store=store), plan=Plan((16,))).race(files, FIRST_AGAINST_SECOND, "proof")
        assert script.logs


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
