"""The map: groups in the order in which values flow, and blocks where there are too many to see at once."""

from collections.abc import Sequence

import pytest

from models import conv_net
from qdqtune.explanation.model_map import MOST_CELLS, Ran, alike, blocks, draw
from qdqtune.explanation.report_values import Map, MapBlock, MapGroup, MapNode
from qdqtune.types import Placement


def divided(names: Sequence[str]) -> tuple[MapBlock, ...]:
    return blocks([(name,) for name in names], dict.fromkeys(names, "Conv"))


def leaves(found: Sequence[MapBlock]) -> list[tuple[int, int]]:
    return [end for b in found for end in (leaves(b.blocks) if b.blocks else [(b.first, b.last)])]


def test_few_groups_need_no_blocks() -> None:
    assert divided([f"n{i}" for i in range(MOST_CELLS)]) == ()


@pytest.mark.parametrize("count", [MOST_CELLS + 1, 3000, 25_000])
@pytest.mark.parametrize("name", ["node_{n}", "/stage{s}/block{b}/Conv_{n}"])
def test_blocks_hold_every_group_once_and_fit_a_screen(count: int, name: str) -> None:
    found = divided([name.format(n=n, b=n // 12, s=n // 500) for n in range(count)])
    assert 1 < len(found) <= MOST_CELLS
    ends = leaves(found)
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
    assert ends[-1][1] == count
    assert all(0 < b - a <= MOST_CELLS for a, b in ends)


def test_blocks_are_the_modules_that_names_tell_of() -> None:
    found = divided([f"/encoder/layer.{n // 25}/MatMul_{n}" for n in range(300)])
    assert [block.label for block in found] == [f"encoder/layer.{n}" for n in range(12)]
    assert [block.first for block in found] == list(range(0, 300, 25))


def test_groups_stand_behind_those_that_they_read_from() -> None:
    model = conv_net()
    drawn = draw(model, [(node.name,) for node in reversed(model.nodes)], Ran(Placement()), None, {}, {})
    assert drawn.flows
    assert all(a < b for a, b in drawn.flows)
    assert {node.name for node in drawn.nodes} == {node.name for node in model.nodes}


def test_groups_of_repeated_modules_are_alike() -> None:
    names = [f"/layers.{layer}/{part}/MatMul_{layer}" for layer in range(4) for part in ("first", "second")]
    nodes = tuple(MapNode(name, "MatMul", False) for name in [*names, "Conv_1", "Conv_2", "Conv_3"])
    groups = tuple(MapGroup((n,), node.op, "float", 1.0, None, 0.0, None) for n, node in enumerate(nodes))
    assert alike(Map(nodes, groups, (), (), "")) == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9], [10]]
