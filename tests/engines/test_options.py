"""The engine that options choose, with what it is given of them."""

from pathlib import Path

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.options import EngineOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"threads": 2}),
        ({"threads": 4, "engine_options": ["fuse=false"]}, {"threads": 4, "fuse": False}),
        ({"engine": "fake", "engine_options": {"provider": "P"}}, {"provider": "P"}),
        ({"engine": "trtexec"}, {"opt_shapes": {"x": [1, 3]}}),
        ({"engine": "trtexec", "engine_options": ["opt_shapes=x:2x3,y:4", "plugin_libraries=a.so"]},
         {"opt_shapes": {"x": [2, 3], "y": [4]}, "plugin_libraries": ["a.so"]}),
        ({"engine": "tensorrt", "engine_options": {"min_shapes": {"x": (2, 3)}, "timing_cache": Path("t.cache")}},
         {"opt_shapes": {"x": [1, 3]}, "min_shapes": {"x": [2, 3]}, "timing_cache": "t.cache"}),
        ({"engine": EngineSpec("fake", {"noise": 0.1})}, {"noise": 0.1}),
    ],
)  # fmt: skip
def test_an_engine_has_the_options_that_are_for_it(given: dict[str, object], expected: dict[str, object]) -> None:
    assert EngineOptions(**given).spec({"x": (1, 3)}, threads=2).options == expected
