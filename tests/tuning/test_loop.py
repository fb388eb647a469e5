"""Whole tuning runs on the fake engine, whose latencies are known exactly."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import INT8, build, conv_net, ranges
from observers import Log
from qdqtune.commands.tune import result_table
from qdqtune.engines import EngineSpec
from qdqtune.engines.facts import ENGINES
from qdqtune.errors import BadModel, BadOption, BaselineFailed, Failure
from qdqtune.graph.loading import load
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.files import read_placement_file
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import count_pairs, is_quantized
from qdqtune.search import best_of
from qdqtune.search.regions import discovery, patterns
from qdqtune.timing.ratios import USUAL_BUILDS, speed
from qdqtune.tuning.estimate import estimate
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.tuning.summary import read_summary
from qdqtune.types import Placement
from runs import cost, hopeless, mixed, out, rows, settings, write
from workers import Build, Watched, WatchedModel, Workers, in_process

pytestmark = pytest.mark.usefixtures("workers")

PROOF_BUILDS = 2 * USUAL_BUILDS
"""The builds of a proof of one file that its first block decides."""


@pytest.fixture(scope="module")
def improved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `result`, with the folder of its run beside it."""
    return write(mixed(), tmp_path_factory.mktemp("improvement"))


@pytest.fixture(scope="module")
def result(improved: Path) -> Result:
    with in_process():
        return tune(settings(improved))


class TestAnImprovement:
    """What one run finds and leaves."""

    def test_all_promised_files_are_there_and_no_candidate(self, improved: Path, result: Result) -> None:
        names = {p.name for p in (improved.parent / "out").iterdir()}
        assert names == {"baseline.onnx", "optimized_final.onnx", "placement.yaml", "autotuner_state.yaml",
                         "autotuner_state_pattern_cache.yaml", "summary.json", "run.json", "logs",
                         "region_models", ".qdqtune", "deploy"}  # fmt: skip
        for name in ("baseline.onnx", "optimized_final.onnx"):
            onnx.checker.check_model(out(improved, name), full_check=True)
        assert list((out(improved, "logs")).glob("trial_*.log"))
        for path in out(improved, "region_models").glob("*.onnx"):
            assert path.name.startswith("region_")
            assert is_quantized(load(path))
        graph = load(improved)
        tuned = patterns.tunable(graph, patterns.group(graph, discovery.find(graph)))
        names = {f"region_{p.instances[0].id}_level_{p.instances[0].level}.onnx" for p in tuned}
        assert {path.name for path in out(improved, "region_models").glob("*.onnx")} == names
        own = {t.proposal.pattern for t in result.history if t.accepted and t.proposal.pattern}
        best = [p.instances[0] for p in tuned if p.digest not in own]
        final = cost(out(improved, "optimized_final.onnx"))
        for region in best:
            path = out(improved, f"region_models/region_{region.id}_level_{region.level}.onnx")
            assert cost(path) == pytest.approx(final)
        assert 0 < len(best) < len(tuned)

    def test_it_is_near_the_best_that_there_is_and_the_summary_agrees(self, improved: Path, result: Result) -> None:
        assert result.improved
        assert cost(out(improved, "optimized_final.onnx")) / cost(improved) == pytest.approx(0.5007, rel=0.02)
        summary = json.loads(out(improved, "summary.json").read_text())
        assert summary["ratio"] == pytest.approx(cost(out(improved, "optimized_final.onnx")) / cost(improved))
        assert summary["ratio_low"] <= summary["ratio"] <= summary["ratio_high"] < 1
        assert summary["final_ms"] / summary["baseline_ms"] == pytest.approx(summary["ratio"])
        assert summary["baseline_ms"] == pytest.approx(1e3 * cost(improved))
        files = {"baseline": improved, "final": out(improved, "optimized_final.onnx")}
        assert summary["file_bytes"] == {name: file.stat().st_size for name, file in files.items()}
        assert summary["trials"] == len(result.history)
        assert summary["builds"] == 1 + len(result.history) <= 32
        assert summary["proof_builds"] == PROOF_BUILDS
        quantized = [n for n in load(out(improved, "optimized_final.onnx")).nodes if n.op == "DequantizeLinear"]
        assert summary["pairs"] == len(quantized)
        assert summary["mode"] == "region"
        assert summary["engine"]["engine"] == "fake"
        assert summary["output_sqnr_db"] > 20

    def test_the_placement_file_says_what_is_in_the_model(self, improved: Path, result: Result) -> None:
        recorded = read_placement_file(out(improved, "placement.yaml"))
        assert recorded.placement == result.placement == best_of(result.history)
        assert (recorded.engine, recorded.quant_type) == ("fake", "int8")


