"""TensorRT-RTX itself, on a machine without a GPU: what this project inserts is parsed, built and fused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from engine_contract import IMAGE, built_by, conv_model, matmul_model, model_of
from loaded_modules import CUDA, absent, present
from models import attention, build, conv_net, feeds, normal, ranges
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.graph import operators
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Edge, Layer, Placement, QuantType
from tensorrt_fakes import FakeCuda

pytest.importorskip("tensorrt_rtx_bindings")

UPSAMPLING = """net (float[N,8,6,6] x) => (float[N,6,12,12] y) {
    [up] u = ConvTranspose <strides=[2,2]> (x, w0, b0)
    [relu] r = Relu(u)
    [next] y = Conv <pads=[1,1,1,1]> (r, w1)
}"""
LOW = {"int8": "INT8", "fp8": "FP8"}


def upsampling(half: bool = False) -> Model:
    weights = {"w0": normal(8, 16, 2, 2, scale=0.3), "b0": normal(16), "w1": normal(6, 16, 3, 3, scale=0.2)}
    return build(UPSAMPLING, weights, half=half)


NETWORKS = {"convolutions": conv_net, "attention": attention, "upsampling": upsampling}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, also where there is one."""
    absent(monkeypatch, CUDA)


def engine(**options: Any) -> Any:
    return open_engine(EngineSpec("tensorrt-rtx", {"target": "sm89", **options}))


def layers_of(model: Model, folder: Path) -> tuple[Layer, ...]:
    """The layers of a model, built for batch 2 where it is dynamic."""
    save(model, folder / "m.onnx")
    shapes = {name: list(array.shape) for name, array in feeds(model, 1)[0].items()}
    built = engine(opt_shapes=shapes).build(folder / "m.onnx", folder / "build.log")
    return tuple(built.layers({}, 1))


def quantized(model: Model, quant_type: QuantType, rule: str) -> tuple[Model, Placement]:
    found = ranges(model)
    possible = possible_edges(model, found)
    placement = Placement(possible) if rule == "all" else start_placements.placements(model, possible)[rule]
    return Inserter(model, found, engine().numeric_format(quant_type)).insert(placement), placement


def carriers(model: Model, placement: Placement) -> dict[str, str]:
    """Convolutions and matrix products with a pair on both inputs, and their operators."""
    return {
        node.name: node.op
        for node in model.nodes
        if node.op in operators.COMPUTE
        and all(Edge(t, node.name, i) in placement for i, t in enumerate(node.inputs[:2]))
    }


def precision_of(layers: tuple[Layer, ...]) -> dict[str, str]:
    return {name: layer.precision for layer in layers for name in layer.nodes}


@pytest.mark.parametrize("rule", ["compute", "all"])
@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_inserted_pairs_build_and_run_in_low_precision(name, half, quant_type, rule, tmp_path):
    """TensorRT-RTX 1.7 has low-precision kernels for all of it but ConvTranspose, whatever the axis of its scales."""
    model = NETWORKS[name](half=half)
    inserted, placement = quantized(model, quant_type, rule)
    found = layers_of(inserted, tmp_path)
    names = [n for layer in found for n in layer.nodes]
    assert sorted(names) == sorted(inserted.index_of)
    assert all(layer.time_ms is None for layer in found if layer.kind != "folded")
    kernels, expected = precision_of(found), carriers(model, placement)
    assert len(expected) >= 2
    float_type = "FP16" if half else "FP32"
    for node, op in expected.items():
        assert kernels[node] == (float_type if op == "ConvTranspose" else LOW[quant_type]), node


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm120"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    inserted, placement = quantized(conv_net(), "int8", "compute")
    save(inserted, tmp_path / "m.onnx")
    built = engine(target=target, opt_shapes={"image": [1, 3, 8, 8]}).build(tmp_path / "m.onnx", tmp_path / "log")
    kernels = precision_of(built.layers({}, 1))
    assert {kernels[node] for node in carriers(conv_net(), placement)} == {"INT8"}


def test_running_needs_a_gpu_and_says_so(tmp_path: Path) -> None:
    built = built_by(engine(opt_shapes={"x": [1, 4, 8, 8]}), conv_model(), tmp_path)
    for call in (lambda: built.run(IMAGE), lambda: built.time(IMAGE, 1)):
        with pytest.raises(EngineUnavailable, match=r"for sm89 can run here: there is no such GPU; building"):
            call()
    built.save(tmp_path / "m.engine")
    assert (tmp_path / "m.engine").stat().st_size > 1000
    built.close()


