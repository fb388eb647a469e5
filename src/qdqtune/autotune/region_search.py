"""`python -m qdqtune.autotune.region_search --model M` is `region_inspect`: one division serves both."""

from qdqtune.autotune.division import CombinedRegionSearch, RegionPartitioner, RegionSearchBase, TopDownRegionBuilder

__all__ = ["CombinedRegionSearch", "RegionPartitioner", "RegionSearchBase", "TopDownRegionBuilder"]

if __name__ == "__main__":
    from qdqtune.autotune.command import inspect

    inspect("region_search")
