"""Builds ahead of time: which are made, what a run makes of them, and what becomes of those that nobody takes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.ahead import Ahead
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.types import Failure
from runs import settings
from workers import Build, Workers

ASIDE = EngineSpec("fake", {"builds_aside": 2, "noise": 0.01})


def cut(model: Path, folder: str, engine: EngineSpec = ASIDE) -> Settings:
    return settings(model, output_dir=model.parent / folder, mode="cut", builds=6, engine=engine)


def test_a_run_finds_the_same_from_builds_that_two_processes_make_at_once(model: Path, workers: Workers) -> None:
    alone = tune(cut(model, "alone", EngineSpec("fake", {"noise": 0.01})))
    count, here = len(workers.builds), threading.get_ident()
    aside, both = itertools.count(), threading.Barrier(2, timeout=60)

    def refused(_: Build) -> None:
        if threading.get_ident() != here and next(aside) < 2:
            both.wait()  # the first build that is made beside others waits for one beside it

    workers.refused = refused
    found = tune(cut(model, "aside"))
    assert next(aside) >= count / 2
    assert len(workers.builds) == 2 * count  # none for nothing
    assert found.history == alone.history
    assert (found.shipped, found.placement, found.ratio) == (alone.shipped, alone.placement, alone.ratio)


def test_what_a_builder_says_counts_and_what_it_was_short_of_is_tried_alone(tmp_path: Path) -> None:
    said = {"refused": Failure("build", "no kernel"), "short": Failure("resources", "out of memory"), "good": 2.5}

    def builder(path: Path, log: Path, plan: Path) -> float | Failure:
        if path.name == "lost":
            raise EngineUnavailable("no such process")
        return said[path.name]  # type: ignore[return-value]

    ahead = Ahead(tmp_path, [builder])
    for name in ("refused", "short", "lost", "good", "good"):
        ahead.begin(Path(name), tmp_path / f"{name}.log")
    taken = {name: ahead.take(tmp_path / f"{name}.log") for name in ("good", "lost", "short", "refused")}
    plan = tmp_path / "good.plan"
    assert taken == {"good": (plan, 2.5), "lost": None, "short": None, "refused": said["refused"]}
    assert ahead.take(tmp_path / "good.log") is None


def test_builds_that_nobody_takes_end_with_their_processes_and_are_told(tmp_path: Path, model: Path) -> None:
    told: list[str] = []
    spec = EngineSpec("fake", {"build_seconds": 600})
    with Runner(spec, log_dir=tmp_path / "logs") as runner, Runner(spec, log_dir=tmp_path / "builder") as builder:
        runner.ahead = Ahead(tmp_path, [builder.compile], told.append)
        for name in ("begun", "waiting"):
            runner.begin(model, name)
        while builder._worker is None:
            pass
        process = builder._worker._process.pid  # type: ignore[attr-defined]
        runner.ahead.close()
        assert builder._worker is None
        with pytest.raises(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    assert told == ["1 build made ahead of time for nothing"]
