"""What a provider leaves to another, counted on a small graph."""

from collections.abc import Sequence

import pytest

from models import build
from qdqtune.engines.fallback import fallback
from qdqtune.graph.model import Model
from qdqtune.types import Layer, LayerKind


def net(size: str = "1,256") -> Model:
    return build(f"net (float[{size}] x) => (float[{size}] y) {{ [a] p = Relu(x) [b] q = Abs(p) [c] y = Relu(q) }}")


def layer(*nodes: str, where: str = "", ms: float | None = None, kind: LayerKind = "compute") -> Layer:
    return Layer("+".join(nodes), nodes, "FP32", ms, kind, elsewhere=where)


def test_nodes_elsewhere_their_reasons_and_borders() -> None:
    found = fallback(net(), (layer("a"), layer("b", where="on the CPU: no kernel"), layer("c")))
    assert found.nodes == 3
    assert [(left.node, left.op, left.reason) for left in found.left] == [("b", "Abs", "on the CPU: no kernel")]
    assert [(border.tensor, border.nbytes) for border in found.borders] == [("p", 1024), ("q", 1024)]
    assert found.in_words() == "1 of 3 nodes run elsewhere, 2 borders of 2 KiB: b on the CPU: no kernel"


def test_the_time_of_nodes_elsewhere_and_of_copies() -> None:
    copies = layer("copy", ms=0.25, kind="copy")
    found = fallback(net("N,4"), (layer("a", ms=1.0), copies, layer("b", "c", where="on the CPU: x", ms=0.5)))
    assert (found.nodes, found.ms) == (3, 0.75)
    assert found.in_words() == (
        "2 of 3 nodes run elsewhere, 1 border, 0.75 ms there and in copies: b and 1 more on the CPU: x"
    )


def test_a_node_without_layer_is_on_the_side_of_what_it_reads() -> None:
    found = fallback(net(), (layer("a", where="on the CPU: x"), layer("c")))
    assert [border.tensor for border in found.borders] == ["q"]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((layer("a", "b", "c"),), "all 3 nodes run on the provider"),
        ((), "where the nodes run is not known: the engine gave no layers"),
        ([layer(f"n{i}", where=f"on the CPU: {i}") for i in range(5)],
         "5 of 5 nodes run elsewhere, 0 borders: n0 on the CPU: 0; n1 on the CPU: 1; n2 on the CPU: 2; 2 more reasons"),
    ],
)  # fmt: skip
def test_a_line_names_a_few_reasons(layers: Sequence[Layer], words: str) -> None:
    assert fallback(net(), layers).in_words() == words
