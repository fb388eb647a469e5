"""Values of options: what is refused, that Python and text mean the same, and how errors name them."""

import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qdqtune.cli.tune import TuneArguments
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
        ({"min_sqnr": float("nan")}, "is no number"),
        ({"input_shapes": {"x": "wide"}}, "'x:wide' is no shape"),
        ({"input_shapes": ""}, "'' is no shape"),
        ({"input_shapes": {"x": [float("inf")]}}, "is no shape"),
        ({"workloads": {"d.npz": 0}}, "no weight above zero"),
        ({"workloads": [None]}, "`workloads`: None is no text"),
        ({"node_filter": [b"a"]}, "is no text"),
        ({"threads": date(2026, 1, 1)}, "is no text"),
        ({"on": []}, r"`on`: \[\] is no text"),
        ({"seed": None}, "None is no whole number"),
        ({"mode": None}, "None is not one of"),
        ({"max_drop": np.array([1, 2])}, "is no number"),
        ({"model": None}, "`model` takes a value, not None"),
    ],
)
def test_values_are_checked_as_on_the_command_line(given: Mapping[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        TuneOptions(**{"model": "model.onnx", **given})


def test_values_of_python_mean_what_text_means() -> None:
    typed = TuneOptions(
        "-model.onnx",
        input_shapes=["x:0:1x3", "s:"], fix_inputs=["n=2", "s=a=b"], engine_options=["streams=2", "mode=x"],
        min_sqnr="none", min_agreement="auto",
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
    assert replace(held) == held


def test_numbers_of_numpy_and_paths_are_taken_as_well() -> None:
    held = TuneOptions(
        "m.onnx", threads=[np.int64(1), np.int64(4)], seed=np.int64(3), min_sqnr=np.str_("auto"),
        workloads=[Path("a.npz")], time_limit="0.00001",
    )  # fmt: skip
    assert (held.threads, held.seed, type(held.min_sqnr)) == ((1, 4), 3, str)
    assert held.workloads == TuneOptions("m.onnx", workloads="a.npz").workloads
    assert TuneOptions("m.onnx", threads=np.int64(4)).threads == (4,)
    assert replace(held) == held


def test_the_one_of_several_files_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadOption, match=rf"cannot read {tmp_path}/pipe: it is no file"):
        TuneArguments(model=["a.onnx", str(tmp_path / "pipe")])


def test_one_line_joins_and_shortens() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 999, limit=50)) == 50


def test_only_options_are_spelled_as_flags() -> None:
    text = "`time_budget` of `object` and `null`"
    assert with_flags(text, {"time_budget": "--time-budget"}) == "--time-budget of `object` and `null`"
