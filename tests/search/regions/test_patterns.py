"""Patterns: what makes signatures equal, and that points mean the same edges in every instance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qdqtune.graph.model import GRAPH
from qdqtune.graph.operators import COMMUTATIVE
from qdqtune.search.regions import discovery, patterns
from qdqtune.search.regions.discovery import Flow, Point, Region, RegionType, post_dominators
from qdqtune.search.regions.structure import Structure
from qdqtune.types import Edge
from region_models import Network, networks, resnet, shuffled

ANY_ORDER = COMMUTATIVE - {"Equal", "And", "Or", "Xor"}


def grouped(model, **options):
    return patterns.group(model, discovery.find(model, "topology", **options))


def only(net):
    """The pattern and the region of a network that is one leaf."""
    model = net.model()
    (pattern,) = grouped(model)
    return model, pattern, pattern.instances[0]


def pattern_at(model, region):
    """The pattern of a region of one's own."""
    structure = Structure(model)
    listings = {r: structure.listing(r.all_nodes()) for r in region.walk()}
    return next(p for p in patterns.alike(model, listings) if region in p.instances)


def signature(op, *inputs, **attributes):
    net = Network(inputs=["input", "other"])
    net.outputs = [net.add(op, *inputs, **attributes)]
    return only(net)[1].signature


def table(last):
    values = numpy_helper.from_array(np.array([0.0] * 500 + [last], np.float32))
    return signature("Custom", "input", domain="custom", table=values)


def condition(op):
    body = helper.make_graph([helper.make_node(op, ["input"], ["y"], name="any")], "body", [],
                             [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])  # fmt: skip
    return signature("If", "condition", then_branch=body, else_branch=body)


def typed(dtype):
    net = Network()
    net.outputs = [net.add("Custom", net.add("Custom", "input", domain="c", dtype=dtype), domain="c")]
    return only(net)[1].signature


def depthwise(group):
    return signature("Conv", "input", "depthwise", group=group)


# ---- signatures
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (signature("Relu", "input"), signature("Sigmoid", "input")),
        (signature("Relu", "input"), signature("Relu", "input", domain="custom")),
        (signature("Concat", "input", "other"), signature("Concat", "input", "other", "input")),
        (signature("Concat", "input", "other"), signature("Concat", "input", "input")),
        (signature("Concat", "input", "other"), signature("Concat", "input", "other", axis=1)),
        (signature("Conv", "input", "weight"), signature("Conv", "input", "weight", "bias")),
        (signature("Conv", "input", "weight"), signature("Conv", "input", "other")),
        (signature("Conv", "input", "weight", group=2), signature("Conv", "input", "weight", group=4)),
        (signature("Clip", "input", "", "scalar"), signature("Clip", "input", "scalar")),
        (signature("MatMul", "input", "weight"), signature("MatMul", "weight", "input")),
        (signature("Add", "input", "bias"), signature("Add", "input", "scalar")),
        (signature("Sub", "input", "bias"), signature("Sub", "bias", "input")),
        (table(1.0), table(2.0)),
        (condition("Relu"), condition("Sigmoid")),
        (typed(TensorProto.FLOAT), typed(TensorProto.INT64)),
        (depthwise(8), depthwise(1)),
    ],
)
def test_signatures_tell_apart(a, b):
    assert a != b


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (table(1.0), table(1.0)),
        (condition("Relu"), condition("Relu")),
        (typed(TensorProto.FLOAT), typed(TensorProto.FLOAT16)),
        (depthwise(8), depthwise(16)),  # whatever its number of channels
        *((signature(op, "input", "bias"), signature(op, "bias", "input")) for op in sorted(ANY_ORDER)),
    ],
)
def test_equal_structure_has_one_short_signature(a, b):
    assert a == b
    assert len(a) < 200


def test_a_different_division_of_the_same_nodes_is_a_different_pattern():
    model = resnet(1)
    (whole,) = (p for p in grouped(model) if p.type is RegionType.COMPOSITE)
    region = whole.instances[0]
    nodes = region.all_nodes()
    halves = tuple(Region(100 + k, 1, part) for k, part in enumerate((nodes[:1], nodes[1:])))
    assert pattern_at(model, Region(99, 0, (), halves)) != whole
    assert pattern_at(model, region) == whole


