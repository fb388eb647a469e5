"""The engine that options choose, with what it is given of them."""

from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.options import EngineOptions, with_timing_cache


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"threads": 2}),
        ({"threads": 4, "engine_options": ["fuse=false"]}, {"threads": 4, "fuse": False}),
        ({"engine": "fake", "provider": "P"}, {"provider": "P"}),
        ({"engine": "trtexec"}, {"opt_shapes": {"x": [1, 3]}}),
        ({"engine": "trtexec", "opt_shapes": {"x": (2, 3)}, "plugin_libraries": ("a.so",)},
         {"opt_shapes": {"x": [2, 3]}, "plugin_libraries": ["a.so"]}),
        ({"engine": EngineSpec("fake", {"noise": 0.1})}, {"noise": 0.1}),
    ],
)  # fmt: skip
def test_an_engine_has_the_options_that_are_for_it(given: dict[str, object], expected: dict[str, object]) -> None:
    assert EngineOptions(**given).spec({"x": (1, 3)}, threads=2).options == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (EngineSpec("trtexec", {"workspace_mb": 9}), {"workspace_mb": 9, "timing_cache": "/out/timing.cache"}),
        (EngineSpec("tensorrt", {"timing_cache": "t"}), {"timing_cache": "t"}),
        (EngineSpec("fake"), {}),
    ],
)
def test_a_timing_cache_lies_beside_the_output_unless_named(spec: EngineSpec, expected: dict[str, object]) -> None:
    assert with_timing_cache(spec, Path("/out")).options == expected
