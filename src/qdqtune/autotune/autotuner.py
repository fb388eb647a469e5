"""The search as a conversation about the regions that are found by themselves."""

from __future__ import annotations

from qdqtune.autotune.autotuner_base import QDQAutotunerBase
from qdqtune.autotune.common import Config, PatternCache
from qdqtune.autotune.graphs import leaves_first, patterns_of
from qdqtune.autotune.region_search import CombinedRegionSearch
from qdqtune.search.regions.patterns import tunable


class QDQAutotuner(QDQAutotunerBase):
    """The conversation about the regions that are found by themselves: leaves first, then what holds them.

    Those are left out that no pair can make faster, as a whole run leaves them out.
    """

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        regions = leaves_first(CombinedRegionSearch(self.graph, *sizes).search_regions())
        pattern_of = patterns_of(self.graph, regions)
        self.regions = [r for r in regions if pattern_of[r].points and tunable(self.graph, [pattern_of[r]])]
