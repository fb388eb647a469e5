"""The interface of ModelOpt's autotuner over this package: scripts made for it change their import and run.

Only here is there a benchmark that all functions share, an infinite latency that means a failure, and an object that
must be called in a certain order.
"""

from qdqtune.autotune.autotuner import AutotunerNotInitializedError, QDQAutotuner, QDQAutotunerBase
from qdqtune.autotune.regions import AutotunerError, InvalidSchemeError, Region, RegionType
from qdqtune.autotune.schemes import (
    ChildRegionInputInsertionPoint,
    Config,
    InsertionScheme,
    NodeInputInsertionPoint,
    PatternCache,
    PatternSchemes,
    RegionOutputInsertionPoint,
    RegionPattern,
    ResolvedInsertionPoint,
)

__all__ = [
    "AutotunerError", "AutotunerNotInitializedError", "ChildRegionInputInsertionPoint", "Config", "InsertionScheme",
    "InvalidSchemeError", "NodeInputInsertionPoint", "PatternCache", "PatternSchemes", "QDQAutotuner",
    "QDQAutotunerBase", "Region", "RegionOutputInsertionPoint", "RegionPattern", "RegionType", "ResolvedInsertionPoint",
]  # fmt: skip
