"""The metrics of common heads, against values by hand and by brute force, and what fits which outputs."""

import numpy as np
import pytest

from qdqtune.errors import BadOption
from qdqtune.numerics.label_metrics import Name, Score, answer, check_classes, chosen, fits, row_scores

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(60, 4)).astype(np.float32)
LABELS = np.where(RANDOM.random(60) < 0.6, SCORES.argmax(1), RANDOM.integers(0, 4, 60))


def scored(metric: Name, outputs: np.ndarray, right: np.ndarray) -> Score:
    """The metric over samples of one row each."""
    by_row = list[float]()
    for one, label in zip(outputs, right, strict=True):
        told, wanted = answer(metric, one[None]), label[None] if isinstance(label, np.ndarray) else np.array([label])
        assert told is not None
        assert fits(metric, told, wanted)
        by_row += row_scores(metric, told, wanted)
    return Score.of_rows(metric, by_row)


def test_the_best_class_and_the_best_five() -> None:
    score = scored("top1", SCORES, LABELS)
    assert score.value == pytest.approx((SCORES.argmax(1) == LABELS).mean())
    assert score.by_sample == tuple((SCORES.argmax(1) == LABELS).astype(float))
    wide = RANDOM.normal(size=(40, 20)).astype(np.float32)
    labels = RANDOM.integers(0, 20, 40)
    ranks = (wide > wide[np.arange(40), labels][:, None]).sum(1)
    assert scored("top5", wide, labels).value == pytest.approx((ranks < 5).mean())
    assert scored("top1", SCORES[:, :, None, None], LABELS).value == score.value  # as pooled pictures
    assert scored("top1", SCORES.argmax(1), LABELS).value == score.value


@pytest.mark.parametrize("outputs", [SCORES, SCORES.argmax(1)], ids=["scores", "integers"])
def test_rows_with_the_label_that_is_ignored_do_not_count(outputs: np.ndarray) -> None:
    ignored = RANDOM.random(60) < 0.3
    labels = np.where(ignored, -1, LABELS)
    assert scored("top1", outputs, labels).value == pytest.approx(
        scored("top1", outputs[~ignored], LABELS[~ignored]).value
    )
    check_classes("top1", "y", outputs, labels)


def test_cosine_of_vectors() -> None:
    a, b = RANDOM.normal(size=(2, 9, 16)).astype(np.float32)
    expected = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    score = scored("cosine", a, b)
    assert score.by_sample == pytest.approx(expected, rel=1e-5)
    assert scored("cosine", a, a).value == pytest.approx(1.0)
    assert scored("cosine", np.zeros((1, 4), "f"), np.zeros((1, 4), "f")).value == 1.0


def test_the_user_names_the_output_behind_the_metric() -> None:
    outputs = {"first": np.zeros((1, 10), np.float32), "second": np.zeros((1, 10), np.float32)}
    assert chosen("auto", outputs, np.zeros(1, np.int64)) == ("top1", "first")
    assert chosen("auto", outputs, np.zeros(1, np.int64), "second") == ("top1", "second")


@pytest.mark.parametrize(
    ("shape", "label", "expected"),
    [
        ((1, 10), np.zeros(1, np.int64), "top1"),
        ((1, 10, 1, 1), np.zeros(1, np.int64), "top1"),
        ((1, 64), np.zeros((1, 64)), "cosine"),
    ],
)
def test_auto_takes_what_fits(shape: tuple[int, ...], label: np.ndarray, expected: str) -> None:
    outputs = {"boxes": np.zeros((3, 2, 2, 2, 2), np.float32), "out": np.zeros(shape, np.float32)}
    assert chosen("auto", outputs, label) == (expected, "out")


def test_what_does_not_fit_is_told_with_the_shapes() -> None:
    outputs = {"out": np.zeros((1, 10), np.float32)}
    with pytest.raises(BadOption, match=r"no metric fits: the model gives out float32\[1, 10\], and `labels` has"):
        chosen("auto", outputs, np.zeros((1, 5), np.int64))
    with pytest.raises(BadOption, match=r"`evaluate` calls a function of yours"):
        chosen("auto", {"out": np.zeros((1, 3, 8, 8), np.float32)}, np.zeros((1, 8, 8), np.int64))
    with pytest.raises(BadOption, match=r"`metric` cosine fits no output: the model gives out"):
        chosen("cosine", outputs, np.zeros((1, 9)))
    with pytest.raises(BadOption, match="label 10 is no class of output out, which has 10: count classes from 0"):
        check_classes("top1", "out", outputs["out"], np.array([10]))
