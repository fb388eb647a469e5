"""Pairs of 16 bits: where they are written, how tensors change bits between nodes, and reading them back."""

from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import pytest

from models import PLAIN, build, conv_net, feeds, normal, ranges, run, sqnr
from qdqtune.calibration.scales import Range
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.model import Model
from qdqtune.placement import engine_rules
from qdqtune.placement.files import PlacementFile, existing, read_placement_file, write_placement
from qdqtune.placement.insertion import Inserter, insert
from qdqtune.placement.possible import (
    computable,
    consistent,
    conversions,
    possible_edges,
    weight_role,
    wide_tensors,
    wide_weights,
)
from qdqtune.placement.reading import read_placement
from qdqtune.placement.stripping import strip_pairs
from qdqtune.tuning.records import StoredPlacement
from qdqtune.types import Edge, Placement, QType

WIDE = replace(PLAIN, wide=QType.UINT16)
QNN = numeric_format("qnn", "int8")


def everywhere(model: Model) -> Placement:
    """Pairs wherever they can stand on an NPU."""
    return engine_rules.place(model, possible_edges(model, ranges(model)), "qnn", "int8").placement


def activations(model: Model, placement: Placement, *nodes: str) -> frozenset[Edge]:
    """The edges of activations into some nodes; of all if none is named."""
    edges = (e for e in placement.edges if e.tensor not in model.constants)
    return frozenset(e for e in edges if not nodes or e.node in nodes)


def widened(model: Model, *nodes: str) -> Placement:
    """Pairs everywhere, in 16 bits in front of some nodes."""
    placed = everywhere(model)
    return Placement.of(placed.edges, (), activations(model, placed, *nodes))


def types(model: Model, op: str) -> list[str]:
    """The types of zero points of all Q or DQ nodes of a model."""
    nodes = (n for n in model.nodes if n.op == op)
    return sorted(onnx.TensorProto.DataType.Name(model.constants[n.inputs[2]].dtype) for n in nodes)


def test_a_node_writes_as_many_bits_as_it_reads() -> None:
    model = conv_net()
    placement = widened(model, "project")
    stored = wide_tensors(model, placement)
    assert stored == {"c2"}
    assert conversions(model, placement, stored) == {Edge("k1", "project", 0), Edge("c2", "add", 0)}


def test_what_comes_as_floats_has_the_bits_of_its_widest_reader() -> None:
    model = conv_net()
    assert "image" in wide_tensors(model, widened(model, "stem"))
    assert "image" not in wide_tensors(model, widened(model, "project"))


def test_without_16_bits_nothing_is_wide() -> None:
    model = conv_net()
    assert not wide_tensors(model, everywhere(model))
    assert not conversions(model, everywhere(model), frozenset())


def test_conversions_are_a_dq_of_one_type_and_a_q_of_the_other() -> None:
    model = conv_net()
    written = insert(model, widened(model, "project"), ranges(model), WIDE)
    onnx.checker.check_model(written.to_proto())
    assert types(written, "QuantizeLinear").count("UINT16") == 2  # k1 for the product, and its result
    assert written.opset == 21
    converted = written.node("project").inputs[0]
    q = written.maker(written.maker(converted).inputs[0])
    assert written.maker(q.inputs[0]).op == "DequantizeLinear"


@pytest.mark.parametrize("nodes", [(), ("stem",), ("project",), ("project", "add"), ("head",)])
@pytest.mark.parametrize("numbers", [WIDE, QNN])
def test_placements_are_read_back(nodes: tuple[str, ...], numbers) -> None:
    model = conv_net()
    placement = widened(model, *nodes)
    reading = read_placement(model, insert(model, placement, ranges(model), numbers))
    assert reading.placement.edges == placement.edges
    shown = {e for e in placement.edges if e.is_graph_output}  # an output has the bits of its maker
    assert reading.placement.wide - shown == placement.wide - shown
    assert not reading.unmatched


