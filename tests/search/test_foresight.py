"""What a search will want next, before it is known what comes of what it wants now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

from qdqtune.search import as_predicted, best_of, upcoming_placements
from qdqtune.timing.ratios import Plan
from qdqtune.types import Edge, Placement, Proposal, Trial


def named(name: str, predicted: float | None = None, *, wants_layers: bool = False) -> Proposal:
    return Proposal(name, Placement.of([Edge(name)]), predicted=predicted, wants_layers=wants_layers)


class Around:
    """Proposes variants of the best so far, one at a time."""

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        best = next((t.proposal.origin for t in history if t.placement == best_of(history)), "float")
        return (named(f"{best}.{len(history)}"),)


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        (named("cut", 0.9, wants_layers=True), ["cut.1", "cut.2"]),  # it is foretold to become the best
        (named("polish", 1.01, wants_layers=True), ["float.1", "float.2"]),
        (named("variant"), ["float.1", "float.2"]),
        (named("fused units", wants_layers=True), []),  # what comes next, its layers will tell
    ],
)
def test_it_takes_for_granted_what_is_foretold_and_guesses_no_lessons(proposal: Proposal, expected: list[str]) -> None:
    coming = islice(upcoming_placements(Around(), [], [proposal], Plan()), 2)
    assert list(coming) == [named(name).placement for name in expected]
    assert (best_of(as_predicted([], [proposal], Plan())) == proposal.placement) == (expected[:1] == ["cut.1"])
