"""Layer reports by node and tensor: no time is lost."""

import numpy as np
import onnx
import pytest

from models import build, normal
from price_chain import FLOAT, chain, parts_of, times
from qdqtune.graph.model import Model
from qdqtune.search.costs.attribution import attribute, node_times
from qdqtune.search.costs.decisions import cut
from qdqtune.search.costs.prices import learn
from qdqtune.types import Edge, Layer, Placement, WeightFormat
from tensorrt_exports import EXPORTS, report_of


def layer(time: float, *nodes: str) -> Layer:
    return Layer(nodes[0] if nodes else "reformat", nodes, "FP32", time, "compute" if nodes else "reformat")


def test_a_conversion_counts_with_one_node_and_that_of_an_added_bias_with_none() -> None:
    layers = layer(4.0, "a"), layer(1.0, "t_QuantizeLinear"), layer(1.0, "t_DequantizeLinear")
    folded = Layer("folded", ("w1_DequantizeLinear", "u_bias_DequantizeLinear"), "", 0.0, "folded")
    spent = node_times(chain(), Placement(), (*layers, layer(4.0, "b"), folded), 10.0)
    assert {name: tuple(time) for name, time in spent.items() if any(time)} == {"a": (4.0, 1.0), "b": (4.0, 1.0)}


def test_attribution_adds_up_to_the_scaled_latency() -> None:
    conversions = layer(1.0, "u_DequantizeLinear"), layer(1.0, "u_DequantizeLinear_2"), layer(0.5, "t_QuantizeLinear")
    layers = (layer(2.0, "a", "t_QuantizeLinear"), layer(1.0), layer(4.0, "b", "c"), *conversions)
    found = attribute(chain(), Placement(), layers, 0.5 * 38.0)
    scale = 0.5 * 38.0 / 9.5
    assert found.nodes["a"] == pytest.approx(2.0 * scale)
    assert found.nodes["b"] + found.nodes["c"] == pytest.approx(5.0 * scale)  # with the reformat in front
    assert found.nodes["b"] > 50 * found.nodes["c"]  # by work
    assert found.dequantize == pytest.approx({"u": 2.0 * scale})
    assert found.quantize == pytest.approx({"t": 0.5 * scale})


def test_a_dynamic_quantization_counts_for_the_products_that_read_it() -> None:
    model = build(
        "net (float[4,8] x) => (float[4,8] y, float[4,8] z) { [a] y = MatMul(x, w0) [b] z = MatMul(x, w1) }",
        {"w0": normal(8, 8), "w1": normal(8, 8)},
    )
    dynamic = WeightFormat(8, dynamic=True)
    placement = Placement.of((), [(Edge("w0", "a", 1), dynamic), (Edge("w1", "b", 1), dynamic)])
    layers = layer(2.0, "x_DynamicQuantizeLinear"), layer(3.0, "a", "a_Cast", "a_scales", "a_Mul"), layer(3.0, "b")
    assert attribute(model, placement, layers, 8.0).nodes == pytest.approx({"a": 4.0, "b": 4.0})


@pytest.mark.parametrize("export", EXPORTS)
def test_recorded_reports_of_tensorrt_are_attributed(export: str) -> None:
    """To a model of other names nothing can be attributed, and to one of its names everything."""
    report = report_of(export)
    total = sum(found.time_ms or 0.0 for found in report)
    stranger = attribute(chain(), Placement(), report, total)
    assert not stranger.nodes
    parts = parts_of(chain())
    costs = learn(parts, [times(**FLOAT), stranger])
    assert np.isfinite(costs.total(cut(costs)))
    named = [n for found in report for n in found.nodes if "QuantizeLinear" not in n]
    model = lookalike(list(dict.fromkeys(named)))
    found = attribute(model, Placement(), report, 0.5 * total)
    spent = sum((*found.nodes.values(), *found.quantize.values(), *found.dequantize.values()))
    assert 0.8 * 0.5 * total < spent <= 0.5 * total * (1 + 1e-9)  # what runs behind the last node has no owner


def lookalike(names: list[str]) -> Model:
    """A chain of nodes with given names."""
    nodes = [onnx.helper.make_node("Relu", [f"t{k}"], [f"t{k + 1}"], name) for k, name in enumerate(names)]
    ends = [onnx.helper.make_tensor_value_info(t, 1, [2, 4]) for t in ("t0", f"t{len(names)}")]
    return Model(onnx.helper.make_model(onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:])))
