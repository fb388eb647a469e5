"""Identity and unused nodes are removed; fixed inputs decide Ifs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import loaded_from, model, normal, outputs, same_when_loaded
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load_proto


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


def test_without_fixed_inputs_ifs_stay() -> None:
    text = CHOICE.replace("Equal(rate, k)", "Constant<value=bool {1}>()").replace(", w)", ", x)")
    assert [n.op for n in load_proto(model(text)).nodes].count("If") == 1


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
