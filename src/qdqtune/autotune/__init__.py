"""The interface of ModelOpt's autotuner over this package: scripts made for it change their import and run.

Only here is there a benchmark that all functions share, an infinite latency that means a failure, and an object that
must be called in a certain order.
"""

from qdqtune.autotune.autotuner import QDQAutotuner
from qdqtune.autotune.autotuner_base import QDQAutotunerBase
from qdqtune.autotune.benchmark import TensorRTPyBenchmark, TrtExecBenchmark
from qdqtune.autotune.division import CombinedRegionSearch
from qdqtune.autotune.errors import AutotunerError, AutotunerNotInitializedError, InvalidSchemeError
from qdqtune.autotune.insertion_points import (
    ChildRegionInputInsertionPoint,
    ChildRegionOutputInsertionPoint,
    NodeInputInsertionPoint,
    ResolvedInsertionPoint,
)
from qdqtune.autotune.pattern_cache import PatternCache, PatternSchemes
from qdqtune.autotune.region_pattern import RegionPattern
from qdqtune.autotune.regions import Region, RegionType
from qdqtune.autotune.schemes import Config, InsertionScheme
from qdqtune.autotune.utils import MODE_PRESETS, StoreWithExplicitFlag, get_node_filter_list

RegionOutputInsertionPoint = ChildRegionOutputInsertionPoint
"""By its earlier name."""

__all__ = [
    "MODE_PRESETS", "AutotunerError", "AutotunerNotInitializedError", "ChildRegionInputInsertionPoint",
    "ChildRegionOutputInsertionPoint", "CombinedRegionSearch", "Config", "InsertionScheme", "InvalidSchemeError",
    "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "QDQAutotuner", "QDQAutotunerBase", "Region",
    "RegionOutputInsertionPoint", "RegionPattern", "RegionType", "ResolvedInsertionPoint", "StoreWithExplicitFlag",
    "TensorRTPyBenchmark", "TrtExecBenchmark", "get_node_filter_list",
]  # fmt: skip
