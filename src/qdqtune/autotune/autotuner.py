"""The search as a conversation about the regions that are found by themselves."""

from __future__ import annotations

from qdqtune.autotune.autotuner_base import QDQAutotunerBase
from qdqtune.autotune.division import CombinedRegionSearch
from qdqtune.autotune.pattern_cache import PatternCache
from qdqtune.autotune.schemes import Config


class QDQAutotuner(QDQAutotunerBase):
    """The conversation about the regions that are found by themselves: leaves first, then what holds them."""

    def initialize(self, config: Config | None = None, pattern_cache: PatternCache | None = None) -> None:
        """See `QDQAutotunerBase`."""
        super().initialize(config, pattern_cache)
        sizes = self.config.maximum_sequence_region_size, self.config.minimum_topdown_search_size
        every = [r for top in CombinedRegionSearch(self.graph, *sizes).search_regions() for r in top.walk()]
        self.regions = [r for r in every if not r.children] + [r for r in every if r.children]
