"""Validation on the whole model: every question once, bad groups found in few builds, the same after a resumption."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import ceil, log2

import pytest

from models import build, normal, ranges
from qdqtune.errors import Failure
from qdqtune.graph.model import Model
from qdqtune.placement.possible import possible_edges
from qdqtune.search import best_of
from qdqtune.search.costs.profiles import PricedScheme, Profile, select
from qdqtune.search.costs.units import Decision, Partition, partition
from qdqtune.search.cut import CUT, CutSearch
from qdqtune.search.subgraph import OPTIMUM_BUILDS, SubgraphSearch
from qdqtune.types import Placement, Proposal, Trial
from search_loop import PLAN, exact, trials_of

GROUPS = 16

Seconds = Callable[[Placement], float]


def ladder(count: int = GROUPS) -> Model:
    """Products with a Tanh behind each, so that no group has a neighbour that gains."""
    lines = "".join(f"[m{k}] a{k} = MatMul(b{k}, w) [t{k}] b{k + 1} = Tanh(a{k})" for k in range(count))
    text = f"net (float[4,8] b0) => (float[4,8] b{count}) {{{lines}}}"
    return build(text, {"w": normal(8, 8)})


def search_of(model: Model, **changes: object) -> SubgraphSearch:
    """Every product gains half a millisecond alone, the first ones a little more."""
    parts = partition(model, possible_edges(model, ranges(model)), [])
    profiles = {}
    for unit in parts.units:
        points = frozenset({(0, 0), (0, 1)})
        gain = 0.5 - unit.number / 1000
        options = (PricedScheme("full", points, 1.0 - gain),) if unit.weights else ()
        profiles[unit.number] = Profile(1.0, options)
    return SubgraphSearch(select(parts, profiles), **changes)


def quantized(parts: Partition, placement: Placement) -> set[str]:
    return {parts.model.nodes[u.nodes[0]].name for u in parts.units if u.weights and set(u.weights) <= placement.edges}


def with_bad(parts: Partition, bad: Collection[str], more: float = 0.0) -> Seconds:
    """A group gains 1 % of the model, a bad one costs five times that; and any bad one `more`."""

    def seconds(placement: Placement) -> float:
        running = quantized(parts, placement)
        taken = sum(-5.0 if name in bad else 1.0 for name in running)
        return 100.0 - taken + (0.0 if running.isdisjoint(bad) else more)

    return seconds


def played(search: SubgraphSearch, seconds: Seconds, refused: Collection[Placement] = ()) -> list[Trial]:
    """The trials of a search whose builds take so long; `refused` placements do not build."""

    def measured(number: int, proposal: Proposal, against: Placement) -> Trial:
        if proposal.placement in refused:
            return Trial(number, proposal, against, Failure("build", "refused"))
        return exact(number, proposal, against, seconds)

    return trials_of(search, measured)


def test_all_groups_come_first_and_nothing_follows_where_they_win() -> None:
    search = search_of(ladder())
    history = played(search, with_bad(search.parts, ()))
    assert [t.proposal.origin for t in history] == ["all groups"]
    assert len(quantized(search.parts, history[0].placement)) == GROUPS
    assert history[0].proposal.predicted == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("bad", [{"m0"}, {"m7"}, {"m15"}, {"m3", "m4"}, {"m1", "m9", "m14"}])
def test_bad_groups_are_found_by_halving(bad: set[str]) -> None:
    search = search_of(ladder())
    history = played(search, with_bad(search.parts, bad, 40.0))
    assert quantized(search.parts, best_of(history)) == {f"m{k}" for k in range(GROUPS)} - bad
    assert len(history) <= 2 + 2 * len(bad) * ceil(log2(GROUPS))


def test_the_best_expected_gain_is_tried_first() -> None:
    search = search_of(ladder())
    history = played(search, lambda p: 100.0 + len(p))
    assert list(search.savings) == sorted(search.savings, key=lambda n: -search.savings[n])
    assert quantized(search.parts, history[1].placement) == {f"m{k}" for k in range(GROUPS // 2)}
    assert best_of(history) == Placement()


def test_a_batch_that_does_not_build_is_halved_as_well() -> None:
    search = search_of(ladder())
    history = played(search, with_bad(search.parts, ()), refused={search.all_accepted})
    assert history[0].result == Failure("build", "refused")
    assert quantized(search.parts, best_of(history)) >= {f"m{k}" for k in range(GROUPS // 2)}


def test_without_incremental_validation_there_is_one_question() -> None:
    search = search_of(ladder(), incremental=False, seeds={"other": Placement()})
    assert [t.proposal.origin for t in played(search, lambda p: 100.0 + len(p))] == ["all groups"]


def test_mixing_keeps_what_neighbours_need() -> None:
    """A tensor between a group that changes and one that does not has a pair where either side still wants it."""
    model = build(
        "net (float[4,8] x) => (float[4,8] y) {[a] t = MatMul(x, w) [b] u = MatMul(t, w) [c] y = Softmax(u)}",
        {"w": normal(8, 8)},
    )
    possible = possible_edges(model, ranges(model))
    parts = partition(model, possible, [])
    search = search_of(model)
    both = parts.placement(Decision.of({0, 1}, {"t"}))
    back = search.mixed(both, Placement(), [parts.owner["a"]])
    assert back == parts.placement(Decision.of({1}))
    front = search.mixed(both, Placement(), [parts.owner["b"]])
    assert front == parts.placement(Decision.of({0}, {"t"}))
    assert search.mixed(both, Placement(), []) == both


class _Led(CutSearch):
    """A cut that leads to some placements, one after the other."""

    def optima(self, history: Sequence[Trial]) -> Iterator[Proposal]:
        return (Proposal(CUT, p, wants_layers=True) for p in self.seeds.values())


def test_optima_of_the_first_builds_are_tried() -> None:
    search = search_of(ladder(), seeds={})
    parts = search.parts
    led = {str(n): parts.placement(Decision.of(range(2 * n))) for n in range(2, 8)}
    by_cut = _Led(parts.model, parts.possible, (), seeds=led, plan=PLAN)
    faster = {led["2"]: 50.0, led["3"]: 90.0, led["4"]: 40.0}
    history = played(replace(search, by_cut=by_cut), lambda p: faster.get(p, 100.0))
    crossing = [t.placement for t in history if t.proposal.origin == CUT]
    assert crossing == list(led.values())[:OPTIMUM_BUILDS]
    assert best_of(history) == led["4"]
