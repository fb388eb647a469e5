"""Candidates of a batch side by side: what is found, in which order it is known, and how such a run goes on."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qdqtune.engines import EngineSpec, open_engine
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning import loop
from qdqtune.tuning.loop import tune
from qdqtune.tuning.proof import prove
from runs import cost, rows, settings
from workers import Workers

MODES: dict[str, dict[str, Any]] = {
    "cut": {"mode": "cut", "builds": 12},
    "one question a build": {"mode": "cut", "builds": 12, "engine": EngineSpec("fake", {"hide_times": True})},
    "region": {"mode": "region", "builds": 20},
    "subgraph": {"mode": "subgraph", "builds": 6},
    "front": {"mode": "cut", "front": True, "builds": 20},
}

pytestmark = pytest.mark.usefixtures("many_cores")


@pytest.fixture
def many_cores(eight_cores: None, workers: Workers) -> Workers:
    """Workers in this process on a machine of eight cores."""
    return workers


@pytest.mark.parametrize("mode", MODES)
def test_three_workers_find_the_same_twice_and_what_one_finds(model: Path, mode: str, many_cores: Workers) -> None:
    alone = tune(settings(model, **MODES[mode]))
    asked = settings(model, output_dir=model.parent / "three", workers=3, **MODES[mode])
    side_by_side = tune(asked)
    assert len({device.name for device in many_cores.devices}) >= 3
    assert cost(asked.output_dir / "optimized_final.onnx") <= 1.02 * cost(model.parent / "out" / "optimized_final.onnx")
    assert [t.number for t in side_by_side.history] == list(range(1, len(side_by_side.history) + 1))
    assert len(side_by_side.history) < asked.builds
    again = tune(replace(asked, output_dir=model.parent / "again"))
    assert again.history == side_by_side.history
    if mode in ("region", "subgraph"):  # whose batches do not hang on how many there are
        assert side_by_side.history == alone.history


def test_a_run_goes_on_as_it_began_with_another_number_of_workers(model: Path, many_cores: Workers) -> None:
    """A driver that was killed leaves what is on disk: the journal, in whatever order its lines came."""
    asked = settings(model, workers=4, **MODES["cut"])
    expected = tune(asked)
    lines = (asked.output_dir / "autotuner_state.yaml").read_bytes().splitlines(keepends=True)
    trials = [n for n, line in enumerate(lines) if b'"key": "trial:' in line]
    for kept, workers in ((1, 4), (3, 1), (-1, 2)):
        cut = lines[: trials[kept]]
        left = sum(b'"key": "trial:' in line for line in lines[trials[kept] :])
        shuffled = [*(line for line in cut if b'"key": "trial:' not in line),
                    *reversed([line for line in cut if b'"key": "trial:' in line])]  # fmt: skip
        folder = model.parent / f"killed_{kept}"
        folder.mkdir()
        (folder / "autotuner_state.yaml").write_bytes(b"".join(shuffled))
        many_cores.builds.clear()
        found = tune(replace(asked, output_dir=folder, workers=workers))
        assert found.history == expected.history
        asked_again = [b for b in many_cores.builds if b.log.name.startswith("trial_")]
        assert len(asked_again) == left


def test_the_proof_runs_alone(model: Path, monkeypatch: pytest.MonkeyPatch, many_cores: Workers) -> None:
    alive: list[int] = []

    def watched(history: Any, run: Any) -> Any:
        alive.append(sum(runner._worker is not None for runner in (run.runner, *run.others)))
        return prove(history, run)

    monkeypatch.setattr(loop, "prove", watched)
    assert tune(settings(model, workers=3, **MODES["region"])).improved
    assert alive == [1]


def test_workers_that_are_not_alike_are_refused_by_name(model: Path, many_cores: Workers) -> None:
    versions = count(1)

    def unlike(spec: EngineSpec) -> Any:
        engine = open_engine(spec)
        told = {**engine.describe(), "version": str(next(versions))}
        return SimpleNamespace(describe=lambda: told, numeric_format=engine.numeric_format, build=engine.build)

    many_cores.opener = unlike
    with pytest.raises(EngineUnavailable, match=r"worker-2 has version \d, worker-1 has \d"):
        tune(settings(model, workers=2))


def test_candidates_beyond_the_budget_are_not_begun(model: Path, many_cores: Workers) -> None:
    asked = settings(model, workers=8, mode="cut", builds=4)
    result = tune(asked)
    known = [r for r in rows(asked.output_dir / "autotuner_state.yaml") if r["kind"] == "trial"]
    assert len(known) == len(result.history) == 3
