"""Nodes without a name in the file have one name everywhere: that of `loading.load`, whatever an engine calls them."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from conftest import Call
from engine_contract import quantized_conv_model, static
from models import INT8, UINT8
from qdqtune.graph.loading import load, node_names
from qdqtune.tuning.subgraphs import groups
from trtexec_stand_in import stand_in

ENGINES = ["fake", "onnxruntime", "openvino", "trtexec"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Options for an engine; TensorRT is a stand-in that names nodes as its parser does."""
    name = str(request.param)
    if name == "openvino" and importlib.util.find_spec(name) is None:
        pytest.skip("needs OpenVINO")
    more = ["--engine-option", f"trtexec={stand_in(tmp_path, '10.16')}"] if name == "trtexec" else []
    return ["--engine", name, *more]


@pytest.fixture
def unnamed(tmp_path: Path, engine: list[str]) -> Path:
    """A convolution behind pairs, with a float result."""
    model = static(quantized_conv_model(UINT8 if engine[1] == "onnxruntime" else INT8))
    last, _ = model.graph.node.pop(), model.graph.node.pop()
    model.graph.node[-1].output[0] = last.output[0]
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "unnamed.onnx")
    return tmp_path / "unnamed.onnx"


def test_layers_have_the_names_of_loading(call: Call, unnamed: Path, engine: list[str]) -> None:
    code, out, _ = call("check", "--layers", unnamed, *engine, "--json")
    assert code == 0
    told = [name for layer in json.loads(out)["layers"] for name in layer["nodes"]]
    assert sorted(told) == sorted(node_names(onnx.load(unnamed).graph))
    assert set(told) >= {node.name for node in load(unnamed).nodes}


def test_a_report_of_tensorrt_gives_groups_of_the_loaded_model(tmp_path: Path) -> None:
    """For subgraph mode with a graph.json that was exported from the user's own file."""
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"]), onnx.helper.make_node("Relu", ["c"], ["r"]),
        onnx.helper.make_node("Softmax", ["r"], ["y"]),
    ]  # fmt: skip
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", 1, [1, 2, 4, 4])], [value("y", 1, [1, 2, 4, 4])],
        [onnx.numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w")],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    (tmp_path / "graph.json").write_text(json.dumps({"Layers": ["w + node_of_c + node_of_r", "node_of_y"]}))
    found = groups.from_file(load(tmp_path / "m.onnx"), tmp_path / "graph.json")
    assert found.groups == (("Conv_0", "Relu_1"), ("Softmax_2",))
    assert not found.nameless
