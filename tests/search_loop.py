"""A search without engines, for the tests of strategies."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from qdqtune.search import Strategy, best_of
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.shipping import accepted
from qdqtune.types import Measurement, Placement, Proposal, Trial

PLAN = Plan((12,), turn_seconds=0.0)


def trials_of(
    search: Strategy, measured: Callable[[int, Proposal, Placement], Trial], most: int = 100, plan: Plan = PLAN
) -> list[Trial]:
    """At most so many trials of a search, accepted as in the tuning loop. `measured` makes a trial of a number, a
    proposal and the best placement so far. A new search that begins in the middle proposes the same."""
    history: list[Trial] = []
    batches: list[tuple[int, Sequence[Proposal]]] = []
    while len(history) < most and (batch := search.propose(history)):
        batches.append((len(history), batch))
        assert {p.placement for p in batch}.isdisjoint({Placement(), *(t.placement for t in history)})
        against, best = best_of(history), next((t for t in reversed(history) if t.accepted), None)
        room = batch[: most - len(history)]
        trials = [measured(number, p, against) for number, p in enumerate(room, len(history) + 1)]
        history += accepted(trials, plan, best)
    middle, batch = batches[len(batches) // 2]
    assert replace(search).propose(tuple(history[:middle])) == batch  # type: ignore[type-var]
    return history


def exact(
    number: int, proposal: Proposal, against: Placement, seconds: Callable[[Placement], float], **fields: object
) -> Trial:
    """A trial whose builds take the same time in each round."""
    rounds = Measurement((seconds(against),) * 12, (seconds(proposal.placement),) * 12)
    return Trial(number, proposal, against, rounds, **{"holds": True, **fields})  # type: ignore[arg-type]