def test_digests_are_the_same_in_every_process_and_a_foreign_point_is_refused():
    first, *others = grouped(resnet(2))
    assert {p.digest: p.ops for p in (first, *others)} == DIGESTS
    with pytest.raises(ValueError, match="no point"):
        patterns.resolve(first, first.instances[0], frozenset({Point("node_input", 7, 0)}))


# ---- points
def test_a_leaf_has_a_point_for_each_edge_that_can_carry():
    net = Network()
    x = net.add("Clip", net.conv("input"), "scalar", "scalar")
    net.outputs = [x]
    _, pattern, region = only(net)
    assert pattern.points == (
        Point("node_input", 0, 0),
        Point("node_input", 0, 1),
        Point("node_input", 1, 0),
        Point("node_output", 1, 0),
    )
    assert patterns.resolve(pattern, region, pattern.everything) == {
        Edge("input", "node0", 0), Edge("weight", "node0", 1), Edge("node0:0", "node1", 0), Edge("node1:0", "", 0),
    }  # fmt: skip


def test_a_residual_block_has_points_at_the_borders_of_its_leaves_and_at_its_weights():
    model = resnet(1)
    (pattern,) = (p for p in grouped(model) if p.type is RegionType.COMPOSITE)
    edges = pattern.edges[pattern.instances[0]]
    weights = [p for p in edges if p.kind == "node_input"]
    entries = {p: {str(e) for e in edges[p]} for p in edges if p.kind == "child_input"}
    assert len(weights) == 2
    assert entries == {
        Point("child_input", 0, 0): {"node1:0 -> node2[0]"},
        Point("child_input", 1, 0): {"node3:0 -> node4[0]"},
        Point("child_input", 1, 1): {"node1:0 -> node5[1]"},
    }
    assert edges[Point("child_output", 1, 0)] == {Edge("node6:0", "", 0)}


def test_inputs_that_cannot_carry_a_pair_are_no_points():
    net = Network()
    integers = net.add("Shape", net.add("Relu", "input"), dtype=TensorProto.INT64)
    x = net.add("Reshape", "node0:0", integers)
    unknown = net.add("Custom", x, domain="custom", dtype=TensorProto.UNDEFINED)
    body = net.branch(x)
    net.outputs = [net.add("If", "condition", then_branch=body, else_branch=body), net.add("Relu", unknown)]
    model = net.model()
    edges = {e for p in grouped(model) for own in p.edges.values() for some in own.values() for e in some}
    assert {(e.tensor, e.node, e.index) for e in edges} == {
        ("input", "node0", 0), ("node0:0", "node1", 0), ("node0:0", "node2", 0), ("node4:0", "", 0), ("node5:0", "", 1),
    }  # fmt: skip


def test_regions_without_points_have_no_pattern():
    net = Network()
    net.types["input"] = TensorProto.INT64
    net.outputs = [net.add("Add", "input", "input", dtype=TensorProto.INT64)]
    assert grouped(net.model()) == ()


@given(networks(), st.data())
@settings(max_examples=30)
def test_names_and_order_do_not_matter(net, data):
    """The same regions in a rewritten model have the same signatures, and points mean the corresponding edges."""
    model = net.model()
    order = _topological(net, data)
    new, names, tensors = shuffled(net, order)
    other = new.model()
    place = {old: k for k, old in enumerate(order)}

    def moved(region):
        nodes = tuple(sorted(place[n] for n in region.nodes))
        return Region(region.id, region.level, nodes, tuple(map(moved, region.children)))

    def translated(edge):
        return Edge(tensors.get(edge.tensor, edge.tensor), names.get(edge.node, ""), edge.index)

    for pattern in grouped(model, max_sequence_size=4, min_topdown_size=4):
        for region in pattern.instances:
            copy = moved(region)
            found = pattern_at(other, copy)
            assert found == pattern
            for point in pattern.points:
                assert set(map(translated, pattern.edges[region][point])) == found.edges[copy][point]


