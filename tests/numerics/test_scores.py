"""Which outputs hold scores of classes, told from the values that the float model gives."""

import numpy as np
import pytest

from qdqtune.errors import BadOption
from qdqtune.numerics.accuracy import accuracy, closeness_of
from qdqtune.numerics.scores import agrees, independent, scores_of, too_few_to_tell
from qdqtune.types import Accuracy, Array

SAMPLES = 6


def softmax(logits: Array, axis: int) -> Array:
    high = np.exp(logits - logits.max(axis, keepdims=True))
    return np.asarray(high / high.sum(axis, keepdims=True))


def normal(*shape: int) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(SAMPLES)]


def clear(shape: tuple[int, ...], axis: int) -> list[Array]:
    """Logits that are far above the others for one class of each row, another one from row to row."""
    rng, found = np.random.default_rng(1), []
    for values in normal(*shape):
        best = rng.integers(shape[axis], size=np.delete(shape, axis))
        np.put_along_axis(values, np.expand_dims(best, axis), 12.0, axis)
        found.append(values)
    return found


@pytest.mark.parametrize(
    ("outputs", "axis"),
    [
        ([softmax(4 * x, 1) for x in normal(1, 10)], 1),
        ([softmax(4 * x, 1) for x in normal(2, 2)], 1),
        ([softmax(4 * x, 1).reshape(1, 10, 1, 1) for x in normal(1, 10)], 1),
        ([softmax(4 * x, 1) for x in normal(1, 4, 8, 8)], 1),  # pixels
        ([softmax(4 * x, 2) for x in normal(1, 8, 20)], 2),  # tokens
        ([np.log(softmax(4 * x, 1)) for x in normal(1, 10)], 1),
        ([softmax(9 * x, 1).astype(np.float16) for x in normal(1, 1000)], 1),
        (clear((1, 10), 1), 1),
        (clear((1, 5, 2000), 2), 2),
    ],
)
def test_scores_are_found(outputs: list[Array], axis: int) -> None:
    assert scores_of([{"out": output} for output in outputs]).axis.get("out") == axis


@pytest.mark.parametrize(
    "outputs",
    [
        normal(1, 1000),  # a model without training, or an embedding
        normal(1, 4),
        [softmax(0.01 * x, 1) for x in normal(1, 2)],  # weights of a mixture
        [1e4 * x for x in normal(1, 64)],
        [np.sort(x, 1) for x in normal(1, 64)],
        [np.float32([[1.0, 7.0, 1.0]])] * SAMPLES,  # always the same class
        clear((1, 2), 1),  # two numbers may be coordinates
        normal(1, 3, 16, 16),  # a picture
        [x[:, :1] for x in normal(1, 2)],
        [x.reshape(-1) for x in normal(1, 9)],
        [np.zeros((0, 4), np.float32)],
        [np.arange(8).reshape(2, 4)],
        [softmax(4 * x[:n, :n], 1) for n, x in enumerate(normal(20, 20), 4)],  # attention: classes do not vary
    ],
)
def test_other_outputs_are_no_scores(outputs: list[Array]) -> None:
    assert not scores_of([{"out": output} for output in outputs]).axis


def test_the_worst_output_of_scores_counts_with_all_its_positions() -> None:
    pixels, classes = [softmax(4 * x, 1) for x in normal(1, 4, 8, 8)], clear((1, 10), 1)
    reference = [{"p": p, "c": c} for p, c in zip(pixels, classes, strict=True)]
    changed = [
        {"p": p, "c": np.roll(c, 1, 1) if n < 3 else c} for n, (p, c) in enumerate(zip(pixels, classes, strict=True))
    ]
    assert scores_of(reference).axis == {"p": 1, "c": 1}
    assert accuracy(reference, reference).top1 == 1.0
    found = accuracy(reference, changed)
    assert (found.top1, found.choices) == (0.5, SAMPLES)
    assert "50.0% of the best classes equal" in closeness_of(found)


def test_a_small_output_that_changed_by_chance_does_not_hide_a_large_one_that_did_not() -> None:
    small, large = clear((1, 10), 1), clear((500, 10), 1)
    reference = [{"small": a, "large": b} for a, b in zip(small, large, strict=True)]
    changed = [sample | {"large": sample["large"].copy()} for sample in reference]
    changed[0]["small"] = np.roll(small[0], 1, 1)
    for sample in changed:
        sample["large"][:40] = np.roll(sample["large"][:40], 1, 1)
    found = accuracy(reference, changed)
    assert (found.top1, found.choices) == (0.92, 500 * SAMPLES)
    assert not agrees(found, 0.98)


def test_what_is_found_is_told_and_why_nothing_is() -> None:
    found = scores_of([{"c": c, "v": v} for c, v in zip(clear((1, 10), 1), normal(1, 1000), strict=True)])
    assert found.told == "taken for scores of classes: c (10 along axis 1)"
    assert found.as_json() == [{"output": "c", "axis": 1, "classes": 10}]
    outputs = [{"map": m, "n": np.array([1]), "v": v} for m, v in zip(normal(1, 19, 8, 8), normal(1, 64), strict=True)]
    assert scores_of(outputs).told == (
        "no scores of classes recognised in map, n, v: if they hold some, add `scores` map,n,v"
    )
    none = scores_of([{"c": c} for c in clear((1, 10), 1)], ["none"])
    assert (none.axis, none.told) == ({}, "best classes are not compared: `scores` is none")


