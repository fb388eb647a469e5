"""Reading ONNX files: what comes out runs like the original, and what cannot be read is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from qdqtune.errors import BadModel, BadOption
from qdqtune.graph import protobuf
from qdqtune.graph.loading import files_of, load
from qdqtune.graph.model import bodies

Arrays = Mapping[str, npt.NDArray[Any]]


def model(text: str, opset: int = 17, ir: int = 8, constants: Arrays | None = None) -> onnx.ModelProto:
    """A model in ONNX text syntax, with `constants` as initializers."""
    proto = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}, "my": 1]>\n{text}')
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (constants or {}).items())
    return proto


def run(proto: onnx.ModelProto | Path, feeds: Arrays) -> list[npt.NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = str(proto) if isinstance(proto, Path) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    results: list[npt.NDArray[Any]] = session.run(None, {n: a for n, a in feeds.items() if n in names})
    return results


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def same(file: Path, feeds: Arrays, **options: Any) -> None:
    """The loaded model passes the checker, and answers as the file does."""
    loaded = load(file, **options).to_proto()
    onnx.checker.check_model(loaded)
    for expected, got in zip(run(file, feeds), run(loaded, feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def normal(*shape: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def external(proto: onnx.ModelProto, file: Path, **changes: str) -> None:
    """Save with all initializers in weights.bin; `changes` replace entries of the first one's reference."""
    onnx.save(
        onnx.ModelProto.FromString(proto.SerializeToString()),
        file,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    saved = onnx.load(file, load_external_data=False)
    for entry in saved.graph.initializer[0].external_data:
        entry.value = changes.get(entry.key, entry.value)
    file.write_bytes(saved.SerializeToString())


# Constants


def test_every_form_of_constant_becomes_an_initializer(file: Path) -> None:
    proto = model(
        """g (float[2,2] x) => (float[2,2] y, string[2] s, int64[1] i) {
        a = Constant<value_float=2.0>()
        b = Constant<value_floats=[1.0, 3.0]>()
        d = Constant<value_int=1>()
        i = Constant<value_ints=[7]>()
        s = Constant<value_strings=["p", "q"]>()
        t = Constant<value=float[2,2] {1,2,3,4}>()
        u = Mul(x, a)  v = Add(u, b)  w = Gather(v, d)  z = Add(w, t)  y = Add(z, q)
    }""".replace("  ", "\n")
    )
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([5, 6], np.float32), "q"), numpy_helper.from_array(np.array([0, 3])), [2, 2]
    )
    proto.graph.sparse_initializer.append(sparse)
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert {n.op for n in loaded.nodes} == {"Mul", "Add", "Gather"}
    assert loaded.constants["q"].array().tolist() == [[5, 0], [0, 6]]
    (y, s, i), x = run(loaded.to_proto(), {"x": normal(2, 2)}), normal(2, 2)
    np.testing.assert_allclose(y, (x * 2 + [1, 3])[1] + [[1, 2], [3, 4]] + np.diag([5, 6]), rtol=1e-6)
    assert (s.tolist(), i.tolist()) == (["p", "q"], [7])


@pytest.mark.parametrize("indices", [[[0, 1], [1, 0]], [1, 2]])
def test_sparse_constant_nodes(file: Path, indices: list[Any]) -> None:
    values = numpy_helper.from_array(np.array([5, 6], np.float32))
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices)), [2, 2])
    proto = model("g (float[2,2] x) => (float[2,2] y) { y = Add(x, q) }")
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["q"], sparse_value=sparse))
    file.write_bytes(proto.SerializeToString())
    assert load(file).constants["q"].array().tolist() == [[0, 5], [6, 0]]


