"""Where a pair may stand is said once, for every operator; and where 16 bits are written, change to 8, and are read."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import INT8, PLAIN, build, constant, conv_net, feeds, known, normal, ranges, run, sqnr
from qdqtune.autotune.region_search import CombinedRegionSearch, patterns_of
from qdqtune.calibration.scales import Range
from qdqtune.engines.formats import numeric_format
from qdqtune.graph import operators
from qdqtune.graph.model import GRAPH, Model
from qdqtune.placement import engine_rules
from qdqtune.placement.files import PlacementFile, existing, read_placement_file, write_placement
from qdqtune.placement.insertion import Inserter, insert
from qdqtune.placement.possible import can_carry, computable, possible_edges, weight_role, wide_tensors, wide_weights
from qdqtune.placement.reading import read_placement
from qdqtune.search.regions import discovery, patterns
from qdqtune.types import Edge, Placement, QType

MOST_INPUTS = 8
FLOAT = TensorProto.FLOAT
OPTIMIZED = {
    "DynamicQuantizeMatMul", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "MatMulIntegerToFloat",
    "MultiHeadAttention", "QAttention", "QGemm", "QuickGelu", "SimplifiedLayerNormalization",
}  # fmt: skip
"""Operators that ONNX Runtime's optimizer makes."""
FAMILIES: dict[str, Iterable[str]] = {
    name: value for name, value in vars(operators).items() if name.isupper() and isinstance(value, frozenset | dict)
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_of_a_family_exists(family: str) -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()} | OPTIMIZED
    assert FAMILIES[family]
    assert not set(FAMILIES[family]) - known


def test_settings_are_inputs_that_their_operators_have() -> None:
    for op, first in operators.SETTINGS_FROM.items():
        versions = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op]
        assert max(len(schema.inputs) for schema in versions) > first


@cache
def every_operator() -> Model:
    """Every operator of ONNX and of the catalogue, with computed and with constant inputs, as ONNX's and as another's.

    All tensors are float, whatever the operator asks for: only the place of an input counts. Each result is a graph
    output. A constant that is empty, one that is not finite, and tensors of other types or of unknown type are there.
    """
    sizes = {s.name: (max(1, s.min_output), min(max(s.min_input, len(s.inputs), 1), MOST_INPUTS))
             for s in onnx.defs.get_all_schemas() if s.domain == ""}  # fmt: skip
    sizes |= dict.fromkeys({op for family in FAMILIES.values() for op in family} - sizes.keys(), (1, MOST_INPUTS))
    nodes, outputs = [], []
    constants = {"c": normal(2, 2), "empty": np.zeros((0, 2), np.float32), "infinite": np.float32([np.inf, 1])}
    for op, (made, taken) in sorted(sizes.items()):
        for domain in ("", "custom"):
            for how in ("computed", "constant"):
                name = f"{op}_{domain}_{how}"
                given = [f"{name}_in{i}" for i in range(taken)] if how == "computed" else ["c"] * taken
                nodes += [helper.make_node("Relu", ["x"], [t], t) for t in given if t != "c"]
                outputs += [f"{name}_out{i}" for i in range(made)]
                nodes.append(helper.make_node(op, given, outputs[-made:], name, domain=domain))
    for name, tensor in (("add_empty", "empty"), ("add_infinite", "infinite"), ("add_ids", "ids"), ("add_any", "any")):
        nodes.append(helper.make_node("Add", ["x", tensor], [f"{name}_out"], name))
        outputs.append(f"{name}_out")
    then = helper.make_graph([helper.make_node("Relu", ["read"], ["r"], "inner")], "body", [], [info("r")])
    nodes += [helper.make_node("Relu", ["x"], ["read"], "make_read"),
              helper.make_node("If", ["ids"], ["chosen"], "choose", then_branch=then, else_branch=then)]  # fmt: skip
    inputs = [info("x"), info("ids", TensorProto.INT64), helper.make_empty_tensor_value_info("any")]
    graph = helper.make_graph(
        nodes, "every", inputs, [info(t) for t in (*outputs, "read", "chosen", "x", "c")],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
        value_info=[info(o) for n in nodes for o in n.output],
    )  # fmt: skip
    return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def info(name: str, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None)


def insertable(model: Model, edges: set[Edge]) -> set[Edge]:
    """The edges that insertion takes: a refusal comes before anything is written, and one for all is as good."""
    inserter = Inserter(model, known(model), INT8)
    taken = edges & inserter._possible
    inserter.insert(Placement(frozenset(taken)))
    for edge in sorted(edges - taken)[::20]:
        with pytest.raises(ValueError, match="no pair can stand on"):
            inserter.insert(Placement.of([edge]))
    return taken


