"""Values that carry one scale: an operator between them hands integers on as they are, or a Concat then only copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from qdqtune.calibration.scales import Range
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import CLAMPS
from qdqtune.placement.possible import clamp_bounds
from qdqtune.types import Edge, Placement

Member = str | Edge
"""What may share a scale: an activation by name, or a constant by its edge, since it may be a weight elsewhere."""

NEAR = 1.15
"""By what factor the range of a Concat's input may differ from its output's to be taken for the same: a step that is
so much coarser loses less than it saves, the second rounding."""


def common_ranges(
    model: Model, own: Mapping[Member, Range], placement: Placement, operators: Set[str]
) -> dict[Member, Range]:
    """The range of each member: where one of `operators` ties several together, that of all of them, without what a
    Concat alone reads: its output has those values, and a range that is the best for all of them. Where a Concat that
    takes a scale for each input is all that reads a value, that of the Concat's output if it is near.

    Such a value is rounded to the Concat's steps in any case: at a scale of its own it would be rounded twice, and the
    Concat would look up each of its integers in a table instead of copying them.
    """
    group, joined = {m: m for m in own}, set[Member]()

    def root(member: Member) -> Member:
        while group[member] != member:
            group[member] = member = group[group[member]]
        return member

    for node in model.nodes if operators else ():
        if node.op not in operators or not any(o in group for o in node.outputs):
            continue
        uses = [e for e in (node.into if node.op == "Concat" else node.into[:1]) if e in placement]
        ends: list[Member] = [e if e in group else e.tensor for e in uses]
        for other in (*ends[1:], *(o for o in node.outputs if o in group)) if ends else ():
            group[root(other)] = root(ends[0])
        if node.op == "Concat":
            joined.update(m for m in ends if isinstance(m, Edge) or len(model.uses(m)) == 1)
    common: dict[Member, Range] = {}
    for member in (m for m in own if m not in joined):
        of = root(member)
        common[of] = common[of] | own[member] if of in common else own[member]
    if operators and "Concat" not in operators:
        _join(model, placement, operators, common, {m: root(m) for m in own})
    return {m: common[root(m)] for m in own}


def joined_for_convolutions(model: Model, placement: Placement) -> frozenset[str]:
    """What a Concat makes and a convolution reads through a pair."""
    joins = (node.outputs[0] for node in model.nodes if node.op == "Concat" and not node.domain)
    paired = ((t, model.user(e)) for t in joins for e in model.edges(t) if e in placement)
    return frozenset(t for t, user in paired if user is not None and user.op == "Conv" and not user.domain)


def _join(
    model: Model, placement: Placement, operators: Set[str], common: dict[Member, Range], root: Mapping[Member, Member]
) -> None:
    """Give (in `common`, by root) the ranges of Concats to what they alone read. The last Concat comes first: what it
    gives to another one's output goes on to that one's inputs."""
    joins = [n for n in model.nodes if n.op == "Concat" and not n.domain and _is_paired(model, n.outputs[0], placement)]
    if not joins:
        return
    members = defaultdict[Member, list[Member]](list)
    for member, of in root.items():
        members[of].append(member)
    edges = defaultdict[str, list[Edge]](list)
    for edge in placement:
        edges[edge.tensor].append(edge)
    for join in reversed(joins):
        given = common[root[join.outputs[0]]]
        uses = [e for e in join.into if e in placement]
        for of in {root[e if e in root else e.tensor] for e in uses}:
            read = (e for m in members[of] for e in ([m] if isinstance(m, Edge) else edges[m]))
            if not 1 / NEAR <= _width(given) / (_width(common[of]) or 1.0) <= NEAR:
                continue
            if _reads_alone(model, join, read, operators, root, of) and _still_clamps(
                model, members[of], common[of], given
            ):
                common[of] = given


def _width(values: Range) -> float:
    """Of the range with the zero that its scale makes it hold."""
    return max(values.high, 0.0) - min(values.low, 0.0)


def _is_paired(model: Model, tensor: str, placement: Placement) -> bool:
    """Whether each use of a tensor carries a pair: nobody reads it in float."""
    edges = model.edges(tensor)
    return bool(edges) and all(e in placement for e in edges)


def _reads_alone(
    model: Model, join: Node, edges: Iterable[Edge], operators: Set[str], root: Mapping[Member, Member], of: Member
) -> bool:
    """Whether nothing reads integers of a group but a Concat, and operators that hand them on within the group."""
    readers = [model.user(e) for e in edges]
    return all(
        n is not None and (n is join or (n.op in operators and all(root.get(o) == of for o in n.outputs if o)))
        for n in readers
    )


def _still_clamps(model: Model, members: Sequence[Member], own: Range, given: Range) -> bool:
    """Whether a pair with the `given` range saturates where the Relu or Clip before it does, which then goes."""
    for node in (model.maker(m) for m in members if isinstance(m, str)):
        bounds = clamp_bounds(model, node) if node and node.op in CLAMPS and not node.domain else None
        if bounds is not None and not (given.low >= bounds[0] and given.high <= max(bounds[1], own.high)):
            return False
    return True