def test_large_constants_stay_outside_and_external_ones_on_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"w": normal(8, 300), "b": normal(300), "small": normal(300)[:3]}
    proto = model(
        "g (float[N,8] x) => (float[N,300] y, float[3] z) { t = MatMul(x, w)\n y = Add(t, b)\n z = Relu(small) }",
        constants=constants,
    )
    file.write_bytes(proto.SerializeToString())
    inline = load(file)
    monkeypatch.setattr(protobuf, "APART_BYTES", 0)
    (link := file.with_name("link.onnx")).symlink_to(file)
    apart = load(link)
    assert protobuf.parsed(link).ByteSize() < 1000
    assert apart.fingerprint == inline.fingerprint
    assert apart.constants["w"].data() == inline.constants["w"].data()
    assert files_of(link) == [link]
    external(proto, file)
    before = (file.read_bytes(), (file.parent / "weights.bin").read_bytes())
    loaded = load(file)
    assert set(loaded.large) == {"w", "b"}
    assert [t.name for t in loaded.proto.graph.initializer] == ["small"]
    assert loaded.constants["w"].array() is not loaded.constants["w"].array(), "they are read when somebody asks"
    assert {n: c.key for n, c in loaded.large.items()} == {n: c.key for n, c in inline.large.items()}
    assert loaded.fingerprint == inline.fingerprint
    assert loaded.tensors["t"].shape == (None, 300), "shapes flow through constants that are not there"
    same(file, {"x": normal(4, 8)})
    assert before == (file.read_bytes(), (file.parent / "weights.bin").read_bytes())


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4", "DOUBLE"])
@pytest.mark.parametrize("place", ["inline", "external"])
def test_element_types_keep_their_bytes(file: Path, dtype: str, place: str) -> None:
    element = TensorProto.DataType.Value(dtype)
    array = np.arange(-2048, 2048).astype(helper.tensor_dtype_to_np_dtype(element)).reshape(64, 64)
    proto = model(
        f"g (float[2] x) => ({dtype.lower()}[64,64] y, float[2] z) {{ y = Identity(w)\n z = Relu(x) }}", 21, 10
    )
    proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
    raw = proto.graph.initializer[0].raw_data
    assert raw
    if place == "external":
        external(proto, file)
    else:
        file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert loaded.constants["w"].array().tobytes() == array.tobytes()
    (whole,) = loaded.to_proto().graph.initializer
    assert (whole.raw_data, whole.data_type, list(whole.dims)) == (raw, element, [64, 64])


def test_constants_listed_as_inputs_are_no_inputs(file: Path) -> None:
    w = normal(300)
    proto = model("g (float[300] x, float[300] w) => (float[300] y) { y = Add(x, w) }", 7, 3, {"w": w})
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert loaded.inputs == ("x",)
    assert [i.name for i in loaded.proto.graph.input] == ["x"]
    assert loaded.proto.ir_version >= 4
    same(file, {"x": w})


def test_identities_and_unused_parts_go_but_graph_outputs_keep_their_names(file: Path) -> None:
    proto = model(
        """g (float[2] x, bool c) => (float[2] y, float[2] same, float[2] k, float[2] z) {
        same = Identity(x)
        i = Identity(w)
        j = Identity(i)
        k = Identity(j)
        y = Add(x, j)
        dead = Add(x, unused)
        z = If(c) <
            then_branch = a () => (float[2] p) { p = Relu(j) },
            else_branch = b () => (float[2] q) { q = Neg(x) }>
        }""",
        constants={"w": np.array([-1, 2], np.float32), "unused": normal(2)},
    )
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert [n.op for n in loaded.nodes] == ["Identity", "Identity", "Add", "If"]
    assert loaded.nodes[2].inputs == ("x", "w")
    assert set(loaded.constants) == {"w"}
    for condition in (True, False):
        same(file, {"x": normal(2), "c": np.array(condition)})


# Names and order


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


def test_external_constants_in_bodies_stay_there_embedded(file: Path) -> None:
    proto = model("""g (bool c, float[300] x) => (float[300] y) {
        y = If(c) <
            then_branch = a () => (float[300] p) { p = Add(x, w) },
            else_branch = b () => (float[300] q) { q = Neg(x) }>
    }""")
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    w = then.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[300], data_location=TensorProto.EXTERNAL)
    w.external_data.add(key="location", value="w.bin")
    (file.parent / "w.bin").write_bytes(normal(300).tobytes())
    file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    (inner,) = [t for body in bodies(loaded.proto.graph.node[0]) for t in body.initializer]
    assert inner.raw_data == normal(300).tobytes()
    np.testing.assert_allclose(
        run(loaded.to_proto(), {"c": np.array(True), "x": normal(300)})[0], 2 * normal(300), rtol=1e-6
    )


