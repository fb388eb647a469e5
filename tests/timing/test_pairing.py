"""Rounds on the engine: which builds are made and unloaded, and where rounds are taken."""

from pathlib import Path
from typing import Any, cast

import pytest

from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineRefused, Failure
from qdqtune.timing.pairing import compare_builds, fresh_builds
from qdqtune.timing.ratios import Plan
from qdqtune.types import Measurement

A, B = Path("a.onnx"), Path("b.onnx")


class Engine:
    """Stands in for the runner: builds of b take half the time of others, and some files are refused."""

    def __init__(self, *refused: Path) -> None:
        self.refused, self.events, self.asked = refused, list[str](), list[tuple[int, int, int]]()

    def load(self, path: Path, log_name: str, *, fresh: bool) -> Handle:
        self.events.append(f"load {log_name}")
        if path in self.refused:
            raise EngineRefused(Failure("build", "no"))
        return Handle(path, len(self.events), 0.0)

    def unload(self, handle: Handle) -> None:
        self.events.append(f"unload {handle.path.stem}")

    def rounds(self, a: Handle, b: Handle, count: int, *, seed: int, first_round: int, **_: Any) -> Measurement:
        self.asked.append((seed, first_round, count))
        return Measurement(*((0.5 if handle.path == B else 1.0,) * count for handle in (a, b)))


def test_b_is_built_first_and_what_was_built_is_unloaded() -> None:
    engine = Engine()
    with fresh_builds(cast(Runner, engine), A, B, "final_0") as pair:
        assert [handle.path for handle in pair] == [A, B]
    assert engine.events == ["load final_0_b", "load final_0_a", "unload a", "unload b"]
    with (
        pytest.raises(EngineRefused, match="no"),
        fresh_builds(cast(Runner, engine := Engine(A)), A, B, "x"),
    ):
        pass
    assert engine.events == ["load x_b", "load x_a", "unload b"]


def test_a_comparison_goes_on_where_the_look_before_it_ended() -> None:
    engine = Engine()
    found = compare_builds(
        cast(Runner, engine), Handle(A, 0, 0.0), Handle(B, 1, 0.0), Plan((8, 12)), 7, lambda _: False
    )
    assert isinstance(found, Measurement)
    assert (found.a, found.b) == ((1.0,) * 12, (0.5,) * 12)
    assert engine.asked == [(7, 0, 8), (7, 8, 4)]
