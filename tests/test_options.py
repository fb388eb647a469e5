"""Values of options: what is refused, that Python and text mean the same, and how errors name them."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from qdqtune.commands.tune import TuneOptions
from qdqtune.errors import BadOption, one_line, with_flags


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"builds": "many"}, "`builds`: 'many' is no whole number"),
        ({"output_dir": ""}, "`output_dir`: the name is empty"),
        ({"mode": "cat"}, "`mode`: 'cat' is not one of"),
        ({"front": 1}, "`front` is true or false"),
        ({"builds": True}, "`builds` takes a value, not True"),
        ({"builds": {"a": 1}}, "is no whole number"),
        ({"scores": {"a": 1}}, "is no list"),
        ({"time_budget": "soon"}, "is no duration"),
        ({"min_sqnr": float("nan")}, "is no finite number"),
        ({"input_shapes": {"x": "wide"}}, "'x:wide' is no shape"),
        ({"workloads": {"d.npz": 0}}, "no weight above zero"),
    ],
)
def test_values_are_checked_as_on_the_command_line(given: Mapping[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        TuneOptions("model.onnx", **given)


def test_values_of_python_mean_what_text_means() -> None:
    typed = TuneOptions(
        "-model.onnx",
        input_shapes=["x:0:1x3", "s:"], fix_inputs=["n=2", "s=a=b"], engine_options=["streams=2", "mode=x"],
        min_sqnr="none", min_agreement="auto",  # type: ignore[arg-type]
        time_budget="90s", threads="1,4", workloads=["a.npz:2"],
    )  # fmt: skip
    held = TuneOptions(
        "-model.onnx",
        input_shapes={"x:0": (1, 3), "s": ()}, fix_inputs={"n": 2, "s": "a=b"},
        engine_options={"streams": 2, "mode": "x"},
        min_sqnr=None, time_budget=90, threads=[1, 4], workloads={"a.npz": 2},
    )  # fmt: skip
    assert typed == held
    assert held.input_shapes == {"x:0": (1, 3), "s": ()}
    assert held.fix_inputs == {"n": 2, "s": "a=b"}
    assert (held.min_sqnr, held.time_budget, held.threads) == (None, 90.0, (1, 4))
    with pytest.raises(FrozenInstanceError):
        held.builds = 3


def test_one_line_joins_and_shortens() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 999, limit=50)) == 50


def test_only_options_are_spelled_as_flags() -> None:
    text = "`time_budget` of `object` and `null`"
    assert with_flags(text, {"time_budget": "--time-budget"}) == "--time-budget of `object` and `null`"
