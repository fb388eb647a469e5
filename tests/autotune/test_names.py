"""Names, signatures and habits that scripts for ModelOpt's autotuner bring along."""

from __future__ import annotations

import io
import json
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from loaded_modules import present
from models import build, conv_net, normal
from qdqtune import autotune, graph_utils, op_types
from qdqtune.autotune import autotuner as benchmark
from qdqtune.autotune import region_search as graphs
from qdqtune.autotune.autotuner import QDQAutotunerBase
from qdqtune.autotune.insertion_points import (
    AutotunerError,
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    Config,
    InsertionScheme,
    InvalidSchemeError,
    NodeInputInsertionPoint,
    PatternCache,
    PatternSchemes,
    Region,
    RegionPattern,
    RegionType,
    ResolvedInsertionPoint,
    has_quantizable_operations,
    merge_resolved_insertion_points,
    resolve_region_io_insertion_points,
    skip_invalid_insertion_points,
)
from qdqtune.autotune.region_search import (
    CombinedRegionSearch,
    RegionPartitioner,
    TopDownRegionBuilder,
    TorchRegionBuilder,
)
from qdqtune.errors import BadOption
from qdqtune.search.regions.cache import read_cache
from qdqtune.search.regions.discovery import Point

TEXT = "net (float[2,8] x) => (float[2,8] y) { [first] h = MatMul(x, w) [act] r = Relu(h) [second] y = Add(r, x) }"


def resolved_name(path: str) -> bool:
    """Whether there is such a name in a module below `qdqtune.autotune`."""
    module, *names = path.split(".")
    try:
        attrgetter(".".join(names))(import_module(f"qdqtune.autotune.{module}"))
    except (ImportError, AttributeError):
        return False
    return True


def test_the_table_of_names_is_true() -> None:
    """Every public name of ModelOpt's modules exists here, but for those that the table says are not served."""
    tests = Path(__file__).parents[1]
    names = (tests / "data" / "modelopt_names.txt").read_text(encoding="utf-8").split()
    text = (tests.parent / "docs" / "reference" / "modelopt.md").read_text(encoding="utf-8")
    section = text.partition("## Public names")[2].partition("\n## ")[0]
    different, absent = set[str](), set[str]()
    for line in section.splitlines():
        if line.startswith("| `"):
            prefix, *cells = (cell.strip() for cell in line.split("|")[1:-1])
            for named, cell in zip((different, absent), cells, strict=True):
                named |= {f"{prefix.strip('`')}.{name}" for name in re.findall("`([^`]+)`", cell)}
    assert different | absent <= set(names)
    assert {name for name in names if not resolved_name(name)} == absent
    counts = re.search(r"Of the (\d+) public names.*?(\d+) are in modules", section, re.DOTALL)
    assert counts is not None
    assert counts.groups() == (str(len(names)), str(len(names) - len(absent)))


def small() -> onnx.ModelProto:
    return build(TEXT, {"w": normal(8, 8)}).to_proto()


def region(*nodes: int) -> Region:
    made = Region(1, 0, RegionType.LEAF)
    made.nodes.update(nodes)
    return made


def scheme(*inputs: int, ms: float) -> InsertionScheme:
    return InsertionScheme([NodeInputInsertionPoint(n, 0) for n in inputs], latency_ms=ms)


def test_regions_answer_what_scripts_ask() -> None:
    outer, inner, other = Region(0, 1, RegionType.COMPOSITE), region(0, 1), region(2)
    outer.add_child(inner)
    outer.nodes.add(3)
    assert inner.parent is outer
    other.add_child(small_child := region(5))
    outer.merge(other)
    assert (outer.get_region_nodes_and_descendants(), small_child.parent) == ({0, 1, 2, 3, 5}, outer)
    assert outer.get_children(sort=True) == [inner, small_child]  # the larger one first
    assert outer.remove_child(inner)
    assert not outer.remove_child(inner)
    outer.metadata["why"] = "because"


