"""The engine that options choose, with what it is given of them."""

import pytest

from qdqtune.commands.compare import CompareOptions
from qdqtune.engines import EngineSpec
from qdqtune.engines.options import MOST_THREADS, EngineOptions
from qdqtune.errors import BadOption


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


def test_another_machine_may_have_more_threads_than_this_one() -> None:
    assert CompareOptions(threads=4 * MOST_THREADS, on="board").spec().options == {"threads": 4 * MOST_THREADS}
    with pytest.raises(BadOption, match=f"is too many for this machine: give at most {MOST_THREADS}"):
        CompareOptions(threads=4 * MOST_THREADS).spec()
