"""ModelOpt's autotuner interface on this package: scripts written for it run once their imports are changed."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdqtune.autotune.__main__ import MODE_PRESETS as MODE_PRESETS
    from qdqtune.autotune.__main__ import get_node_filter_list as get_node_filter_list
    from qdqtune.autotune.autotuner import *  # noqa: F403
    from qdqtune.autotune.insertion_points import *  # noqa: F403
    from qdqtune.autotune.region_search import *  # noqa: F403

_NAMES = {
    "__main__": "MODE_PRESETS get_node_filter_list",
    "autotuner": "QDQAutotuner QDQAutotunerBase TensorRTPyBenchmark TrtExecBenchmark",
    "insertion_points": "ChildRegionInputInsertionPoint ChildRegionOutputInsertionPoint Config InsertionScheme "
    "NodeInputInsertionPoint PatternCache PatternSchemes RegionOutputInsertionPoint RegionPattern "
    "ResolvedInsertionPoint",
    "region_search": "AutotunerError AutotunerNotInitializedError CombinedRegionSearch InvalidSchemeError Region "
    "RegionType",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module of each public name; it is imported when the name is first used."""

PATHS = {
    "autotuner_base": "autotuner",
    "benchmark": "autotuner",
    "fusion_grouping": "workflows",
    "common": "insertion_points",
    "region_pattern": "insertion_points",
    "subgraph_extractor": "workflows",
    "subgraph_workflow": "workflows",
    "tensorrt_utils": "autotuner",
    "torch_region_builder": "region_search",
    "utils": "__main__",
}
"""ModelOpt's module names, with the module here that has their contents."""

__all__ = [*_HOMES]


def _name_in(module: str, name: str) -> Any:
    return getattr(import_module(f"{__name__}.{module}"), name)


for _path, _home in PATHS.items():
    _module = ModuleType(f"{__name__}.{_path}")
    _module.__dict__["__getattr__"] = partial(_name_in, _home)
    sys.modules[_module.__name__] = globals()[_path] = _module


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return _name_in(_HOMES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
