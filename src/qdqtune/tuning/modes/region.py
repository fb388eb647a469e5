"""Region mode: pattern by pattern, from what the cut finds in the first builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.search import Seeded, Strategy
from qdqtune.search.costs.guess import guesses
from qdqtune.search.region import RegionSearch
from qdqtune.search.regions import cache
from qdqtune.tuning.folder import CONSTANTS, REGION_MODELS
from qdqtune.tuning.modes.cut import cut_search
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.noise import foresee
from qdqtune.tuning.observer import Observer
from qdqtune.tuning.run import Run
from qdqtune.types import Placement, Trial


@dataclass(frozen=True)
class Region:
    """See `Mode`."""

    strategy: Strategy
    run: Run
    observers: tuple[Observer, ...] = ()

    def record(self, history: Sequence[Trial], _: Placement) -> Recorded:
        """Keep the best model of each region: the whole model with the placement as it was when that region last won.

        This comes after the search: their constants are links, and ONNX's checker refuses a file with several of them.
        """
        output = self.run.output
        folder = output.clear(REGION_MODELS)
        regions = {p.digest: p.instances[0] for p in self.run.subject.patterns}
        wins = {t.proposal.pattern: t.placement for t in history if t.accepted and t.proposal.pattern}
        for pattern, placement in wins.items():
            name = f"region_{regions[pattern].id}_level_{regions[pattern].level}.onnx"
            output.claim(folder / CONSTANTS)
            self.run.candidates.write_linked(placement, output.claim(folder / name))
        return Recorded()


def prepare(run: Run) -> Region:
    """Read the pattern cache, and the layers of the float build if the cut comes first."""
    settings, subject, noise = run.settings, run.subject, foresee(run)
    by_region = RegionSearch(
        model=subject.shaped,
        patterns=subject.patterns,
        possible=subject.possible,
        seeds=subject.suggestions(),
        cached=cache.read_cache(settings.pattern_cache) if settings.pattern_cache else {},
        config=settings.config,
        plan=settings.plan,
        seed=settings.seed,
        noise=noise,
        within=guesses(subject.shaped, subject.possible, noise),
    )
    by_cut = cut_search(run, noise) if settings.seed_builds > 0 else None
    return Region(by_region if by_cut is None else Seeded(by_cut, by_region, settings.seed_builds), run)
