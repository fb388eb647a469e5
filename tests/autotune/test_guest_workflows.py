"""Quantization and subgraph mode from scripts, under ModelOpt's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtune as moq
from models import Reader, conv_net
from qdqtune.autotune import autotuner as benchmark
from qdqtune.autotune.autotuner import Benchmark, TrtExecBenchmark
from qdqtune.autotune.quantization import quantize
from qdqtune.autotune.region_search import AutotunerError
from qdqtune.autotune.workflows import (
    create_fusion_groups,
    extract_subgraph,
    extract_subgraph_by_nodes,
    generate_graph_json,
    parse_graph_json,
    subgraph_autotuning_workflow,
)
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.placement.reading import read_placement
from qdqtune.placement.stripping import strip_pairs
from runs import cost, mixed, write
from trtexec_stand_in import stand_in
from workers import Workers

pytestmark = pytest.mark.usefixtures("workers")


def quantized(path: Path) -> set[str]:
    """The nodes that read a pair."""
    model = load(path)
    return {e.node for e in read_placement(strip_pairs(model), model).placement}


def test_quantize_by_its_keywords(tmp_path: Path) -> None:
    path, data = write(mixed(), tmp_path), np.load(tmp_path / "model.npz")
    samples = {name: data[name] for name in data.files}
    how: dict[str, Any] = {"calibration_method": "max", "engine": "onnxruntime", "high_precision_dtype": "fp32"}
    quantize(str(path), "int8", samples, **how, nodes_to_exclude=["sec.*", "nothing"], log_level="INFO")
    names = quantized(tmp_path / "model.quant.onnx")
    assert "first" in names
    assert "second" not in names
    reader = Reader([{name: value[:1] for name, value in samples.items()} for _ in range(3)])
    how |= {"output_path": tmp_path / "q.onnx", "nodes_to_exclude": None}
    quantize(path, calibration_data_reader=reader, nodes_to_quantize=["second"], **how)
    assert "first" not in quantized(tmp_path / "q.onnx")


def test_quantize_takes_modelopts_keyword_from_the_package_as_well(tmp_path: Path) -> None:
    path = write(mixed(batch=None), tmp_path)
    samples = np.ones((3, 2, 64, 64), np.float32)
    how: dict[str, Any] = {"high_precision_dtype": "fp32", "calibration_method": "max", "target_dla": False}
    moq.quantize(onnx_path=str(path), calibration_data=samples, output_path=str(tmp_path / "q.onnx"), **how)
    assert "first" in quantized(tmp_path / "q.onnx")
    moq.quantize(onnx_path=path, calibration_shapes="x:2x64x64", **how)
    assert "first" in quantized(tmp_path / "model.quant.onnx")
    assert moq.quantize(path, output=tmp_path / "own.onnx", input_shapes={"x": (2, 64, 64)}).output.exists()


def test_modelopts_call_is_known_by_its_keywords_where_no_output_is_named(tmp_path: Path) -> None:
    path, how = write(mixed(), tmp_path), {"calibration_method": "max"}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((str(path),), {"quantize_mode": "int8"}),
        ((path,), {"high_precision_dtype": "fp32"}),
        ((path,), {"override_shapes": None}),
        ((path, "int8"), {"keep_intermediate_files": True}),
        ((path, "int8"), {}),
        ((path, "int8", None, "max"), {}),
    ]
    for arguments, keywords in calls:
        moq.quantize(*arguments, **(how if len(arguments) < 4 else {}), **keywords)
        assert "first" in quantized(tmp_path / "model.quant.onnx")
        (tmp_path / "model.quant.onnx").unlink()
    with pytest.raises(BadOption, match="no option 'quantize_mode'; did you mean 'quant_type'"):
        moq.quantize(path, output=tmp_path / "q.onnx", quantize_mode="int8")
    with pytest.raises(BadOption, match="quantize_mode is int8 or fp8, not 'int4'"):
        moq.quantize(path, quantize_mode="int4")
    with pytest.raises(BadOption, match="quantize has no output here"):
        moq.quantize(path, "int8", output="q.onnx")
    with pytest.raises(BadOption, match="quantize takes keywords behind its model"):
        moq.quantize(path, "q.onnx")
    assert {file.suffix for file in tmp_path.iterdir()} <= {".onnx", ".npz", ""}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dq_only": True, "block_size": None}, "quantize has no dq_only here"),
        ({"nodes_to_exclude": ["("]}, "is no regular expression"),
        ({"nodes_to_quantize": ["nothing"]}, "no node matches"),
        ({"calibration_shapes": "x=3"}, "is no shape"),
    ],
)
def test_what_quantize_cannot_do_is_said(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        quantize(write(mixed(), tmp_path), **given)


def test_parts_of_a_graph_are_models() -> None:
    net = conv_net()
    first, second = net.nodes[:2]
    part = onnx.load_from_string(extract_subgraph_by_nodes(net, [first.name, second.name]))
    assert [n.name for n in part.graph.node] == [first.name, second.name]
    same = onnx.load_from_string(extract_subgraph(net.to_proto(), [first.inputs[0]], [second.outputs[0]]))
    assert [n.name for n in same.graph.node] == [first.name, second.name]
    for broken in (lambda: extract_subgraph(net, ["no"], []), lambda: extract_subgraph_by_nodes(net, ["no"])):
        with pytest.raises(AutotunerError, match=r"not found in the graph|None of the specified nodes"):
            broken()


def test_groups_are_what_a_graph_json_mentions(tmp_path: Path) -> None:
    net = conv_net()
    first, second = net.nodes[:2]
    metadata = f"[ONNX Layer: {first.name}]\x1e[ONNX Layer: {second.name}]"
    layers = [{"Name": "fused", "LayerType": "CaskConvolution", "Inputs": [], "Outputs": [], "Metadata": metadata}]
    (tmp_path / "graph.json").write_text(json.dumps({"Layers": layers}))
    (layer,) = parse_graph_json(str(tmp_path / "graph.json"))
    assert layer.nodes == (first.name, second.name)
    (group,) = create_fusion_groups(parse_graph_json(tmp_path / "graph.json"), net)
    assert (group.trt_layer_name, group.onnx_node_names) == ("fused", [first.name, second.name])
    assert (group.has_quantizable_op, group.input_tensors) == (True, [first.inputs[0]])
    assert group.output_tensors == list(second.outputs)
    assert create_fusion_groups(parse_graph_json(tmp_path / "graph.json"), net, {"Sin"})[0].quantizable_node_names == []


def test_trtexec_leaves_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    path = write(mixed(), tmp_path)
    stand_in(tmp_path, "10.16")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = generate_graph_json(str(path), tmp_path / "out")
    assert made == str(tmp_path / "out" / "model.fp16.graph.json")
    groups = create_fusion_groups(parse_graph_json(made), load(path))
    assert {name for group in groups for name in group.onnx_node_names} >= {"first", "second"}
    assert (tmp_path / "out" / "model.fp16.build.log").exists()


@pytest.mark.usefixtures("workers", "no_benchmark")
def test_subgraph_mode_from_a_script(tmp_path: Path) -> None:
    path = write(mixed(), tmp_path)
    benchmark.init_benchmark_instance(engine="fake")
    final = subgraph_autotuning_workflow(path, tmp_path / "out", quantizable_ops={"MatMul"}, calibration_method="max")
    assert cost(Path(final)) < cost(path)
    assert (tmp_path / "out" / "autotune_cache.json").exists()
    assert issubclass(TrtExecBenchmark, Benchmark)
