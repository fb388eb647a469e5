"""Groups from layer reports: every node once, and nothing dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models import attention, build, conv_net, normal, ranges
from qdqtune.errors import BadOption
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning.subgraphs import groups
from qdqtune.types import Layer


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
    found = groups.from_layers(model, report, "from a test")
    assert found.groups[:2] == ((names[0],), (names[1], names[2]))
    assert [name for group in found.groups for name in group] == names
    assert found.nameless == ("copy",)
    assert "layer 'copy' names no node of the model" in found.lines()
    assert found.lines()[0] == f"{len(names) - 1} groups from a test"


def test_nodes_that_are_computed_in_advance_are_told_apart() -> None:
    model = conv_net()
    names = [node.name for node in model.nodes]
    found = groups.from_layers(model, [layer("folded", names[3], kind="folded")], "")
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
    assert found.lines()[0] == "2 groups from graph.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"Layers": [{"Name": "of", "LayerType"', "cut short"),
        (json.dumps({"Layers": [{"Name": "somebody + else"}]}), "another model"),
        (json.dumps([1, 2]), "no list 'Layers'"),
        (None, "cannot read"),
    ],
)
def test_a_file_of_no_use_is_refused_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "graph.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadOption, match=words) as error:
        groups.from_file(conv_net(), path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_report_rules_say_what_engines_fuse() -> None:
    model = conv_net()
    found = groups.by_rules(model, possible_edges(model, ranges(model)))
    assert ("stem", "stem_relu") in found.groups
    assert sorted(n for g in found.groups for n in g) == sorted(n.name for n in model.nodes)
    matrices = attention()
    assert all(len(g) == 1 for g in groups.by_rules(matrices, frozenset()).groups)
