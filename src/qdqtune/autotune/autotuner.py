"""The search as a conversation about the regions that are found by themselves."""

from __future__ import annotations

from qdqtune.autotune.autotuner_base import QDQAutotunerBase
from qdqtune.autotune.common import Config, PatternCache
from qdqtune.autotune.region_search import CombinedRegionSearch
from qdqtune.autotune.regions import leaves_first


class QDQAutotuner(QDQAutotunerBase):
    """The conversation about the regions that are found by themselves: leaves first, then what holds them."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """See `QDQAutotunerBase`."""
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        self.regions = leaves_first(CombinedRegionSearch(self.graph, *sizes).search_regions())
