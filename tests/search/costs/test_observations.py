"""The states of units in a placement."""

from models import ranges
from price_chain import chain, parts_of, placed
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.prices import state
from qdqtune.search.costs.units import Decision, partition
from qdqtune.types import Edge, Placement


def test_states() -> None:
    parts = parts_of(chain())

    def states(placement: Placement) -> list[str]:
        return [state(u, parts, placement) for u in parts.units]

    assert states(Placement()) == ["float"] * 4
    assert states(placed(parts, "abcd", "tuvy")) == ["quantized"] * 4
    assert states(placed(parts, "a")) == ["handing", "float", "float", "float"]
    assert states(placed(parts, "a", "t")) == ["quantized", "float", "float", "float"]
    assert states(Placement.of([Edge("x", "a", 0)])) == ["float"] * 4
    assert states(Placement.of([Edge("w0", "a", 1)]))[0] == "float"


def test_a_unit_with_pairs_inside_is_mixed() -> None:
    model = chain()
    parts = partition(model, possible_edges(model, ranges(model)), [("a", "b")])
    whole = parts.placement(Decision.of({0}, {"u"}))
    assert state(parts.units[0], parts, whole) == "quantized"
    assert state(parts.units[0], parts, whole | Placement.of([Edge("t", "b", 0)])) == "mixed"