def test_the_file_that_ships_is_the_file_that_was_measured(model: Path, workers: Workers) -> None:
    built: list[tuple[str, str]] = []

    def watched(build: Build) -> None:
        if build.engine == "fake":
            built.append((build.path.name, hashlib.sha256(build.path.read_bytes()).hexdigest()))

    workers.refused = watched
    assert tune(settings(model)).improved
    for name in ("optimized_final.onnx", "model.onnx"):
        path = model if name == "model.onnx" else out(model, name)
        digests = [digest for built_name, digest in built if built_name == name]
        assert digests == [hashlib.sha256(path.read_bytes()).hexdigest()] * (3 + 1), "the proof, and single inferences"
    (proof,) = races(model)
    floats, tuned = np.array(proof["value"]["seconds"]).reshape(2, -1)
    assert tuned.max() < floats.min()


def races(model: Path) -> list[dict[str, Any]]:
    return [row for row in rows(out(model, "autotuner_state.yaml")) if row["kind"] == "race"]


@pytest.mark.parametrize("make", [hopeless, conv_net])
def test_where_no_pair_pays_the_baseline_ships(tmp_path: Path, make: Callable[[], Model]) -> None:
    model = write(make(), tmp_path)
    result = tune(settings(model, builds=22))
    assert (result.improved, result.shipped, result.placement, result.ratio) == (False, "baseline", Placement(), None)
    assert out(model, "optimized_final.onnx").read_bytes() == out(model, "baseline.onnx").read_bytes()
    assert read_placement_file(out(model, "placement.yaml")).placement == Placement()
    summary = json.loads(out(model, "summary.json").read_text())
    assert (summary["ratio"], summary["ratio_low"], summary["pairs"], summary["output_sqnr_db"]) == (1.0, None, 0, None)
    assert not is_quantized(load(out(model, "baseline.onnx")))


def test_if_the_engine_refuses_the_users_file_the_baseline_is_compared(model: Path, workers: Workers) -> None:
    proto = onnx.load(model)
    proto.doc_string = "of the user"  # so that it is another file than ours
    onnx.save(proto, model)
    workers.refused = lambda build: "no" if build.path == model else None
    result = tune(settings(model))
    assert result.improved
    assert result.notes[0] == "the engine does not run model.onnx as it is, so it was not compared: no"
    assert ["failure" in row for row in races(model)] == [True, False]


@pytest.mark.parametrize("front", [False, True])
def test_a_candidate_that_does_not_run_as_a_finished_file_costs_no_other(model, workers, front):
    broken: list[Path] = []

    def refused(build: Build) -> str | None:
        is_finished = build.path.name == "optimized_final.onnx"
        if is_finished and not broken:
            broken.append(build.path)
        return "no" if build.path in broken else None

    workers.refused = refused
    result = tune(settings(model, mode="cut", front=front, builds=25, min_sqnr=None))
    assert broken
    assert result.improved
    if not front:
        assert any("did not run as a finished file: no" in note for note in result.notes)
        assert not any("as it is" in note for note in result.notes)


def test_a_file_that_is_not_proven_never_takes_the_place_of_the_final_one(model: Path, workers: Workers) -> None:
    def interrupted(build: Build) -> None:
        if build.path.name == "optimized_final.onnx":
            raise KeyboardInterrupt

    workers.refused = interrupted
    with pytest.raises(KeyboardInterrupt):
        tune(settings(model))
    assert not out(model, "optimized_final.onnx").exists()


def test_the_node_filter_leaves_other_regions_in_float(model: Path) -> None:
    result = tune(settings(model, node_filter=("fir*",)))
    assert result.improved
    touched = {e.node for t in result.history for e in t.placement}
    assert "first" in touched
    assert not touched & {"third", "tanh", "head"}
    with pytest.raises(BadOption, match="matches no node"):
        tune(settings(model, node_filter=("nobody*",), restart=True))


def quantized(model: Path, name: str, placement: Placement) -> Path:
    """A Q/DQ version of the model, made by us."""
    path = model.parent / name
    save(insert(load(model), placement, ranges(load(model)), INT8), path)
    return path


def doubled(model: Model) -> Model:
    """A model with twice the weights."""
    wide = {name: c for name, c in model.constants.items() if c.dtype == onnx.TensorProto.FLOAT and len(c.shape) > 1}
    return rebuild(model, model.proto.graph.node, {name: Constant.of(2 * c.array()) for name, c in wide.items()})


def possible(model: Path) -> frozenset[Any]:
    return possible_edges(load(model), ranges(load(model)))


