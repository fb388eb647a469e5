"""Scripts in the form that ModelOpt's documentation gives them, on a real network and on small ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import qdqtune as moq
from models import INT8, Reader, build, conv_net, feeds, normal, ranges
from qdqtune.autotune import (
    AutotunerError,
    AutotunerNotInitializedError,
    ChildRegionInputInsertionPoint,
    Config,
    InsertionScheme,
    InvalidSchemeError,
    NodeInputInsertionPoint,
    PatternCache,
    PatternSchemes,
    QDQAutotuner,
    QDQAutotunerBase,
    Region,
    RegionOutputInsertionPoint,
    RegionPattern,
    RegionType,
    ResolvedInsertionPoint,
    workflows,
)
from qdqtune.autotune import autotuner as benchmark
from qdqtune.autotune.autotuner import Benchmark, TrtExecBenchmark
from qdqtune.autotune.quantization import quantize
from qdqtune.autotune.workflows import (
    benchmark_onnx_model,
    create_fusion_groups,
    extract_subgraph,
    generate_graph_json,
    init_benchmark_instance,
    parse_graph_json,
    region_pattern_autotuning_workflow,
    subgraph_autotuning_workflow,
)
from qdqtune.engines import EngineSpec
from qdqtune.engines.facts import ENGINES
from qdqtune.engines.fake import latency
from qdqtune.errors import BadOption, BadState, BaselineFailed
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.reading import read_placement
from qdqtune.placement.stripping import strip_pairs
from qdqtune.qdq_utils import get_quantized_tensors
from qdqtune.search.regions.discovery import Point
from qdqtune.tuning.settings import Settings
from runs import cost, hopeless, mixed, write
from trtexec_stand_in import stand_in
from workers import Workers

DIGITS = Path(__file__).parents[2] / "demo" / "digits.onnx"
INF = float("inf")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: Workers) -> None:
    monkeypatch.setattr(benchmark, "_instance", None)
    monkeypatch.chdir(tmp_path)


def begun(of: Any, config: Config | None = None, engine: Any = "fake", **more: Any) -> Any:
    """An autotuner, or one of a model, that knows the latency of the model without pairs."""
    init_benchmark_instance(engine=engine)
    autotuner = QDQAutotuner(of) if isinstance(of, onnx.ModelProto) else of
    autotuner.initialize(config, **more)
    autotuner.submit(benchmark_onnx_model(autotuner.export_onnx(None, insert_qdq=False)))
    return autotuner


def profile(autotuner: QDQAutotunerBase, schemes: int = 4) -> Iterator[bytes]:
    """The loop of every script; gives each model that is measured."""
    for number, region in enumerate(autotuner.regions):
        autotuner.set_profile_region(region, commit=number > 0)
        if autotuner.current_profile_pattern_schemes is None:
            continue
        for _ in range(schemes):
            if autotuner.generate() == -1:
                break
            model = autotuner.export_onnx(None, insert_qdq=True)
            yield model
            found = benchmark_onnx_model(model)
            autotuner.submit(found, success=found != INF)
    autotuner.set_profile_region(None, commit=True)


def seconds(model: bytes) -> float:
    """Exact latency on the fake engine."""
    return latency(onnx.load_from_string(model))


def pairs(model: bytes, onto: Model) -> Any:
    """The edges of `onto` that carry a pair."""
    return read_placement(onto, load_proto(onnx.load_from_string(model))).placement


def test_the_documented_loop_makes_a_real_network_faster() -> None:
    init_benchmark_instance(
        use_trtexec=False, timing_cache_file="timing.cache", warmup_runs=5, timing_runs=20, engine="fake"
    )
    model = onnx.load(DIGITS)
    autotuner = QDQAutotuner(model)
    config = Config(default_quant_type="int8", verbose=True)
    autotuner.initialize(config)

    autotuner.export_onnx("baseline.onnx", insert_qdq=False)
    baseline_latency = benchmark_onnx_model("baseline.onnx")
    autotuner.submit(baseline_latency)

    best = baseline_latency
    for model_bytes in profile(autotuner):
        best = min(best, seconds(model_bytes) * 1e3)
        assert autotuner.export_onnx() == model_bytes  # current until the next one is made
    for done in autotuner.profiled_patterns:
        assert [s.latency_ms for s in done.schemes] == sorted(s.latency_ms for s in done.schemes)
    autotuner.export_onnx("optimized_final.onnx", insert_qdq=True)

    assert cost(Path("baseline.onnx")) * 1e3 == pytest.approx(baseline_latency)
    assert cost(Path("optimized_final.onnx")) * 1e3 <= best * config.performance_threshold
    assert best < 0.5 * baseline_latency
    assert len({p.pattern for p in autotuner.profiled_patterns}) == len(autotuner.profiled_patterns) > 5


def test_on_onnx_runtime_what_was_measured_runs_and_is_near_float() -> None:
    init_benchmark_instance(warmup_runs=1, timing_runs=4, engine="onnxruntime")
    autotuner = QDQAutotuner(onnx.load(DIGITS))
    autotuner.initialize(Config())
    autotuner.submit(benchmark_onnx_model(autotuner.export_onnx("float.onnx", insert_qdq=False)))
    autotuner.regions = autotuner.regions[:1]
    (model, *_) = profile(autotuner, schemes=1)
    assert autotuner.profiled_patterns[0].schemes[0].latency_ms < INF
    feed = feeds(load(DIGITS), 1)[0]
    ours, floats = (
        onnxruntime.InferenceSession(m).run(None, feed)[0] for m in (model, Path("float.onnx").read_bytes())
    )
    assert np.abs(ours - floats).max() < 0.2 * np.abs(floats).max()
    types = {t.data_type for t in onnx.load_from_string(model).graph.initializer}
    assert onnx.TensorProto.UINT8 in types  # the engine's own numbers


def test_the_benchmark_comes_first_and_says_so() -> None:
    with pytest.raises(AutotunerError, match="Benchmark instance not initialized: call init_benchmark_instance"):
        benchmark_onnx_model("model.onnx")
    with pytest.raises(AutotunerError, match="not initialized"):
        region_pattern_autotuning_workflow("model.onnx")


def test_calls_come_in_order() -> None:
    autotuner = QDQAutotuner(onnx.load(DIGITS))
    calls: list[Callable[[], object]] = [
        autotuner.export_onnx, autotuner.generate,
        lambda: autotuner.import_insertion_points({"x"}),
        lambda: autotuner.load_state("state.yaml"), lambda: autotuner.save_state("state.yaml"),
        lambda: autotuner.set_profile_region(None), lambda: autotuner.submit(1.0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(AutotunerNotInitializedError, match="call initialize"):
            call()
    autotuner = begun(onnx.load(DIGITS))
    for early in (autotuner.generate, lambda: autotuner.submit(1.0)):
        with pytest.raises(InvalidSchemeError):
            early()
    with pytest.raises(InvalidSchemeError, match="none of the autotuner's regions"):
        autotuner.set_profile_region(Region())


def test_the_engine_is_tensorrt_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(ENGINES["tensorrt"], packages=("no_such_package",), install="pip install it")
    monkeypatch.setitem(ENGINES, "tensorrt", absent)
    why = "TensorRT cannot be used here: not installed: pip install it"
    assert benchmark.default_engine() == ("onnxruntime", why)
    monkeypatch.setitem(ENGINES, "tensorrt", replace(absent, packages=()))
    assert benchmark.default_engine()[0] == "onnxruntime"  # installed, perhaps, but there is no GPU
    state = benchmark.engine_state("fake")
    monkeypatch.setattr("qdqtune.autotune.autotuner.engine_state", lambda *_: state)
    assert benchmark.default_engine() == ("tensorrt", "TensorRT 1 on cost model")


def test_options_of_the_benchmark_reach_engines_that_know_them() -> None:
    given: dict[str, Any] = {"plugin_libraries": ["a.so"], "timing_cache_file": "t", "trtexec_args": ["--x", "--y=1"]}
    own = {"timing_cache": "t", "plugin_libraries": ["a.so"]}
    assert init_benchmark_instance(use_trtexec=True, **given).spec == EngineSpec(
        "trtexec", own | {"trtexec_args": "--x --y=1"}
    )
    assert init_benchmark_instance(engine="tensorrt", **given).spec == EngineSpec("tensorrt", own)
    assert init_benchmark_instance(engine="onnxruntime", **given).spec == EngineSpec("onnxruntime", {})
    made = init_benchmark_instance(engine="fake", warmup_runs=7, timing_runs=100)
    assert (made.plan.warmup, made.plan.looks) == (7, (50,))  # a round runs each model twice


def test_a_refused_model_takes_infinitely_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(mixed(), tmp_path)
    autotuner = begun(onnx.load(path), engine=EngineSpec("fake", {"faults": {"refuse": "*"}}))
    assert all(seconds(model) for model in profile(autotuner, schemes=2))
    assert "no implementation for a quantized node" in caplog.text
    tried = [s for p in autotuner.profiled_patterns for s in p.schemes]
    assert tried
    assert all(s.error and s.latency_ms == INF and s.is_profiled for s in tried if s.core)
    assert seconds(autotuner.export_onnx()) == cost(path)
    assert benchmark_onnx_model(path.read_bytes(), "one.log") < INF
    assert "building" in Path("one.log").read_text()


@pytest.mark.parametrize(("latency", "success"), [(INF, True), (1.0, False), (-1.0, True)])
def test_a_failed_baseline_is_an_error(latency: float, success: bool) -> None:
    autotuner = QDQAutotuner(mixed().to_proto())
    autotuner.initialize()
    with pytest.raises(BaselineFailed):
        autotuner.submit(latency, success=success)


def test_no_placement_is_measured_twice_and_what_stands_beats_what_comes_later() -> None:
    autotuner = begun(mixed().to_proto())
    best, models, measured = [autotuner.baseline_latency_ms or 0.0], set[bytes](), []
    for model in profile(autotuner, schemes=20):
        models.add(model)
        measured.append(pairs(model, autotuner.graph))
        best.append(seconds(autotuner.export_onnx(best=True)) * 1e3)
    assert len(set(measured)) == len(measured) > 10
    for placement in measured:  # a weight or an activation alone only costs
        edges = {(e.node, e.index) for e in placement}
        assert all(((n.name, 0) in edges) == ((n.name, 1) in edges) for n in autotuner.graph.nodes if n.op == "MatMul")
    assert pairs(autotuner.export_onnx(insert_qdq=False), autotuner.graph) not in measured
    assert best == sorted(best, reverse=True)
    assert seconds(autotuner.export_onnx()) * 1e3 <= best[-1]
    assert autotuner.export_onnx() in models  # scales and all


def test_state_goes_on_where_it_was_and_forgets_no_pattern() -> None:
    config = Config(default_quant_type="int8")
    autotuner = begun(mixed().to_proto(), config)
    for number, _ in enumerate(profile(autotuner)):
        autotuner.save_state("autotuner_state.yaml")
        if number == 6:
            break
    autotuner.submit(benchmark_onnx_model(autotuner.export_onnx()))
    autotuner.save_state("autotuner_state.yaml")
    begun_patterns = {p.pattern for p in autotuner.profiled_patterns}
    begun_patterns.add(autotuner.current_profile_pattern_schemes.pattern)

    resumed = QDQAutotuner(mixed().to_proto())
    resumed.initialize(config)
    resumed.load_state("autotuner_state.yaml")
    assert resumed.baseline_latency_ms == autotuner.baseline_latency_ms
    assert {p.pattern for p in resumed.profiled_patterns} == begun_patterns
    assert resumed.export_onnx() == autotuner.export_onnx(best=True)
    for region in resumed.regions:
        resumed.set_profile_region(region)
        current = resumed.current_profile_pattern_schemes
        assert current is None or current.pattern not in begun_patterns
    seen = {pairs(m, resumed.graph) for m in profile(resumed)}
    assert not {digest for digest in autotuner._measured if digest in {p.digest for p in seen}}
    resumed.save_state("autotuner_state.yaml")
    assert Path("autotuner_state_pattern_cache.yaml").is_file()


def test_state_is_that_of_one_configuration_and_of_the_last_script_that_wrote_it() -> None:
    autotuner = begun(mixed().to_proto())
    list(profile(autotuner))
    autotuner.save_state("state.yaml")
    other = begun(mixed().to_proto(), Config(maximum_mutations=2))
    for use in (other.load_state, other.save_state):
        with pytest.raises(BadState, match="`maximum_mutations` 3, now it is 2"):
            use("state.yaml")
    with pytest.raises(BadState, match="no state file"):
        other.load_state("missing.yaml")
    second = begun(mixed().to_proto())
    second.save_state("state.yaml")
    second.load_state("state.yaml")
    assert second.profiled_patterns == []


def test_a_pattern_cache_is_tried_first_without_points_that_a_pattern_has_not() -> None:
    autotuner = begun(mixed().to_proto())
    region = next(r for r in autotuner.regions if RegionPattern.from_region(r, autotuner.graph).size > 1)
    pattern = RegionPattern.from_region(region, autotuner.graph)
    full = pattern.get_full_insertion_scheme(region, autotuner.graph)
    older = InsertionScheme([*full.node_inputs, NodeInputInsertionPoint(0, 99)], [], list(full.region_outputs))
    cache = PatternCache()
    cache.add_pattern_schemes(PatternSchemes(pattern, [older]))
    cache.save("cache.yaml")
    warm = begun(mixed().to_proto(), pattern_cache=PatternCache.load("cache.yaml"))
    warm.set_profile_region(next(r for r in warm.regions if RegionPattern.from_region(r, warm.graph) == pattern))
    current = warm.current_profile_pattern_schemes
    assert [s.core for s in current.schemes] == [older.core - {Point("node_input", 0, 99)}]
    assert warm.generate() == 0
    assert warm.export_onnx()


def test_a_cache_keeps_the_fastest_that_differ_enough() -> None:
    pattern = RegionPattern("LEAF(Conv)", digest="0" * 16)
    schemes = [
        InsertionScheme([NodeInputInsertionPoint(0, k) for k in range(n)], latency_ms=10.0 - n) for n in range(6)
    ]
    schemes.append(InsertionScheme([NodeInputInsertionPoint(9, 9)], error=True))
    cache = PatternCache(minimum_distance=3)
    cache.add_pattern_schemes(PatternSchemes(pattern, schemes))
    found = cache.get_pattern_schemes(pattern)
    assert [len(s.node_inputs) for s in found.schemes] == [5, 2]
    other = PatternCache(max_entries_per_pattern=1)
    other.merge(cache)
    assert [own.num_schemes for own in other.pattern_schemes] == [1]
    with pytest.raises(BadOption):
        PatternCache.load("missing.yaml")


def test_pairs_of_a_quantized_model_are_tried_first() -> None:
    net = conv_net()
    everything = start_placements.everything(net, possible_edges(net, ranges(net)))
    quantized = insert(net, everything, ranges(net), INT8).to_proto()
    tensors = get_quantized_tensors(quantized)
    assert {"p0", "r1"} <= tensors <= {*net.tensors, *(t.name for t in quantized.graph.initializer)}
    assert not get_quantized_tensors(net.to_proto())
    autotuner = begun(net.to_proto())
    autotuner.import_insertion_points(tensors)
    assert autotuner.pattern_cache.num_patterns > 3
    found = set[Any]()
    for region in autotuner.regions:
        autotuner.set_profile_region(region)
        if autotuner.current_profile_pattern_schemes is not None and autotuner.generate() == 0:
            found |= set(pairs(autotuner.export_onnx(), autotuner.graph))
    wanted = {e for e in everything if not e.is_graph_output}
    assert len(found & wanted) > 0.9 * len(wanted)


@pytest.mark.parametrize(
    ("of", "quant_type", "values", "scale"),
    [
        (mixed(batch=8), "fp8", onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT),
        (conv_net(half=True), "int8", onnx.TensorProto.INT8, onnx.TensorProto.FLOAT16),
    ],
)
def test_pairs_have_the_type_that_was_asked_for_and_scales_that_of_the_model(of, quant_type, values, scale):
    older = of.to_proto()
    older.opset_import[0].version = 17
    autotuner = begun(older, Config(default_quant_type=quant_type))
    proto = onnx.load_from_string(next(iter(profile(autotuner))))
    assert next(o.version for o in proto.opset_import if o.domain == "") >= 19
    types = {t.name: t.data_type for t in proto.graph.initializer}
    pairs = [node for node in proto.graph.node if node.op_type == "DequantizeLinear"]
    assert {types[node.input[1]] for node in pairs} == {scale}
    assert values in {types.get(node.input[0]) for node in pairs}


def test_sizes_of_the_configuration_decide_the_division() -> None:
    small = begun(conv_net().to_proto(), Config(maximum_sequence_region_size=1, minimum_topdown_search_size=1))
    assert len(small.regions) > len(begun(conv_net().to_proto()).regions)


def test_a_model_that_cannot_be_calibrated_gets_the_default_scale() -> None:
    proto = mixed().to_proto()
    proto.opset_import.append(onnx.helper.make_opsetid("plugins", 1))
    proto.graph.node.append(onnx.helper.make_node("Own", ["a"], ["own"], "own", domain="plugins"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("own", onnx.TensorProto.FLOAT, None))
    init_benchmark_instance(engine="fake")
    autotuner = QDQAutotuner(proto)
    autotuner.initialize(Config(default_q_scale=0.25))
    autotuner.submit(1.0)
    autotuner.set_profile_region(autotuner.regions[0])
    while autotuner.generate() != -1 and b"QuantizeLinear" not in autotuner.export_onnx():
        autotuner.submit(1.0)
    made = onnx.load_from_string(autotuner.export_onnx()).graph
    scales = {n.input[1] for n in made.node if n.op_type == "QuantizeLinear"}
    assert {float(onnx.numpy_helper.to_array(t)) for t in made.initializer if t.name in scales} == {0.25}


class CustomAutotuner(QDQAutotunerBase):
    """As the documentation has it."""

    def __init__(self, model: onnx.ModelProto, custom_regions: list[Region]) -> None:
        super().__init__(model)
        self.regions = custom_regions


def test_regions_may_change_and_have_one_id() -> None:
    autotuner = begun(mixed().to_proto())
    halves = [Region(), Region()]
    for half, nodes in zip(halves, ({0, 1}, {2, 3}), strict=True):
        half.nodes.update(nodes)
    both = Region(region_type=RegionType.COMPOSITE)
    for half in halves:
        both.add_child(half)
    autotuner.regions = [both]
    autotuner.set_profile_region(both)
    assert autotuner.generate() == 0
    everything = RegionPattern.from_region(both, autotuner.graph).get_full_insertion_scheme(both, autotuner.graph)
    assert {p.region_index for p in everything.child_region_inputs} == {0, 1}
    autotuner.save_state("state.yaml")
    autotuner.regions = halves
    with pytest.raises(BadState, match="made with `regions`"):
        autotuner.load_state("state.yaml")


def test_regions_that_no_pair_makes_faster_are_left_out() -> None:
    text = """net (float[2,8] x) => (float[2,8] y, float[2,8] z) {
        [product] p = MatMul(x, w) [relu] y = Relu(p) [sin] s = Sin(x) [exp] z = Exp(s)
    }"""
    autotuner = QDQAutotuner(build(text, {"w": normal(8, 8)}).to_proto())
    autotuner.initialize()
    held = {autotuner.graph.nodes[n].name for region in autotuner.regions for n in region.nodes}
    assert held == {"product", "relu"}


def test_regions_of_ones_own() -> None:
    leaf = Region(region_id=0, level=1, region_type=RegionType.LEAF)
    leaf.nodes.update({0, 1})
    outer = Region(region_id=1, level=0, region_type=RegionType.COMPOSITE)
    outer.add_child(leaf)
    outer.nodes.update({2, 3})
    autotuner = begun(CustomAutotuner(mixed().to_proto(), [leaf, outer]))
    models = list(profile(autotuner))
    assert len(models) > 3
    inside = {autotuner.graph.nodes[n].name for n in range(4)}
    reached = {e.node for m in models for e in pairs(m, autotuner.graph)}
    assert reached <= inside | {"softmax"}  # an output of the region is an input of what follows
    assert len(autotuner.profiled_patterns) == 2
    assert RegionPattern.from_region(Region(), autotuner.graph).is_empty
    broken = Region()
    broken.nodes.add(99)
    with pytest.raises(AutotunerError, match="needs nodes between 0 and 7: indices in the autotuner's graph"):
        RegionPattern.from_region(broken, autotuner.graph)


def test_schemes_of_ones_own_and_what_they_mean() -> None:
    autotuner = begun(conv_net().to_proto())
    graph = autotuner.graph
    stem = next(
        r for r in autotuner.regions if r.type is RegionType.LEAF and "stem" in {graph.nodes[n].name for n in r.nodes}
    )
    pattern = RegionPattern.from_region(stem, graph)
    full = pattern.get_full_insertion_scheme(stem, graph)
    point = NodeInputInsertionPoint(node_index=0, input_index=0)
    assert point in full.node_inputs
    stem_index = graph.index_of["stem"]
    meant = pattern.matches(stem, graph, InsertionScheme([point]))
    assert meant == {ResolvedInsertionPoint("image", stem_index, 0), ResolvedInsertionPoint("w0", stem_index, 1)}
    assert pattern.matches(stem, graph, full) > meant
    assert pattern.matches(stem, graph)
    assert pattern.matches(RegionPattern.from_region(stem, graph))
    composite = next(r for r in autotuner.regions if r.type is RegionType.COMPOSITE)
    points = RegionPattern.from_region(composite, graph).get_full_insertion_scheme(composite, graph)
    assert all(isinstance(p, ChildRegionInputInsertionPoint) for p in points.child_region_inputs)
    assert all(isinstance(p, RegionOutputInsertionPoint) for p in points.region_outputs)
    assert not pattern.matches(composite, graph)
    with pytest.raises(InvalidSchemeError):
        pattern.get_full_insertion_scheme(composite, graph)

    autotuner.set_profile_region(stem)
    current = autotuner.current_profile_pattern_schemes
    current.schemes.append(InsertionScheme([point]))  # as in ModelOpt, the weight comes along
    assert autotuner.generate() == 0
    placed = {(e.node, e.index) for e in pairs(autotuner.export_onnx(), graph)}
    assert {("stem", 0), ("stem", 1)} <= placed
    autotuner.submit(0.001)
    current.schemes.append(InsertionScheme([NodeInputInsertionPoint(77, 0)]))
    with pytest.raises(InvalidSchemeError, match="has no point"):
        autotuner.generate()


def test_a_region_without_points_has_an_empty_scheme() -> None:
    text = "{ [shape] s = Shape(x) [size] t = Neg(s) [first] y = MatMul(x, w) }"
    net = build(f"net (float[2,8] x) => (float[2,8] y, int64[2] t) {text}", {"w": normal(8, 8)})
    nothing = Region()
    nothing.nodes.add(net.index_of["size"])
    pattern = RegionPattern.from_region(nothing, net)
    assert pattern.get_full_insertion_scheme(nothing, net) == InsertionScheme()
    assert pattern.matches(nothing, net)
    assert pattern.matches(nothing, net, InsertionScheme()) == set()
    autotuner = CustomAutotuner(net.to_proto(), [nothing])
    autotuner.initialize()
    autotuner.set_profile_region(nothing)
    assert autotuner.current_profile_pattern_schemes is None


def test_open_sizes_come_from_trtexecs_arguments_or_from_samples(tmp_path, monkeypatch):
    path = write(mixed(batch=None), tmp_path)
    np.savez("samples.npz", x=np.zeros((3, 2, 64, 64), np.float32))
    stand_in(tmp_path, "10.16")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    asked = list[Settings]()
    monkeypatch.setattr(workflows, "tune", lambda settings, _: asked.append(settings) or sys.exit())
    shapes = ["--minShapes=x:1x64x64", "--optShapes=x:8x64x64", "--maxShapes=x:8x64x64"]
    ways: list[dict[str, Any]] = [
        {"use_trtexec": True, "trtexec_args": shapes},
        {"engine": "fake", "calibration_data": "samples.npz"},
    ]
    for given in ways:
        init_benchmark_instance(**given)
        autotuner = QDQAutotuner(onnx.load(path))
        autotuner.initialize()
        autotuner.set_profile_region(autotuner.regions[0])
        assert autotuner.generate() == 0
        model = autotuner.export_onnx()
        assert benchmark_onnx_model(model) < INF
        dims = onnx.load_from_string(model).graph.input[0].type.tensor_type.shape.dim
        assert [d.dim_value or d.dim_param for d in dims] == ["N", 64, 64]
        with pytest.raises(AutotunerError, match="give the model"):
            region_pattern_autotuning_workflow()
        with pytest.raises(SystemExit):
            region_pattern_autotuning_workflow(path)
    assert [settings.input_shapes for settings in asked] == [{"x": (8, 64, 64)}, {}]
    assert [settings.calibration_data for settings in asked] == [None, "samples.npz"]


@pytest.mark.usefixtures("temporary")
def test_models_that_were_timed_are_not_kept_and_drift_between_two_cancels(workers: Workers, tmp_path: Path) -> None:
    init_benchmark_instance(engine="fake")
    model = mixed().to_proto().SerializeToString()
    for drift in (1.0, 3.0, 1.0):
        workers.drift = drift
        assert benchmark_onnx_model(model) == pytest.approx(seconds(model) * 1e3)
    (kept,) = tmp_path.glob("qdqtune-*/*.onnx")
    other = hopeless().to_proto().SerializeToString()  # with other inputs: nothing to compare with
    assert benchmark_onnx_model(other) == pytest.approx(seconds(other) * 1e3)
    assert [*tmp_path.glob("qdqtune-*/*.onnx")] == [kept.with_name("model_4.onnx")]


def test_a_whole_run_gives_an_autotuner_that_holds_it(tmp_path: Path) -> None:
    path = write(mixed(), tmp_path)
    init_benchmark_instance(timing_cache_file="trt_cache.cache", warmup_runs=5, timing_runs=20, engine="fake")
    arguments: dict[str, Any] = {"model_path": str(path), "output_dir": Path("results"), "num_schemes_per_region": 3}
    autotuner = region_pattern_autotuning_workflow(**arguments, calibration_data=str(path.with_suffix(".npz")))
    final = Path("results") / "optimized_final.onnx"
    assert autotuner.baseline_latency_ms == pytest.approx(cost(path) * 1e3)
    assert cost(final) < cost(path)
    assert len(autotuner.profiled_patterns) > 2
    assert autotuner.pattern_cache.num_patterns > 2
    best = min(s.latency_ms for p in autotuner.profiled_patterns for s in p.schemes)
    assert best == pytest.approx(cost(final) * 1e3)
    assert pairs(autotuner.export_onnx(), autotuner.graph) == pairs(final.read_bytes(), autotuner.graph)
    autotuner.save_state("mine.yaml")
    again = QDQAutotuner(onnx.load(path))
    again.initialize(autotuner.config)
    again.load_state("mine.yaml")
    assert again.export_onnx() == autotuner.export_onnx()


def quantized(path: Path) -> set[str]:
    """The nodes that read a pair."""
    model = load(path)
    return {e.node for e in read_placement(strip_pairs(model), model).placement}


def test_quantize_by_its_keywords(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, data = write(mixed(), tmp_path), np.load(tmp_path / "model.npz")
    samples = {name: data[name] for name in data.files}
    how: dict[str, Any] = {"calibration_method": "max", "engine": "onnxruntime", "high_precision_dtype": "fp32"}
    quantize(str(path), "int8", samples, **how, nodes_to_exclude=["sec.*", "nothing"], log_level="INFO")
    assert [record.getMessage() for record in caplog.records if record.name == "qdqtune.autotune"] == [
        "no node matches 'nothing'"
    ]
    names = quantized(tmp_path / "model.quant.onnx")
    assert "first" in names
    assert "second" not in names
    reader = Reader([{name: value[:1] for name, value in samples.items()} for _ in range(3)])
    how |= {"output_path": tmp_path / "q.onnx", "nodes_to_exclude": None}
    quantize(path, calibration_data_reader=reader, nodes_to_quantize=["second"], **how)
    assert "first" not in quantized(tmp_path / "q.onnx")


def test_modelopts_call_is_known_by_its_keywords_where_no_output_is_named(tmp_path: Path) -> None:
    path, how = write(mixed(batch=None), tmp_path), {"calibration_method": "max"}
    samples = np.ones((3, 2, 64, 64), np.float32)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((str(path),), {"quantize_mode": "int8", "calibration_data": samples}),
        ((path,), {"high_precision_dtype": "fp32", "calibration_shapes": "x:2x64x64"}),
        ((path,), {"override_shapes": "x:2x64x64", "target_dla": False}),
        ((path, "int8"), {"keep_intermediate_files": True}),
        ((path, "int8", None, "max"), {}),
    ]
    for arguments, keywords in calls:
        moq.quantize(*arguments, **(how if len(arguments) < 4 else {}), **keywords)
        assert "first" in quantized(tmp_path / "model.quant.onnx")
        (tmp_path / "model.quant.onnx").unlink()
    moq.quantize(onnx_path=path, output_path=str(tmp_path / "named.onnx"), **how)
    assert "first" in quantized(tmp_path / "named.onnx")
    assert moq.quantize(path, output=tmp_path / "own.onnx", input_shapes={"x": (2, 64, 64)}).output.exists()
    with pytest.raises(BadOption, match="no option 'quantize_mode'; did you mean 'quant_type'"):
        moq.quantize(path, output=tmp_path / "q.onnx", quantize_mode="int8")
    with pytest.raises(BadOption, match="quantize_mode is int8 or fp8, not 'int4'"):
        moq.quantize(path, quantize_mode="int4")
    with pytest.raises(BadOption, match="quantize has no output here"):
        moq.quantize(path, "int8", output="q.onnx")
    with pytest.raises(BadOption, match="quantize takes keywords behind its model"):
        moq.quantize(path, "q.onnx")
    assert {file.suffix for file in tmp_path.iterdir()} <= {".onnx", ".npz", ""}


def test_what_modelopt_takes_by_itself_may_be_given(tmp_path: Path) -> None:
    output = tmp_path / "quantized.onnx"
    quantize(
        write(mixed(), tmp_path), calibration_data=[], passes=["concat_elimination"], mha_accumulation_dtype="fp16",
        output_path=str(output),
    )  # fmt: skip
    assert output.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dq_only": True, "block_size": None}, "quantize has no dq_only here"),
        ({"nodes_to_exclude": ["("]}, "is no regular expression"),
        ({"nodes_to_quantize": ["nothing"]}, "no node is named 'nothing'"),
        ({"calibration_shapes": "x=3"}, "is no shape"),
    ],
)
def test_what_quantize_cannot_do_is_said(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        quantize(write(mixed(), tmp_path), **given)


def test_parts_of_a_graph_are_models() -> None:
    net = conv_net()
    first, second = net.nodes[:2]
    for graph in (net, net.to_proto()):
        part = onnx.load_from_string(extract_subgraph(graph, [first.inputs[0]], [second.outputs[0]]))
        assert [n.name for n in part.graph.node] == [first.name, second.name]
    with pytest.raises(AutotunerError, match="not found in the graph"):
        extract_subgraph(net, ["no"], [])


def test_trtexec_leaves_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(mixed(), tmp_path)
    stand_in(tmp_path, "10.16")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = generate_graph_json(str(path), tmp_path / "out")
    assert made == str(tmp_path / "out" / "model.fp16.graph.json")
    groups = create_fusion_groups(parse_graph_json(made), load(path))
    assert sorted(name for group in groups for name in group) == sorted(node.name for node in load(path).nodes)
    assert len(groups) < len(load(path).nodes)
    assert (tmp_path / "out" / "model.fp16.build.log").exists()


def test_subgraph_mode_from_a_script(tmp_path: Path) -> None:
    path = write(mixed(), tmp_path)
    benchmark.init_benchmark_instance(engine="fake")
    final = subgraph_autotuning_workflow(path, tmp_path / "out")
    assert cost(Path(final)) < cost(path)
    assert (tmp_path / "out" / "autotune_cache.json").exists()
    assert issubclass(TrtExecBenchmark, Benchmark)
