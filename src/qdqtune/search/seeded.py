"""One search after another: the second one begins where the first has ended, and knows all that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.search import Strategy
from qdqtune.types import Proposal, Trial


@dataclass(frozen=True)
class Seeded:
    """`first`, which learns from layers, until it has no ideas or has spent `builds`; then `second`, which does not."""

    first: Strategy
    second: Strategy
    builds: int

    def propose(self, history: Sequence[Trial]) -> Sequence[Proposal]:
        """See `Strategy`."""
        is_first = all(t.proposal.wants_layers for t in history) and sum(t.builds for t in history) < self.builds
        return (is_first and self.first.propose(history)) or self.second.propose(history)