@pytest.fixture
def destroyed(given: Path) -> Path:
    """A Q/DQ version whose outputs are all 0: a pair at the output has a scale that is far too wide."""
    proto = onnx.load(given)
    next(n for n in proto.graph.node if n.output[0] == "y").output[0] = "exact"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e3, np.float32), "wide"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.int8), "zero"))
    proto.graph.node.append(onnx.helper.make_node("QuantizeLinear", ["exact", "wide", "zero"], ["q"], "q"))
    proto.graph.node.append(onnx.helper.make_node("DequantizeLinear", ["q", "wide", "zero"], ["y"], "dq"))
    onnx.save(proto, given)
    return given


@pytest.fixture
def given(model: Path) -> Path:
    """A Q/DQ version with pairs at the inputs of products."""
    return quantized(model, "qdq.onnx", start_placements.compute_inputs(load(model), possible(model)))


class TestAModelThatHasPairs:
    def test_it_is_refused_unless_said(self, model: Path) -> None:
        given = quantized(model, "qdq.onnx", start_placements.everything(load(model), possible(model)))
        with pytest.raises(BadModel, match="already has Q/DQ pairs: give `from_qdq`"):
            tune(settings(model, model=given))
        with pytest.raises(BadOption, match="leave `from_qdq` out"):
            tune(settings(model, from_qdq=True))
        with pytest.raises(BadOption, match="exclude each other"):
            settings(model, from_qdq=True, qdq_baseline=model)

    def test_its_pairs_are_stripped_and_tried_first_and_the_proof_compares_with_float_and_with_it(self, model, given):
        placement = start_placements.compute_inputs(load(model), possible(model))
        before = given.read_bytes()
        result = tune(settings(model, model=given, from_qdq=True))
        assert result.history[0].proposal.origin == "imported"
        assert {(e.node, e.index) for e in result.history[0].placement} == {(e.node, e.index) for e in placement}
        assert not is_quantized(load(out(model, "baseline.onnx")))
        assert given.read_bytes() == before
        assert result.improved
        final = cost(out(model, "optimized_final.onnx"))
        assert result.ratio.median == pytest.approx(final / cost(model))
        assert result.summary["ratio_to_given"] == pytest.approx(final / cost(given))
        assert final < cost(given)
        assert result.summary["proof_builds"] == PROOF_BUILDS + 3

    def test_it_is_refused_if_it_is_not_read_rightly(self, model, given, monkeypatch):
        """Nothing that is measured of the pairs would be true of the file."""
        monkeypatch.setattr("qdqtune.tuning.subject.strip_pairs", lambda _: doubled(load(model)))
        with pytest.raises(BadModel, match="tune the float model"):
            tune(settings(model, model=given, from_qdq=True))

    def test_its_scales_are_kept(self, model: Path, given: Path) -> None:
        doubled = onnx.load(given)
        scale = next(i for i in doubled.graph.initializer if i.name == pair_scale(doubled, "x"))
        scale.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(scale), scale.name))
        onnx.save(doubled, given)
        result = tune(settings(model, model=given, from_qdq=True))
        assert any(e.tensor == "x" for e in result.placement)
        final = onnx.load(out(model, "optimized_final.onnx"))
        values = {i.name: onnx.numpy_helper.to_array(i) for i in final.graph.initializer}
        assert values[pair_scale(final, "x")] == pytest.approx(onnx.numpy_helper.to_array(scale))

    def test_what_is_told_is_about_the_file_that_ships_again(self, model: Path) -> None:
        best, again = tune(settings(model)).placement, model.parent / "again"
        given = quantized(model, "qdq.onnx", best)
        result = tune(settings(model, model=given, from_qdq=True, output_dir=again, mode="cut", builds=2))
        assert (result.shipped, result.ratio, result.placement) == ("given", None, Placement())
        assert (again / "optimized_final.onnx").read_bytes() == given.read_bytes()
        assert any("did not prove faster than qdq.onnx: 1.00x" in note for note in result.notes)
        summary, (trial,) = result.summary, result.history
        assert summary["baseline_ms"] == pytest.approx(1e3 * cost(again / "baseline.onnx"))
        assert summary["final_ms"] == pytest.approx(1e3 * cost(given))
        assert summary["ratio"] == pytest.approx(cost(given) / cost(again / "baseline.onnx"))
        assert (summary["pairs"], summary["edges"]) == (count_pairs(best), len(best))
        assert summary["output_sqnr_db"] == trial.sqnr_db is not None
        shown = {row[0]: row[1:] for row in result_table(result).rows}
        assert shown["latency"] == (f"{1e3 * cost(model):.3f} ms", f"{1e3 * cost(given):.3f} ms")
        assert shown["  in the search, unproven"] == ("1x", speed(summary["ratio"]))
        assert shown["output SQNR against float"][1].startswith(f"{trial.sqnr_db:.1f}")

    def test_a_file_that_the_engine_refuses_does_not_ship(self, model: Path, given: Path, workers: Workers) -> None:
        workers.refused = lambda build: "no" if build.path == given else None
        result = tune(settings(model, model=given, from_qdq=True, mode="cut", builds=2))
        assert result.shipped == "baseline"

    def test_where_nothing_was_tried_its_time_is_unknown(self, model: Path, given: Path) -> None:
        result = tune(settings(model, model=given, from_qdq=True, time_budget=1e-3))
        assert (result.shipped, result.history) == ("given", ())
        assert (result.summary["final_ms"], result.summary["ratio"]) == (None, None)
        assert result.summary["output_sqnr_db"] > 20
        assert result.summary["pairs"] > 0
        assert ("latency", f"{1e3 * cost(model):.3f} ms", "not timed") in result_table(result).rows
        assert json.loads(out(model, "summary.json").read_text()) == result.summary
        assert read_summary(out(model, "summary.json").parent)["shipped"] == "given"

    def test_with_a_pair_that_has_no_counterpart_its_own_accuracy_is_told(self, model: Path, given: Path) -> None:
        proto = onnx.load(given)
        stored = {t.name for t in proto.graph.initializer}
        other = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored)
        weight = onnx.helper.make_node("DequantizeLinear", other.input, ["more"], "more")
        weight.attribute.extend(other.attribute)
        proto.graph.node.append(weight)
        proto.graph.output.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [None] * 2))
        onnx.save(proto, given)
        result = tune(settings(model, model=given, from_qdq=True, mode="cut", builds=2))
        assert any("have no counterpart" in note for note in result.notes)
        assert result.shipped == "given"
        assert result.summary["final_ms"] == pytest.approx(1e3 * cost(given))
        assert result.summary["pairs"] > 0
        assert result.summary["output_sqnr_db"] > 20

    def test_a_file_that_misses_the_limits_is_told_and_does_not_ship(self, model: Path, destroyed: Path) -> None:
        result = tune(settings(model, model=destroyed, from_qdq=True, mode="cut", builds=2))
        assert result.shipped == "baseline"
        (note,) = (note for note in result.notes if "does not hold the limits" in note)
        assert note.startswith("qdq.onnx does not hold the limits on accuracy: the output SQNR of all samples is ")

    @pytest.mark.parametrize(("max_drop", "shipped", "after"), [(None, "given", 0.0), (0.1, "baseline", 1.0)])
    def test_the_metric_of_the_file_itself_decides(self, model, destroyed, max_drop, shipped, after):
        metric = model.parent / "metric.py"
        metric.write_text(
            f"import numpy as np\nX = np.load({str(model.with_suffix('.npz'))!r})['x'][0]\n"
            "def score(predict):\n    return float(predict({'x': X})['y'].any())\n"
        )
        asked = {"from_qdq": True, "mode": "cut", "builds": 2, "evaluate": f"{metric}:score", "max_drop": max_drop}
        summary = tune(settings(model, model=destroyed, **asked)).summary
        assert (summary["shipped"], summary["metric_before"], summary["metric_after"]) == (shipped, 1.0, after)

    @pytest.mark.parametrize("lonely", [True, False])
    def test_a_useless_import_does_not_stop_the_search(self, model: Path, lonely: bool) -> None:
        edges = [e for e in possible(model) if e.node == ("first" if lonely else "tanh") and e.index == 0]
        other = quantized(model, "qdq.onnx", Placement.of(edges))
        result = tune(settings(model, qdq_baseline=other, node_filter=() if lonely else ("first", "relu")))
        assert result.improved
        assert len(result.history) > 4


