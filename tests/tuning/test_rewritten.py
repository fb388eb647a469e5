"""Rewrites that pay are found before the search, kept, told and made again; what does not pay is left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtune.commands.explain import explain_run
from qdqtune.commands.tune import result_table
from qdqtune.commands.verify import VerifyOptions, verify
from qdqtune.engines.fake import latency
from qdqtune.errors import BadModel, EngineRefused, Failure
from qdqtune.graph import rewrites
from qdqtune.graph.inference import infer
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES, Rewrites
from qdqtune.placement.files import read_placement_file
from qdqtune.tuning import rewritten
from qdqtune.tuning.estimate import estimate
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from runs import mixed, rows, settings, swishing, without_seconds, write
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def run(folder: Path, model: Model, **changes: Any) -> Settings:
    return settings(write(model, folder), **{"rewrites": "auto", "mode": "cut", "builds": 5, **changes})


def tried(asked: Settings) -> list[dict[str, Any]]:
    """The rewrites that a run has tried, as its state file has them."""
    (record,) = (row for row in rows(asked.state) if row["key"] == "rewrites")
    found: list[dict[str, Any]] = record["value"]["tried"]
    return found


def test_a_rewrite_that_pays_is_kept_and_told(tmp_path: Path) -> None:
    asked = run(tmp_path, swishing())
    result = tune(asked)
    told = result.summary["rewrites"]
    assert result.improved
    assert told["names"] == ["hardswish"]
    (row,) = tried(asked)
    assert (row["name"], row["form"], row["kept"]) == ("hardswish", "float", True)
    assert told["gave"] == row["ratio"]["median"] < 0.95
    assert result.ratio is not None
    assert told["gave"] * told["placement_gave"] == pytest.approx(result.ratio.median)
    assert told["builds"] == 2 <= 4 == estimate(asked).builds - estimate(replace(asked, rewrites="off")).builds
    assert result.summary["builds"] == 1 + 2 + len(result.history)
    assert result.summary["baseline_ms"] == pytest.approx(1e3 * latency(onnx.load(asked.model)), rel=1e-6)
    final = load(asked.output_dir / "optimized_final.onnx")
    assert "HardSwish" in {n.op for n in final.nodes}
    assert read_placement_file(asked.output_dir / "placement.yaml").rewrites == Rewrites(True, ("hardswish",))
    assert any("HardSwish" in row.operators for row in explain_run(asked.output_dir).rows)


@pytest.mark.parametrize("make", [mixed, swishing])
def test_a_metric_is_asked_once_for_the_float_model(tmp_path: Path, make: Callable[[], Model]) -> None:
    """Also if rewrites make another float model of it, and by the same command again."""
    metric, calls = tmp_path / "metric.py", tmp_path / "calls"
    metric.write_text(f"def score(predict):\n    open({str(calls)!r}, 'a').write('x')\n    return 1.0\n")
    asked = run(tmp_path, make(), evaluate=f"{metric}:score", min_sqnr=99.0)  # which no candidate holds
    for _ in range(2):
        result = tune(asked)
        assert result.summary["rewrites"]["names"] == ([] if make is mixed else ["hardswish"])
        assert result.summary["metric_before"] == 1.0
        assert calls.read_text() == "x"


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    whole = tune(run(tmp_path, swishing()))
    state = tmp_path / "out" / "autotuner_state.yaml"
    content = state.read_bytes()
    lines = content.splitlines(keepends=True)
    keys = [record["kind"] for record in rows(state)]
    for count in (keys.index("rewrites"), keys.index("rewrites") + 1, keys.index("ranges") + 2):
        state.write_bytes(b"".join(lines[:count]))
        again = tune(run(tmp_path, swishing()))
        assert again.placement == whole.placement
        assert again.summary["rewrites"] == whole.summary["rewrites"]
        assert [r["kind"] for r in rows(state)][: len(keys) - 1] == keys[:-1]


def alter(patch: pytest.MonkeyPatch, name: str, apply: Callable[[Model], Model]) -> None:
    """Let a rewrite do something else."""
    changed = {**rewrites.REWRITES, name: replace(REWRITES[name], apply=apply)}
    for module in (rewritten, rewrites):
        patch.setattr(module, "REWRITES", changed)


def test_rewrites_race_together_and_all_that_pay_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(monkeypatch, "rmsnorm", REWRITES["hardswish"].apply)
    alter(monkeypatch, "layernorm", slowed)
    asked = run(tmp_path, swishing())
    told = tune(asked).summary["rewrites"]
    assert told["names"] == ["hardswish", "rmsnorm"]
    forms = [(row["name"], row["form"]) for row in tried(asked)]
    assert forms == [*((name, "float") for name in rewritten.NAMES), ("layernorm", "pairs")]
    assert told["builds"] == 4 + 2


def slowed(model: Model) -> Model:
    """The same function with nodes more."""
    if "slow" in model.index_of:
        return model
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    nodes, at = proto.graph.node, model.index_of["relu"]
    read, nodes[at].input[0] = nodes[at].input[0], "s2"
    nodes.insert(at, onnx.helper.make_node("Neg", ["s1"], ["s2"], "slow2"))
    nodes.insert(at, onnx.helper.make_node("Neg", [read], ["s1"], "slow"))
    return Model(infer(proto, model.large), model.large)


def test_what_half_precision_gains_is_no_gain_of_rewrites(tmp_path, workers, monkeypatch):
    alter(monkeypatch, "hardswish", slowed)
    asked = run(tmp_path, swishing(), precision="fp16")
    workers.slower = lambda build: 9 if build.path == asked.model else 1
    assert tune(asked).summary["rewrites"]["names"] == []


def test_what_fails_in_the_converter_is_passed_over_with_a_note(tmp_path, monkeypatch):
    def fail(_: Model) -> Model:
        raise BadModel("cannot convert from opset 19 to 17: no adapter")

    alter(monkeypatch, "layernorm", fail)
    result = tune(run(tmp_path, mixed()))
    assert result.improved
    assert any(note.startswith("rewrite layernorm was passed over:") and "no adapter" in note for note in result.notes)


def test_other_outputs_are_no_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Model) -> Model:
        made = REWRITES["hardswish"].apply(model)
        node = made.proto.graph.node[made.index_of["sixth"]] if made is not model else None
        if node is not None:
            node.op_type = "HardSigmoid"
        return made

    alter(monkeypatch, "hardswish", wrong)
    result = tune(run(tmp_path, swishing()))
    assert result.summary["rewrites"]["names"] == []
    assert any("the engine computes other outputs with it" in note for note in result.notes)


def test_a_rewrite_that_the_engine_refuses_is_passed_over(tmp_path: Path, workers: Workers) -> None:
    workers.refused = lambda build: "no kernel" if build.log.stem == "rewrite_hardswish_float" else None
    result = tune(run(tmp_path, swishing()))
    assert result.summary["rewrites"]["names"] == []
    assert "rewrite hardswish was passed over: no kernel" in result.notes


def test_rewrites_alone_ship_where_no_pair_pays(tmp_path: Path) -> None:
    asked = run(tmp_path, swishing(8))
    result = tune(asked)
    assert result.improved
    assert not result.placement
    assert result.summary["shipped"] == "tuned"
    assert result.summary["pairs"] == 0
    assert result.summary["rewrites"]["placement_gave"] == pytest.approx(1.0)
    told = [row[0] for row in result_table(result).rows]
    assert "speedup by hardswish" in told
    assert "  and by the placement" not in told
    assert any("no pair is worth its time here" in note for note in result.notes)
    assert {n.op for n in load(asked.output_dir / "optimized_final.onnx").nodes} == {"MatMul", "HardSwish", "Relu"}
    explained = explain_run(asked.output_dir)
    assert "what ships is the rewritten float model without pairs" in explained.headline
    assert "rewritten float, ms" in explained.table().columns
    assert "builds" in explained.ended


def test_rewrites_are_verified_against_the_file_of_the_user(tmp_path: Path) -> None:
    asked = run(tmp_path, swishing(8))
    tune(asked)
    found = verify(VerifyOptions(folder=asked.output_dir))
    assert found.finding == "holds"
    assert found.comparison is not None
    assert found.comparison.first == str(asked.model)
    asked.model.rename(tmp_path / "elsewhere.onnx")
    moved = verify(VerifyOptions(folder=asked.output_dir))
    assert moved.finding == "cannot tell"
    assert "has its rewrites already" in moved.why


def test_pairs_do_not_ship_for_what_rewrites_gave(tmp_path: Path, workers: Workers) -> None:
    asked = run(tmp_path, swishing())

    def slower(build: Build) -> float:
        if build.path.name != "optimized_final.onnx":
            return 1
        # With pairs it is as fast as without.
        return latency(onnx.load(asked.output_dir / "baseline.onnx")) / latency(onnx.load(build.path))

    workers.slower = slower
    result = tune(asked)
    assert result.improved
    assert not result.placement
    assert [n for n in result.notes if "did not prove more than its rewrites: 1.00x" in n], result.notes
    assert result.summary["proof_builds"] % 3 == 0, "the user's file, the rewritten model, and that with pairs"


def test_rewrites_ship_without_samples_as_they_are_exact(tmp_path: Path) -> None:
    result = tune(run(tmp_path, swishing(), calibration_data=None))
    assert result.improved
    assert not result.placement
    assert (result.summary["accuracy"], result.summary["unchecked"]) == ("not measured", False)


def test_a_rewrite_that_an_accident_kept_out_is_tried_by_the_next_run(tmp_path, monkeypatch):
    def crash(*_: object, **__: object) -> None:
        raise EngineRefused(Failure("crash", "the engine process ended"))

    with monkeypatch.context() as patch:
        patch.setattr(rewritten, "race_candidates", crash)
        first = tune(run(tmp_path, swishing()))
    assert first.summary["rewrites"]["names"] == []
    second = tune(run(tmp_path, swishing()))
    assert second.summary["rewrites"]["names"] == ["hardswish"]
    kinds = [record["kind"] for record in rows(tmp_path / "out" / "autotuner_state.yaml")]
    assert kinds.count("ranges") == 1  # what was measured of the other float model is forgotten
    assert without_seconds(tune(run(tmp_path, swishing())).summary) == without_seconds(second.summary)


def test_what_was_left_open_stays_as_it_was_where_time_is_short(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rewritten, "is_cut_short", lambda *_: True)
        first = tune(run(tmp_path, swishing()))
    assert first.summary["rewrites"]["names"] == ["hardswish"]
    monkeypatch.setattr(rewritten._Trying, "is_late", lambda *_: True)
    assert without_seconds(tune(run(tmp_path, swishing())).summary) == without_seconds(first.summary)


def test_the_users_graph_stays_or_is_rewritten_as_told(tmp_path: Path) -> None:
    result = tune(run(tmp_path, swishing(), rewrites="off"))
    assert result.summary["rewrites"] == {"folded": False, "names": []}
    assert "Clip" in {n.op for n in load(tmp_path / "out" / "baseline.onnx").nodes}
    result = tune(run(tmp_path, swishing(), rewrites="hardswish", restart=True))
    assert result.summary["rewrites"] == {"folded": False, "names": ["hardswish"]}
    assert "HardSwish" in {n.op for n in load(tmp_path / "out" / "baseline.onnx").nodes}
