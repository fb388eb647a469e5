"""What QNN's simulator computes in 16 bits: nearly what ONNX defines, where the numbers suit it."""

import platform
from pathlib import Path

import numpy as np
import onnx
import pytest

from models import build, normal, ranges
from qdqtune import compare, quantize
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.formats import numeric_format
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES
from qdqtune.graph.saving import save
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.rule_costs import W8A16, W16A16, RuleCosts
from qdqtune.types import Array

SIMULATOR = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="Qualcomm's simulator runs on x86-64 only"
)

DATA = np.random.default_rng(0).standard_normal((8, 1, 64, 8, 8)).astype(np.float32)


def convolution(kernel: int, gap: int) -> Model:
    pads = kernel // 2 * gap
    text = f"""n (float[1,64,8,8] x) => (float[1,16,8,8] y) {{
        [conv] y = Conv <pads=[{pads},{pads},{pads},{pads}], dilations=[{gap},{gap}]> (x, w)
    }}"""
    weight = normal(16, 64, kernel, kernel, scale=0.1)
    return build(text, {"w": np.where(weight == -np.abs(weight).max((1, 2, 3), keepdims=True), -weight, weight)})


def costs_of(model: Model, known: Ranges) -> RuleCosts:
    return RuleCosts(model, engine_rules.place(model, possible_edges(model, known), "qnn", "int8").placement)


def simulated(model: Model, folder: Path, data: Array = DATA) -> float:
    """The SQNR in dB of a file with weights and activations of 16 bits."""
    pytest.importorskip("onnxruntime_qnn")
    known = ranges(model, [{"x": sample} for sample in data])
    costs = costs_of(model, known)
    files, samples = (folder / "float.onnx", folder / "pairs.onnx"), str(folder / "samples.npz")
    save(model, files[0])
    save(insert(model, costs.placement(costs.everywhere(W16A16)), known, numeric_format("qnn", "int8")), files[1])
    np.savez(samples, x=data)
    return compare(*files, calibration_data=samples, engine="qnn").rows[-1].sqnr_db


@SIMULATOR
@pytest.mark.parametrize("gap", [1, 2])  # a kernel of one point loses nothing without its dilation
def test_the_largest_weight_is_one_that_the_simulator_sums_up_exactly(gap: int, tmp_path: Path) -> None:
    assert simulated(REWRITES["dilations"].apply(convolution(1, gap)), tmp_path) > 70


@SIMULATOR
@pytest.mark.parametrize(("low", "high"), [(0.5, 4.0), (1.0, 2.0), (0.05, 0.5)])
def test_a_logarithm_is_right_in_16_bits(low: float, high: float, tmp_path: Path) -> None:
    data = np.random.default_rng(0).uniform(low, high, (8, 1, 64, 8, 8)).astype(np.float32)
    assert (
        simulated(build("n (float[1,64,8,8] x) => (float[1,64,8,8] y) { [log] y = Log(x) }", {}), tmp_path, data) > 60
    )


@SIMULATOR
def test_a_running_sum_is_right_by_the_rules(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    text = "n (float[1,64,8,8] x) => (float[1,64,8,8] y) { [conv] t = Conv(x, w) [sum] y = CumSum(t, axis) }"
    weight = normal(64, 64, 1, 1, scale=0.1)
    files, samples = (tmp_path / "float.onnx", tmp_path / "pairs.onnx"), str(tmp_path / "samples.npz")
    save(build(text, {"w": weight, "axis": np.array(2, np.int64)}), files[0])
    np.savez(samples, x=DATA)
    quantize(files[0], output=files[1], engine="qnn", calibration_data=samples)
    sqnr_db = compare(*files, calibration_data=samples, engine="qnn").rows[-1].sqnr_db
    assert sqnr_db is not None
    assert sqnr_db > 25


def test_dilated_convolutions_get_no_weights_of_16_bits() -> None:
    for gap, expected in ((2, W8A16), (1, W16A16)):
        model = convolution(3, gap)
        assert costs_of(model, ranges(model)).everywhere(W16A16) == (expected,)


def test_only_needless_dilations_go() -> None:
    rewrite = REWRITES["dilations"].apply
    for kernel, gap, expected in ((1, 2, 1), (3, 2, 2), (3, 1, 1)):
        model = convolution(kernel, gap)
        found = rewrite(model)
        assert onnx.helper.get_node_attr_value(found.proto.graph.node[0], "dilations") == [expected] * 2
        assert (found is model) == (expected == gap)
