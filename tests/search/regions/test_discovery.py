"""Region discovery: the partition, the hierarchy, and the borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtune.graph.model import GRAPH
from qdqtune.search.regions import discovery
from qdqtune.search.regions.discovery import Flow, RegionType, post_dominators
from region_models import Network, networks, resnet


def ops(model, region):
    return [model.nodes[n].op for n in region.all_nodes()]


def leaf_ops(model, found):
    return [ops(model, r) for r in found.leaves]


def check_partition(model, found):
    assert sorted(n for leaf in found.leaves for n in leaf.nodes) == list(range(len(model.nodes)))
    assert [r.id for r in found.walk()] == list(range(len(list(found.walk()))))
    for region in found.root.walk():
        firsts = [child.all_nodes()[0] for child in region.children]
        assert firsts == sorted(firsts)
        assert all(child.level == region.level + 1 for child in region.children)
        assert list(region.nodes) == sorted(region.nodes)
        if region is not found.root:
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
    assert [r.type.name for r in found.root.children] == ["LEAF", "COMPOSITE", "COMPOSITE"]
    assert leaf_ops(model, found) == [["Conv", "Relu"]] + [["Conv", "Relu"], ["Conv", "Add", "Relu"]] * 2


def test_the_order_of_parallel_towers_in_the_file_does_not_matter():
    net, a, b = Network(inputs=["left", "right"]), "left", "right"
    for _ in range(2):  # node by node in turn, as a breadth-first exporter writes
        conv_a, conv_b = net.conv(a), net.conv(b)
        relu_a, relu_b = net.add("Relu", conv_a), net.add("Relu", conv_b)
        conv_a, conv_b = net.conv(relu_a), net.conv(relu_b)
        a, b = net.add("Add", conv_a, a), net.add("Add", conv_b, b)
    net.outputs = [a, b]
    found = discovery.find(net.model())
    assert [len(r.children) for r in found.root.children] == [2, 2, 2, 2]


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


def test_attention_masks_do_not_join_the_layers_that_share_them():
    net = Network(inputs=["input", "mask"])
    mask, x = net.add("Mul", net.add("Sub", "scalar", "mask"), "scalar"), net.add("Relu", "input")
    for _ in range(3):
        scores = net.add("MatMul", net.add("MatMul", x, "weight"), net.add("MatMul", x, "weight"))
        x = net.add("Add", net.add("Softmax", net.add("Add", scores, mask)), x)
    net.outputs = [x]
    found = discovery.find(net.model())
    layers = [r for r in found.root.children if r.type is RegionType.COMPOSITE]
    assert [len(r.all_nodes()) for r in layers] == [6, 6, 6]


def test_an_output_that_is_used_further_does_not_end_a_block():
    net = Network()
    x = net.add("Relu", net.conv("input"))
    middle = net.conv(x)
    last = net.add("Add", net.conv(middle), x)
    net.outputs = [middle, last]
    found = discovery.find(net.model())
    assert [r.type.name for r in found.root.children] == ["LEAF", "COMPOSITE"]


def test_long_sequences_are_cut():
    net, x = Network(), "input"
    for _ in range(25):
        x = net.add("Relu", x)
    net.outputs = [x]
    model = net.model()
    assert [len(r.nodes) for r in discovery.find(model).leaves] == [10, 10, 5]
    assert [len(r.nodes) for r in discovery.find(model, max_sequence_size=20).leaves] == [20, 5]


def test_blocks_up_to_min_topdown_size_are_not_divided():
    net = Network()
    x = net.add("Relu", "input")
    y = x
    for _ in range(6):
        y = net.add("Relu", y)
    net.outputs = [net.add("Add", y, x)]
    model = net.model()
    assert len(discovery.find(model, max_sequence_size=3, min_topdown_size=7).leaves) == 2
    assert len(discovery.find(model, max_sequence_size=3, min_topdown_size=6).leaves) > 2


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
    assert [len(r.children) for r in found.root.children] == [2, 2, 2, 0], "layers, and not one region for them all"
    assert leaf_ops(model, found)[:2] == [["Conv", "Relu"], ["Conv", "Add", "Relu"]]


def test_a_module_whose_nodes_are_scattered_is_one_region():
    net = Network()
    a = net.conv("input", name="/m/a/Conv")
    other = net.conv("input", name="/n/a/Conv")
    b = net.conv(a, name="/m/b/Conv")
    net.outputs = [b, net.conv(other, name="/n/b/Conv")]
    found = discovery.find(net.model(), "names")
    assert [r.all_nodes() for r in found.root.children] == [(0, 2), (1, 3)]


def test_epilogues_behind_a_module_are_drawn_in():
    net = Network()
    x = net.conv(net.add("Relu", net.conv("input", name="/m/a/Conv"), name="/m/Relu"), name="/m/b/Conv")
    y = net.add("Relu", net.add("Add", x, "input", name="/Add"), name="/Relu")
    net.outputs = [net.conv(y, name="/n/Conv")]
    model = net.model()
    found = discovery.find(model, "names")
    assert ops(model, found.root.children[0]) == ["Conv", "Relu", "Conv", "Add", "Relu"]


def test_nodes_without_a_path_go_to_their_neighbours():
    net = Network()
    x = net.conv(net.add("Relu", net.conv("input", name="/m/a/Conv"), name="cast_me"), name="/m/b/Conv")
    net.outputs = [x]
    found = discovery.find(net.model(), "names")
    assert [r.all_nodes() for r in found.root.children] == [(0, 1, 2)]


@pytest.mark.parametrize(("named", "method"), [(6, "topology"), (7, "names")])
def test_auto_wants_names_on_most_nodes(named, method):
    net, x = Network(), "input"
    for k in range(10):
        x = net.add("Relu", x, name=f"/m/act{k}/Relu" if k < named else f"relu{k}")
    net.outputs = [x]
    assert discovery.find(net.model()).method == method


def test_borders_are_ordered_by_structure_and_not_by_name():
    def inputs(names):
        net = Network(inputs=list(names))
        net.outputs = [net.add("Add", net.conv(names[0]), names[1])]
        return discovery.find(net.model()).root.children[0].inputs

    assert inputs(("a", "b")) == ("a", "b")
    assert inputs(("z", "b")) == ("z", "b")


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
    assert max(r.level for r in found.walk()) < 10
