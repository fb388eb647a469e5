"""The search as a conversation about the regions that are found by themselves."""

from __future__ import annotations

from qdqtune.autotune.autotuner_base import QDQAutotunerBase
from qdqtune.autotune.common import Config, PatternCache
from qdqtune.autotune.region_search import CombinedRegionSearch
from qdqtune.autotune.regions import Grouping, leaves_first
from qdqtune.search.regions.patterns import tunable


class QDQAutotuner(QDQAutotunerBase):
    """The conversation about the regions that are found by themselves: leaves first, then what holds them.

    Those are left out that no pair can make faster, as a whole run leaves them out.
    """

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """See `QDQAutotunerBase`."""
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        found = leaves_first(CombinedRegionSearch(self.graph, *sizes).search_regions())
        grouping = Grouping.of(self.graph, found)
        tuned = {core for p in tunable(self.graph, grouping.patterns.values()) for core in p.instances}
        self.regions = [region for region in found if grouping.cores[region] in tuned]