def test_a_file_that_is_read_and_written_again_is_the_same() -> None:
    model = conv_net()
    written = insert(model, widened(model, "project", "add"), ranges(model), QNN)
    reading = read_placement(model, written)
    again = insert(model, reading.placement, reading.ranges, QNN)
    for expected, got in zip(run(written, feeds(model)), run(again, feeds(model)), strict=True):
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


def test_pairs_of_16_bits_are_stripped() -> None:
    model = conv_net()
    stripped = strip_pairs(insert(model, widened(model, "project"), ranges(model), WIDE))
    assert [n.op for n in stripped.nodes] == [n.op for n in model.nodes]
    assert sqnr(run(model, feeds(model)), run(stripped, feeds(model))) > 30  # weights are those of 8 bits


def test_16_bits_are_nearer_to_float_than_8() -> None:
    model = conv_net()
    found = {}
    for name, placement in {
        "8": everywhere(model),
        "mixed": widened(model, "head", "average"),
        "16": widened(model),
    }.items():
        written = insert(model, placement, ranges(model), replace(WIDE, bias="int32"))
        found[name] = sqnr(run(model, feeds(model)), run(written, feeds(model)))
    assert found["8"] <= found["mixed"] < found["16"]


def test_wide_ranges_hold_every_value() -> None:
    model = build("n (float[N,4] x) => (float[N,3] y) { [g] y = Gemm(x, w) }", {"w": normal(4, 3)})
    placed = everywhere(model)
    clipped = replace(ranges(model), activations={"x": Range(-1, 1), "y": Range(-1, 1)}, wide={"x": Range(-8, 8)})
    written = insert(model, Placement.of(placed.edges, (), activations(model, placed)), clipped, WIDE)
    qs = [n for n in written.nodes if n.op == "QuantizeLinear"]
    assert sorted(float(written.constants[q.inputs[1]].array()) * 65535 for q in qs) == pytest.approx([2, 16], rel=1e-4)


@pytest.mark.parametrize(("op", "scale", "zero"), [("Sigmoid", 2**-16, 0), ("Tanh", 2**-15, 2**15)])
def test_some_results_have_one_scale_in_16_bits(op: str, scale: float, zero: int) -> None:
    model = build(f"n (float[N,4] x) => (float[N,4] y) {{ [s] t = {op}(x) [r] y = Relu(t) }}")
    written = insert(model, widened(model), ranges(model), QNN)
    q = next(n for n in written.nodes if n.op == "QuantizeLinear" and n.inputs[0] == "t")
    assert written.constants[q.inputs[1]].array() == np.float32(scale)
    assert written.constants[q.inputs[2]].array() == zero
    narrow = insert(model, everywhere(model), ranges(model), QNN)
    q = next(n for n in narrow.nodes if n.op == "QuantizeLinear" and n.inputs[0] == "t")
    assert narrow.constants[q.inputs[1]].array() != np.float32(scale)


@pytest.mark.parametrize(("low", "high", "expected"), [(-0.7, 1.4, 4.0), (1.0, 2.0, 4.0), (-7.0, 1.0, 8.0)])
def test_some_results_have_a_least_scale_in_16_bits(low: float, high: float, expected: float) -> None:
    model = build("n (float[N,4] x) => (float[N,4] y) { [a] p = Abs(x) [l] t = Log(p) [r] y = Relu(t) }")
    known = replace(ranges(model), activations={**ranges(model).activations, "t": Range(low, high)})
    for placement, spread in ((widened(model), expected), (everywhere(model), max(high, 0.0) - min(low, 0.0))):
        written = insert(model, placement, known, QNN)
        q = next(n for n in written.nodes if n.op == "QuantizeLinear" and n.inputs[0] == "t")
        steps = 65535 if placement.wide else 255
        assert float(written.constants[q.inputs[1]].array()) * steps == pytest.approx(spread, rel=1e-5)


def test_engines_without_16_bits_refuse_them() -> None:
    model = conv_net()
    with pytest.raises(ValueError, match="no activations in 16 bits"):
        insert(model, widened(model), ranges(model), PLAIN)


