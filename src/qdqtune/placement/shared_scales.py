"""Values that must carry one scale, as an operator between them hands integers on as they are."""

from __future__ import annotations

from collections.abc import Mapping, Set

from qdqtune.calibration.scales import Range
from qdqtune.graph.model import Model
from qdqtune.types import Edge, Placement

Member = str | Edge
"""What may share a scale: an activation by name, or a constant by its edge, since it may be a weight elsewhere."""


def common_ranges(
    model: Model, own: Mapping[Member, Range], placement: Placement, operators: Set[str]
) -> dict[Member, Range]:
    """The range of each member: where one of `operators` ties several together, that of all of them."""
    group = {m: m for m in own}

    def root(member: Member) -> Member:
        while group[member] != member:
            group[member] = member = group[group[member]]
        return member

    for node in model.nodes if operators else ():
        if node.op not in operators or not any(o in group for o in node.outputs):
            continue
        data = node.inputs if node.op == "Concat" else node.inputs[:1]
        uses = [e for i, t in enumerate(data) if (e := Edge(t, node.name, i)) in placement]
        ends: list[Member] = [e if e in group else e.tensor for e in uses]
        for other in (*ends[1:], *(o for o in node.outputs if o in group)) if ends else ():
            group[root(other)] = root(ends[0])
    common: dict[Member, Range] = {}
    for member, values in own.items():
        common[root(member)] = common.get(root(member), values) | values
    return {m: common[root(m)] for m in own}