def pair_scale(proto: onnx.ModelProto, tensor: str) -> str:
    return next(str(n.input[1]) for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == tensor)


@pytest.mark.parametrize(("kind", "stage"), [("refuse", "build"), ("nan", "output")])
def test_a_placement_that_fails_does_not_ship_and_the_search_goes_on(model: Path, kind: str, stage: str) -> None:
    result = tune(settings(model, engine=EngineSpec("fake", {"faults": {kind: "skip"}})))
    failed = [t for t in result.history if isinstance(t.result, Failure)]
    assert failed
    assert {t.result.stage for t in failed if isinstance(t.result, Failure)} == {stage}
    assert all(any(e.node == "skip" for e in t.placement) for t in failed)
    assert result.improved
    assert not any(e.node == "skip" for e in result.placement)
    assert cost(out(model, "optimized_final.onnx")) <= cost(out(model, "baseline.onnx")) <= 1.0001 * cost(model)


def test_a_float_model_that_the_engine_refuses_ends_the_run(model: Path, tmp_path: Path, workers: Workers) -> None:
    workers.refused = lambda build: "no such operator" if build.engine == "fake" else None
    with pytest.raises(BaselineFailed, match=r"cannot run the float model: .*no such operator") as failure:
        tune(settings(model))
    assert failure.value.exit_code == 5
    assert not out(model, "optimized_final.onnx").exists()
    with pytest.raises(BaselineFailed):
        estimate(settings(model, output_dir=tmp_path / "other"))