def test_points_have_their_fields_in_this_order() -> None:
    assert ChildRegionOutputInsertionPoint(None, 3, 1).to_dict() == {
        "region_index": None, "node_index": 3, "output_index": 1
    }  # fmt: skip
    for point in (NodeInputInsertionPoint(1, 0), ChildRegionInputInsertionPoint(2, 1), ResolvedInsertionPoint("t", 1)):
        assert type(point).from_dict(point.to_dict()) == point
    whole = region(0, 1)
    points = NodeInputInsertionPoint.collect_from_region(whole, small())
    meant = [p for point in points for p in point.resolve(whole, small())]
    assert ResolvedInsertionPoint("x", 0, 0) in meant
    assert ChildRegionOutputInsertionPoint.collect_from_region(whole, small())[0].resolve(whole, small()) == {
        ResolvedInsertionPoint("r", 2, 0)
    }
    with pytest.raises(InvalidSchemeError, match="has no point"):
        NodeInputInsertionPoint(9, 9).resolve(whole, small())


def test_what_can_be_quantized() -> None:
    model = small()
    assert has_quantizable_operations(region(0), model)
    assert not has_quantizable_operations(region(1), model)
    assert not skip_invalid_insertion_points(model, "x", region(0))
    assert skip_invalid_insertion_points(model, "x", model.graph.node[1])  # does not read it
    everywhere = resolve_region_io_insertion_points(None, model, "x")
    assert everywhere == {ResolvedInsertionPoint("x", 0, 0), ResolvedInsertionPoint("x", 2, 1)}
    assert resolve_region_io_insertion_points(region(2), model, "x") < everywhere
    assert merge_resolved_insertion_points(model, everywhere) == {ResolvedInsertionPoint("x")}
    one = {ResolvedInsertionPoint("x", 0, 0)}
    assert merge_resolved_insertion_points(model, one) == one


def test_patterns_by_the_names_that_scripts_use() -> None:
    model = small()
    pattern = RegionPattern.from_region(region(0, 1), model)
    assert (pattern.is_leaf, pattern.is_composite, pattern.is_empty, pattern.size) == (True, False, False, 2)
    assert sorted(pattern.matches(region(0, 1), model) or []) == [0, 1]
    assert pattern.matches(region(1, 2), model) is None
    assert len(pattern.get_hash()) == 32
    assert pattern.get_short_signature(10) == f"{pattern.signature[:7]}..."
    outer = Region(7, 1, RegionType.COMPOSITE)
    outer.add_child(region(0, 1))
    assert "Region 1: LEAF(" in pattern.format_tree(outer, model)
    assert RegionPattern.from_region(outer, model).is_composite
    with pytest.raises(InvalidSchemeError, match="give the graph"):
        pattern.matches(region(0))


def test_schemes_and_caches_are_plain_values_and_back(tmp_path: Path) -> None:
    first, second = scheme(0, ms=12.0), scheme(1, 0, ms=8.0)
    assert first.hash != second.hash == scheme(0, 1, ms=3.0).hash
    assert InsertionScheme().is_empty
    assert not first.is_empty
    values = InsertionScheme().to_dict()  # scripts read all of them
    assert (values["latency_ms"], values["error"]) == (float("inf"), False)
    assert InsertionScheme.from_dict(values) == InsertionScheme()
    cache = PatternCache(minimum_distance=0)
    cache.add_pattern_schemes(PatternSchemes(RegionPattern(signature="Conv->Relu", size=2), [first, second]))
    again = PatternCache.from_dict(cache.to_dict())
    assert again == cache
    assert [own.pattern_signature for own in again.pattern_schemes] == ["Conv->Relu"]
    assert again.get_pattern_schemes("Conv->Relu") is not None
    best = again.pattern_schemes[0].best_scheme
    assert best.latency_ms == 8.0
    cache.save(tmp_path / "cache.yaml")
    assert PatternCache.load(tmp_path / "cache.yaml") == cache
    assert [len(s) for s in read_cache(tmp_path / "cache.yaml").values()] == [2]  # and a tuning run reads it


