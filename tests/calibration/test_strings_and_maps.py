"""Inputs that are strings, in every form in which users have them; outputs that are maps, as of scikit-learn."""

from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qdqtune
from loaded_modules import present
from models import normal
from qdqtune.calibration.samples import open_samples
from qdqtune.commands.quantize import QuantizeOptions, quantize
from qdqtune.errors import BadData
from qdqtune.graph.loading import load
from workers import Workers

WORDS = np.array([["a", "bcd"], ["bcd", "é"], ["", "a"]])
LABELS = {"classlabels_int64s": [0, 1, 2]}, {"classlabels_strings": ["x", "y", "z"]}


def written(nodes: list[onnx.NodeProto], given: Any, outputs: list[Any], weights: dict[str, Any], path: Path) -> Path:
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", [given], outputs, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture
def of_words(tmp_path: Path) -> Path:
    encode = {"keys_strings": ["a", "bcd", "é"], "values_floats": [1.0, 2.0, 3.0]}
    nodes = [
        helper.make_node("LabelEncoder", ["word"], ["n"], "encode", domain="ai.onnx.ml", default_float=0.0, **encode),
        helper.make_node("MatMul", ["n", "w"], ["y"], "product"),
    ]
    given = helper.make_tensor_value_info("word", TensorProto.STRING, ["N", 2])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16])
    return written(nodes, given, [made], {"w": normal(2, 16)}, tmp_path / "words.onnx")


def classifier(path: Path, labels: dict[str, Any]) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["s"], "product"),
        helper.make_node("Softmax", ["s"], ["p"], "softmax", axis=-1),
        helper.make_node("ArgMax", ["s"], ["label"], "decide", axis=1, keepdims=0),
        helper.make_node("ZipMap", ["p"], ["probability"], "zip", domain="ai.onnx.ml", **labels),
    ]
    key = TensorProto.INT64 if "classlabels_int64s" in labels else TensorProto.STRING
    kind = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    zipped = onnx.ValueInfoProto(name="probability", type=helper.make_sequence_type_proto(kind))
    label = helper.make_tensor_value_info("label", TensorProto.INT64, ["N"])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32])
    return written(nodes, given, [label, zipped], {"w": normal(32, 3)}, path)


def in_form(kind: str) -> Any:
    match kind:
        case "str":
            return WORDS
        case "bytes":
            return np.char.encode(WORDS, "utf-8")
        case "objects":
            return WORDS.astype(object)
    return WORDS.tolist()


@pytest.mark.parametrize(
    ("kind", "way"), [*product(("str", "bytes", "objects", "list"), ("npz", "npy", "code", "python"))]
)
def test_strings_are_taken_in_every_form(
    kind: str, way: str, of_words: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, source = in_form(kind), str(tmp_path / f"data.{way}")
    if way == "code":
        module = ModuleType("gives_words")
        module.__dict__["feed"] = lambda: [{"word": words}]
        present(monkeypatch, {"gives_words": module})
        source = "gives_words:feed"
    elif way == "python":
        done = qdqtune.quantize(of_words, output=tmp_path / "q.onnx", calibration_data={"word": words})
        assert done.judged == 3
        qdqtune.quantize(of_words, output=tmp_path / "q.onnx", calibration_data=[{"word": words}, {"word": words}])
        qdqtune.quantize(of_words, output=tmp_path / "q.onnx", calibration_data=[words, words])
        return
    elif way == "npz":
        np.savez(source, word=words)
    else:
        np.save(source, words)
    samples = open_samples(source, load(of_words))
    if kind == "objects" and way != "code":
        with pytest.raises(BadData, match=r"never unpickled.*array.astype\(str\)"):
            list(samples)
        return
    assert [word for sample in samples for word in sample["word"].flat] == WORDS.flatten().tolist()
    assert quantize(QuantizeOptions(of_words, output=tmp_path / "q.onnx", calibration_data=source)).judged


@pytest.mark.parametrize("values", [np.ones((3, 2), np.float32), np.array([["a", 1]], object)])
def test_what_is_no_string_is_refused_where_strings_are_wanted(values: Any, of_words: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="strings"):
        qdqtune.quantize(of_words, output=tmp_path / "q.onnx", calibration_data=lambda: [{"word": values}])


@pytest.mark.parametrize("labels", LABELS)
def test_probabilities_in_maps_are_compared_and_stay_in_the_file(
    labels: dict[str, Any], tmp_path: Path, workers: Workers
) -> None:
    path, data = classifier(tmp_path / "net.onnx", labels), tmp_path / "data.npz"
    np.savez(data, x=normal(40, 32))
    done = quantize(QuantizeOptions(path, output=tmp_path / "q.onnx", calibration_data=str(data)))
    assert done.placed.placement
    assert done.sqnr_db is not None
    assert done.sqnr_db > 20
    assert onnx.load(tmp_path / "q.onnx").graph.output[1] == onnx.load(path).graph.output[1]
    row = qdqtune.compare(path, tmp_path / "q.onnx", calibration_data=str(data), timing_runs=12).rows[0]
    assert row.sqnr_db is not None
