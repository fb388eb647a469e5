"""Weights that alone are quantized: written as standard ONNX, run by ONNX Runtime, and read back."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import quantize_dynamic

from models import Array, build, normal, run, sqnr
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.formats import numeric_format, weight_formats_like
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import ConstantFile, save
from qdqtune.placement.files import PlacementFile, existing, read_placement_file, write_placement
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import weight_only_edges
from qdqtune.placement.reading import quantized_how, read_placement
from qdqtune.placement.start_placements import weight_only
from qdqtune.placement.stripping import strip_pairs
from qdqtune.types import Edge, Placement, WeightFormat
from weight_only_nets import DYNAMIC

DYNAMIC_KERNELS = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
WEIGHTS = {Edge("up_weight", "up", 1), Edge("down_weight", "down", 1),
           Edge("head_weight", "head", 1)}  # fmt: skip


def net(opset: int = 18) -> Model:
    """A table that embedding and head share, and two products."""
    constants = {"table": normal(40, 32), "up_weight": normal(32, 32, scale=0.2, seed=1),
                 "down_weight": normal(32, 32, scale=0.2, seed=2), "bias": normal(32, seed=3),
                 "rows": np.array([3, 32]), "shape": np.array([1, 3, 32])}  # fmt: skip
    text = """net (int64[1,3] ids) => (float[1,3,40] logits) {
        [pick] x = Gather(table, ids)
        [between] t = Tanh(x)
        [up] u = MatMul(t, up_weight)
        [flat] f = Reshape(u, rows)
        [down] d = Gemm <transB=1> (f, down_weight, bias)
        [back] b = Reshape(d, shape)
        [turn] head_weight = Transpose <perm=[1,0]> (table)
        [head] logits = MatMul(b, head_weight)
    }"""
    return build(text, constants, opset)


def inserter(model: Model) -> Inserter:
    return Inserter(model, Ranges({}), numeric_format("onnxruntime", "int8"))


def placed(model: Model, wanted: str) -> Placement:
    return weight_only(model, weight_only_edges(model), weight_formats_like("onnxruntime", wanted))


IDS = {"ids": np.array([[1, 39, 7]])}


def logits(path: Path) -> Array:
    """Of a file, whose optimized form is written beside it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.optimized_model_filepath = str(path.with_name("optimized.onnx"))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, IDS)[0]


@pytest.mark.parametrize("wanted", ["w8", "w8b32", "w4b32", "w4b32a", DYNAMIC.name])
def test_onnx_runtime_runs_them_in_its_kernels_and_they_are_read_back(wanted: str, tmp_path: Path) -> None:
    model = net()
    placement = placed(model, wanted)
    weight_formats = placement.weight_formats
    assert weight_formats.keys() == WEIGHTS
    assert {s.name for s in weight_formats.values()} == {wanted}
    save(inserter(model).insert(placement), tmp_path / "stored.onnx")
    onnx.checker.check_model(str(tmp_path / "stored.onnx"), full_check=True)
    floats = run(model, [IDS])
    least = 10 if wanted.startswith("w4") else 30
    assert sqnr(floats, [{"logits": logits(tmp_path / "stored.onnx")}]) > least
    ran = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    kernels = DYNAMIC_KERNELS if wanted == DYNAMIC.name else {"MatMulNBits"}
    assert sum(op in kernels for op in ran) == 3
    assert "Transpose" not in ran
    loaded = load(tmp_path / "stored.onnx")
    assert read_placement(model, loaded).placement == placement
    stripped = strip_pairs(loaded)
    assert not any(node.op.endswith("quantizeLinear") for node in stripped.nodes)
    again = read_placement(stripped, loaded).placement
    assert {(e.node, s.name) for e, s in again.weight_only} == {(e.node, s.name) for e, s in placement.weight_only}
    assert sqnr(floats, run(stripped, [IDS])) > least


def test_dynamic_quantization_is_shared_simulated_and_read_from_the_files_of_others(tmp_path: Path) -> None:
    text = """net (float[2,5,64] x) => (float[2,5,64] y) {
        [q] a = MatMul(x, w0)
        [k] b = MatMul(x, w1)
        [mul] c = Mul(a, b)
        [out] d = MatMul(c, w2)
        [bias] y = Add(d, w3)
    }"""
    weights = {f"w{i}": normal(64, 64, scale=0.1, seed=i) for i in range(3)} | {"w3": normal(64, seed=3)}
    model = build(text, weights)
    samples = [{"x": normal(2, 5, 64, seed=seed)} for seed in range(4)]
    placement = Placement.of((), [(Edge(f"w{i}", node, 1), DYNAMIC) for i, node in enumerate(("q", "k", "out"))])
    written = inserter(model).insert(placement)
    assert [node.op for node in written.nodes].count("DynamicQuantizeLinear") == 2
    exact, unfused, fused = run(model, samples), run(written, samples), run(written, samples, fused=True)
    assert sqnr(unfused, fused) > 60 > sqnr(exact, fused) > 30
    save(model, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "theirs.onnx")
    theirs = load(tmp_path / "theirs.onnx")
    assert quantized_how(theirs) == "is dynamically quantized already"
    assert {format.name for _, format in read_placement(model, theirs).placement.weight_only} == {"d8"}
    assert read_placement(model, written).placement == placement
    assert {node.op for node in strip_pairs(theirs).nodes} == {"MatMul", "Mul", "Add"}


def test_candidates_share_their_integers_by_reference(tmp_path: Path) -> None:
    model = net(21)
    placement = placed(model, "w4b32")
    make = inserter(model)
    with ConstantFile(tmp_path / "constants.bin") as constants:
        constants.save(make.insert(placement), tmp_path / "small.onnx")
        constants.save(make.insert(Placement()), tmp_path / "floats.onnx")
    (whole,) = run(make.insert(placement), [IDS], fused=True)
    assert np.array_equal(whole["logits"], logits(tmp_path / "small.onnx"))
    assert make.insert(Placement()).opset == 21


def test_what_cannot_be_stored_so_is_refused() -> None:
    model, make = net(), inserter(net())
    up, bias, table = Edge("up_weight", "up", 1), Edge("bias", "down", 2), Edge("table", "pick", 0)
    for edge, how in ((up, WeightFormat(4, 64)), (bias, WeightFormat(8)), (table, WeightFormat(8))):
        with pytest.raises(ValueError, match="cannot be the weight format of"):
            make.insert(Placement.of((), [(edge, how)]))
    with pytest.raises(ValueError, match="one weight format"):
        Placement.of([Edge("up_weight", "up", 1)], [(Edge("up_weight", "up", 1), WeightFormat(8))])
    assert model.opset == 18


def test_a_placement_file_holds_them(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "placement.yaml"
    placement = placed(model, "w4b32a")
    write_placement(path, PlacementFile(placement, "int8", "onnxruntime", {}), "net.onnx")
    assert "{tensor: up_weight, node: up, input: 1, storage: w4b32a}" in path.read_text()
    assert read_placement_file(path).placement == placement
    assert existing(model, placement, frozenset()) == (placement, ())
    other = Placement.of((), [(Edge("nothing", "up", 1), WeightFormat(8))])
    assert existing(model, other, frozenset()) == (Placement(), (Edge("nothing", "up", 1),))
