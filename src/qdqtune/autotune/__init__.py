"""The interface of ModelOpt's autotuner over this package: scripts made for it change their import and run.

Only here is there a benchmark that all functions share, an infinite latency that means a failure, and an object that
must be called in a certain order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdqtune.autotune.autotuner import QDQAutotuner as QDQAutotuner
    from qdqtune.autotune.autotuner_base import QDQAutotunerBase as QDQAutotunerBase
    from qdqtune.autotune.benchmark import TensorRTPyBenchmark as TensorRTPyBenchmark
    from qdqtune.autotune.benchmark import TrtExecBenchmark as TrtExecBenchmark
    from qdqtune.autotune.common import *  # noqa: F403
    from qdqtune.autotune.region_search import CombinedRegionSearch as CombinedRegionSearch
    from qdqtune.autotune.utils import MODE_PRESETS as MODE_PRESETS
    from qdqtune.autotune.utils import StoreWithExplicitFlag as StoreWithExplicitFlag
    from qdqtune.autotune.utils import get_node_filter_list as get_node_filter_list

_NAMES = {
    "autotuner": "QDQAutotuner",
    "autotuner_base": "QDQAutotunerBase",
    "benchmark": "TensorRTPyBenchmark TrtExecBenchmark",
    "common": "AutotunerError AutotunerNotInitializedError ChildRegionInputInsertionPoint "
    "ChildRegionOutputInsertionPoint Config InsertionScheme InvalidSchemeError NodeInputInsertionPoint PatternCache "
    "PatternSchemes Region RegionOutputInsertionPoint RegionPattern RegionType ResolvedInsertionPoint",
    "region_search": "CombinedRegionSearch",
    "utils": "MODE_PRESETS StoreWithExplicitFlag get_node_filter_list",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Public names by module: each is imported when somebody asks for it, as in the package above."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