# Opsets

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


# Fixed inputs

CHOICE = """g (float[2] x, int64 rate) => (float[2] y) {
    k = Constant<value_int=16000>()
    c = Equal(rate, k)
    t = Relu(x)
    [choose] r = If(c) <
        then_branch = a () => (float[2] p) {
            n = Neg(t)
            d = Constant<value=bool {0}>()
            [inner] p = If(d) <
                then_branch = aa () => (float[2] pp) { pp = Neg(n) },
                else_branch = ab () => (float[2] pq) { m = Add(n, w)
                    pq = Add(m, x) }>
        },
        else_branch = b () => (float[2] q) { m = Relu(x)
            q = Add(m, m) }>
    m = Relu(r)
    y = Add(m, x)
}"""


@pytest.mark.parametrize(("rate", "nodes"), [(16000, 6), (8000, 4)])
def test_a_fixed_input_decides_ifs(file: Path, rate: int, nodes: int) -> None:
    proto = model(CHOICE)
    branches = {a.name: a.g for a in proto.graph.node[3].attribute}
    branches["then_branch"].initializer.append(numpy_helper.from_array(np.array([3, 4], np.float32), "w"))
    file.write_bytes(proto.SerializeToString())
    loaded = load(file, fix_inputs={"rate": rate})
    assert loaded.inputs == ("x",)
    assert "If" not in {n.op for n in loaded.nodes}
    assert len(loaded.nodes) == nodes
    onnx.checker.check_model(loaded.to_proto())
    x = normal(2)
    hidden = -np.maximum(x, 0) + [3, 4] + x if rate == 16000 else 2 * np.maximum(x, 0)
    np.testing.assert_allclose(run(loaded.to_proto(), {"x": x})[0], np.maximum(hidden, 0) + x, rtol=1e-6)


def test_without_fixed_inputs_ifs_stay(file: Path) -> None:
    text = CHOICE.replace("Equal(rate, k)", "Constant<value=bool {1}>()").replace(", w)", ", x)")
    file.write_bytes(model(text).SerializeToString())
    assert [n.op for n in load(file).nodes].count("If") == 1


def test_a_branch_may_return_a_constant_and_one_tensor_twice(file: Path) -> None:
    proto = model("""g (float[2] x, bool c) => (float[2] y, float[2] z, float[2] u) {
        y, z, u = If(c) <
            then_branch = a () => (float[2] p, float[2] p, float[2] i) { p = Neg(x) },
            else_branch = b () => (float[2] q, float[2] r, float[2] s) { q = Neg(x)
                r = Neg(q)
                s = Neg(r) }>
    }""")
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    then.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), "i"))
    file.write_bytes(proto.SerializeToString())
    y, z, u = run(load(file, fix_inputs={"c": "true"}).to_proto(), {"x": normal(2)})
    np.testing.assert_array_equal(y, -normal(2))
    np.testing.assert_array_equal(z, -normal(2))
    assert u.tolist() == [1, 2]


def test_a_branch_with_too_few_outputs(file: Path) -> None:
    proto = model("""g (float[2] x, bool c) => (float[2] y) {
        y, z = If(c) <
            then_branch = a () => (float[2] p) { p = Neg(x) },
            else_branch = b () => (float[2] q) { q = Relu(x) }>
    }""")
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(BadModel, match="has 2 outputs, its body 1"):
        load(file, fix_inputs={"c": 1})