def test_a_model_without_anything_to_quantize_is_refused(tmp_path: Path) -> None:
    model = write(build("net (int64[2,8] x) => (int64[2,8] y) { [negate] y = Neg(x) }"), tmp_path)
    with pytest.raises(BadModel, match="has no tensor that could be quantized"):
        tune(settings(model))


@pytest.mark.parametrize("time_budget", [None, 0.01])
def test_half_precision_that_is_slower_or_not_timed_ships_for_nobody(tmp_path: Path, time_budget: float | None) -> None:
    model = write(hopeless(), tmp_path)
    result = tune(settings(model, precision="fp16", time_budget=time_budget))
    assert cost(out(model, "baseline.onnx")) > cost(model)  # its casts cost time here
    assert (result.shipped, bool(result.history)) == ("given", time_budget is None)
    assert out(model, "optimized_final.onnx").read_bytes() == model.read_bytes()


@pytest.mark.parametrize(("body", "words"), [
    ("raise RuntimeError('no pictures')", "failed: RuntimeError: no pictures"),
    ("return float('nan')", "fails on the float model: the metric of .* is nan"),
    ("return predict()", "failed: TypeError: .*missing 1 required"),
    ("return predict({})", "calls predict without x: the model has the inputs x"),
])  # fmt: skip
def test_a_metric_that_fails_is_told_before_calibration(tmp_path: Path, body: str, words: str) -> None:
    metric, log = tmp_path / "metric.py", Log()
    metric.write_text(f"def score(predict):\n    {body}\n")
    with pytest.raises((BadOption, BaselineFailed), match=words):
        tune(settings(write(mixed(), tmp_path), evaluate=f"{metric}:score"), log)
    assert log.stages[-1].startswith("evaluating the float model with")
    assert not any("calibrating" in stage for stage in log.stages)


@pytest.mark.parametrize(
    ("make", "fast", "is_exact", "has_metric"),
    [
        (hopeless, "baseline.onnx", True, False),
        (hopeless, "baseline.onnx", False, False),
        (hopeless, "baseline.onnx", False, True),
        (mixed, "baseline.onnx", False, False),
        (mixed, "optimized_final.onnx", False, False),
    ],
)
def test_half_precision_that_nobody_asked_for_ships_by_what_its_own_file_computes(
    make, fast, tmp_path, workers, monkeypatch, is_exact, has_metric
):
    class Inexact(WatchedModel):
        def run(self, inputs: Any) -> dict[str, Any]:
            return {name: 1.5 * array for name, array in super().run(inputs).items()}

    def build(engine: Watched, file: Path, log: Path) -> WatchedModel:
        made = built(engine, file, log)
        is_spoiled = file.name == "baseline.onnx" and not is_exact
        return Inexact(made.workers, made.built, made.factor) if is_spoiled else made

    built = Watched.build
    monkeypatch.setattr(Watched, "build", build)
    monkeypatch.setitem(ENGINES, "fake", replace(ENGINES["fake"], precision="fp16"))
    workers.slower = lambda build: 0.1 if build.path.name == fast else 1
    (tmp_path / "metric.py").write_text("def score(predict):\n    return 1.0\n")
    metric = {"evaluate": f"{tmp_path / 'metric.py'}:score", "max_drop": 0.1} if has_metric else {}
    result = tune(settings(write(make(), tmp_path), builds=12, **metric))
    assert not result.placement
    assert bool(best_of(result.history)) == (make is mixed)
    if is_exact:
        assert result.shipped == "tuned"
        assert 30 < result.summary["output_sqnr_db"] < 100
    else:
        assert result.shipped == "given"
        why = "the output SQNR" if fast == "baseline.onnx" else "without its pairs the output SQNR"
        assert any(f"proved faster, and was not taken: {why}" in note for note in result.notes)