def test_all_callers_agree_on_every_operator() -> None:
    model = every_operator()
    edges = {Edge(t, n.name, i) for n in model.nodes for i, t in enumerate(n.inputs) if t}
    edges |= {Edge(t, "", i) for i, t in enumerate(model.outputs)}
    by_structure = {
        e for e in edges if can_carry(model, e.tensor, model.index_of[e.node] if e.node else GRAPH, e.index)
    }
    scaled = {e for e in by_structure if e.tensor != "infinite"}
    assert {e for e in edges if e.tensor == "infinite"} < by_structure
    assert possible_edges(model, known(model)) == scaled
    assert insertable(model, edges) == scaled
    found = patterns.group(model, discovery.find(model))
    assert {e for p in found for own in p.edges.values() for some in own.values() for e in some} == by_structure
    guest_patterns = patterns_of(model, CombinedRegionSearch(model).search_regions()).values()
    guests = {e for p in guest_patterns for own in p.edges.values() for some in own.values() for e in some}
    assert guests == by_structure


@pytest.mark.parametrize(
    ("op", "constant", "slots"),
    [
        ("Conv", False, [0, 1, 2]),  # a computed bias is data
        ("Conv", True, [1]),
        ("MatMul", True, [0, 1]),
        ("LayerNormalization", False, [0]),
        ("LayerNormalization", True, [1]),  # its scale is a weight, if it is one
        ("LSTM", False, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("LSTM", True, []),
        ("Clip", False, [0]),
        ("Resize", False, [0]),
        ("BatchNormalization", False, [0]),
        ("BatchNormalization", True, [1]),
        ("OneHot", False, []),
        ("Gather", True, [0]),
        ("Pow", True, []),
        ("Shape", False, [0]),  # a pair is good for nothing there, and does no harm
    ],
)
def test_what_is_decided_of_single_operators(op: str, constant: bool, slots: list[int]) -> None:
    model = every_operator()
    node = model.nodes[model.index_of[f"{op}__{'constant' if constant else 'computed'}"]]
    assert [i for i, t in enumerate(node.inputs) if can_carry(model, t, node.index, i)] == slots


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


def test_what_comes_as_floats_has_the_bits_of_its_widest_reader() -> None:
    model = conv_net()
    assert "image" in wide_tensors(model, widened(model, "stem"))
    assert "image" not in wide_tensors(model, widened(model, "project"))


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


def test_wide_ranges_hold_every_value() -> None:
    model = build("n (float[N,4] x) => (float[N,3] y) { [g] y = Gemm(x, w) }", {"w": normal(4, 3)})
    placed = everywhere(model)
    clipped = replace(ranges(model), activations={"x": Range(-1, 1), "y": Range(-1, 1)}, wide={"x": Range(-8, 8)})
    written = insert(model, Placement.of(placed.edges, (), activations(model, placed)), clipped, WIDE)
    qs = [n for n in written.nodes if n.op == "QuantizeLinear"]
    assert sorted(float(written.constants[q.inputs[1]].array()) * 65535 for q in qs) == pytest.approx([2, 16], rel=1e-4)


def pair_on(model: Model, tensor: str) -> tuple[Any, Any]:
    """The scale and the zero point of the pair on an activation."""
    q = next(n for n in model.nodes if n.op == "QuantizeLinear" and n.inputs[0] == tensor)
    return constant(model, q.inputs[1]), constant(model, q.inputs[2])


@pytest.mark.parametrize(("op", "scale", "zero"), [("Sigmoid", 2**-16, 0), ("Tanh", 2**-15, 2**15)])
def test_some_results_have_one_scale_in_16_bits(op: str, scale: float, zero: int) -> None:
    model = build(f"n (float[N,4] x) => (float[N,4] y) {{ [s] t = {op}(x) [r] y = Relu(t) }}")
    assert pair_on(insert(model, widened(model), ranges(model), QNN), "t") == (np.float32(scale), zero)
    assert pair_on(insert(model, everywhere(model), ranges(model), QNN), "t")[0] != np.float32(scale)


@pytest.mark.parametrize(("low", "high", "expected"), [(-0.7, 1.4, 4.0), (1.0, 2.0, 4.0), (-7.0, 1.0, 8.0)])
def test_some_results_have_a_least_scale_in_16_bits(low: float, high: float, expected: float) -> None:
    model = build("n (float[N,4] x) => (float[N,4] y) { [a] p = Abs(x) [l] t = Log(p) [r] y = Relu(t) }")
    known = replace(ranges(model), activations={**ranges(model).activations, "t": Range(low, high)})
    narrow, wide = (pair_on(insert(model, p, known, QNN), "t")[0] for p in (everywhere(model), widened(model)))
    assert float(narrow) * 255 == pytest.approx(max(high, 0.0) - min(low, 0.0), rel=1e-5)
    assert float(wide) * 65535 == pytest.approx(expected, rel=1e-5)


def test_engines_without_16_bits_and_edges_without_a_pair_refuse_them() -> None:
    model = conv_net()
    with pytest.raises(ValueError, match="no activations in 16 bits"):
        insert(model, widened(model), ranges(model), PLAIN)
    with pytest.raises(ValueError, match="only an edge with a pair"):
        Placement.of([Edge("a", "n", 0)], (), [Edge("b", "n", 1)])


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
    assert (tmp_path / "placement.yaml").read_text().count("bits: 16") == len(both.wide)
    recorded = read_placement_file(tmp_path / "placement.yaml").placement
    assert existing(model, recorded, possible_edges(model, ranges(model))) == (found, ())