@pytest.mark.parametrize(("prefer_existing", "kept"), [(True, [7.0]), (False, [5.0, 7.0])])
def test_merging_says_whether_schemes_join_those_of_the_same_pattern(prefer_existing: bool, kept: list[float]) -> None:
    ours, theirs = PatternCache(minimum_distance=0), PatternCache()
    ours.add_pattern_schemes(PatternSchemes(RegionPattern("p", 1), [scheme(0, ms=7.0)]))
    theirs.add_pattern_schemes(
        PatternSchemes(RegionPattern("p", 1), [scheme(0, 1, 2, 3, 4, ms=5.0), scheme(0, ms=9.0)])
    )
    theirs.add_pattern_schemes(PatternSchemes(RegionPattern("other", 1), [scheme(0, ms=1.0)]))
    ours.merge(theirs, prefer_existing=prefer_existing)
    assert [[s.latency_ms for s in own.schemes] for own in ours.pattern_schemes] == [kept, [1.0]]


def test_the_pattern_of_a_quantized_region_has_the_points_that_carry_pairs() -> None:
    cache, model, whole = PatternCache(), small(), region(0, 1)
    cache.add_pattern_from_region(whole, model, {"x"})
    (found,) = (s for own in cache.pattern_schemes for s in own.schemes)
    pattern = RegionPattern.from_region(whole, model)
    assert found.core == {Point("node_input", 0, 0)}
    assert pattern.matches(whole, model, found) == {
        ResolvedInsertionPoint("x", 0, 0),
        ResolvedInsertionPoint("w", 0, 1),
    }


def test_a_file_of_modelopt_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("minimum_distance: 2\npattern_schemes: []\n")
    for read in (PatternCache.load, read_cache):
        with pytest.raises(BadOption, match=r"is a file of ModelOpt's autotuner.*`from_qdq`"):
            read(path)
    path.write_text("version: 1\ninterface: {pattern_schemes: 3}\n")
    with pytest.raises(BadOption, match="is no pattern cache"):
        PatternCache.load(path)


def test_the_configuration_can_be_changed_until_it_is_used() -> None:
    assert Config(True, 1.05).performance_threshold == 1.05
    config = Config()
    config.maximum_mutations = 2
    assert config.check().maximum_mutations == 2
    config.default_quant_type = "int4"
    with pytest.raises(BadOption, match="default_quant_type is one of"):
        QDQAutotunerBase(small()).initialize(config)


def test_both_phases_of_the_division() -> None:
    net = conv_net()
    tops = RegionPartitioner(net).partition_graph()
    assert sorted(n for top in tops for n in top.nodes) == list(range(len(net.nodes)))
    assert not any(top.children for top in tops)
    largest = max(tops, key=lambda top: len(top.nodes))
    built = TopDownRegionBuilder(net, largest, next_region_id=50).build_composite_region()
    assert built.get_region_nodes_and_descendants() == largest.nodes
    assert built.children
    assert min(r.id for r in built.walk()) == built.id == 50
    out = io.StringIO()
    CombinedRegionSearch(net).print_tree(built, max_items=1, file=out)
    assert "├─ Region 50 (Level 0, Type: COMPOSITE)" in out.getvalue()
    assert 0 < out.getvalue().count("    - ") <= 3 * out.getvalue().count("├─ Region")