def _topological(net, data):
    """A random order of the nodes in which producers come first."""
    producer = {t: k for k, n in enumerate(net.nodes) for t in n.output}
    needs = [set() for _ in net.nodes]
    for k, node in enumerate(net.nodes):
        bodies = [a.g for a in node.attribute if a.HasField("g")]
        read = [*node.input, *(t for b in bodies for n in b.node for t in n.input)]
        needs[k] = {producer[t] for t in read if t in producer}
    order, waiting = [], set(range(len(needs)))
    while waiting:
        ready = sorted(k for k in waiting if not needs[k] & waiting)
        order.append(data.draw(st.sampled_from(ready)))
        waiting.remove(order[-1])
    return order


DIGESTS = {
    "5824f93f2bebee86": ("Conv", "Relu"),
    "dd2a78b746ef66f7": ("Conv", "Relu", "Conv", "Add", "Relu"),
    "e778a146ba0c7360": ("Conv", "Add", "Relu"),
}
"""Pattern caches refer to patterns by digest: these change only with the format of signatures."""


# Region discovery: the partition, the hierarchy, and the borders
def ops(model, region):
    return [model.nodes[n].op for n in region.all_nodes()]


def leaf_ops(model, found):
    return [ops(model, r) for r in found.leaves]


def check_partition(model, found):
    assert sorted(n for leaf in found.leaves for n in leaf.nodes) == list(range(len(model.nodes)))
    assert [r.id for r in found.listings] == list(range(len(found.listings)))
    for region in found.listings:
        firsts = [child.all_nodes()[0] for child in region.children]
        assert firsts == sorted(firsts)
        assert all(child.level == region.level + 1 for child in region.children)
        assert list(region.nodes) == sorted(region.nodes)
        check_borders(model, region)
        assert (region.type is RegionType.COMPOSITE) == (len(region.children) > 1) == (not region.nodes)


def check_borders(model, region):
    inside = set(region.all_nodes())
    used = {t for n in inside for t in (*model.nodes[n].inputs, *model.nodes[n].captures) if t}
    made = {t for n in inside for t in model.nodes[n].outputs}
    assert set(region.inputs) == used - made - set(model.constants)
    assert set(region.outputs) == {t for t in made if any(n not in inside for n, _ in model.uses(t))}
    assert len(set(region.inputs)) == len(region.inputs)
    assert len(set(region.outputs)) == len(region.outputs)


@given(networks(), st.sampled_from([1, 3, 10]), st.sampled_from([1, 4, 10]))
def test_every_node_is_in_exactly_one_leaf(net, max_sequence, min_topdown):
    model = net.model()
    found = discovery.find(model, "topology", max_sequence_size=max_sequence, min_topdown_size=min_topdown)
    check_partition(model, found)
    assert max(len(r.nodes) for r in found.leaves) <= max(max_sequence, min_topdown)


@given(networks(), st.data())
def test_the_partition_holds_whatever_the_modules(net, data):
    modules = ["", "/m", "/m/n", "/m/o", "/p/q/r"]
    for k, node in enumerate(net.nodes):
        prefix = data.draw(st.sampled_from([None, *modules]))
        node.name = f"plain{k}" if prefix is None else f"{prefix}/{node.op_type}_{k}"
    model = net.model()
    found = discovery.find(model, "names", min_topdown_size=data.draw(st.sampled_from([1, 3, 10])))
    assert found.method == "names"
    check_partition(model, found)


@given(networks(max_nodes=20))
def test_post_dominators_agree_with_the_definition(net):
    flow = Flow(net.model())
    every: dict[int, set[int]] = {}  # vertex to all its post-dominators
    for v in reversed(flow.order):
        paths = [every[u] for u in flow.after[v] if u in every]
        if paths or v in flow.leaves_graph:
            every[v] = {v}.union(set.intersection(*paths) if paths else ())
    nearest = post_dominators(flow)
    assert nearest.keys() == every.keys()
    for v, dominators in every.items():
        assert nearest[v] == min(dominators - {v}, key=flow.position.__getitem__, default=GRAPH)


def test_a_residual_block_is_a_composite_of_leaves_that_start_at_a_convolution():
    model = resnet(2)
    found = discovery.find(model)
    assert found.method == "topology"
    assert [r.type.name for r in found.tops] == ["LEAF", "COMPOSITE", "COMPOSITE"]
    assert leaf_ops(model, found) == [["Conv", "Relu"]] + [["Conv", "Relu"], ["Conv", "Add", "Relu"]] * 2


