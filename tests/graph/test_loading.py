"""Reading ONNX files: what comes out runs like the original, and what cannot be read is refused in one line."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

from loaded_models import Arrays, model, normal, run, same
from qdqtune.errors import BadModel
from qdqtune.graph.loading import load


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
    file.write_bytes(proto.SerializeToString())
    names = [n.name for n in load(file).nodes]
    assert names == ["mine", "Relu_2_2", "mine_3", "Relu_2", "mine_2", "mine_4"]
    assert names == [n.name for n in load(file).nodes]


def test_nodes_out_of_order_are_sorted(file: Path) -> None:
    file.write_bytes(
        model(
            "g (float[2] x) => (float[2] y) { [c] y = Add(q, x)\n [b] q = Relu(p)\n [a] p = Neg(x) }"
        ).SerializeToString()
    )
    loaded = load(file)
    assert [n.name for n in loaded.nodes] == ["a", "b", "c"]
    np.testing.assert_allclose(run(loaded.to_proto(), {"x": normal(2)})[0], normal(2) + np.maximum(-normal(2), 0))


def test_custom_operators_pass(file: Path) -> None:
    proto = model("g (float[2] x) => (float[2] y) { [k] t = my.Thing<size=3>(x)\n y = Relu(t) }", opset=11)
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert (loaded.nodes[0].domain, loaded.nodes[0].name, loaded.nodes[0].attributes["size"]) == ("my", "k", 3)
    assert loaded.opset == 13


def test_functions_are_inlined(file: Path) -> None:
    proto = parser.parse_model("""<ir_version: 9, opset_import: ["": 17, "f": 1]>
        g (float[300] x) => (float[300] y) { [one] a = f.Foo<slope=0.5>(x)
            [two] y = f.Foo<slope=0.25>(a) }
        <domain: "f", opset_import: ["": 17]>
        Foo <slope>(u) => (r) { t = LeakyRelu<alpha: float=@slope>(u)
            r = Add(t, k) }""")
    big = numpy_helper.from_array(normal(300))
    proto.functions[0].node.insert(0, helper.make_node("Constant", [], ["k"], value=big))
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert [n.op for n in loaded.nodes] == ["LeakyRelu", "Add", "LeakyRelu", "Add"]
    assert len({n.name for n in loaded.nodes}) == 4
    assert len({c.key for c in loaded.large.values()}) == 1
    same(file, {"x": normal(300)})


UP = np.array([1, 1, 1.7, 2.3], np.float32)
DOWN = np.array([1, 1, 0.6, 0.6], np.float32)
CONVERTED = [
    (7, "y = Softmax<axis=1>(x)", {}),
    (7, 'y = Upsample<mode="linear", scales=[1.0, 1.0, 2.0, 2.0]>(x)', {}),
    (7, "y = Clip<min=-0.5, max=0.5>(x)", {}),
    (7, "y = BatchNormalization(x, s, s, s, s)", {"s": np.array([1, 2, 3], np.float32)}),
    (7, "y = Pad<pads=[0,1,0,0,0,0,0,2], value=3.0>(x)", {}),
    (7, "y = Slice<axes=[1], starts=[1], ends=[3]>(x)", {}),
    (7, "y, i = TopK<k=2>(x)", {}),
    (7, "t = Unsqueeze<axes=[1]>(x)\n y = Squeeze<axes=[1]>(t)", {}),
    (7, "y, z = Split<axis=3, split=[2, 2]>(x)", {}),
    (9, 'y = Upsample<mode="nearest">(x, k)', {"k": UP}),
    (9, 'y = Upsample<mode="linear">(x, k)', {"k": UP}),
    (10, 'y = Resize<mode="nearest">(x, k)', {"k": UP}),
    (10, 'y = Resize<mode="nearest">(x, k)', {"k": DOWN}),
    (10, 'y = Resize<mode="linear">(x, k)', {"k": DOWN}),
    (11, "y = ReduceSum<axes=[-2], keepdims=0>(x)", {}),
    (11, "y = LogSoftmax<axis=2>(x)", {}),
    (12, "y = MatMul(x, w)", {"w": normal(300, 4, 4)[:3]}),
]


@pytest.mark.parametrize(("opset", "nodes", "constants"), CONVERTED)
@pytest.mark.parametrize("target", [13, 19])
def test_older_opsets_are_converted(file: Path, opset: int, nodes: str, constants: Arrays, target: int) -> None:
    result = "float[a,b,c]" if "keepdims=0" in nodes else "float[a,b,c,d]"
    proto = model(f"g (float[2,3,4,4] x) => ({result} y) {{ {nodes} }}", opset, 4, constants)
    file.write_bytes(proto.SerializeToString())
    assert load(file, min_opset=target).opset == target
    same(file, {"x": normal(2, 3, 4, 4)}, min_opset=target)


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
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert (loaded.inputs, loaded.outputs) == (("b", "a"), ("q", "p"))
    assert {"first", "second"} <= loaded.index_of.keys()
    assert loaded.proto.metadata_props[0].value == "somebody"
    assert loaded.proto.graph.node[0].metadata_props[0].value == "net.layer"
    same(file, {"a": normal(8, 8), "b": normal(8, 8)})


def test_recent_opsets_are_left_alone(file: Path) -> None:
    file.write_bytes(model("g (float[2] x) => (float[2] y) { y = Relu(x) }", 18, 10).SerializeToString())
    assert (load(file).opset, load(file).proto.ir_version) == (18, 10)


@pytest.mark.parametrize(
    ("opset", "node", "message"),
    [(6, "Relu(x)", "opset 6 is older than 7; export"), (9, "Hardmax(x)", "from opset 9 to 13: Hardmax .*; export")],
)
def test_opsets_that_cannot_be_raised(file: Path, opset: int, node: str, message: str) -> None:
    file.write_bytes(model(f"g (float[2,2] x) => (float[2,2] y) {{ y = {node} }}", opset, 4).SerializeToString())
    with pytest.raises(BadModel, match=message):
        load(file)


def test_shape_inference_that_fails_is_not_fatal(file: Path) -> None:
    file.write_bytes(model("g (float[2,3] x) => (float[2,2] y) { t = Reshape(x, s)\n y = MatMul(t, x) }", constants={
        "s": np.array([5, 5])}).SerializeToString())  # fmt: skip
    assert [n.op for n in load(file).nodes] == ["Reshape", "MatMul"]


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="is a folder"):
        load(tmp_path)


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
    file.write_bytes(model(f"g (float[2] x) => (float[2] y) {{ {nodes} }}").SerializeToString())
    with pytest.raises(BadModel, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)