@pytest.mark.parametrize(
    ("shape", "asked"), [((9,), "y"), ((4, 1), "y"), ((1, 1, 8, 8), "y"), ((2, 9, 1), "y"), ((1, 256), "y:binary")]
)
@pytest.mark.parametrize("middle", [0.0, 0.5])
def test_values_that_say_yes_or_no_are_compared_by_the_side_they_are_on(shape, asked, middle):
    logits = normal(*shape)
    values = [1 / (1 + np.exp(-x)) if middle else x for x in logits]
    scores = scores_of([{"y": y} for y in values], [asked])
    assert scores.told == f"taken for scores of classes: y (yes above {middle:g})"
    assert scores.as_json() == [{"output": "y", "axis": None, "classes": 2}]
    changed = [y.copy() for y in values]
    for y in changed:
        y.flat[0] = 2 * middle - y.flat[0]
    found = accuracy([{"y": y} for y in values], [{"y": y} for y in changed], scores)
    size = values[0].size
    assert (found.top1, found.choices) == (pytest.approx(1 - 1 / size), SAMPLES * size)


@pytest.mark.parametrize(
    ("asked", "axis"),
    [
        (["map"], {"map": 1}),
        (["map:-1"], {"map": 3}),
        (["tokens"], {"tokens": 2}),
        (["tokens:1", "a:0"], {"tokens": 1, "a:0": 1}),
    ],
)
def test_the_user_names_outputs_and_axes(asked: list[str], axis: dict[str, int]) -> None:
    outputs = [{"map": normal(1, 3, 8, 8)[0], "tokens": normal(1, 5, 7)[0], "a:0": normal(2, 4)[0]}]
    assert scores_of(outputs, asked).axis == axis


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("other", "names no output: the model has map, ids"),
        ("map:", "names no output"),
        ("map:x", "names no output"),
        ("map:4", r"float32\[1, 3, 8, 8\] has no scores of classes along axis 4"),
        ("map:0", "along axis 0"),
        ("ids", r"int64\[1, 4\] has no scores"),
        ("ids:binary", r"int64\[1, 4\] has no scores"),
    ],
)
def test_names_that_fit_nothing_are_refused(asked: str, why: str) -> None:
    outputs = [{"map": normal(1, 3, 8, 8)[0], "ids": np.zeros((1, 4), np.int64)}]
    with pytest.raises(BadOption, match=f"`scores` {asked.split(':')[0]}.*{why}"):
        scores_of(outputs, [asked])


def test_pixels_of_a_picture_do_not_count_as_independent() -> None:
    """3 % of all pixels differ: beyond doubt where each picture has some, not where one picture has them all."""
    reference = [{"map": x} for x in [softmax(4 * x, 1) for x in normal(1, 4, 32, 32)] * 3]
    everywhere = [{"map": sample["map"].copy()} for sample in reference]
    for sample in everywhere:
        sample["map"][..., :1, :31] = np.roll(sample["map"][..., :1, :31], 1, 1)
    one = [{"map": sample["map"].copy()} for sample in reference]
    one[0]["map"][..., :17, :] = np.roll(one[0]["map"][..., :17, :], 1, 1)
    spread, together = accuracy(reference, everywhere), accuracy(reference, one)
    assert (spread.choices, together.choices) == (18432, 18432)
    assert spread.top1 == pytest.approx(together.top1, abs=1e-3)
    assert not agrees(spread, 0.98)
    assert together.independent < 30
    assert agrees(together, 0.98)


def test_independent_choices_are_those_of_independent_positions() -> None:
    ones, rng = np.ones(50), np.random.default_rng(0)
    assert independent(np.float64([1] * 49 + [0]), ones) == 50
    assert independent(np.full(8, 100.0), np.full(8, 100.0)) == 8  # all equal: nothing tells how pixels go together
    equal, sizes = rng.binomial(100, 0.9, 200).astype(float), np.full(200, 100.0)
    assert 0.7 < independent(equal, sizes) / 20000 <= 1
    assert independent(100.0 * (rng.random(200) < 0.9), sizes) == pytest.approx(200, rel=0.05)


def test_many_outputs_take_one_short_line_and_a_sample_may_have_no_rows() -> None:
    caches = [{f"cache{n}": x for n in range(9)} for x in normal(1, 2, 6, 4)]
    told = scores_of(caches).told
    assert told.endswith("cache4, cache5, ...: if they hold some, add `scores` NAME")
    rows = [{"y": y} for y in [*clear((5, 10), 1), np.zeros((0, 10), np.float32)]]
    found = accuracy(rows, rows)
    assert (found.top1, found.choices, found.independent) == (1.0, 5 * SAMPLES, None)


@pytest.mark.parametrize(("samples", "share", "least"), [(8, 0.75, 0.95), (15, 13 / 15, 0.9), (50, 0.9, 0.95)])
def test_the_samples_that_are_said_to_tell_two_shares_apart_do(samples: int, share: float, least: float) -> None:
    told = too_few_to_tell(Accuracy(top1=share, choices=samples, samples=samples), least)
    assert told is not None
    could = int(told.split()[-2].replace(",", ""))
    assert could > samples
    assert not agrees(Accuracy(top1=share, choices=could, samples=could), least)
