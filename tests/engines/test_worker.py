"""The worker: orders of rounds, turns of workloads, and layers of the average call."""

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.memory import OUT_OF_RESOURCES
from qdqtune.engines.runner import as_workloads
from qdqtune.engines.worker import Model, Session, average_layers
from qdqtune.errors import EngineFailure
from qdqtune.types import Layer, Turn, Workload


class Scripted:
    """A model whose inferences take as long as its inputs say, times a factor; without inputs a second more with each
    turn of any model. `turns` are the names and the numbers of inferences of all models."""

    def __init__(self, name: str, turns: list[tuple[str, int]], factor: float = 1.0) -> None:
        self.name, self.turns, self.factor = name, turns, factor
        self.asked: list[tuple[float, int]] = []

    def time(self, inputs: Mapping[str, Any], runs: int) -> float:
        self.turns.append((self.name, runs))
        if not inputs:
            return self.factor + len(self.turns)
        self.asked.append((float(inputs["x"]), runs))
        return self.factor * float(inputs["x"])


def hold(session: Session, *models: Any) -> None:
    session._models = {number: Model(Path(), Path(), {None: model}) for number, model in enumerate(models)}


def scripted(*names: str) -> tuple[Session, list[tuple[str, int]]]:
    turns: list[tuple[str, int]] = []
    session = Session()
    session.open(EngineSpec("fake"))
    session.feed(as_workloads({}))
    hold(session, *(Scripted(name, turns) for name in names))
    return session, turns


def test_a_round_is_abba_or_baab_by_its_own_coin() -> None:
    session, turns = scripted("A", "B")
    samples = session.rounds((0, 1), 5, range(64), [Turn(7, 2, 0.01)], 3).pair(0, 1)
    assert turns[:2] == [("A", 3), ("B", 3)]
    assert {runs for _, runs in turns[2:]} == {7}
    orders = ["".join(name for name, _ in turns[i : i + 4]) for i in range(2, len(turns), 4)]
    assert set(orders) == {"ABBA", "BAAB"}
    assert 16 < orders.count("ABBA") < 48
    assert samples.a == samples.b  # a steady drift hits both sides alike

    later, later_slots = scripted("A", "B")
    later.rounds((0, 1), 5, range(10, 30), [Turn(7, 2, 0.01)], 0)
    assert ["".join(name for name, _ in later_slots[i : i + 4]) for i in range(0, 80, 4)] == orders[10:30]


def test_three_models_race_in_all_orders_and_back_again() -> None:
    session, turns = scripted("A", "B", "C")
    times = session.rounds((0, 1, 2), 5, range(60), [Turn(1, 2, 0.01)], 0)
    orders = ["".join(name for name, _ in turns[i : i + 6]) for i in range(0, len(turns), 6)]
    assert all(order[3:] == order[2::-1] for order in orders)
    assert len({order[:3] for order in orders}) == 6
    assert times.seconds[0] == times.seconds[1] == times.seconds[2], "a steady drift hits all alike"


def test_a_round_has_every_workload_in_its_part_of_a_slot() -> None:
    session = Session()
    session.open(EngineSpec("fake"))
    a, b = Scripted("A", [], 0.001), Scripted("B", [], 0.0005)
    hold(session, a, b)
    session.feed(as_workloads((Workload({"x": 1.0}, 3.0), Workload({"x": 10.0}, 1.0))))  # type: ignore[dict-item]
    turns = session.probe((0, 1), 0.02)
    assert turns == [Turn(10, 2, 0.001), Turn(1, 2, 0.01)]
    a.asked.clear()
    measured = session.rounds((0, 1), 5, range(3), turns, 2).pair(0, 1)
    assert a.asked == [(1.0, 2), (10.0, 2), *([(1.0, 1), (1.0, 10), (1.0, 10), (10.0, 1), (10.0, 1), (10.0, 1)] * 3)]
    assert measured.a == pytest.approx([0.00325] * 3)
    assert [(p.a, p.b) for p in measured.parts] == [((0.001,) * 3, (0.0005,) * 3), ((0.01,) * 3, (0.005,) * 3)]


def test_of_two_models_with_long_inferences_each_has_one_in_a_round() -> None:
    session = Session()
    session.open(EngineSpec("fake"))
    a, b = Scripted("A", [], 0.05), Scripted("B", [], 0.02)
    hold(session, a, b)
    session.feed(as_workloads({"x": 1.0}))  # type: ignore[dict-item]
    turns = session.probe((0, 1), 0.02)
    a.asked.clear()
    measured = session.rounds((0, 1), 5, range(8), turns, 2).pair(0, 1)
    assert a.asked == [(1.0, 2), *[(1.0, 1)] * 8]
    assert (measured.a, measured.b) == ((0.05,) * 8, (0.02,) * 8), "whichever comes first"


def layer(name: str, ms: float | None) -> Layer:
    return Layer(name, (name,), "FP32", ms, "compute")


def test_layers_have_the_times_of_the_average_call() -> None:
    mix = as_workloads((Workload({}, 0.75), Workload({}, 0.25)))
    same = average_layers(mix, [(layer("a", 1.0), layer("b", None)), (layer("a", 5.0), layer("b", None))])
    assert same == (replace(layer("a", 2.0), parts=(1.0, 5.0)), layer("b", None))
    other = average_layers(mix, [(layer("a", 1.0), layer("b", 1.0)), (layer("c", 6.0), layer("d", 12.0))])
    assert other == (layer("c", 6.0), layer("d", 12.0))


def test_a_file_that_cannot_be_written_is_a_failure_for_lack_of_resources() -> None:
    class Full(Session):
        def describe(self) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "candidate.log")

    good, error = Full().answer("describe")
    assert (good, type(error)) == (False, EngineFailure)
    assert str(error) == "the engine process cannot use candidate.log: No space left on device"
    assert OUT_OF_RESOURCES.search(str(error))
