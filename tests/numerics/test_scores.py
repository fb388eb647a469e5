"""Which outputs hold scores of classes, told from the values that the float model gives."""

import numpy as np
import pytest

from qdqtune.numerics.accuracy import accuracy
from qdqtune.numerics.scores import agrees, class_axis, scores_of, smallest_seen
from qdqtune.types import Array

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
    assert class_axis(outputs) == axis


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
    ],
)
def test_other_outputs_are_no_scores(outputs: list[Array]) -> None:
    assert class_axis(outputs) is None


def test_the_worst_output_of_scores_counts_with_all_its_positions() -> None:
    pixels, classes = [softmax(4 * x, 1) for x in normal(1, 4, 8, 8)], clear((1, 10), 1)
    reference = [{"p": p, "c": c} for p, c in zip(pixels, classes, strict=True)]
    changed = [
        {"p": p, "c": np.roll(c, 1, 1) if n < 3 else c} for n, (p, c) in enumerate(zip(pixels, classes, strict=True))
    ]
    assert scores_of(reference) == {"p": 1, "c": 1}
    assert accuracy(reference, reference).top1 == 1.0
    found = accuracy(reference, changed)
    assert (found.top1, found.choices) == (0.5, SAMPLES)
    assert "50.0% of the best classes equal" in str(found)


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


def test_few_choices_show_large_losses_only() -> None:
    shares = [smallest_seen(choices, 0.98) for choices in (1, 16, 32, 100, 1000)]
    assert shares == pytest.approx([1.0, 0.125, 3 / 32, 0.06, 0.029])
    assert smallest_seen(10, 1.0) == 0.1
