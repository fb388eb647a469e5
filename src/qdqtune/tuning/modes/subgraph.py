"""Subgraph mode: every distinct fusion group alone, then what gains on the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtune.search.costs.priors import NO_PRIOR
from qdqtune.search.subgraph import SubgraphSearch, with_quiet_seeds
from qdqtune.tuning import price_cache
from qdqtune.tuning.folder import RAW
from qdqtune.tuning.modes.cut import cut_search
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.noise import foresee
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.run import Run
from qdqtune.tuning.subgraphs.outcomes import outcomes, record
from qdqtune.tuning.subgraphs.prepare import Profiled, profile
from qdqtune.types import Placement, Trial


@dataclass(frozen=True)
class Subgraph:
    """See `Mode`."""

    strategy: SubgraphSearch
    profiled: Profiled
    run: Run

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The file of progress."""
        return (self.profiled.progress,)

    def record(self, history: Sequence[Trial], final: Placement) -> Recorded:
        """What became of every group; what ships goes into the price cache."""
        by_cut = self.strategy.by_cut
        price_cache.remember(self.run, final, by_cut.learned_prior(history) if by_cut and history else NO_PRIOR)
        groups = outcomes(self.profiled, history, final)
        return Recorded(groups, self.profiled.summary() | {"groups": record(groups)}, notes=self.profiled.notes)


def prepare(run: Run) -> Subgraph:
    """Time the groups alone."""
    profiled = profile(run)
    run.candidates.write_whole(profiled.search.all_accepted, run.settings.output_dir / RAW)
    search, noise = profiled.search, foresee(run)
    seeds = price_cache.found_before(run) | dict(search.seeds)
    search = replace(search, seeds=seeds, by_cut=cut_search(run, noise) if search.incremental else None)
    return Subgraph(with_quiet_seeds(search, noise), profiled, run)