def test_targets_are_checked_and_needed() -> None:
    with pytest.raises(BadOption, match=r"'sm90'; it does for .*sm89"):
        engine(target="sm90")
    with pytest.raises(EngineUnavailable, match="for another GPU give `engine_options` target=sm89"):
        open_engine(EngineSpec("tensorrt-rtx"))


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    present(monkeypatch, {"cuda.bindings.runtime": cuda})
    device = SimpleNamespace(name=b"Data-centre GPU", major=9, minor=0)
    cuda.__dict__["cudaGetDeviceProperties"] = lambda number: (cuda.cudaError_t.cudaSuccess, device)
    with pytest.raises(
        EngineUnavailable, match=r"no kernels for Data-centre GPU \(sm90\).*`engine_options` target=sm89"
    ):
        open_engine(EngineSpec("tensorrt-rtx"))
    assert engine().describe()["target"] == "sm89"


def test_dynamic_sizes_need_shapes(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"'x' has dynamic sizes \(-1, 16\).*`engine_options` opt_shapes=.*min_shapes="):
        built_by(engine(), matmul_model(), tmp_path)
    bounds = {"min_shapes": {"x": [1, 16]}, "opt_shapes": {"x": [4, 16]}, "max_shapes": {"x": [8, 16]}}
    built = built_by(engine(**bounds), matmul_model(), tmp_path)
    assert set(precision_of(built.layers({}, 1))) == {"matmul"}
    with pytest.raises(BadOption, match=r"'x'|valid optimization profile"):
        built_by(engine(**bounds | {"max_shapes": {"x": [2, 16]}}), matmul_model(), tmp_path)
    with pytest.raises(EngineFailure, match="x has 2 dimensions"):
        built_by(engine(opt_shapes={"x": [4, 16, 1]}), matmul_model(), tmp_path)


@pytest.mark.parametrize("kind", ["not onnx", "unknown operator"])
def test_a_bad_model_is_refused_in_one_line_with_a_log(kind: str, tmp_path: Path) -> None:
    path, log = tmp_path / "bad.onnx", tmp_path / "log"
    onnx.save(model_of("[strange] y = NoSuchOp(x)", "1"), path)
    if kind == "not onnx":
        path.write_bytes(b"this is no model")
    with pytest.raises(EngineFailure) as refusal:
        engine().build(path, log)
    assert len(str(refusal.value).splitlines()) == 1
    assert log.read_text().strip()
    assert ("node 'strange'" in str(refusal.value)) == (kind == "unknown operator")


def test_builds_of_one_process_have_their_own_logs_and_layers(tmp_path: Path) -> None:
    """TensorRT keeps the first logger of a process: all engines share it. One has its weights in a file beside it."""
    beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(conv_model(), tmp_path / "conv.onnx", **beside)
    onnx.save(matmul_model(), tmp_path / "matmul.onnx")
    first = engine(opt_shapes={"x": [1, 4, 8, 8]}).build(tmp_path / "conv.onnx", tmp_path / "conv.log")
    second = engine(opt_shapes={"x": [1, 16]}).build(tmp_path / "matmul.onnx", tmp_path / "matmul.log")
    assert "conv" in precision_of(first.layers({}, 1))
    assert set(precision_of(second.layers({}, 1))) == {"matmul"}
    assert "[ONNX Layer: conv]" in (tmp_path / "conv.log").read_text()
    assert "[ONNX Layer: conv]" not in (tmp_path / "matmul.log").read_text()


def test_the_layer_list_is_read_whole() -> None:
    from qdqtune.engines.tensorrt.report import layers_from_log

    tensor = "{ Name: %s, Dimensions: [%s], Strides: [1], Datatype: %s, Format: (Linear) Row major linear format }"
    line = (
        f"Name: /a, b]/Conv_myl0_1, LayerType: correlation, Inputs: [ {tensor % ('x', '1,2', 'Int8')}, "
        f"{tensor % ('y', '', 'Half')}], Constants: [], Outputs: [ {tensor % ('z', '3', 'Float')}], TacticName: t_0x1, "
        "StreamId: 0, Metadata: [ONNX Layer: /a, b]/Conv]\x1e[ONNX Layer: c]"
    )
    text = f"Layers:\n{line}\nName: s, LayerType: signal, StreamId: 1\n\nI/O Tensors:\n Name: x, IOMode: Input"
    first, second = json.loads(layers_from_log(text))["Layers"]
    assert (first["Name"], first["LayerType"], first["TacticName"]) == ("/a, b]/Conv_myl0_1", "correlation", "t_0x1")
    assert first["Inputs"] == [{"Name": "x", "Datatype": "Int8"}, {"Name": "y", "Datatype": "Half"}]
    assert [t["Name"] for t in first["Outputs"]] == ["z"]
    assert first["Metadata"] == "[ONNX Layer: /a, b]/Conv]\x1e[ONNX Layer: c]"
    assert (second["Name"], second["Inputs"]) == ("s", [])
