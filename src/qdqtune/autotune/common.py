"""Regions, schemes, their cache and their configuration, in the module where scripts look for them."""

from qdqtune.autotune.errors import AutotunerError, AutotunerNotInitializedError, InvalidSchemeError
from qdqtune.autotune.insertion_points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    InsertionPoint,
    NodeInputInsertionPoint,
    RegionOutputInsertionPoint,
    ResolvedInsertionPoint,
)
from qdqtune.autotune.pattern_cache import PatternCache, PatternSchemes
from qdqtune.autotune.region_pattern import RegionPattern
from qdqtune.autotune.regions import Region, RegionType
from qdqtune.autotune.schemes import Config, InsertionScheme

__all__ = [
    "AutotunerError", "AutotunerNotInitializedError", "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint", "Config", "InsertionPoint", "InsertionScheme", "InvalidSchemeError",
    "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "Region", "RegionOutputInsertionPoint",
    "RegionPattern", "RegionType", "ResolvedInsertionPoint",
]  # fmt: skip
