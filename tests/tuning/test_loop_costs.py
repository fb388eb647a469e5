"""What a search costs: builds that tell something, inferences, and bytes that are written."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models import build, normal
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.types import Placement
from runs import settings, write
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def test_no_placement_is_built_twice_in_a_search(model: Path, workers: Workers) -> None:
    """Schemes that mean the same edges are one placement, the float model is built once, and runs choose alike."""
    result = tune(settings(model, builds=52))
    built = [build.path.stem for build in workers.builds if build.is_candidate]
    placements = [t.placement for t in result.history]
    assert len(set(placements)) == len(placements) > 12
    assert Placement() not in placements
    assert len(built) == len(set(built)) == 1 + len(placements)
    twin = tune(settings(model, builds=52, output_dir=model.parent / "twin"))
    assert [t.placement for t in twin.history] == placements


def test_warmup_is_a_number_of_inferences(model: Path, workers: Workers) -> None:
    tune(settings(model, builds=4, plan=replace(Plan(), turn_seconds=0.0, warmup=7)))
    assert set(workers.runs) == {1, 7}


def test_a_candidate_costs_less_than_its_model_is_large(tmp_path, monkeypatch, workers):
    written: Counter[str] = Counter()
    original = Path.write_bytes

    def counted(self: Path, data: Any) -> int:
        written[self.parent.name if self.suffix == ".onnx" else ""] += len(data)
        return original(self, data)

    sizes: list[int] = []

    def watched(build: Build) -> None:
        constants = build.path.parent / "constants.bin"
        if build.path.parent.name == "candidates" and constants.exists():
            sizes.append(constants.stat().st_size)

    workers.refused = watched
    monkeypatch.setattr(Path, "write_bytes", counted)
    text = (
        "net (float[1,2,512] x) => (float[1,2,512] y) { [up] a = MatMul(x, w) [r] b = Relu(a) [down] y = MatMul(b, v) }"
    )
    weights = {"w": normal(512, 512, scale=0.05), "v": normal(512, 512, scale=0.05, seed=1)}
    path = write(build(text, weights), tmp_path)
    written.clear()
    result = tune(settings(path, builds=22))
    nbytes = sum(w.nbytes for w in weights.values())
    assert len(result.history) >= 5
    assert written["candidates"] < nbytes / 10
    assert max(sizes) < 1.5 * nbytes + 100_000  # float and 8 bits, once each
