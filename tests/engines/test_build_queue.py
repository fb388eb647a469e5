"""Builds made ahead of time: which are made, what a run makes of them, and what becomes of those that nobody takes."""

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from processes import until
from qdqtune.engines import EngineSpec
from qdqtune.engines.build_queue import BuildQueue, Urgency
from qdqtune.engines.execution import Checked
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.run import prepared
from qdqtune.tuning.settings import Settings
from qdqtune.types import Failure
from runs import settings
from workers import Build

ASIDE = EngineSpec("fake", {"builds_aside": 2, "noise": 0.01})


def cut(model: Path, folder: str, engine: EngineSpec = ASIDE) -> Settings:
    return settings(model, output_dir=model.parent / folder, mode="cut", builds=6, engine=engine)


@pytest.mark.parametrize("mode", ["cut", "region"])
def test_a_run_finds_the_same_from_builds_that_two_processes_make_at_once(mode, model, workers):
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


def test_builds_of_a_large_model_are_not_made_ahead(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.engines.memory.LARGE_MODEL", 1)
    with prepared(cut(model, "large"), Silent()) as ready:
        assert ready.runner.build_queue.builders == 0


def which(build: Build) -> str:
    """The file that is built, by name: in the end all lie in other folders."""
    return build.path.name


class Aside(Checked):
    """A builder of which only this is known."""

    def __init__(self, compile: Callable[[Path, Path, Path], float | Failure]) -> None:
        super().__init__()
        self.compile = compile


def test_refusals_of_a_builder_count_and_lack_of_memory_does_not(tmp_path: Path) -> None:
    said = {"refused": Failure("build", "no kernel"), "short": Failure("resources", "out of memory"), "good": 2.5}

    def builder(path: Path, log: Path, plan: Path) -> float | Failure:
        log.write_text(path.name)
        if path.name == "lost":
            raise EngineUnavailable("no such process")
        return said[path.name]  # type: ignore[return-value]

    queue = BuildQueue(tmp_path, [Aside(builder)])
    names = ("refused", "short", "lost", "good", "good")
    for name in names:
        queue.add(Path(name))
    begun(queue, 0)
    taken = {name: queue.take(Path(name), tmp_path / name, Aside(builder)) for name in sorted(set(names))}
    assert taken == {"good": (tmp_path / "4.plan", 2.5), "lost": None, "short": None, "refused": said["refused"]}
    assert (tmp_path / "good").read_text() == "good"
    assert queue.take(Path("good"), tmp_path / "good", Aside(builder)) is None


def begun(queue: BuildQueue, waiting: int) -> None:
    """Return when builders have begun all builds but so many."""
    until(lambda: len(queue._pool._waiting) <= waiting)


def test_the_most_urgent_build_begins_first_and_a_waiting_runner_makes_urgent_ones(tmp_path: Path) -> None:
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

    queue = BuildQueue(tmp_path, [Aside(builder)])
    queue.add(Path("first"))
    begun(queue, 0)
    queue.add(Path("best"), "final_0", Urgency.BEST)
    queue.add(Path("given"), "final_0", Urgency.PROOF)
    queue.add(Path("likely"), urgency=Urgency.NEXT)
    queue.add(Path("unlikely"), urgency=Urgency.BEST)
    queue.add(Path("asked for"), urgency=Urgency.NEXT)
    queue.add(Path("asked for"))
    assert queue.take(Path("unlikely"), tmp_path / "trial_001.log", Aside(here)) is None  # nobody has begun it
    assert queue.take(Path("best"), tmp_path / "final_1.log", Aside(here)) is None  # another one
    assert queue.take(Path("first"), tmp_path / "trial_002.log", Aside(here)) == (tmp_path / "1.plan", 0.0)
    begun(queue, 0)
    queue.close()
    assert made == ["asked for here", "first", "likely", "given", "best"]


def test_unused_builds_are_cancelled_and_counted_in_a_message(tmp_path: Path, model: Path) -> None:
    told: list[str] = []
    spec = EngineSpec("fake", {"build_seconds": 600})
    with Runner(spec, log_dir=tmp_path / "logs") as runner, Runner(spec, log_dir=tmp_path / "builder") as builder:
        runner.build_queue = BuildQueue(tmp_path, [builder], told.append)
        for name in ("begun", "waiting", "withdrawn"):
            runner.build_queue.add(model, name, Urgency.PROOF if name == "withdrawn" else Urgency.NEXT)
        runner.build_queue.withdraw(Urgency.PROOF)
        while builder._connection.worker is None:
            pass
        begun(runner.build_queue, 1)
        process = builder._connection.worker._process.pid  # type: ignore[attr-defined]
        runner.build_queue.close()
        assert builder._connection.worker is None
        with pytest.raises(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    assert told == ["1 build made ahead of time for nothing"]
