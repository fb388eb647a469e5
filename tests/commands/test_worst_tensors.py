"""The tensors that do most damage: their noise, what is said of them, and which of them to keep in float."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from models import build, feeds
from qdqtune.commands import worst_tensors
from qdqtune.commands.worst_tensors import (
    LOUDEST,
    SENSITIVE,
    UNKNOWN_NOISE,
    Damage,
    errors_by_sample,
    noise,
    switched_pairs,
    to_exclude,
)
from qdqtune.placement.switches import file_pairs
from qdqtune.types import Array, noise_of
from workers import Workers

EXACT = {"y": np.array([3.0, 4.0]), "class": np.array([1, 2, 3, 4])}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 0.0),
        ({"y": np.array([3.0, 4.5])}, 0.01),
        ({"class": np.array([1, 2, 3, 0])}, 0.25),
        ({"y": np.array([3.0, 4.5]), "class": np.array([0, 0, 3, 0])}, 0.75),
        ({"y": np.array([3e9, 0.0])}, LOUDEST),
        ({"y": np.array([np.nan, 4.0])}, UNKNOWN_NOISE),
        ({"y": np.array([3.0, 4.0, 5.0])}, UNKNOWN_NOISE),
    ],
)
def test_the_worst_output_counts(changed: dict[str, Array], expected: float) -> None:
    assert noise([EXACT], [EXACT | changed]) == pytest.approx(expected)


def test_a_sample_without_a_signal_makes_none_of_the_error() -> None:
    reference = [{"y": np.full(4, value, np.float32)} for value in (1e-6, 1.0, 2.0)]
    outputs = [{"y": np.full(4, value, np.float32)} for value in (1e-3, 1.0, 1.5)]
    assert errors_by_sample(reference, outputs) == pytest.approx([2e-7, 0.0, 0.05], rel=0.01)
    assert errors_by_sample(reference, [{"y": np.full(4, np.nan, np.float32)}] * 3) == [UNKNOWN_NOISE] * 3
    names = [{"y": np.array(["a", "b"])}]
    assert errors_by_sample(names, [{"y": np.array(["a", "c"])}]) == [0.5]
    integers = [{"y": np.array([1, 2])}]
    assert errors_by_sample(integers, [{"y": np.array([1, 3])}]) == [0.5]


FITS = Damage("t", "activation", ("a", "b"), 0.5, (-1.0, 1.0), (-1.0, 1.0), (0.01, 0.01), (0, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, SENSITIVE),
        ({"quantized_range": (nan, inf)}, "its scale is no finite number"),
        ({"quantized_range": (0.0, 0.0)}, "its pair can give one value only"),
        (
            {"joined": {"p": (-9.0, 1.0), "s": (0.0, 0.1)}},
            "a Concat gives one scale to parts of unlike size: p up to 9",
        ),
        ({"joined": {"p": (-1.0, 1.0), "s": (0.0, 0.1)}}, SENSITIVE),
        ({"kind": "constant", "quantized_range": (-1.0, 0.5)}, "its constant has other values than the float one"),
    ],
)
def test_the_reason_follows_from_the_two_ranges(changes: dict[str, Any], reason: str) -> None:
    assert replace(FITS, **changes).reason.startswith(reason)


@pytest.mark.parametrize("inferences", [400, 7], ids=["one by one", "in blocks"])
def test_the_worst_stand_first(inferences: int, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst_tensors, "MOST_INFERENCES", inferences)
    nodes, pairs, numbers = [], [], {"fine": np.float32(0.01), "coarse": np.float32(3), "z": np.int8(0)}
    for i in range(8):
        scale = "coarse" if i == 5 else "fine"
        nodes.append(f"[n{i}] t{i + 1} = Neg(t{i})")
        pairs.append(
            f"[q{i}] q{i} = QuantizeLinear(t{i}, {scale}, z) [d{i}] d{i} = DequantizeLinear(q{i}, {scale}, z) "
            f"[n{i}] t{i + 1} = Neg(d{i})"
        )
    plain, quantized = (
        build(f"net (float[N,4] t0) => (float[N,4] t8) {{ {' '.join(body)} }}", known)
        for body, known in ((nodes, {}), (pairs, numbers))
    )
    found, unmatched = file_pairs(plain, quantized)
    assert not unmatched
    with switched_pairs(plain, quantized, found, feeds(plain, 3)) as switched:
        ranking = switched.ranking()
        assert len(ranking) == 8
        assert next(iter(ranking)) == "t5"


def test_only_what_makes_a_tenth_of_the_error_is_to_be_excluded() -> None:
    levels = {("n1", "n2"): 12.0, ("n2",): 20.0, ("n3",): 20.1, ("n4",): None}
    found = [
        replace(FITS, tensor=nodes[0], nodes=nodes, noise=0.0 if level is None else noise_of(level))
        for nodes, level in levels.items()
    ]
    for sqnr_db, most, expected in (
        (10.001, 4, ("n1", "n2")),
        (10.2, 4, ("n1", "n2", "n3")),
        (10.2, 2, ("n1", "n2")),
        (10.2, 1, ()),
        (1.0, 4, ()),
        (None, 4, ()),
    ):
        assert to_exclude(found, sqnr_db, lambda nodes, most=most: len(nodes) <= most) == expected  # type: ignore[misc]
