"""The modes of a search: what each one measures before the search, and what it adds to the result.

A further mode is a function here, and a line in `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qdqtune.errors import writing
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search import Strategy, TwoStage, best_of
from qdqtune.search.by_latency import LatencySearch, placement_within
from qdqtune.search.by_rule import RuleSearch
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.units import weights_by_family
from qdqtune.search.cut import CutSearch
from qdqtune.search.front import FrontSearch
from qdqtune.search.region import WITHIN_LIMITS, RegionSearch
from qdqtune.search.regions import cache
from qdqtune.search.subgraph import with_quiet_seeds
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.folder import RAW, REGION_MODELS
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.rounding_noise import binding_noise_of, noise_of, noise_of_bits
from qdqtune.tuning.run import Run, rule_costs
from qdqtune.tuning.settings import EFFORTS
from qdqtune.tuning.subgraphs.prepare import profile
from qdqtune.types import Placement, Trial

UNHURRIED = 2.0
"""A search hurries if less time is left than this many times the shortest time of all its builds. Chosen, not
measured."""


@dataclass(frozen=True)
class Mode:
    """A mode made ready for one run.

    `strategy` proposes candidates. `end` is called with the trials when the search has ended, and may write files.
    `notes` are for the user. `observers` are told of each trial before the observer of the run is. `shortfall` tells
    the user what a time budget had no room for before the search.
    """

    strategy: Strategy
    end: Callable[[Sequence[Trial]], None] = lambda history: None
    notes: tuple[str, ...] = ()
    observers: tuple[Observer, ...] = ()
    shortfall: str | None = None


# ---------------------------------------------------------------- cut


def cut(run: Run) -> Mode:
    """Price fusion groups by the layer times of builds; without layer times, by the latency of whole builds."""
    if not run.settings.is_timed:
        return Mode(rule_search(run))  # costs by rule, where nothing is timed
    subject, noise = run.subject, noise_of(run)
    if (by_layers := cut_search(run, noise)) is not None:
        if run.settings.front and noise is not None:
            return Mode(FrontSearch(by_layers, noise))
        return Mode(by_layers)
    can_learn = run.budget.can_learn
    suggestions = subject.suggestions() if can_learn else {}
    noise = binding_noise_of(run) if can_learn else None
    if noise is not None:
        suggestions[WITHIN_LIMITS] = placement_within(subject.shaped, subject.possible, noise)(noise.levels(())[0])
    seeds = {**subject.foremost(), **suggestions, **weights_by_family(run.format_shares)}
    strategy: Strategy = LatencySearch(subject.shaped, subject.possible, seeds, run.width)
    if subject.numbers.wide is not None and not run.budget.is_late:
        strategy = TwoStage(rule_search(run), strategy, run.budget.builds)
    return Mode(strategy)


def rule_search(run: Run) -> RuleSearch:
    costs = rule_costs(run.settings, run.subject).learned([(Placement(), run.bench.layers())])
    plan = run.settings.plan if run.settings.is_timed else None
    return RuleSearch(costs, noise_of_bits(run), plan)


def cut_search(run: Run, noise: Noise | None) -> CutSearch | None:
    """The search that prices fusion groups by layer times; None if the engine reports none, or no time is left to ask
    it for them."""
    if not run.budget.can_learn:
        return None
    subject, layers = run.subject, run.bench.layers()
    if not any(layer.time_ms for layer in layers):
        return None
    first, left = subject.foremost(), run.budget.seconds_left
    usual = min(run.budget.builds, EFFORTS["default"].builds["cut"])
    needed = UNHURRIED * usual * run.bench.trial_seconds / run.learning_width
    fallbacks = {name: p for name, p in subject.suggestions().items() if name not in first}
    is_hurried = left is not None and left < needed and not run.settings.front
    if noise is not None and is_hurried:  # a build tells as much in the time of a few simulated placements
        noise = replace(noise, simulate=None)
    return CutSearch(
        model=subject.shaped,
        possible=subject.possible,
        float_layers=layers,
        seeds=first,
        plan=run.settings.plan,
        noise=noise,
        fallbacks=fallbacks,
        width=run.learning_width,
        format_shares=run.format_shares,
        contexts=run.shares,
        is_hurried=is_hurried,
    )


# ---------------------------------------------------------------- region


def region(run: Run) -> Mode:
    """Vary placements pattern by pattern, starting from what cut mode finds in its first builds."""
    settings, subject, noise = run.settings, run.subject, binding_noise_of(run)
    _tell_of_16_bits(run)
    run.observer.patterns(subject.tuned)
    by_region = RegionSearch(
        model=subject.shaped,
        patterns=subject.tuned,
        possible=subject.possible,
        seeds={
            **subject.suggestions(),
            **weights_by_family(run.format_shares),
        },
        cached=cache.read_cache(settings.pattern_cache) if settings.pattern_cache else {},
        config=settings.config,
        plan=settings.plan,
        seed=settings.seed,
        noise=noise,
        within=placement_within(subject.shaped, subject.possible, noise),
        width=run.width,
    )
    strategy: Strategy = by_region
    if settings.seed_builds > 0 and (by_cut := cut_search(run, noise)) is not None:
        by_cut = replace(by_cut, seeds={**by_region.from_cache(), **by_cut.seeds})
        strategy = TwoStage(by_cut, by_region, settings.seed_builds)
    folder = run.output.clear(REGION_MODELS)
    run.output.claim(folder / CONSTANTS)
    files = dict[str, Path]()
    for pattern in subject.tuned:
        first = pattern.instances[0]
        files[pattern.digest] = run.output.claim(folder / f"region_{first.id}_level_{first.level}.onnx")

    def end(history: Sequence[Trial]) -> None:
        if history:
            _write_regions(files, history, run)

    return Mode(strategy, end)


def _tell_of_16_bits(run: Run) -> None:
    if run.subject.numbers.wide is not None:
        run.observer.note(f"`mode` {run.settings.mode} places pairs of 8 bits only; `mode` cut also those of 16")


def _write_regions(files: Mapping[str, Path], history: Sequence[Trial], run: Run) -> None:
    """Write for each pattern, given by its digest, the whole model with the last accepted placement that changed it; if
    no scheme of the pattern was accepted, with the best placement of the search. The models share one file of
    constants."""
    inserter = Inserter(run.subject.model, run.subject.ranges, run.subject.numbers)
    folder, best = run.output.path / REGION_MODELS, best_of(history)
    won = {t.proposal.pattern: t.placement for t in history if t.accepted}
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with ConstantFile(folder / CONSTANTS) as constants:
        for pattern, file in files.items():
            with atomic_write(file) as fresh:
                constants.save(inserter.insert(won.get(pattern, best)), fresh)


# ---------------------------------------------------------------- subgraph


def subgraph(run: Run) -> Mode:
    """Time every distinct fusion group alone, then try what gains on the whole model."""
    _tell_of_16_bits(run)
    search, progress, notes, shortfall = profile(run)
    run.candidates.write_whole(search.all_accepted, run.settings.output_dir / RAW)
    noise = binding_noise_of(run)
    search = replace(search, by_cut=cut_search(run, noise) if search.incremental else None)
    return Mode(with_quiet_seeds(search, noise), notes=notes, observers=(progress,), shortfall=shortfall)


MODES: Mapping[str, Callable[[Run], Mode]] = {"cut": cut, "region": region, "subgraph": subgraph}
"""The modes by the name that `mode` has."""
