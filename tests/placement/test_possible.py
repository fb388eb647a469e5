"""Where a pair may stand is said once: everybody who asks agrees, on every operator there is."""

from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import normal
from qdqtune.autotune.graphs import patterns_of
from qdqtune.autotune.region_search import CombinedRegionSearch
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.graph import operators
from qdqtune.graph.model import GRAPH, Model
from qdqtune.placement import engine_rules, start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import can_carry, possible_edges
from qdqtune.search.regions import discovery, patterns
from qdqtune.types import Edge, NumericFormat, Placement, QType

FORMAT = NumericFormat(QType.INT8, QType.INT8, symmetric=True)
MOST_INPUTS = 8
FLOAT = TensorProto.FLOAT


def families() -> set[str]:
    """Every operator that the catalogue names."""
    return {op for name, family in vars(operators).items() if name.isupper() and isinstance(family, frozenset | dict)
            for op in family}  # fmt: skip


@cache
def every_operator() -> Model:
    """Every operator of ONNX and of the catalogue, with computed and with constant inputs, as ONNX's and as another's.

    All tensors are float, whatever the operator asks for: only the place of an input counts. Each result is a graph
    output. A constant that is empty, one that is not finite, and tensors of other types or of unknown type are there.
    """
    sizes = {s.name: (max(1, s.min_output), min(max(s.min_input, len(s.inputs), 1), MOST_INPUTS))
             for s in onnx.defs.get_all_schemas() if s.domain == ""}  # fmt: skip
    sizes |= dict.fromkeys(families() - sizes.keys(), (1, MOST_INPUTS))
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


def all_edges(model: Model) -> set[Edge]:
    inside = {Edge(t, n.name, i) for n in model.nodes for i, t in enumerate(n.inputs) if t}
    return inside | {Edge(t, "", i) for i, t in enumerate(model.outputs)}


def whole_range(model: Model) -> Ranges:
    return Ranges({t: Range(-1, 1) for t in model.tensors})


def insertable(model: Model, edges: set[Edge]) -> set[Edge]:
    """The edges that insertion takes: a refusal comes before anything is written, and one for all is as good."""
    inserter, taken = Inserter(model, whole_range(model), FORMAT), set()
    for edge in edges:
        if inserter._problem(edge) is None:
            taken.add(edge)
    inserter.insert(Placement(frozenset(taken)))
    for edge in sorted(edges - taken)[::20]:
        with pytest.raises(ValueError, match="no pair can stand on"):
            inserter.insert(Placement.of([edge]))
    return taken


def test_all_callers_agree_on_every_operator() -> None:
    model = every_operator()
    edges = all_edges(model)
    by_structure = {
        e for e in edges if can_carry(model, e.tensor, model.index_of[e.node] if e.node else GRAPH, e.index)
    }
    scaled = {e for e in by_structure if e.tensor != "infinite"}
    assert {e for e in edges if e.tensor == "infinite"} < by_structure
    assert possible_edges(model, whole_range(model)) == scaled
    assert insertable(model, edges) == scaled
    found = patterns.group(model, discovery.find(model))
    assert {e for p in found for own in p.edges.values() for some in own.values() for e in some} == by_structure
    guest_patterns = patterns_of(model, CombinedRegionSearch(model).search_regions()).values()
    guests = {e for p in guest_patterns for own in p.edges.values() for some in own.values() for e in some}
    assert guests == by_structure


def test_no_rule_leaves_what_is_possible() -> None:
    model = every_operator()
    possible = possible_edges(model, whole_range(model))
    assert all(placement.edges <= possible for placement in start_placements.placements(model, possible).values())
    for engine in ("onnxruntime", "tensorrt"):
        assert engine_rules.place(model, possible, engine, "int8").placement.edges <= possible


@pytest.mark.parametrize(
    ("op", "constant", "slots"),
    [
        ("Conv", False, [0, 1, 2]),  # a computed bias is data
        ("Conv", True, [1]),
        ("Gemm", True, [0, 1]),
        ("MatMul", True, [0, 1]),
        ("LayerNormalization", False, [0]),
        ("LayerNormalization", True, [1]),  # its scale is a weight, if it is one
        ("LSTM", False, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("LSTM", True, []),
        ("Einsum", False, [0]),
        ("Einsum", True, []),
        ("Clip", False, [0]),
        ("Resize", False, [0]),
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


def test_nothing_stands_on_what_has_no_scale_or_no_name_of_its_own() -> None:
    model = every_operator()
    found = possible_edges(model, whole_range(model))
    assert not {e.tensor for e in found if e.is_graph_output} & {"read", "x", "c"}
    assert Edge("read", "", model.outputs.index("read")) in all_edges(model)
    assert not {e for e in found if e.tensor in ("empty", "infinite", "ids", "any")}
    assert not {e for e in found if e.node and model.nodes[model.index_of[e.node]].domain}
    assert not {e for e in possible_edges(model, Ranges({})) if e.tensor not in model.constants}