class Surgeon:
    """As a graph of GraphSurgeon looks from outside."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        tensors: dict[str, Any] = {}
        named = lambda name: tensors.setdefault(name, SimpleNamespace(name=name))  # noqa: E731
        self.nodes = [SimpleNamespace(name=n.name, inputs=[*map(named, n.input)]) for n in proto.graph.node]

    def toposort(self) -> Surgeon:
        return self


def export_onnx(graph: Surgeon) -> onnx.ModelProto:
    """What the autotuner calls in the module that a graph comes from."""
    return graph.proto


def test_graphs_of_graphsurgeon_serve_as_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Surgeon.__module__.partition(".")[0]
    present(monkeypatch, {library: SimpleNamespace(export_onnx=export_onnx)})
    graph = Surgeon(small())
    assert [n.name for n in QDQAutotunerBase(graph).graph.nodes] == ["first", "act", "second"]
    assert RegionPattern.from_region(region(0, 1), graph) == RegionPattern.from_region(region(0, 1), small())
    assert graph_utils.get_tensor_consumer_node_indices(graph)["x"] == [0, 2]
    with pytest.raises(AutotunerError, match="not int"):
        QDQAutotunerBase(3)
    constant = small()
    constant.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["c"], value_float=1.0))
    with pytest.raises(AutotunerError, match="numbered otherwise"):
        graphs.as_model(constant)


def test_the_benchmark_gives_a_latency_and_a_profile_or_infinity(monkeypatch, tmp_path, workers, caplog):
    timed = benchmark.init_benchmark_instance(engine="fake")
    assert timed("missing.onnx") == float("inf")
    assert "cannot read the model" in caplog.text
    content, path = small().SerializeToString(), tmp_path / "profile.json"
    first = timed(content, flush_timing_cache=True)
    assert first == benchmark.benchmark_onnx_model(content, export_profile_path=path) < float("inf")
    count, *layers = json.loads(path.read_text())
    assert count["count"] > 0
    assert sum(layer["averageMs"] for layer in layers) > 0
    monkeypatch.setenv("PATH", str(tmp_path))
    assert benchmark.TrtExecBenchmark()(content) == float("inf")
    assert "trtexec" in caplog.text


def test_modules_of_modelopt_have_its_names_wherever_they_stand_here() -> None:
    for graph in (small(), small().graph):
        assert graph_utils.get_tensor_consumer_node_indices(graph) == {"x": [0, 2], "w": [0], "h": [1], "r": [2]}
    assert op_types.get_symmetric_ops() & {"Add", "Mul", "Sub", "Div", "MatMul"} == {"Add", "Mul"}
    common = import_module("qdqtune.autotune.common")
    assert (autotune.common, common.Region) == (common, Region)
    with pytest.raises(AttributeError, match="no_such"):
        _ = common.no_such


def test_borders_of_a_region_are_computed_on_request() -> None:
    part = region(0, 1)
    search = TopDownRegionBuilder(small(), part)
    search.compute_region_boundaries(part)
    assert ("x" in part.inputs, part.outputs) == (True, ["r"])
    search.print_tree(part, file=(out := io.StringIO()))
    assert "Total nodes: 2" in out.getvalue()


def test_a_leaf_has_no_points_of_children() -> None:
    for point in (ChildRegionInputInsertionPoint(0, 0), ChildRegionOutputInsertionPoint(0, None, 0)):
        assert point.resolve(region(0, 1), small()) == set()


def test_nodes_of_graphsurgeon_are_judged_by_what_they_say() -> None:
    def tensor(name: str, *shape: int, dtype: Any = np.float32) -> Any:
        return SimpleNamespace(name=name, dtype=dtype, shape=shape, inputs=[])

    def node(op: str, inputs: list[Any], *outputs: Any, name: str = "") -> Any:
        return SimpleNamespace(op=op, name=name, inputs=inputs, outputs=list(outputs))

    x, w, c, scale, n, y = (tensor(name, 2, 4, 4, 4) for name in ("x", "w", "c", "scale", "n", "y"))
    nodes = [node("Conv", [x, w], c), node("BatchNormalization", [c, scale], n), node("Relu", [n], y)]
    graph = SimpleNamespace(nodes=nodes, inputs=[x], outputs=[y], toposort=lambda: None)
    skipped = [skip_invalid_insertion_points(graph, t.name, user) for user in nodes for t in user.inputs]
    assert skipped == [False, True, True, True, True]  # of all only the input, with which the weight comes
    point = NodeInputInsertionPoint(0, 0)
    assert {r.tensor_name for r in point.resolve(region(0, 1, 2), graph)} == {"x", "w"}
    for op, given, is_skipped in (
        ("MatMul", tensor("t", 1, 64), False), ("Shape", tensor("t", 1, 64), True), ("Equal", tensor("t", 9), True),
        ("Add", tensor("t", 2, 2), True), ("Add", tensor("t", 64, dtype=np.int32), True),
    ):  # fmt: skip
        assert skip_invalid_insertion_points(graph, "t", node(op, [given])) is is_skipped
    assert has_quantizable_operations(Region(1, 1, RegionType.COMPOSITE), graph)


def test_regions_of_a_pytorch_program() -> None:
    net = small()
    for node, name in zip(net.graph.node, ("/a/MatMul", "/a/Relu", "/b/Add"), strict=True):
        node.name = name
    builder = TorchRegionBuilder(net)
    assert {n for r in builder.build_regions() for n in r.nodes} == {0, 1, 2}
    assert {len(r.children) for r in builder.build_regions(linearize=False, only_quantizable=True)} == {0}
