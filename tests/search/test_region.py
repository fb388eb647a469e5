"""The region strategy alone: a pure function of trials, fed with exact latencies of the fake engine's cost model."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from itertools import compress, product
from typing import Any

import pytest

from models import attention, build, conv_net, normal, ranges
from qdqtune.engines import formats
from qdqtune.engines.fake import latency
from qdqtune.errors import Failure
from qdqtune.graph.model import Model
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.region import BATCH, Config, RegionSearch
from qdqtune.search.regions import discovery, patterns
from qdqtune.search.regions.patterns import Pattern
from qdqtune.timing.ratios import Plan
from qdqtune.types import Edge, Placement, Proposal, Trial
from runs import mixed
from search_loop import exact, trials_of


def blocks() -> Model:
    """Three residual blocks of one structure."""
    lines, weights, x = [], {}, "x"
    for k in range(3):
        lines += [f"[up{k}] a{k} = MatMul({x}, u{k})", f"[relu{k}] b{k} = Relu(a{k})",
                  f"[down{k}] c{k} = MatMul(b{k}, d{k})", f"[add{k}] s{k} = Add(c{k}, {x})",
                  f"[tanh{k}] {'y' if k == 2 else f'x{k}'} = Tanh(s{k})"]  # fmt: skip
        weights |= {f"u{k}": normal(64, 64, scale=0.1, seed=k), f"d{k}": normal(64, 64, scale=0.1, seed=9 + k)}
        x = f"x{k}"
    text = "\n".join(lines)
    return build(f"net (float[4,32,64] x) => (float[4,32,64] y) {{ {text} }}", weights)


MODELS = {"mixed": mixed, "conv_net": conv_net, "attention": attention, "blocks": blocks}


@functools.cache
def parts(name: str) -> tuple[Model, tuple[Pattern, ...], frozenset[Edge], Inserter]:
    model = MODELS[name]()
    found = ranges(model)
    inserter = Inserter(model, found, formats.numeric_format("fake", "int8"))
    return model, patterns.group(model, discovery.find(model)), possible_edges(model, found), inserter


def search(name: str = "mixed", **changes: Any) -> RegionSearch:
    model, grouped, possible, _ = parts(name)
    made = RegionSearch(model, grouped, possible, start_placements.placements(model, possible))
    return replace(made, **{"config": Config(schemes_per_region=6), **changes})


@functools.cache
def seconds(name: str, placement: Placement) -> float:
    return latency(parts(name)[3].insert(placement).to_proto())


def play(strategy: RegionSearch, name: str = "mixed", most: int = 48) -> list[Trial]:
    """The trials of a search, measured without noise."""
    return trials_of(strategy, functools.partial(exact, seconds=functools.partial(seconds, name)), most)


@functools.cache
def played(name: str) -> tuple[Trial, ...]:
    return tuple(play(search(name), name))


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_suggestions_come_first_in_their_order(name: str) -> None:
    suggested = search(name).seeds
    first = played(name)[: len(suggested)]
    assert [t.proposal.origin for t in first] == list(suggested)
    assert [t.placement for t in first] == [consistent(parts(name)[0], p) for p in suggested.values()]
    assert all(t.proposal.pattern for t in played(name)[len(suggested) :] if t.proposal.origin != "merged winners")
    sizes = [len(search(name).propose(played(name)[:count])) for count in (0, len(suggested))]
    assert sizes == [min(BATCH, len(suggested)), BATCH]


def test_suggestions_are_ranked_by_their_ratio_to_the_float_model() -> None:
    history = played("mixed")[: len(search().seeds)]
    assert history[-1].against.edges
    ratios = ratios_to_float(history, Plan())
    floats = seconds("mixed", Placement())
    assert ratios == pytest.approx(
        {p: seconds("mixed", p) / floats for p in (Placement(), *(t.placement for t in history))}
    )
    failed = [replace(history[0], result=Failure("crash", "gone")), *history[1:]]
    assert set(ratios_to_float(failed, Plan())) == set(ratios) - {history[0].placement}


@pytest.mark.parametrize(("name", "cap"), [("mixed", 0), ("mixed", 1), ("mixed", 6), ("mixed", 30), ("conv_net", 12)])
def test_every_pattern_has_its_number_of_schemes_or_all_that_there_are(name: str, cap: int) -> None:
    model, grouped, _, _ = parts(name)
    strategy = search(name, config=Config(schemes_per_region=cap))
    history = play(strategy, name, 800)
    assert strategy.propose(history) == ()
    known, best = {t.placement for t in history} | {Placement()}, best_of(history)
    counts, exhausted = Counter(t.proposal.pattern for t in history), 0
    assert all(count <= cap for pattern, count in counts.items() if pattern)
    for pattern in grouped:
        if counts[pattern.digest] < cap:
            exhausted += 1
            points = [strategy._edges(pattern, [p]) for p in pattern.points]
            inside = frozenset[Edge]().union(*points)
            for chosen in product((False, True), repeat=len(points)):
                edges = frozenset[Edge]().union(*compress(points, chosen))
                assert consistent(model, Placement((best.edges - inside) | edges)) in known
    assert exhausted or cap < 20


def test_a_run_of_mutations_that_miss_the_limits_ends_the_search_of_them() -> None:
    strategy = search(config=Config(maximum_generation_attempts=7))
    asked = list[Placement]()

    def never(placement: Placement) -> bool:
        asked.append(placement)
        return False

    ideas = strategy._mutations(best_of(played("mixed")), played("mixed"), Counter())
    assert list(strategy._fresh(ideas, set(), Counter(), never)) == []
    assert len(asked) == 7


def test_cached_schemes_come_first_and_those_that_lost_come_again_alone() -> None:
    _, grouped, _, _ = parts("mixed")
    best = best_of(played("mixed"))
    schemes = {p.digest: patterns.scheme_of(p, p.instances[0], best.edges) for p in grouped}
    cached = {digest: [s, frozenset(sorted(s, key=repr)[1:])] for digest, s in schemes.items()}
    history = play(search(cached=cached, config=Config(schemes_per_region=20)), most=64)
    assert history[0].proposal == Proposal("pattern cache", best)
    assert history[0].accepted
    assert {t.proposal.origin for t in history} >= {"cached"} | set(search().seeds)


def test_winners_of_one_batch_are_tried_together() -> None:
    history = played("mixed")
    number, merged = next((k, t) for k, t in enumerate(history) if t.proposal.origin == "merged winners")
    lost = [t for t in history[:number] if t.proposal.pattern and not t.accepted and t.result.b < t.result.a]
    added, removed = lost[-1].placement - lost[-1].against, lost[-1].against - lost[-1].placement
    assert merged.against != lost[-1].against
    assert merged.placement == (merged.against | added) - removed


@pytest.mark.parametrize(
    "wrong", [{"maximum_mutations": 0}, {"maximum_generation_attempts": 0}, {"schemes_per_region": -1}]
)
def test_impossible_constants_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Config(**wrong)
