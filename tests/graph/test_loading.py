"""Reading ONNX files: what comes out runs like the original, what cannot be read is refused in one line."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from conftest import Call
from models import Arrays, loaded_from, model, normal, same_when_loaded
from qdqtune.errors import BadModel
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model_folder import companions, first_beside, graphs_in, model_in


def test_node_names_become_unique_and_stay_the_same_from_load_to_load(file: Path) -> None:
    proto = model("""g (float[2] x) => (float[2] y) {
        k = Constant<value_floats=[1.0, 2.0]>()
        [mine] a = Relu(x)
        b = Relu(a)
        [mine] c = Add(b, k)
        [Relu_2] d = Relu(c)
        [mine_2] e = Relu(d)
        [mine] y = Relu(e)
    }""")
    names = [n.name for n in loaded_from(file, proto).nodes]
    assert names == ["mine", "Relu_2_2", "mine_3", "Relu_2", "mine_2", "mine_4"]
    assert names == [n.name for n in load(file).nodes]


def test_functions_are_inlined(file: Path) -> None:
    proto = parser.parse_model("""<ir_version: 9, opset_import: ["": 17, "f": 1]>
        g (float[300] x) => (float[300] y) { [one] a = f.Foo<slope=0.5>(x)
            [two] y = f.Foo<slope=0.25>(a) }
        <domain: "f", opset_import: ["": 17]>
        Foo <slope>(u) => (r) { t = LeakyRelu<alpha: float=@slope>(u)
            r = Add(t, k) }""")
    big = numpy_helper.from_array(normal(300))
    proto.functions[0].node.insert(0, helper.make_node("Constant", [], ["k"], value=big))
    loaded = loaded_from(file, proto)
    assert [n.op for n in loaded.nodes] == ["LeakyRelu", "Add", "LeakyRelu", "Add"]
    assert len({n.name for n in loaded.nodes}) == 4
    assert len({c.key for c in loaded.large.values()}) == 1
    same_when_loaded(file, {"x": normal(300)})


UP = np.array([1, 1, 1.7, 2.3], np.float32)
DOWN = np.array([1, 1, 0.6, 0.6], np.float32)
CONVERTED = [
    (7, "y = Softmax<axis=1>(x)", {}),
    (7, 'y = Upsample<mode="linear", scales=[1.0, 1.0, 2.0, 2.0]>(x)', {}),
    (7, "y = Clip<min=-0.5, max=0.5>(x)", {}),
    (7, "y = BatchNormalization(x, s, s, s, s)", {"s": np.array([1, 2, 3], np.float32)}),
    (7, "y = Pad<pads=[0,1,0,0,0,0,0,2], value=3.0>(x)", {}),
    (7, "t = Unsqueeze<axes=[1]>(x)\n y = Squeeze<axes=[1]>(t)", {}),
    (9, 'y = Upsample<mode="nearest">(x, k)', {"k": UP}),
    (9, 'y = Upsample<mode="linear">(x, k)', {"k": UP}),
    (10, 'y = Resize<mode="nearest">(x, k)', {"k": UP}),
    (10, 'y = Resize<mode="nearest">(x, k)', {"k": DOWN}),
    (10, 'y = Resize<mode="linear">(x, k)', {"k": DOWN}),
    (12, "y = MatMul(x, w)", {"w": normal(300, 4, 4)[:3]}),
]


@pytest.mark.parametrize(("opset", "nodes", "constants"), CONVERTED)
@pytest.mark.parametrize("target", [13, 19])
def test_older_opsets_are_converted(file: Path, opset: int, nodes: str, constants: Arrays, target: int) -> None:
    proto = model(f"g (float[2,3,4,4] x) => (float[a,b,c,d] y) {{ {nodes} }}", opset, 4, constants)
    assert loaded_from(file, proto, min_opset=target).opset == target
    same_when_loaded(file, {"x": normal(2, 3, 4, 4)}, min_opset=target)


def test_conversion_keeps_names_metadata_and_order(file: Path) -> None:
    proto = model(
        "g (float[8,8] b, float[8,8] a) => (float[8,8] q, float[8,8] p) {"
        "[first] t = MatMul(a, w)\n [second] p = Clip<min=0.0>(t)\n [third] q = Softmax<axis=0>(b) }",
        9,
        constants={"w": normal(8, 300)[:, :8]},
    )
    proto.metadata_props.add(key="author", value="somebody")
    proto.graph.node[0].metadata_props.add(key="module", value="net.layer")
    proto.graph.initializer.append(numpy_helper.from_array(normal(300), "unused"))
    loaded = loaded_from(file, proto)
    assert (loaded.inputs, loaded.outputs) == (("b", "a"), ("q", "p"))
    assert {"first", "second"} <= loaded.index_of.keys()
    assert loaded.proto.metadata_props[0].value == "somebody"
    assert loaded.proto.graph.node[0].metadata_props[0].value == "net.layer"
    same_when_loaded(file, {"a": normal(8, 8), "b": normal(8, 8)})


@pytest.mark.parametrize(
    ("opset", "node", "message"),
    [(6, "Relu(x)", "opset 6 is older than 7; export"), (9, "Hardmax(x)", "from opset 9 to 13: Hardmax .*; export")],
)
def test_opsets_that_cannot_be_raised(opset: int, node: str, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        load_proto(model(f"g (float[2,2] x) => (float[2,2] y) {{ y = {node} }}", opset, 4))


GOOD = model("g (float[300] x) => (float[300] y) { [n] y = Add(x, w) }", constants={"w": normal(300)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not an ONNX file"),
        (b"no model at all, just some words", "not an ONNX file"),
        (GOOD.SerializeToString()[:-7], "not an ONNX file, or damaged|invalid graph"),
        (b"\x08\x63" + GOOD.SerializeToString()[2:], r"IR 99 or .* is later .*: pip install -U onnx, or"),
        (model("g (float[2] x) => (float[2] y) { y = Relu(x) }", 99).SerializeToString(), "opset 99 is later .*: pip"),
        (GOOD.SerializeToString().replace(b"Add", b"\xff\xfe\xfd"), "model.onnx: "),
    ],
)
def test_files_that_are_no_models(file: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadModel, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadModel, match="Is a directory; check the path"):
        load(file.parent)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("[n] y = Foo(x)", "No Op registered for Foo"),
        ("[n] y = Add(x, nothing)", "'nothing'"),
        ("[n] y = Relu<axis=1>(x)", "Unrecognized attribute: axis"),
        ("[a] p = Add(x, q)\n [b] q = Relu(p)\n y = Relu(q)", "cycle .a -> b -> a|cycle .b -> a -> b"),
        ("t = Relu(x)", "Graph output 'y'"),
        ("y = Relu(x)\n y = Neg(x)", "single static assignment"),
        ("t = other.Foo(x)\n y = Relu(t)", "domain 'other'"),
        ("c = Constant()\n y = Add(x, c)", "must have one value"),
    ],
)
def test_invalid_graphs(file: Path, nodes: str, message: str) -> None:
    with pytest.raises(BadModel, match=message) as caught:
        loaded_from(file, model(f"g (float[2] x) => (float[2] y) {{ {nodes} }}"))
    assert "\n" not in str(caught.value)


def small() -> onnx.ModelProto:
    text = "net (float[2,8] x) => (float[2,8] y) { [first] a = MatMul(x, w)\n [second] y = Softmax(a) }"
    return model(text, constants={"w": np.eye(8, dtype=np.float32)})


def test_an_output_that_is_no_tensor_is_refused(call: Call, tmp_path: Path) -> None:
    proto = small()
    proto.graph.node.append(helper.make_node("SequenceConstruct", ["y", "a"], ["s"]))
    proto.graph.output.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    onnx.save(proto, tmp_path / "m.onnx")
    code, out, err = call("quantize", tmp_path / "m.onnx", "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "output 's' is no tensor but of type sequence" in err
    assert not list(tmp_path.glob("out/*.onnx"))
    assert load(tmp_path / "m.onnx").outputs == ("y", "s")  # it can be inspected all the same


@pytest.mark.parametrize("place", ["input", "output", "value_info"])
@pytest.mark.parametrize("code", [99, -5])
def test_an_unknown_element_type_is_refused(place: str, code: int) -> None:
    proto = small()
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, None))
    changed = getattr(proto.graph, place)[0]
    changed.type.tensor_type.elem_type = code
    with pytest.raises(BadModel, match=f"unknown element type \\({code}\\)"):
        load_proto(proto)


@pytest.mark.parametrize("place", ["initializer", "Constant"])
def test_sparse_constants_are_refused(place: str) -> None:
    proto = small()
    values, places = numpy_helper.from_array(np.ones(1, np.float32), "k"), numpy_helper.from_array(np.array([3]), "at")
    constant = onnx.SparseTensorProto(values=values, indices=places, dims=[8])
    if place == "Constant":
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["k"], sparse_value=constant))
    else:
        proto.graph.sparse_initializer.append(constant)
    proto.graph.node.append(helper.make_node("Add", ["y", "k"], ["z"]))
    with pytest.raises(BadModel, match="constant 'k' is sparse: write sparse constants out"):
        load_proto(proto)


def test_a_negative_size_in_a_body_is_an_open_one() -> None:
    proto = small()
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    kinds = [helper.make_tensor_value_info(o, TensorProto.FLOAT, [-1, 8]) for o in "pq"]
    bodies = [helper.make_graph([helper.make_node("Neg", ["y"], [o.name])], o.name, [], [o]) for o in kinds]
    proto.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=bodies[0], else_branch=bodies[1]))
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    body = load_proto(proto).proto.graph.node[-1].attribute[0].g
    assert body.output[0].type.tensor_type.shape.dim[0].dim_value == 2  # by inference


# Folders


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.onnx", "config.json"], ["model.onnx"]),
        (["model.onnx", "model_quantized.onnx", "model.qdq.onnx", "model_q4f16.onnx", "model_uint8.onnx"],
         ["model.onnx"]),
        (["onnx/model.onnx", "onnx/model_fp16.onnx", "config.json"], ["onnx/model.onnx"]),
        (["model_quantized.onnx"], ["model_quantized.onnx"]),
        (["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"],
         ["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"]),
    ],
)  # fmt: skip
def test_versions_of_a_graph_are_passed_over(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    folder = with_files(tmp_path, *names)
    assert [path.relative_to(folder).as_posix() for path in graphs_in(folder)] == expected
    if len(expected) == 1:
        assert model_in(folder) == folder / expected[0]


def test_a_folder_without_one_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"holds no \.onnx file: name an ONNX file, or a folder that holds some"):
        model_in(tmp_path)
    with pytest.raises(BadModel, match="optimum-cli export onnx --model"):
        model_in(with_files(tmp_path, "config.json"))
    with_files(tmp_path, "encoder_model.onnx", "decoder_model.onnx")
    with pytest.raises(BadModel, match=r"2 models \(decoder_model.onnx, encoder_model.onnx\): name one"):
        model_in(tmp_path)
    assert model_in(tmp_path / "gone.onnx") == tmp_path / "gone.onnx"


def test_companions_lie_beside_a_model_or_above_its_subfolder(tmp_path: Path) -> None:
    plain = with_files(tmp_path / "plain", "model.onnx", "tokenizer.json")
    assert companions(plain / "model.onnx") == []
    flat = with_files(tmp_path / "flat", "model.onnx", "config.json", "tokenizer.json", "notes.md", "model.safetensors")
    assert [path.name for path in companions(flat / "model.onnx")] == ["config.json", "tokenizer.json"]
    nested = with_files(tmp_path / "nested", "onnx/model.onnx", "config.json", "preprocessor_config.json")
    assert companions(nested / "onnx" / "model.onnx") == [nested / "config.json", nested / "preprocessor_config.json"]
    assert first_beside(["gone", "config.json"], [plain, nested / "onnx"]) == nested / "config.json"
    assert first_beside(["tokenizer.json"], [plain, flat]) == plain / "tokenizer.json"
    assert first_beside(["gone"], [plain, flat]) is None
