"""`apply`: the pairs of a recorded placement in another model."""

import json
from pathlib import Path

import numpy as np
import onnx

from command_lines import errors
from models import conv_net
from runs import write


def test_apply_for_an_engine_that_is_not_installed_and_in_float16(call, tuned, placement, tmp_path):
    """As the search with --precision fp16 had it: the edges' tensors are float16, and so are their scales."""
    command = ["apply", tuned, "--placement", placement, "-o", tmp_path / "m.onnx"]
    data = ["--calibration-data", tuned.with_suffix(".npz")]
    assert call(*command, *data, "--engine", "tensorrt", "--precision", "fp16")[0] == 0
    scales = [t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer if t.name.endswith("_scale")]
    assert set(scales) == {onnx.TensorProto.FLOAT16}
    assert errors(call(*command, "--engine", "abacus")) == (2, errors(call("tune", tuned, "--engine", "abacus"))[1])


def test_apply_on_retrained_weights_gives_the_same_edges_and_other_scales(call, tuned, final, placement, tmp_path):
    retrained = onnx.load(tuned)
    for tensor in retrained.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(3 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(retrained, tmp_path / "retrained.onnx")
    arguments = ["--placement", placement, "--calibration-data", tuned.with_suffix(".npz")]
    code, out, _ = call("apply", tmp_path / "retrained.onnx", *arguments)
    assert code == 0
    count = json.loads(final.with_name("summary.json").read_text())["pairs"]
    made = tmp_path / "retrained.qdq.onnx"
    assert out.startswith(f"{made}: {count} tensors with a Q/DQ pair, output SQNR against float: ")
    old, new = (pairs(path) for path in (final, made))
    assert old.keys() == new.keys()
    thrice = {t.removesuffix("_DequantizeLinear_Output") for t in old if np.allclose(3 * old[t], new[t], rtol=0.1)}
    assert thrice == {"w0", "b", "w1"}  # the weights of the two large products, and the activation between them
    assert [t for t in old if np.array_equal(old[t], new[t])] == ["x_DequantizeLinear_Output"]
    call("apply", tuned, *arguments, "-o", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes().startswith(final.read_bytes())  # a mark of who made it follows


def pairs(path: Path) -> dict[str, np.ndarray]:
    """Output of each DequantizeLinear to its scale."""
    graph = onnx.load(path).graph
    values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    return {n.output[0]: values[n.input[1]] for n in graph.node if n.op_type == "DequantizeLinear"}


def test_apply_says_why_outputs_are_not_compared(call, tuned, placement, tmp_path):
    changed = onnx.load(tuned)
    output = changed.graph.output[0].name
    last = next(node for node in changed.graph.node if output in node.output)
    last.output[0] = "before"
    changed.graph.node.append(onnx.helper.make_node("Abs", ["before"], ["size"]))
    changed.graph.node.append(onnx.helper.make_node("Neg", ["size"], ["below"]))
    changed.graph.node.append(onnx.helper.make_node("Log", ["below"], [output]))
    onnx.save(changed, tmp_path / "changed.onnx")
    data = ("--placement", placement, "--calibration-data", tuned.with_suffix(".npz"))
    code, out, err = call("apply", tmp_path / "changed.onnx", *data, "--json")
    assert (code, json.loads(out)["accuracy"]) == (0, None)
    assert "note: outputs were not compared: the outputs hold NaN or infinite values" in err


def test_apply_says_what_is_not_there(call, placement, tmp_path):
    code, error = errors(call("apply", write(conv_net(), tmp_path), "--placement", placement))
    assert code == 2
    assert "is it the same network?" in error
