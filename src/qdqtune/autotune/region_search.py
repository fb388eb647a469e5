"""`python -m qdqtune.autotune.region_search --model M` is `region_inspect`: one division serves both."""

from qdqtune.autotune.__main__ import inspect
from qdqtune.autotune.regions import CombinedRegionSearch

__all__ = ["CombinedRegionSearch"]

if __name__ == "__main__":
    inspect("region_search")
