"""Identity and unused nodes are removed; fixed inputs decide Ifs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import loaded_from, model, normal, outputs, same_when_loaded
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model import bodies, rebuild


def test_identities_and_unused_nodes_are_removed_and_outputs_keep_their_names(file: Path) -> None:
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
    loaded = loaded_from(file, proto)
    assert [n.op for n in loaded.nodes] == ["Identity", "Identity", "Add", "If"]
    assert loaded.nodes[2].inputs == ("x", "w")
    assert set(loaded.constants) == {"w"}
    for condition in (True, False):
        same_when_loaded(file, {"x": normal(2), "c": np.array(condition)})


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
    loaded = loaded_from(file, proto, fix_inputs={"rate": rate})
    assert loaded.inputs == ("x",)
    assert "If" not in {n.op for n in loaded.nodes}
    assert len(loaded.nodes) == nodes
    onnx.checker.check_model(loaded.to_proto())
    x = normal(2)
    hidden = -np.maximum(x, 0) + [3, 4] + x if rate == 16000 else 2 * np.maximum(x, 0)
    np.testing.assert_allclose(outputs(loaded.to_proto(), {"x": x})[0], np.maximum(hidden, 0) + x, rtol=1e-6)


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
    y, z, u = outputs(loaded_from(file, proto, fix_inputs={"c": "true"}).to_proto(), {"x": normal(2)})
    np.testing.assert_array_equal(y, -normal(2))
    np.testing.assert_array_equal(z, -normal(2))
    assert u.tolist() == [1, 2]


def test_only_small_results_are_folded(file: Path) -> None:
    proto = model("""g (float[2] x, int64[2] n, int64 k) => (int64[2] a, float[N,M] y) {
        a = Add(n, n)
        e = Expand(x, n)
        y = Relu(e)
    }""")
    loaded = loaded_from(file, proto, fix_inputs={"n": 1_000_000, "x": 0.5})
    assert [n.op for n in loaded.nodes] == ["Expand", "Relu"]
    assert loaded.constants["a"].array().tolist() == [2_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [("int64[3]", "7", [7, 7, 7]), ("float16", 0.5, 0.5), ("bool", 1, True), ("uint8[1]", 255.0, [255])],
)
def test_fixed_values_take_the_type_and_shape_of_the_input(file: Path, kind: str, value: Any, expected: Any) -> None:
    proto = model(f"g ({kind} v, float[2] x) => ({kind} o, float[2] y) {{ o = Identity(v)\n y = Relu(x) }}")
    assert loaded_from(file, proto, fix_inputs={"v": value}).constants["o"].array().tolist() == expected


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
    with pytest.raises(BadOption, match=message):
        loaded_from(file, proto, fix_inputs={name: value})


# Constants of every form become initializers; large ones stay outside the protobuf
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


def test_every_form_of_constant_becomes_an_initializer(file: Path) -> None:
    proto = model(
        """g (float[2,2] x) => (float[2,2] y, string[2] s, int64[1] i) {
        a = Constant<value_float=2.0>()
        b = Constant<value_floats=[1.0, 3.0]>()
        d = Constant<value_int=1>()
        i = Constant<value_ints=[7]>()
        s = Constant<value_strings=["p", "q"]>()
        t = Constant<value=float[2,2] {1,2,3,4}>()
        u = Mul(x, a)  v = Add(u, b)  w = Gather(v, d)  y = Add(w, t)
    }""".replace("  ", "\n")
    )
    loaded = loaded_from(file, proto)
    assert {n.op for n in loaded.nodes} == {"Mul", "Add", "Gather"}
    (y, s, i), x = outputs(loaded.to_proto(), {"x": normal(2, 2)}), normal(2, 2)
    np.testing.assert_allclose(y, (x * 2 + [1, 3])[1] + [[1, 2], [3, 4]], rtol=1e-6)
    assert (s.tolist(), i.tolist()) == (["p", "q"], [7])


def test_large_constants_stay_outside_and_external_ones_on_disk(file: Path) -> None:
    constants = {"w": normal(8, 300), "b": normal(300), "small": normal(300)[:3]}
    proto = model(
        "g (float[N,8] x) => (float[N,300] y, float[3] z) { t = MatMul(x, w)\n y = Add(t, b)\n z = Relu(small) }",
        constants=constants,
    )
    inline = loaded_from(file, proto)
    external(proto, file)
    before = (file.read_bytes(), (file.parent / "weights.bin").read_bytes())
    loaded = load(file)
    assert set(loaded.large) == {"w", "b"}
    assert [t.name for t in loaded.proto.graph.initializer] == ["small"]
    assert loaded.constants["w"].array() is not loaded.constants["w"].array(), "they are read when somebody asks"
    assert {n: c.key for n, c in loaded.large.items()} == {n: c.key for n, c in inline.large.items()}
    assert loaded.fingerprint == inline.fingerprint
    assert loaded.tensors["t"].shape == (None, 300), "shapes flow through constants that are not there"
    same_when_loaded(file, {"x": normal(4, 8)})
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
    loaded = loaded_from(file, proto)
    assert loaded.inputs == ("x",)
    assert [i.name for i in loaded.proto.graph.input] == ["x"]
    assert loaded.proto.ir_version >= 4
    same_when_loaded(file, {"x": w})


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("is_external", [False, True])
def test_what_callers_may_override_stays_in_the_interface_and_is_no_constant(file, opset, is_external):
    w, v = normal(300), normal(300)
    inputs = "float[300] w, float[300] x, float[300] v, float[300] idle"
    proto = model(
        f"g ({inputs}) => (float[300] y) {{ a = Add(x, w) y = Mul(a, v) }}",
        opset,
        6,
        {"w": w, "v": v, "idle": v, "c": v},
    )
    if is_external:
        external(proto, file)
    else:
        file.write_bytes(proto.SerializeToString())
    loaded = load(file)
    assert loaded.proto.graph.input == proto.graph.input
    assert loaded.inputs == ("x",)
    assert not loaded.constants
    same_when_loaded(file, {"x": w})
    same_when_loaded(file, {"x": w, "v": w, "w": v})
    assert rebuild(loaded, loaded.proto.graph.node, {}).overridable == {"w", "v", "idle"}
    fixed = load(file, fix_inputs={"v": 2})
    assert fixed.constants["v"].array()[0] == 2
    assert [i.name for i in fixed.proto.graph.input] == ["w", "x", "idle"]


GOOD = model("g (float[300] x) => (float[300] y) { [n] y = Add(x, w) }", constants={"w": normal(300)})


def test_constants_whose_bytes_do_not_fit() -> None:
    for change in ({"dims": [301]}, {"data_type": 99}, {"data_type": 0}):
        proto = onnx.ModelProto()
        proto.CopyFrom(GOOD)
        tensor = proto.graph.initializer[0]
        del tensor.dims[:]
        tensor.MergeFrom(TensorProto(dims=change.get("dims", [300]), data_type=change.get("data_type", 1)))
        with pytest.raises(BadModel, match="'w'"):
            load_proto(proto)


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
    loaded = loaded_from(file, proto)
    (inner,) = [t for body in bodies(loaded.proto.graph.node[0]) for t in body.initializer]
    assert inner.raw_data == normal(300).tobytes()
    np.testing.assert_allclose(
        outputs(loaded.to_proto(), {"c": np.array(True), "x": normal(300)})[0], 2 * normal(300), rtol=1e-6
    )
