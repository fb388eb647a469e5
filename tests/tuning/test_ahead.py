"""Builds ahead of time: which are made, what a run makes of them, and what becomes of those that nobody takes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.ahead import Ahead, Need
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.run import prepared
from qdqtune.tuning.settings import Settings
from qdqtune.types import Failure
from runs import settings
from workers import Build, Workers

ASIDE = EngineSpec("fake", {"builds_aside": 2, "noise": 0.01})


def cut(model: Path, folder: str, engine: EngineSpec = ASIDE) -> Settings:
    return settings(model, output_dir=model.parent / folder, mode="cut", builds=6, engine=engine)


@pytest.mark.parametrize("mode", ["cut", "region"])
def test_a_run_finds_the_same_from_builds_that_two_processes_make_at_once(
    mode: Literal["cut", "region"], model: Path, workers: Workers
) -> None:
    alone = tune(replace(cut(model, "alone", EngineSpec("fake", {"noise": 0.01})), mode=mode))
    needed, here = Counter(map(which, workers.builds)), threading.get_ident()
    aside, both = itertools.count(), threading.Barrier(2, timeout=60)
    workers.builds.clear()

    def refused(_: Build) -> None:
        if threading.get_ident() != here and next(aside) < 2:
            both.wait()  # the first build that is made beside others waits for one beside it

    workers.refused = refused
    found = tune(replace(cut(model, "aside"), mode=mode))
    assert next(aside) >= needed.total() / 3
    assert Counter(map(which, workers.builds)) >= needed  # and some for nothing
    assert found.history == alone.history
    assert (found.shipped, found.placement, found.ratio) == (alone.shipped, alone.placement, alone.ratio)


def test_nothing_is_built_ahead_of_a_model_that_leaves_no_room_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtune.tuning.run.LARGE", 1)
    with prepared(cut(model, "large"), Silent()) as ready:
        assert ready.runner.ahead.count == 0


def which(build: Build) -> str:
    """The file that is built, by name: in the end all lie in other folders."""
    return build.path.name


def test_what_a_builder_says_counts_and_what_it_was_short_of_is_tried_alone(tmp_path: Path) -> None:
    said = {"refused": Failure("build", "no kernel"), "short": Failure("resources", "out of memory"), "good": 2.5}

    def builder(path: Path, log: Path, plan: Path) -> float | Failure:
        log.write_text(path.name)
        if path.name == "lost":
            raise EngineUnavailable("no such process")
        return said[path.name]  # type: ignore[return-value]

    ahead = Ahead(tmp_path, [builder])
    names = ("refused", "short", "lost", "good", "good")
    for name in names:
        ahead.begin(Path(name))
    begun(ahead, 0)
    taken = {name: ahead.take(Path(name), tmp_path / name, builder) for name in sorted(set(names))}
    assert taken == {"good": (tmp_path / "4.plan", 2.5), "lost": None, "short": None, "refused": said["refused"]}
    assert (tmp_path / "good").read_text() == "good"
    assert ahead.take(Path("good"), tmp_path / "good", builder) is None


def begun(ahead: Ahead, waiting: int) -> None:
    """Return when builders have begun all builds but so many."""
    while sum(not job.is_begun for job in ahead._jobs.values()) > waiting:
        pass


def test_the_most_urgent_build_is_begun_first_and_who_waits_makes_another_that_is_as_urgent(tmp_path: Path) -> None:
    made: list[str] = []
    go = threading.Event()

    def builder(path: Path, log: Path, plan: Path) -> float:
        go.wait(60)
        made.append(path.name)
        return 0.0

    def here(path: Path, log: Path, plan: Path) -> float:
        made.append(f"{path.name} here")
        go.set()
        return 0.0

    ahead = Ahead(tmp_path, [builder])
    ahead.begin(Path("first"))
    begun(ahead, 0)
    ahead.begin(Path("best"), "final_0", Need.BEST)
    ahead.begin(Path("given"), "final_0", Need.PROOF)
    ahead.begin(Path("likely"), need=Need.NEXT)
    ahead.begin(Path("unlikely"), need=Need.BEST)
    ahead.begin(Path("asked for"), need=Need.NEXT)
    ahead.begin(Path("asked for"))
    assert ahead.take(Path("unlikely"), tmp_path / "trial_001.log", here) is None  # nobody has begun it
    assert ahead.take(Path("best"), tmp_path / "final_1.log", here) is None  # another one
    assert ahead.take(Path("first"), tmp_path / "trial_002.log", here) == (tmp_path / "1.plan", 0.0)
    begun(ahead, 0)
    ahead.close()
    assert made == ["asked for here", "first", "likely", "given", "best"]


def test_builds_that_nobody_takes_end_with_their_processes_and_are_told(tmp_path: Path, model: Path) -> None:
    told: list[str] = []
    spec = EngineSpec("fake", {"build_seconds": 600})
    with Runner(spec, log_dir=tmp_path / "logs") as runner, Runner(spec, log_dir=tmp_path / "builder") as builder:
        runner.ahead = Ahead(tmp_path, [builder.compile], told.append)
        for name in ("begun", "waiting", "withdrawn"):
            runner.ahead.begin(model, name, Need.PROOF if name == "withdrawn" else Need.NEXT)
        runner.ahead.withdraw(Need.PROOF)
        while builder._worker is None:
            pass
        begun(runner.ahead, 1)
        process = builder._worker._process.pid  # type: ignore[attr-defined]
        runner.ahead.close()
        assert builder._worker is None
        with pytest.raises(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    assert told == ["1 build made ahead of time for nothing"]
