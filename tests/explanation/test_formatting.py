"""Counts and names as text: the same wherever people read of them."""

import re
from itertools import product
from pathlib import Path

import pytest

from qdqtune.explanation.formatting import builds, built, title


@pytest.mark.parametrize("counts", list(product([1, 8], [0, 3], [0, 4])))
def test_builds_for_rewrites_are_told_beside_those_of_the_search(counts: tuple[int, int, int]) -> None:
    search, rewrites, proof = counts
    summary = {"builds": search + rewrites, "proof_builds": proof, "rewrites": {"builds": rewrites}}
    assert built(summary) == builds(*counts)
    assert [int(number) for number in re.findall(r"\d+", built(summary))] == [n for n in counts if n]


@pytest.mark.parametrize(
    ("path", "told"),
    [("a/model.onnx", "a/model.onnx"), ("x/a/model.onnx", "a/model.onnx"), ("a/m.onnx", "m.onnx"),
     ("/model.onnx", "model.onnx")],
)  # fmt: skip
def test_titles_name_the_folder_of_a_usual_name(path: str, told: str) -> None:
    assert title(Path(path)) == told
