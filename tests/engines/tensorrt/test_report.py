from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engine_contract import model_of
from qdqtune.engines.tensorrt.report import NodeNames, read_report
from qdqtune.errors import BadOption
from qdqtune.graph.loading import name_nodes
from qdqtune.types import Layer
from tensorrt_exports import DATA, EXPORTS, report_of, text_of

# Counted in the JSON by hand: layers; layers of type Reformat by origin QDQ and REFORMAT; layers with convolution
# weights of type Int8, and with the pools that read and write Int8; and the sum of all medianMs.
BY_HAND = {
    "mobilenet_qat_TITANRTX": (73, 17, 1, 53, 53, 0.469),
    "mobilenet_v2_residuals_qat": (58, 2, 1, 53, 53, 0.355),
    "resnet18_torch_A100_fp16": (36, 0, 2, 0, 0, 1.017),
    "resnet18_torch_A100_fp32": (32, 0, 1, 0, 0, 2.124),
    "resnet18_torch_A100_qat": (37, 10, 2, 21, 21, 1.096),
    "resnet18_torch_A100_qat-residual": (26, 3, 0, 21, 21, 0.731),
    "resnet18_torch_A100_qat-residual-qgap": (24, 1, 0, 21, 22, 0.673),
    "resnet50_tf_RTX3090_fp16": (86, 0, 2, 0, 0, 4.273),
    "resnet50_tf_RTX3090_qat": (63, 1, 1, 54, 56, 2.381),
}


def compiled(case: str, model: onnx.ModelProto | None = None) -> tuple[Layer, ...]:
    """A report in the layout of TensorRT 11."""
    return read_report(json.dumps(json.loads(text_of("rtx1.7_sm89.json"))[case]), None, model)


def named(*names: str) -> str:
    """Layer information with names only."""
    return json.dumps({"Layers": names, "Bindings": ["x", "y"]})


def detailed(*layers: dict[str, Any]) -> str:
    return json.dumps({"Layers": layers, "Bindings": ["x", "y"]})


def chain(*nodes: onnx.NodeProto, constants: dict[str, Any] | None = None) -> onnx.ModelProto:
    model = model_of("", "1,4,8,8", constants)
    model.graph.node.extend(nodes)
    return model


