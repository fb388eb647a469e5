"""Constants of every form become initializers; large ones stay outside the protobuf."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import loaded_from, model, normal, outputs, same_when_loaded
from qdqtune.errors import BadModel
from qdqtune.graph.loading import load, load_proto
from qdqtune.graph.model import bodies, rebuild


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
def test_what_callers_may_override_stays_in_the_interface_and_is_no_constant(
    file: Path, opset: int, is_external: bool
) -> None:
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