def test_only_an_edge_with_a_pair_has_16_bits() -> None:
    with pytest.raises(ValueError, match="only an edge with a pair"):
        Placement.of([Edge("a", "n", 0)], (), [Edge("b", "n", 1)])


def test_placements_with_16_bits_are_added_and_taken_apart() -> None:
    a, b = Edge("a", "n", 0), Edge("b", "n", 1)
    both = Placement.of([a], (), [a]) | Placement.of([b])
    assert (both.edges, both.wide) == ({a, b}, {a})
    assert (both - Placement.of([a])).wide == frozenset()
    assert both.paired([b]).wide == frozenset()
    assert both.digest != Placement.of([a, b]).digest


def test_a_lonely_pair_takes_its_16_bits_with_it() -> None:
    model = conv_net()
    edge = Edge("image", "stem", 0)
    assert consistent(model, Placement.of([edge], (), [edge])) == Placement()


def test_files_and_records_keep_the_bits(tmp_path) -> None:
    model = conv_net()
    placement = widened(model, "project")
    write_placement(tmp_path / "placement.yaml", PlacementFile(placement, "int8", "qnn", {}), "model.onnx")
    assert (tmp_path / "placement.yaml").read_text().count("bits: 16") == 1
    assert read_placement_file(tmp_path / "placement.yaml").placement == placement
    assert StoredPlacement.of(placement).placement == placement
    known, lost = existing(model, placement, possible_edges(model, ranges(model)))
    assert (known, lost) == (placement, ())


def test_candidates_share_what_they_have_written() -> None:
    model = conv_net()
    inserter = Inserter(model, ranges(model), WIDE)
    for nodes in product([(), ("project",), ("add",)], repeat=2):
        placement = widened(model, "head", *nodes[0], *nodes[1])
        expected = insert(model, placement, ranges(model), WIDE).to_proto()
        assert inserter.insert(placement).to_proto() == expected


def test_weights_in_16_bits_are_next_to_exact_and_need_no_corrected_bias() -> None:
    model = conv_net()
    placement = everywhere(model)
    weights = frozenset(e for e in placement.edges if e.tensor in model.constants and weight_role(model, e) is not None)
    wide = Placement.of(placement.edges, (), activations(model, placement) | weights)
    assert wide_weights(model, wide) == {e.tensor for e in weights}
    name = next(n.name for n in model.nodes if n.op == "Conv")
    channels = model.tensors[model.node(name).outputs[0]].shape[1]
    shifted = replace(ranges(model), shifts={name: (0.5,) * channels})  # found for weights of 8 bits
    written = insert(model, wide, shifted, QNN)
    assert types(written, "DequantizeLinear").count("INT16") == len(weights)
    x = feeds(model)
    assert sqnr(run(model, x), run(written, x)) > 60
    again = read_placement(model, written)
    assert again.placement == wide
    rewritten = insert(model, again.placement, again.ranges, QNN)
    assert sqnr(run(written, x), run(rewritten, x)) > 60
    narrow = insert(model, everywhere(model), again.ranges, QNN)  # the steps of 16 bits are no good in 8
    assert sqnr(run(model, x), run(narrow, x)) > 20


def test_weights_of_16_bits_need_activations_of_16(tmp_path) -> None:
    model = conv_net()
    placed = everywhere(model)
    weights = frozenset(e for e in placed.edges if e.tensor in model.constants and weight_role(model, e) is not None)
    both = Placement.of(placed.edges, (), weights | activations(model, placed, "project"))
    found = computable(model, both)
    assert {e.node for e in found.wide} == {"project"}
    assert wide_weights(model, found) == {e.tensor for e in weights if e.node == "project"}
    write_placement(tmp_path / "placement.yaml", PlacementFile(both, "int8", "qnn", {}), "m.onnx")
    recorded = read_placement_file(tmp_path / "placement.yaml").placement
    assert existing(model, recorded, possible_edges(model, ranges(model))) == (found, ())
