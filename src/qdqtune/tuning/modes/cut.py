"""Cut mode: prices from layer times; where the engine tells none, one question of the whole latency a build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.search import Strategy
from qdqtune.search.costs.decisions import explain, record
from qdqtune.search.costs.noise import Noise
from qdqtune.search.costs.priors import NO_PRIOR
from qdqtune.search.costs.units import weights_by_bits
from qdqtune.search.cut import CutSearch
from qdqtune.search.front import FrontSearch
from qdqtune.search.grouped import GroupedSearch, placement_within
from qdqtune.search.region import WITHIN_LIMITS
from qdqtune.tuning import price_cache
from qdqtune.tuning.folder import UNITS
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.noise import noise_of
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.run import Run
from qdqtune.types import Placement, Trial

KNOWN = "what earlier runs have learned holds for this model: few builds had to do; --price-cache none searches in full"


@dataclass(frozen=True)
class Cut:
    """See `Mode`; `by_layers` is the strategy where it learns from layer times."""

    strategy: Strategy
    by_layers: CutSearch | None
    run: Run
    observers: tuple[Observer, ...] = ()

    def record(self, history: Sequence[Trial], final: Placement) -> Recorded:
        """What every unit costs either way; and what of it serves other models, in the price cache."""
        if self.by_layers is None:
            price_cache.remember(self.run, final)
            return Recorded()
        price_cache.remember(self.run, final, self.by_layers.learned_prior(history) if history else NO_PRIOR)
        units = explain(self.by_layers.costs(history, final), final)
        notes = (KNOWN,) if self.by_layers.is_as_predicted(history) else ()
        return Recorded(units, files={UNITS: {"units": record(units)}}, notes=notes)


def prepare(run: Run) -> Cut:
    """Read the layers of the float build."""
    subject, noise = run.subject, noise_of(run)
    if (by_layers := cut_search(run, noise)) is not None:
        strategy = (
            FrontSearch(by_layers, noise, run.settings.builds - run.found.builds, len(run.settings.thread_counts))
            if run.settings.front and noise is not None
            else by_layers
        )
        return Cut(strategy, by_layers, run)
    suggestions = subject.suggestions()
    if noise is not None and not noise.is_harmless:
        suggestions[WITHIN_LIMITS] = placement_within(subject.shaped, subject.possible, noise)(noise.levels(())[0])
    seeds = price_cache.found_before(run) | suggestions | weights_by_bits(run.ways)
    return Cut(GroupedSearch(subject.shaped, subject.possible, seeds, run.width), None, run)


def cut_search(run: Run, noise: Noise | None) -> CutSearch | None:
    """The search that prices units from layer times; None if the engine tells none, or no time is left to ask it."""
    if run.budget.is_late:
        return None
    subject, layers = run.subject, run.bench.layers()
    if not any(layer.time_ms for layer in layers):
        return None
    first = subject.foremost()
    fallbacks = {name: p for name, p in subject.suggestions().items() if name not in first}
    return CutSearch(
        subject.shaped,
        subject.possible,
        layers,
        seeds=first,
        plan=run.settings.plan,
        noise=noise,
        fallbacks=fallbacks,
        width=run.learning_width,
        format_shares=run.ways,
        prior=NO_PRIOR if run.settings.front else price_cache.known(run),  # a front needs all builds for its points
        shipped_before=price_cache.found_before(run),
    )
