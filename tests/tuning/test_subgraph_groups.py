"""Groups of layer reports: every node once. Groups as models of their own: they compute what the whole model does."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from models import attention, build, conv_net, feeds, normal, ranges, run, tapped
from qdqtune.calibration.observe import observe
from qdqtune.engines.tensorrt.options import Span
from qdqtune.errors import BadOption
from qdqtune.graph.inference import with_input_shapes
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning import subgraph_groups as groups
from qdqtune.tuning.subgraph_groups import Resolved, borders, by_rules, extract, is_shape, resolve
from qdqtune.types import Layer

pytestmark = pytest.mark.usefixtures("workers")

RESHAPED = """net (float[N,4,6] x) => (float[N,M,2] y) {
    [rows] s = Shape <start=0, end=1> (x)
    [wanted] t = Concat <axis=0> (s, minus, six)
    [reshape] a = Reshape(x, t)
    [product] b = MatMul(a, w)
    [relu] y = Relu(b)
    }"""


def reshaped() -> Model:
    return build(RESHAPED, {"w": normal(6, 2), "minus": np.array([-1]), "six": np.array([6])})


@pytest.mark.parametrize("make", [conv_net, attention, tapped])
def test_a_part_computes_what_the_model_computes_there(make: Callable[[], Model]) -> None:
    model = make()
    (sample,) = feeds(model, 1)
    resolved = resolve(model, model, sample, {})
    tensors = [tensor for node in model.nodes for tensor in node.outputs if tensor]
    values = dict(observe(model, tensors, [sample], widen=False)) | sample
    for group in by_rules(model, possible_edges(model, ranges(model))).groups:
        nodes = [model.index_of[name] for name in group]
        reads, writes = borders(model, nodes)
        if not writes:  # nobody reads what it makes
            continue
        part = extract(model, nodes, resolved, {})
        onnx.checker.check_model(part.to_proto(), full_check=True)
        assert (part.inputs, part.outputs) == (reads, writes)
        (found,) = run(part, [{name: values[name] for name in reads}])
        for name in writes:
            np.testing.assert_allclose(found[name], values[name], rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_model_not_copies() -> None:
    model = conv_net()
    resolved = resolve(model, model, feeds(model, 1)[0], {})
    for node in model.nodes:
        part = extract(model, [node.index], resolved, {})
        assert set(part.large) == set(model.large) & set(node.inputs)
        assert all(part.large[name] is model.large[name] for name in part.large)
        assert set(part.constants) == set(model.constants) & set(node.inputs)


def test_shapes_that_inference_cannot_find_are_looked_up_by_running_the_model() -> None:
    model = reshaped()
    sample = {"x": np.ones((3, 4, 6), np.float32)}
    shaped = with_input_shapes(model, {"x": (3, 4, 6)})
    assert resolve(model, model, sample, {}).sizes["b"] == (3, 4, 2)
    assert resolve(model, shaped, sample, {}).sizes["y"] == (3, 4, 2)


def test_shapes_that_nodes_compute_become_constants() -> None:
    model = reshaped()
    resolved = resolve(model, model, {"x": np.ones((3, 4, 6), np.float32)}, {})
    assert is_shape(model, "t", resolved.sizes)
    assert not is_shape(model, "a", resolved.sizes)
    part = extract(model, [model.index_of["reshape"]], resolved, {"t": np.array([3, -1, 6])})
    assert part.inputs == ("x",)
    assert run(part, [{"x": np.ones((3, 4, 6), np.float32)}])[0]["a"].shape == (3, 4, 6)


def test_sizes_that_vary_stay_open_in_a_part() -> None:
    model = build("net (float[N,8] x) => (float[N,8] y) {[a] t = MatMul(x, w) [b] y = Relu(t)}", {"w": normal(8, 8)})
    sample = {"x": np.ones((4, 8), np.float32)}
    shaped = with_input_shapes(model, {"x": (4, 8)})
    fixed = resolve(model, shaped, sample, {"x": Span((4, 8), (4, 8), (4, 8))})
    assert fixed.spans == {}
    assert extract(shaped, [1], fixed, {}).tensors["t"].shape == (4, 8)
    resolved = resolve(model, shaped, sample, {"x": Span((1, 8), (4, 8), (16, 8))})
    assert resolved.spans["t"] == ((1, 8), (4, 8), (16, 8))
    part = extract(shaped, [1], resolved, {})
    assert part.tensors["t"].shape == part.tensors["y"].shape == (None, 8)
    onnx.checker.check_model(part.to_proto(), full_check=True)


def test_a_border_of_unknown_type_is_refused() -> None:
    model = build("net (float[2] x) => (float[2] y) {[a] t = Relu(x) [b] y = Relu(t)}")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.value_info[:]
    with pytest.raises(BadOption, match="type of tensor 't'"):
        extract(Model(proto, model.large), [1], Resolved({}), {})


def layer(name: str, *nodes: str, kind: str = "compute") -> Layer:
    return Layer(name, nodes, "FP32", 1.0, kind)  # type: ignore[arg-type]


def exported(folder: Path, *names: str) -> Path:
    path = folder / "graph.json"
    path.write_text(json.dumps({"Layers": [{"Name": name, "LayerType": "Convolution"} for name in names]}))
    return path


def test_each_node_is_in_one_group_in_graph_order() -> None:
    model = conv_net()
    names = [node.name for node in model.nodes]
    report = [
        layer("b", names[2], names[1]),
        layer("a", names[0], names[2], "of no use"),
        layer("copy", kind="reformat"),
    ]
    found = groups.from_layers(model, report)
    assert found.groups[:2] == ((names[0],), (names[1], names[2]))
    assert [name for group in found.groups for name in group] == names
    assert found.nameless == ("copy",)


def test_nodes_that_are_computed_in_advance_are_in_no_group() -> None:
    model = conv_net()
    names = [node.name for node in model.nodes]
    found = groups.from_layers(model, [layer("folded", names[3], kind="folded")])
    assert found.folded == (names[3],)
    assert (names[3],) not in found.groups
    assert sorted([*found.folded, *(n for g in found.groups for n in g)]) == sorted(names)


def test_groups_of_a_file_that_tensorrt_wrote(tmp_path: Path) -> None:
    model = build(
        "net (float[1,8] x) => (float[1,8] y) {[a] t = MatMul(x, w) [b] u = Relu(t) [c] y = MatMul(u, v)}",
        {"w": normal(8, 200, scale=0.1), "v": normal(200, 8, seed=1)},
    )
    assert model.large  # its names are not in the protobuf, and still no strangers
    path = exported(tmp_path, "w + a + b", "Reformatting CopyNode for Input Tensor 0 to v + c", "v + c")
    found = groups.from_file(model, path)
    assert found.groups == (("a", "b"), ("c",))
    assert len(found.nameless) == 1


def test_an_unusable_report_is_refused_with_the_option_that_names_it(tmp_path: Path) -> None:
    path = exported(tmp_path, "somebody + else")
    with pytest.raises(BadOption, match=f"`graph_json` {path}: .*another model"):
        groups.from_file(conv_net(), path)
