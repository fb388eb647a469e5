"""What is killed, too slow or short of room is tried again, and changes nothing of what ships; refusals are kept."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qdqtune.errors import BaselineFailed, EngineFailure
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from runs import mixed, rows, settings, write
from workers import Build, WatchedModel, Workers, in_process

STATE = "autotuner_state.yaml"
SHIPPED = ["baseline.onnx", "optimized_final.onnx", "placement.yaml"]
SHORT: list[BaseException] = [
    EOFError(),
    TimeoutError(),
    EngineFailure("CUDA failure 2: out of memory"),
    EngineFailure("std::bad_alloc"),
    EngineFailure("write of model.plan: No space left on device"),
]

Refuse = Callable[[Build], str | None]


def shipped(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in SHIPPED}


def raising(error: BaseException, when: Callable[[Build], bool]) -> Refuse:
    """An engine that fails in that way at some builds."""

    def refused(build: Build) -> str | None:
        if when(build):
            raise error
        return None

    return refused


def is_tuned(build: Build) -> bool:
    """Whether it is a candidate of the search, and not the float model."""
    return build.is_candidate and build.log.stem.startswith("trial")


def run(model: Path, mode: str) -> Result:
    return tune(settings(model, builds=8, mode=mode))


@dataclass(frozen=True)
class Whole:
    """A run in which nothing failed: its result, and what it wrote."""

    found: Result
    files: dict[str, bytes]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The whole run in a mode, on the model of all tests here."""

    @cache
    def ran(mode: str) -> Whole:
        model = write(mixed(), tmp_path_factory.mktemp("whole"))
        with in_process():
            return Whole(run(model, mode), shipped(model.parent / "out"))

    return ran


@pytest.mark.parametrize(("mode", "error"), [("subgraph", SHORT[0]), *(("cut", error) for error in SHORT)])
def test_transient_failures_are_not_stored(
    model: Path, workers: Workers, mode: str, error: BaseException, whole: Callable[[str], Whole]
) -> None:
    expected = whole(mode)
    workers.refused = raising(error, is_tuned if mode == "cut" else lambda b: "group" in b.path.name)
    failed = run(model, mode)
    assert failed.history != expected.found.history or mode == "subgraph"
    records = rows(model.parent / "out" / STATE)
    assert "failure" not in json.dumps(records)
    workers.refused = lambda _: None
    assert run(model, mode).history == expected.found.history
    assert shipped(model.parent / "out") == expected.files


@pytest.mark.parametrize("error", [SHORT[1], SHORT[2]])
def test_a_proof_with_a_transient_failure_is_tried_again(
    model: Path, workers: Workers, error: BaseException, whole: Callable[[str], Whole]
) -> None:
    expected = whole("cut")
    workers.refused = raising(error, lambda build: build.path.name in ("optimized_final.onnx", "model.onnx"))
    with pytest.raises(BaselineFailed, match="failed on the finished files"):
        run(model, "cut")
    assert not (model.parent / "out" / "optimized_final.onnx").exists()
    workers.refused = lambda _: None
    assert run(model, "cut").ratio == expected.found.ratio
    assert shipped(model.parent / "out") == expected.files


def test_a_layer_report_that_was_killed_is_asked_for_again(model, workers, monkeypatch, whole):
    expected = whole("cut")
    with monkeypatch.context() as patch:
        patch.setattr(WatchedModel, "layers", lambda *_, **__: (_ for _ in ()).throw(EOFError()))
        run(model, "cut")
    assert "layers" not in [r["kind"] for r in rows(model.parent / "out" / STATE)]
    assert run(model, "cut").history == expected.found.history


def test_a_metric_that_was_killed_is_asked_for_again(model, workers, monkeypatch, tmp_path):
    (tmp_path / "score.py").write_text(
        "import numpy as np\ndef score(predict):\n    predict({'x': np.ones((8, 8, 64), np.float32)})\n    return 1.0\n"
    )
    told = settings(model, builds=8, mode="cut", evaluate=f"{tmp_path / 'score.py'}:score", max_drop=0.5)
    whole = WatchedModel.run
    asked: list[bool] = []

    def killed(built: WatchedModel, inputs: Any) -> Any:
        asked.append(bool((inputs["x"] == 1).all()))
        if sum(asked) > 1 and asked[-1]:  # the float model has passed
            raise EOFError
        return whole(built, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(WatchedModel, "run", killed)
        assert not tune(told).improved
    assert tune(told).improved
    assert workers.started > 1