def node(op: str, name: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node whose output is called like itself."""
    return helper.make_node(op, list(inputs), [name], name=name, **attributes)


@pytest.mark.parametrize("name", EXPORTS)
def test_real_exports_are_read_whole_and_give_the_counts_of_a_reader(name: str) -> None:
    layers = report_of(name)
    assert [x.name for x in layers] == [entry["Name"] for entry in json.loads(text_of(f"{name}.graph.json"))["Layers"]]
    times = [entry["medianMs"] for entry in json.loads(text_of(f"{name}.profile.json"))[1:]]
    assert [x.time_ms for x in layers] == times
    kinds = Counter(x.kind for x in layers)
    raw = text_of(f"{name}.graph.json")
    int8_weights = len(re.findall(r'eights": \{"Type": "Int8", "Count": [1-9]', raw))
    int8 = sum(x.kind == "compute" and x.precision == "INT8" for x in layers)
    *counts, milliseconds = BY_HAND[name]
    assert [len(layers), kinds["quantize"], kinds["reformat"], int8_weights, int8] == counts
    assert sum(x.time_ms or 0 for x in layers) == pytest.approx(milliseconds, abs=6e-4)


def test_precision_is_that_of_the_arithmetic() -> None:
    layers = {x.name: x for x in report_of("resnet18_torch_A100_qat")}
    fused = "layer1.0.conv2.weight + QuantizeLinear_32 + Conv_34 + Add_36 + Relu_37"  # int8 and a float16 residual
    assert layers[fused].precision == "INT8"
    assert layers[fused].nodes == ("layer1.0.conv2.weight", "QuantizeLinear_32", "Conv_34", "Add_36", "Relu_37")
    assert layers["QuantizeLinear_15"].kind == "quantize"
    assert layers["GlobalAveragePool_246"].precision == "FP16"
    copies = [x for x in layers.values() if x.kind == "reformat"]
    assert all(x.name.startswith("Reformatting CopyNode") and not x.nodes for x in copies)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ({"Format/Datatype": "Row major linear BF16"}, "BF16"),
        ({"Format/Datatype": "Thirty-two wide channel vectorized row major FP8"}, "FP8"),
        ({"Datatype": "Half", "Format": "(NHWC) Channel major format"}, "FP16"),
        ({"Datatype": "BFloat16", "Format": "(Linear) Row major linear format"}, "BF16"),
        ({"Datatype": "Int64", "Format": ""}, "INT64"),
        ({"Format/Datatype": "something new"}, ""),
    ],
)
def test_datatypes(words: dict[str, str], precision: str) -> None:
    (layer,) = read_report(detailed({"Name": "a", "LayerType": "kgen", "Inputs": [words], "Outputs": [words]}))
    assert layer.precision == precision


@pytest.mark.parametrize(("name", "known", "mentioned"), [
    ("w + Q_1 + Conv_2 + PWN(Clip_3)", "Q_1 Conv_2 Clip_3", ("Q_1", "Conv_2", "Clip_3")),
    ("PWN(PWN(sig), mul)", "sig mul", ("sig", "mul")),
    ("a || b || c", "a b c", ("a", "b", "c")),
    ("{ForeignNode[/enc/Conv.../dec/Add]}", "/enc/Conv /dec/Add", ("/enc/Conv", "/dec/Add")),
    ("__myl_MulAdd_myl0_3", "MulAdd", ()),
    ("/m/mm_myl0_12", "/m/mm", ("/m/mm",)),
    ("(Unnamed Layer* 3) [Shuffle] + Gemm_1", "Gemm_1", ("Gemm_1",)),
    ("reshape_after_Gemm_1", "Gemm_1", ()),
    ("a(1) + x[0]_myl0_1", "a(1) x[0]", ("a(1)", "x[0]")),
])  # fmt: skip
def test_nodes_in_the_name_of_a_layer(name: str, known: str, mentioned: tuple[str, ...]) -> None:
    assert NodeNames(chain(*(node("Relu", each, "x") for each in known.split())).graph).mentioned(name) == mentioned


def test_the_longest_node_in_the_name_of_a_layer_counts() -> None:
    graph = chain(*(node("Relu", each, "x") for each in ("a", "a + b", "b + c", "c"))).graph
    assert NodeNames(graph).mentioned("a + b + c") == ("a + b", "c")


def test_without_a_model_a_layer_has_the_words_in_its_name() -> None:
    names = "w + Q_1 + PWN(Clip_3)", "{ForeignNode[/enc/Conv.../dec/Add]}", "/m/mm_myl0_12", "reshape_after_Gemm_1"
    words = [("w", "Q_1", "Clip_3"), ("/enc/Conv", "/dec/Add"), ("/m/mm",), ()]
    assert [layer.nodes for layer in read_report(named(*names))] == words


@pytest.mark.parametrize("case", ["fp8_attention", "int8_conv_relu_add_fp16"])
def test_compiled_layers_hold_each_node_once(case: str) -> None:
    model = onnx.load(DATA / f"{case}.onnx")
    layers = compiled(case, model)
    assert sorted(n for x in layers for n in x.nodes) == sorted(n.name for n in model.graph.node)


def test_compiled_attention_is_one_fp8_kernel() -> None:
    layers = compiled("fp8_attention", onnx.load(DATA / "fp8_attention.onnx"))
    assert [(x.kind, x.precision) for x in layers] == [
        ("quantize", "FP8"), ("quantize", "FP8"), ("quantize", "FP8"), ("compute", "FP8"), ("reformat", "FP16"),
    ]  # fmt: skip
    assert set(layers[3].nodes) >= {"qk", "scale", "softmax", "pv", "pd_Q", "pd_DQ"}


def test_a_kernel_that_converts_its_fp8_input_first_computes_in_float() -> None:
    last = compiled("fp8_attention_float_softmax")[-1]
    assert (last.name, last.kind, last.precision) == ("__myl_CastMulFc_myl0_5", "compute", "FP16")


def test_a_node_in_two_kernels_belongs_to_the_one_that_bears_its_name() -> None:
    layers = compiled("int8_conv_relu_add_fp16", onnx.load(DATA / "int8_conv_relu_add_fp16.onnx"))
    assert "conv1" in layers[1].nodes
    assert layers[1].name == "conv1_myl0_1"
    assert layers[2].nodes == ("relu1", "r1d_Q")


def test_weights_dequantized_at_run_time_are_seen() -> None:
    first = compiled("weight_only")[0]
    assert (first.kind, first.precision, first.nodes) == ("quantize", "FP32", ("wd_DQ", "wd_Q"))


def test_nodes_fused_without_trace_go_to_the_layer_that_absorbed_them() -> None:
    scale = {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    weight = {"w": np.ones((4, 4, 1, 1), np.float32), "one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
    model = chain(
        node("QuantizeLinear", "xq", "x", "s", "z"), node("DequantizeLinear", "xd", "xq", "s", "z"),
        node("Mul", "ws", "w", "s"), node("QuantizeLinear", "wq", "ws", "s", "z"),
        node("DequantizeLinear", "wd", "wq", "s", "z"), node("Conv", "conv", "xd", "wd"),
        node("BatchNormalization", "bn", "conv", "one", "zero", "zero", "one"), node("Identity", "id", "bn"),
        node("Relu", "relu", "id"), node("QuantizeLinear", "rq", "relu", "s", "z"),
        node("DequantizeLinear", "rd", "rq", "s", "z"), node("MaxPool", "y", "rd", kernel_shape=[2, 2]),
        constants={**scale, **weight},
    )  # fmt: skip
    layers = read_report(named("xq", "w + wq + conv + relu", "y"), None, model)
    assert [(x.nodes, x.kind) for x in layers] == [
        (("xq",), "quantize"),
        (("xd", "wq", "wd", "conv", "bn", "id", "relu", "rq"), "compute"),
        (("rd", "y"), "compute"),
        (("ws",), "folded"),
    ]
    assert layers[-1].time_ms == 0


def test_a_foreign_node_holds_the_paths_between_its_ends() -> None:
    model = chain(
        node("Relu", "a", "x"), node("Exp", "b", "a"), node("Neg", "c", "a"), node("Add", "d", "b", "c"),
        node("Relu", "y", "d"),
    )  # fmt: skip
    layers = read_report(named("{ForeignNode[a...d]}", "y"), None, model)
    assert [x.nodes for x in layers] == [("a", "b", "c", "d"), ("y",)]


@pytest.mark.parametrize("loaded", [False, True])
def test_nodes_without_a_name_are_known_by_what_the_parser_calls_them(loaded: bool) -> None:
    """In the name of a layer, in its metadata, and at the ends of a foreign node; also once loading has named them."""
    ops = [("Relu", "x", "a"), ("Exp", "a", "b"), ("Neg", "b", "c"), ("Abs", "c", "d"), ("Sqrt", "d", "y")]
    model = chain(*(helper.make_node(op, [t], [made]) for op, t, made in ops))
    if loaded:
        name_nodes(model.graph)
    entries = [{"Name": "node_of_a + (Unnamed Layer* 1) [Constant]", "LayerType": "PointWise"},
               {"Name": "__myl_Exp_myl0_1", "LayerType": "kgen", "Metadata": "[ONNX Layer: node_of_b]"},
               {"Name": "{ForeignNode[node_of_c...node_of_y]}", "LayerType": "Myelin"}]  # fmt: skip
    layers = read_report(detailed(*entries), None, model)
    assert [x.nodes for x in layers] == [("Relu_0",), ("Exp_1",), ("Neg_2", "Abs_3", "Sqrt_4")]


def test_a_name_in_the_file_counts_before_one_of_the_parser() -> None:
    first, second = helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["y"], name="node_of_a")
    layers = read_report(named("node_of_a", "(Unnamed Layer* 1) [Shuffle]"), None, chain(first, second))
    assert [x.nodes for x in layers] == [("Relu_0", "node_of_a"), ()]


def test_bodies_of_control_flow_do_not_count_as_constants() -> None:
    branch = helper.make_graph(
        [node("Neg", "n", "x")], "b", [], [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)]
    )
    decided = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    model = chain(node("Relu", "r", "x"), decided, constants={"c": np.array(True)})
    layers = read_report(named("r", "if"), None, model)
    assert [x.nodes for x in layers] == [("r",), ("if",)]


def test_metadata_names_nodes_with_brackets_and_plus() -> None:
    model = chain(node("Relu", "a[0]", "x"), node("Exp", "b + c", "a[0]"), node("Neg", "y", "b + c"))
    entry = {"Name": "fused", "LayerType": "PointWise", "Metadata": "[ONNX Layer: a[0]]\x1e[ONNX Layer: b + c]"}
    layers = read_report(detailed(entry, {"Name": "y", "LayerType": "PointWise"}), None, model)
    assert [x.nodes for x in layers] == [("a[0]", "b + c"), ("y",)]
    assert read_report(detailed(entry))[0].nodes == ("a[0]", "b + c")


def test_names_that_repeat_keep_their_order() -> None:
    profile = [{"count": 2}, *({"name": "a", "averageMs": ms} for ms in (1.0, 2.0)), {"name": "b", "medianMs": 3.0}]
    layers = read_report(named("a", "a", "b", "c"), json.dumps(profile))
    assert [x.time_ms for x in layers] == [1.0, 2.0, 3.0, None]
    assert [x.time_ms for x in read_report(named("a", "b"), [("b", 2.0), ("a", 1.0)])] == [1.0, 2.0]


def test_scale_layers_that_quantize() -> None:
    found = read_report(
        detailed(
            {"Name": "QuantizeLinear_4_quantize_scale_node", "LayerType": "Scale"},
            {"Name": "Mul_1", "LayerType": "Scale"},
        )
    )
    assert [x.kind for x in found] == ["quantize", "compute"]


@pytest.mark.parametrize(
    ("graph", "profile", "words"),
    [
        ('{"Layers": [{"Name": "a"', None, "cut short"),
        ("[]", None, "no list 'Layers'"),
        ('{"Layers": [{"LayerType": "x"}]}', None, "without a name"),
        (named("a"), '[ { "count" : 1 }\n, { "name" : "a", "timeMs" : 1', "cut short"),
        (named("a"), '{"a": 1}', "no list of layers"),
        (named("a"), '[{"name": "a"}]', "without a time"),
        (named("a"), '[{"name": "b", "medianMs": 1}]', "of two engines"),
        ("N/A due to dynamic shapes", None, "--shapes="),
    ],
)
def test_bad_texts_are_refused_in_one_line(graph: str, profile: str | None, words: str) -> None:
    with pytest.raises(BadOption, match=words) as refusal:
        read_report(graph, profile)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("layers", [("p", "q", "y"), ("__myl_Exp_myl0_0",)])
def test_a_report_of_another_model_is_refused(layers: tuple[str, ...]) -> None:
    model = chain(node("Relu", "r", "x"), node("Exp", "y", "r"))
    with pytest.raises(BadOption, match="of another model"):
        read_report(named(*layers), None, model)


def tensor(name: str, datatype: str) -> dict[str, str]:
    return {"Name": name, "Format/Datatype": datatype}


@pytest.mark.parametrize(
    ("layer_type", "tactic", "inputs", "output", "precision"),
    [
        # Gemm weights, factors and made-up constants stand among the inputs since TensorRT 10.
        ("gemm", "", [tensor("a", "Int8"), tensor("b", "Int8"), tensor("__mye34mm_alpha", "Float"),
                      tensor("__mye35mm_beta_myl0", "Float")], "Half", "INT8"),
        ("kgen", "", [tensor("a", "FP8"), tensor("__mye554_const-lit-in_myl0", "Half")], "Half", "FP8"),
        ("kgen", "", [tensor("mask", "Bool"), tensor("a", "FP8"), tensor("b", "FP8")], "Half", "FP8"),
        ("kgen", "_gemm_mha_v2_0x39", [tensor("q", "FP8"), tensor("k", "FP8"), tensor("mask", "Half"),
                                       tensor("v", "FP8")], "Half", "FP8"),
        ("kgen", "_gemm_mha_v2_0x39", [tensor("q", "FP8"), tensor("k", "Half"), tensor("v", "Half")], "Half", "FP16"),
        ("kgen", "_gemm_mha_v2_0x39", [tensor("mask", "Half"), tensor("q", "Int8"), tensor("k", "Int8"),
                                       tensor("v", "Int8")], "Int8", "INT8"),
        ("CudaSoftMax", "", [tensor("x", "Half")], "Int8", "FP16"),
        # A sum in float of what came in 8 bits and in float, with a Q behind it.
        ("kgen", "", [tensor("skip", "Int8"), tensor("branch", "Half")], "Int8", "FP16"),
        ("kgen", "", [tensor("branch", "Half"), tensor("skip", "Int8")], "Int8", "FP16"),
        ("gemm", "", [tensor("a", "Int8"), tensor("b", "Half")], "Half", "FP16"),
        ("gemm", "", [tensor("a", "Int8"), tensor("w", "Int8"), tensor("residual", "Half")], "Half", "INT8"),
        ("CaskConvolution", "sm80_xmma_fprop_implicit_gemm_interleaved_i8f16_i8i32_f32_nchw_vect_c",
         [tensor("mask", "Half"), tensor("x", "Int8")], "Half", "INT8"),
        ("gemm", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x64", [tensor("a", "Float")], "Int8", "FP32"),
    ],
)  # fmt: skip
def test_a_kernel_is_named_by_what_it_multiplies(layer_type, tactic, inputs, output, precision):
    outputs = [tensor("is_set", "Bool"), tensor("y", output)]
    layer = {"Name": "mm", "LayerType": layer_type, "TacticName": tactic, "Inputs": inputs, "Outputs": outputs}
    (read,) = read_report(detailed(layer))
    assert (read.kind, read.precision) == ("compute", precision)


def test_weights_among_the_inputs_are_known_by_the_model() -> None:
    model = chain(node("MatMul", "y", "x", "w"), constants={"w": np.ones((4, 4), np.float32)})
    inputs = [tensor("x", "Int8"), tensor("w", "Int8"), tensor("bias", "Half")]
    layer = {"Name": "y", "LayerType": "kgen", "Inputs": inputs, "Outputs": [tensor("y", "Half")]}
    assert read_report(detailed(layer), None, model)[0].precision == "INT8"
    assert read_report(detailed(layer))[0].precision == "FP16"


def test_rows_of_a_profile_that_fit_no_layer_are_unknown() -> None:
    profile = [("a + b", 1.0), ("a + b [part 2]", 0.25), ("__myl_Fill", 0.125), ("__myl_Fill", 0.125)]
    layers = read_report(named("a + b", "c"), profile)
    assert [(x.name, x.time_ms, x.kind) for x in layers] == [
        ("a + b", 1.0, "compute"), ("c", None, "compute"), ("a + b [part 2]", 0.25, "unknown"),
        ("__myl_Fill", 0.25, "unknown"),
    ]  # fmt: skip
    assert all(not x.nodes for x in layers[2:])
