"""Whole runs on a simulated machine, with faults anywhere: `make simulate` plays many more.

Hypothesis draws scenarios, and makes one that fails smaller. `play` it to see it again, or add its seed to `KEPT`.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.machine import Fault
from simulation.many import IN_MEMORY
from simulation.scenario import Scenario, Stage, World, drawn, play, scenario_of

EXAMPLES = 7
"""Scenarios of each world in every run of the tests: always the same."""

WORLDS = {
    "cut": World("cut", "asymmetric", "usual", noise=2),
    "region": World("region", workers=2, asks="function"),
    "subgraph": World("subgraph", "refusing", asks="metric"),
    "front": World("front", "without times", noise=1, asks="scores"),
    "little time": World("subgraph", "asymmetric", asks="little time"),
}


def kept(world: World, *faults: Fault, **more: Any) -> Scenario:
    """One process meets these faults."""
    return Scenario(world, (faults,), **more)


KEPT = {
    "the list of files is half written when the power goes": kept(World("cut"), Fault("write", "power", 7), seed=1),
    "the list of files is there, and the power goes later": kept(World("cut"), Fault("write", "power", 130)),
    "a temporary folder is killed before it is marked": kept(World("region"), Fault("write", "kill", 24)),
    "no process can be started": kept(World("region"), Fault("start", "no process", 2, 2)),
    "interrupted while a process starts": kept(World("cut", "refusing"), Fault("start", "interrupt", 1)),
    "no room for noise that is being measured": kept(World("front", "refusing"), Fault("message", "no room", 42, 3)),
    "workers are lost while noise is measured": kept(
        World("subgraph", "asymmetric", noise=2), Fault("build", "lost", 17, 10**9)
    ),
    "no memory during calibration": kept(World("subgraph"), Fault("message", "no memory", 17)),
    "no memory to run the float model again": Scenario(
        World("region", noise=1, asks="limits"),
        ((Fault("message", "silent", 14, 2),), (Fault("message", "no memory", 14, 10**9),)),
    ),
    "the float model is late for a metric": Scenario(
        World("region", "refusing", noise=3, asks="metric"),
        ((Fault("message", "cancel", 9),), (Fault("message", "delay", 16, 3),)),
        seed=41200,
    ),
    "no memory for rounds of a proof before another file's metric was asked for": kept(
        World("subgraph", "plain", "minmax", workers=2, asks="function"), Fault("rounds", "no memory", 6), seed=5085
    ),
    "no room for the layers of a point of a front": kept(World("front", noise=1), Fault("message", "no room", 76)),
    "no room for the layers of the float model": kept(
        World("subgraph", "refusing", noise=3), Fault("message", "no room", 16)
    ),
    "each time that rounds are timed, and no time is left": kept(
        World("cut", noise=1, asks="little time"), Fault("rounds", "lost", 2, 10**9)
    ),
    "a search that lacked memory has timed what becomes a point of a front": kept(
        World("front", asks="scores"), Fault("message", "no memory", 103), repeats=True
    ),
    "a front that lacked memory has timed what a search proposes": kept(
        World("front", workers=2, asks="function"), Fault("message", "no memory", 86)
    ),
    "a race of several is lost when no time is left to race each alone": kept(
        World("front", "without times", "usual", asks="little time"), Fault("rounds", "lost", 2, 10**9)
    ),
    "no room for temporary folders": kept(World("cut", "refusing"), Fault("write", "full", 168, 10**9)),
}
"""What the simulation has found, with faults where they have failed."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    gc.collect()
    gc.freeze()
    gc.disable()  # or it walks through all of the libraries again and again
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Stage(Path(folder))
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("world", WORLDS)
def test_whatever_fails_a_run_ends_as_if_nothing_had_happened(stage: Stage, world: str) -> None:
    whole = stage.reference(WORLDS[world])

    @settings(max_examples=EXAMPLES, derandomize=True, database=None)
    @given(st.randoms(use_true_random=False))
    def plays(random) -> None:
        found = play(drawn(random, stage.reference, WORLDS[world]), stage)
        assert not found.wrong, f"{found.scenario}\n" + "\n".join(found.wrong)

    assert whole.events["write"] > 100
    plays()
    gc.collect()


@pytest.mark.parametrize("what", KEPT)
def test_what_was_found(stage: Stage, what: str) -> None:
    found = play(KEPT[what], stage)
    assert not found.wrong, "\n".join(found.wrong)
    assert found.happened


def test_a_seed_gives_the_same_run_again(stage: Stage) -> None:
    stage.tells = True
    first, second = (play(scenario_of(7, stage.reference), stage) for _ in range(2))
    assert (first.scenario, first.happened, first.ends) == (second.scenario, second.happened, second.ends)
    assert [text.splitlines()[-1] for text in first.told] == [text.splitlines()[-1] for text in second.told]
