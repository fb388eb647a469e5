"""The text and the JSON of region inspection."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from models import build, normal
from qdqtune.commands import inspect
from qdqtune.search.regions import discovery, patterns
from qdqtune.tuning.result import spent_without_pairs
from qdqtune.types import Layer
from region_models import Network


@pytest.fixture(scope="session")
def found():
    """Shape arithmetic, then two residual blocks, then a softmax."""
    net = Network()
    net.types["sizes"] = TensorProto.INT64
    net.inputs.append("sizes")
    integers = net.add("Sub", net.add("Abs", "sizes", dtype=TensorProto.INT64), "shape", dtype=TensorProto.INT64)
    x = net.add("Relu", net.conv("input"))
    x = net.residual(net.residual(x))
    net.outputs = [net.add("Softmax", net.conv(x)), integers]
    model = net.model()
    made = discovery.find(model)
    return model, made, patterns.group(model, made)


def test_the_overview_tells_what_a_model_holds_and_what_keeps_it_from_8_bits(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 11]>
        g (float[2] x, bool on, float[N, 3] z) => (float[2] y, float[N, 4] p) {
            y = If (on) <
                then_branch = a () => (float[2] t) { t = Abs (x) },
                else_branch = b () => (float[2] e) { e = Neg (x) }
            >
            w = Constant <value = float[3, 4] {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}> ()
            p = MatMul (z, w)
        }"""
    file = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    inspection = inspect.inspect(inspect.InspectOptions(model=file))
    assert inspection.values["model"] == {
        "opset": 11,
        "nodes": 2,
        "parameters": 12,
        "inputs": ["x: float32[2]", "on: bool[]", "z: float32[?,3]"],
        "outputs": ["y: float32[2]", "p: float32[?,4]"],
        "operators": {"If": 1, "MatMul": 1},
        "products": 1,
        "all_products": 1,
        "notes": ["2 nodes in the bodies of If stay in float; if on decides, `fix_inputs` on=VALUE may bring them out"],
    }
    assert inspection.overview()[-2].startswith("8 bits   1 of 1 ")


def test_nodes_that_are_constant_but_for_an_open_batch_are_told(tmp_path):
    text = """g (float[N,3,8,8] x) => (float[N,3,8,8] y) {
        s = Shape(x) b = Shape <end=1> (x) c = Concat <axis=0> (b, rest)
        e = Expand(t, c) [resized] r = Resize <mode="cubic"> (e, , , s) y = Add(x, r)
    }"""
    model = build(text, {"t": normal(1, 3, 4, 4), "rest": np.array([3, 4, 4])})
    told = inspect.overview_of(model)["notes"]
    assert any(note.startswith("each inference computes 1 node (Resize) from sizes alone: ") for note in told)
    layers = [Layer("a", ("resized",), "float32", 3.0, "compute"), Layer("b", ("n",), "float32", 7.0, "compute")]
    (note,) = spent_without_pairs(model, layers)
    assert note.startswith("3 of 10 ms are spent on nodes that read constants and sizes")
    assert not [*spent_without_pairs(model, layers[1:])]


def test_an_input_of_one_value_may_decide_an_if():
    model = build("""g (float[1] level, float[2] x, int64[1] steps, bool[1] cached) => (float[2] y) {
        loud = Cast <to = 9> (level)
        both = And (cached, loud)
        y = If (both) <
            then_branch = a () => (float[2] t) { t = Abs (x) },
            else_branch = b () => (float[2] e) { e = Neg (x) }
        >
    }""")
    (note,) = inspect.overview_of(model)["notes"]
    assert note.endswith("if cached decides, `fix_inputs` cached=VALUE may bring them out")


def test_the_text_has_the_phases_the_summary_and_the_most_frequent_patterns(found):
    lines = inspect.inspected(*found).lines()
    assert "Phase 1 complete: 5 regions, 16/16 nodes (100.0%)" in lines
    assert "Phase 2 complete: refined 2 regions, skipped 3" in lines
    assert "Summary: 9 regions (7 LEAF, 2 COMPOSITE), 16/16 nodes (100.0%)" in lines
    assert "LEAF region sizes: min=2, max=3, avg=2.3" in lines
    at = next(n for n, line in enumerate(lines) if line.startswith("Patterns: 4 (3 LEAF, 1 COMPOSITE)"))
    assert lines[at + 1].endswith("3 instances, 4 points: Conv, Relu")


def test_the_tree_shows_a_composite_with_its_leaves_and_verbose_names_nodes_and_tensors(found):
    text = "\n".join(inspect.inspected(*found).lines(tree=True))
    digest = next(p.digest for p in found[2] if p.ops == ("Conv", "Relu", "Conv", "Add", "Relu"))
    _, _, composite = text.partition("\n├─ Region 2 (Level 0, Type: COMPOSITE)\n")
    own, _, leaf = composite.partition("│    ├─ Region 3 (Level 1, Type: LEAF)\n")
    assert own.startswith("│  ├─ Direct nodes: 0\n│  ├─ Total nodes (recursive): 5\n│  ├─ Children: 2\n")
    assert f"│  ├─ Pattern: {digest} (2 instances)\n" in own
    assert leaf.startswith("│    │  ├─ Direct nodes: 2\n")
    assert "node2" not in text
    assert "Region 0 (" not in text
    assert "Hidden: 1 region without quantizable operators" in text
    named = "\n".join(inspect.inspected(*found).lines(verbose=True))
    assert "│  ├─ Nodes: Conv, Relu\n│  │    - node2\n│  │    - node3\n│  ├─ Inputs: 1 tensor\n" in named
    shown = "\n".join(inspect.inspected(*found, include_all_regions=True).lines(tree=True))
    assert "Region 0 (" in shown
    assert "Hidden" not in shown


def test_patterns_that_no_search_tunes_are_counted_only_with_all_regions():
    net = Network(inputs=["input", "other"])
    plain = net.add("ReduceSum", net.add("Exp", net.add("Sin", "other")), keepdims=1)
    net.outputs = [net.add("Relu", net.conv("input")), plain]
    model = net.model()
    made = discovery.find(model)
    grouped = patterns.group(model, made)
    assert sorted(p.ops for p in grouped) == [("Conv", "Relu"), ("Sin", "Exp", "ReduceSum")]
    assert [p.ops for p in patterns.tunable(model, grouped)] == [("Conv", "Relu")]
    for every, counts in (
        (False, "1 (1 LEAF, 0 COMPOSITE), in 1 region"),
        (True, "2 (2 LEAF, 0 COMPOSITE), in 2 regions"),
    ):
        shown = inspect.inspected(model, made, grouped, include_all_regions=every)
        assert f"Patterns: {counts}" in shown.lines()
        assert len(shown.values["patterns"]) == 1 + every


def test_json_has_the_same_numbers(found):
    model, made, grouped = found
    data = inspect.inspected(*found).values
    assert json.loads(json.dumps(data)) == data
    assert data["summary"]["hidden"] == 1
    assert [p["digest"] for p in data["patterns"]] == [p.digest for p in grouped]
    block = next(r for r in data["regions"] if r["id"] == 2)
    assert block["children"] == [3, 4]
    assert [r["parent"] for r in data["regions"] if r["id"] in (3, 4)] == [2, 2]
    everything = inspect.inspected(*found, include_all_regions=True).values["regions"]
    assert sorted(n for r in everything for n in r["nodes"]) == sorted(n.name for n in model.nodes)
    assert len(everything) == len(made.listings)
