"""Region mode: pattern by pattern, from what the cut finds in the first builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtune.errors import writing
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search import Seeded, Strategy
from qdqtune.search.costs.guess import guesses
from qdqtune.search.costs.units import by_bits
from qdqtune.search.region import RegionSearch
from qdqtune.search.regions import cache
from qdqtune.system.writing import atomic_write
from qdqtune.tuning import price_cache
from qdqtune.tuning.folder import REGION_MODELS
from qdqtune.tuning.modes.cut import cut_search
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.noise import foresee
from qdqtune.tuning.observer import Observer, Silent, State
from qdqtune.tuning.run import Run
from qdqtune.tuning.weight_formats import products_of
from qdqtune.types import Placement, Trial


class RegionModels(Silent):
    """Keeps the best model of each region: the whole model with the placement as it was when that region last won.

    They share a file of constants of their own, so that they can be looked at while the search goes on.
    """

    def __init__(self, run: Run) -> None:
        self._output, subject = run.output, run.subject
        self._folder = run.output.clear(REGION_MODELS)
        rounding = products_of(run.settings, subject)
        self._inserter = Inserter(subject.model, subject.ranges, subject.numbers, rounding)
        regions = ((pattern.digest, pattern.instances[0]) for pattern in subject.patterns)
        self._names = {digest: f"region_{region.id}_level_{region.level}.onnx" for digest, region in regions}
        self._written: dict[str, Placement] = {}
        self._constants: ConstantFile | None = None

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        """See `Observer`."""
        if state.best == trial.placement and (name := self._names.get(trial.proposal.pattern)):
            self._write(name, trial.placement)

    def finish(self, history: Sequence[Trial]) -> None:
        """Leave those whose placement was accepted: in a batch several can win, and one is taken."""
        won = {self._names.get(t.proposal.pattern, ""): t.placement for t in history if t.accepted}
        for name, placement in won.items():
            if name and self._written.get(name) != placement:
                self._write(name, placement)
        for name in self._written.keys() - won.keys():
            with writing(self._folder / name):
                (self._folder / name).unlink()
        if self._constants is not None:
            self._constants.__exit__()

    def _write(self, name: str, placement: Placement) -> None:
        path = self._output.claim(self._folder / name)
        if self._constants is None:
            with writing(self._folder):
                self._folder.mkdir(exist_ok=True)
            self._constants = ConstantFile(self._output.claim(self._folder / CONSTANTS))
        with atomic_write(path) as fresh:
            self._constants.save(self._inserter.insert(placement), fresh)
        self._written[name] = placement


@dataclass(frozen=True)
class Region:
    """See `Mode`."""

    strategy: Strategy
    models: RegionModels
    run: Run

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What writes the models of regions."""
        return (self.models,)

    def record(self, history: Sequence[Trial], final: Placement) -> Recorded:
        """All is in the models; and what ships in the price cache."""
        self.models.finish(history)
        price_cache.remember(self.run, final)
        return Recorded()


def prepare(run: Run) -> Region:
    """Read the pattern cache, and the layers of the float build if the cut comes first."""
    settings, subject, noise = run.settings, run.subject, foresee(run)
    by_region = RegionSearch(
        model=subject.shaped,
        patterns=subject.patterns,
        possible=subject.possible,
        seeds=price_cache.found_before(run)
        | subject.suggestions()
        | by_bits(run.ways, lambda p: noise is None or noise.fits(p, ())),
        cached=cache.read_cache(settings.pattern_cache) if settings.pattern_cache else {},
        config=settings.config,
        plan=settings.plan,
        seed=settings.seed,
        noise=noise,
        within=guesses(subject.shaped, subject.possible, noise),
        width=run.width,
        ways=run.ways,
    )
    by_cut = cut_search(run, noise) if settings.seed_builds > 0 else None
    return Region(
        by_region if by_cut is None else Seeded(by_cut, by_region, settings.seed_builds), RegionModels(run), run
    )