def test_only_small_results_are_folded(file: Path) -> None:
    proto = model("""g (float[2] x, int64[2] n, int64 k) => (int64[2] a, float[N,M] y) {
        a = Add(n, n)
        e = Expand(x, n)
        y = Relu(e)
    }""")
    file.write_bytes(proto.SerializeToString())
    loaded = load(file, fix_inputs={"n": 1_000_000, "x": 0.5})
    assert [n.op for n in loaded.nodes] == ["Expand", "Relu"]
    assert loaded.constants["a"].array().tolist() == [2_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [("int64[3]", "7", [7, 7, 7]), ("float16", 0.5, 0.5), ("bool", 1, True), ("uint8[1]", 255.0, [255])],
)
def test_fixed_values_take_the_type_and_shape_of_the_input(file: Path, kind: str, value: Any, expected: Any) -> None:
    proto = model(f"g ({kind} v, float[2] x) => ({kind} o, float[2] y) {{ o = Identity(v)\n y = Relu(x) }}")
    file.write_bytes(proto.SerializeToString())
    assert load(file, fix_inputs={"v": value}).constants["o"].array().tolist() == expected


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("int64", "w", 1, "inputs are v, x"),
        ("int64", "v", 1.5, "int64"),
        ("uint8", "v", 300, "uint8"),
        ("int64", "v", "many", "int64"),
        ("bool", "v", "maybe", "bool"),
        ("float[N]", "v", 1, "static"),
        ("seq(float[2])", "v", 1, "static"),
    ],
)
def test_values_that_do_not_fit_are_refused(file: Path, kind: str, name: str, value: Any, message: str) -> None:
    proto = model(f"g ({kind} v, float[2] x) => ({kind} o, float[2] y) {{ o = Identity(v)\n y = Relu(x) }}")
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(BadOption, match=message):
        load(file, fix_inputs={name: value})


# Shapes


def test_shape_inference_that_fails_is_not_fatal(file: Path) -> None:
    file.write_bytes(model("g (float[2,3] x) => (float[2,2] y) { t = Reshape(x, s)\n y = MatMul(t, x) }", constants={
        "s": np.array([5, 5])}).SerializeToString())  # fmt: skip
    assert [n.op for n in load(file).nodes] == ["Reshape", "MatMul"]


# Bad files

GOOD = model("g (float[300] x) => (float[300] y) { [n] y = Add(x, w) }", constants={"w": normal(300)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not an ONNX file"),
        (b"no model at all, just some words", "not an ONNX file"),
        (GOOD.SerializeToString()[:-7], "not an ONNX file, or damaged|invalid graph"),
        (GOOD.SerializeToString()[:500], "not an ONNX file"),
        (GOOD.SerializeToString().replace(b"Add", b"\xff\xfe\xfd"), "model.onnx: "),
    ],
)
@pytest.mark.parametrize("apart", [protobuf.APART_BYTES, 0])
def test_files_that_are_no_models(
    file: Path, content: bytes | None, message: str, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protobuf, "APART_BYTES", apart)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadModel, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)


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


def test_constants_whose_bytes_do_not_fit(file: Path) -> None:
    for change in ({"dims": [301]}, {"data_type": 99}, {"data_type": 0}):
        proto = onnx.ModelProto()
        proto.CopyFrom(GOOD)
        tensor = proto.graph.initializer[0]
        del tensor.dims[:]
        tensor.MergeFrom(TensorProto(dims=change.get("dims", [300]), data_type=change.get("data_type", 1)))
        file.write_bytes(proto.SerializeToString())
        with pytest.raises(BadModel, match="'w'"):
            load(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "gone.bin"}, "gone.bin is missing"),
        ({"offset": "4"}, "too short"),
        ({"length": "8"}, "do not fit"),
        ({"offset": "-8"}, "do not fit"),
        ({"offset": "many"}, "must be numbers"),
        ({"location": "../weights.bin"}, "not a file in the model's folder"),
        ({"location": "/weights.bin"}, "not a file in the model's folder"),
    ],
)
def test_external_data_that_cannot_be_read(file: Path, changes: dict[str, str], message: str) -> None:
    external(GOOD, file, **changes)
    with pytest.raises(BadModel, match=message):
        load(file)
