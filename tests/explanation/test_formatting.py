"""Counts and names as text: the same wherever people read of them."""

import re
from itertools import product
from pathlib import Path

import pytest

from qdqtune.explanation.formatting import builds, built, origin_in_words, title
from qdqtune.numerics.accuracy import closeness, closeness_cell, closeness_of
from qdqtune.numerics.scores import equal_share
from qdqtune.types import Accuracy


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


@pytest.mark.parametrize(
    ("accuracy", "told", "short", "cell"),
    [
        (Accuracy(24.06, 18.0, 31.0, samples=3), "24.1 dB (18.0 to 31.0 over 3 samples)", "24.1 dB", "24.1"),
        (Accuracy(24.06, agreement=0.5), "24.1 dB, 50.0% of the integers equal", "24.1 dB", "24.1"),
        (Accuracy(agreement=0.5), "50.0% of the integers equal", "50.0% of the integers equal", ""),
        (Accuracy(agreement=1.0, samples=3), "exact, 100.0% of the integers equal", "exact", "exact"),
        (Accuracy(top1=1.0), "exact, 100.0% of the best classes equal", "exact", "exact"),
        (Accuracy(), "exact", "exact", "exact"),
    ],
)
def test_how_close_outputs_are_is_told_alike_everywhere(accuracy: Accuracy, told: str, short: str, cell: str) -> None:
    equal = equal_share(accuracy)
    here = (closeness_of(accuracy), closeness(accuracy.sqnr_db, equal), closeness_cell(accuracy.sqnr_db, equal))
    assert here == (told, short, cell)


def test_every_origin_has_words() -> None:
    assert origin_in_words("cut") == "the cut of the prices"
    assert origin_in_words("compute") == "the rule 'compute'"
    assert origin_in_words("mine") == "the candidate 'mine'"