def test_an_activation_made_of_several_nodes_stays_with_its_matmul():
    net = Network()
    x = net.add("Add", net.add("MatMul", "input", "weight"), "bias")
    half = net.add("Mul", x, net.add("Add", net.add("Erf", net.add("Div", x, "scalar")), "scalar"))
    net.outputs = [net.add("MatMul", net.add("Mul", half, "scalar"), "weight")]
    model = net.model()
    assert leaf_ops(model, discovery.find(model)) == [
        ["MatMul", "Add", "Div", "Erf", "Add", "Mul", "Mul"], ["MatMul"]]  # fmt: skip


def test_concat_is_no_epilogue_of_one_of_its_branches():
    net = Network()
    x = net.add("Relu", net.conv("input"))
    net.outputs = [net.add("Concat", net.add("Relu", net.conv(x)), net.add("Relu", net.conv(x)), axis=1)]
    model = net.model()
    assert leaf_ops(model, discovery.find(model)) == [["Conv", "Relu"]] * 3 + [["Concat"]]


def test_long_sequences_are_cut():
    net, x = Network(), "input"
    for _ in range(25):
        x = net.add("Relu", x)
    net.outputs = [x]
    model = net.model()
    assert [len(r.nodes) for r in discovery.find(model).leaves] == [10, 10, 5]
    assert [len(r.nodes) for r in discovery.find(model, max_sequence_size=20).leaves] == [20, 5]


def encoder(layers):
    net, x = Network(), "input"
    for k in range(layers):
        x = net.residual(x, prefix=f"/encoder/layer.{k}")
    net.outputs = [net.add("MatMul", x, "weight", name="/head/MatMul")]
    return net.model()


def test_modules_become_regions():
    model = encoder(3)
    found = discovery.find(model)
    assert found.method == "names"
    assert [len(r.children) for r in found.tops] == [2, 2, 2, 0], "layers, and not one region for them all"
    assert leaf_ops(model, found)[:2] == [["Conv", "Relu"], ["Conv", "Add", "Relu"]]


def test_epilogues_behind_a_module_are_drawn_in():
    net = Network()
    x = net.conv(net.add("Relu", net.conv("input", name="/m/a/Conv"), name="/m/Relu"), name="/m/b/Conv")
    y = net.add("Relu", net.add("Add", x, "input", name="/Add"), name="/Relu")
    net.outputs = [net.conv(y, name="/n/Conv")]
    model = net.model()
    found = discovery.find(model, "names")
    assert ops(model, found.tops[0]) == ["Conv", "Relu", "Conv", "Add", "Relu"]


def test_nodes_without_a_path_go_to_their_neighbours():
    net = Network()
    x = net.conv(net.add("Relu", net.conv("input", name="/m/a/Conv"), name="cast_me"), name="/m/b/Conv")
    net.outputs = [x]
    found = discovery.find(net.model(), "names")
    assert [r.all_nodes() for r in found.tops] == [(0, 1, 2)]


@pytest.mark.parametrize(("named", "method"), [(6, "topology"), (7, "names")])
def test_auto_wants_names_on_most_nodes(named, method):
    net, x = Network(), "input"
    for k in range(10):
        x = net.add("Relu", x, name=f"/m/act{k}/Relu" if k < named else f"relu{k}")
    net.outputs = [x]
    assert discovery.find(net.model()).method == method


@pytest.mark.parametrize("shape", ["gated", "nested", "dense"])
def test_hostile_graphs_neither_blow_up_nor_overflow(shape):
    net, x, kept = Network(), "input", []
    for k in range(1500):
        if shape == "gated":
            x = net.add("Mul", x, net.add("Sigmoid", x))
        elif shape == "dense":
            kept = [*kept[-7:], x]
            x = net.add("Sum", *kept)
        elif k < 750:
            x = net.conv(x)
            kept.append(x)
        else:
            x = net.add("Add", x, kept.pop())
    net.outputs = [x]
    model = net.model()
    found = discovery.find(model)
    check_partition(model, found)
    assert max(r.level for r in found.listings) < 10
