"""Groups timed alone: equal ones once, by layers or else by the whole, and without those that do not build."""

from pathlib import Path

import pytest

from models import build, normal
from qdqtune.engines import EngineSpec
from qdqtune.tuning.loop import tune
from qdqtune.tuning.subgraphs import profiler
from runs import mixed_run, settings, write
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def test_equal_groups_are_timed_once(tmp_path: Path) -> None:
    model = build(
        "net (float[64,64] x) => (float[64,64] y) {"
        "[a] t = MatMul(x, w) [b] u = Relu(t) [c] v = MatMul(u, w) [d] z = Relu(v) [e] y = MatMul(z, k)}",
        {"w": normal(64, 64, scale=0.1), "k": normal(64, 64, scale=0.1, seed=1)},
    )
    result = tune(settings(write(model, tmp_path), mode="subgraph", builds=8))
    kinds = [row.kind for row in result.recorded.rows]
    assert len(kinds) == 3
    assert len(set(kinds)) == 2
    assert result.improved


def test_without_layer_times_total_latency_is_compared_and_a_note_says_so(tmp_path: Path) -> None:
    result = mixed_run(tmp_path, "subgraph", engine=EngineSpec("fake", {"hide_times": True}))
    assert result.improved
    assert any("total latency" in note for note in result.notes)
    assert "total latency" in (tmp_path / "out" / "logs" / "subgraphs.log").read_text()
    assert "all groups and what lies between" in [t.proposal.origin for t in result.history]
    assert all(row.gain_in_model is None for row in result.recorded.rows)


def test_groups_that_do_not_build_are_listed_and_skipped(tmp_path: Path) -> None:
    result = mixed_run(tmp_path, "subgraph", engine=EngineSpec("fake", {"faults": {"refuse": "softmax"}}))
    rows = {row.nodes[0]: row for row in result.recorded.rows}
    assert rows["softmax"].why.startswith("scheme activation-only")
    assert "no implementation" in rows["softmax"].why
    assert not rows["softmax"].kept
    assert result.improved


def test_a_group_that_is_timed_when_the_time_is_over_ends_with_the_scheme_in_hand(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [False]
    monkeypatch.setattr(profiler.time, "monotonic", lambda: 1e9 * late[0])

    def refused(built: Build) -> None:
        late[0] |= built.path.parent.name == "subgraphs" and "." in built.path.stem

    workers.refused = refused
    result = mixed_run(tmp_path, "subgraph", time_budget=1e6)
    groups = [built.path.name for built in workers.builds if built.path.parent.name == "subgraphs"]
    assert len(groups) == 2  # the group in float, and one scheme
    assert any(row.why == "no time was left" for row in result.recorded.rows)
    assert any(note.startswith("`time_budget` ended before") for note in result.notes)
    workers.builds.clear()
    again = mixed_run(tmp_path, "subgraph", time_budget=1e6)
    assert workers.builds
    assert len(again.history) >= len(result.history)
