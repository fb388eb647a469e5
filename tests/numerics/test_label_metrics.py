"""The metrics of common heads, against values by hand and by brute force, and what fits which outputs."""

import numpy as np
import pytest

from qdqtune.errors import BadOption
from qdqtune.numerics.label_metrics import Name, Tally, answer, check_classes, chosen, edits, fits, parsed
from qdqtune.numerics.losses import Score

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(60, 4)).astype(np.float32)
LABELS = np.where(RANDOM.random(60) < 0.6, SCORES.argmax(1), RANDOM.integers(0, 4, 60))


def scored(metric: Name, outputs: np.ndarray, right: np.ndarray) -> Score:
    """The metric over samples of one row each."""
    tally = Tally(metric)
    for one, label in zip(outputs, right, strict=True):
        told, wanted = answer(metric, one[None]), label[None] if isinstance(label, np.ndarray) else np.array([label])
        assert told is not None
        assert fits(metric, told, wanted)
        tally.add(told, wanted)
    return tally.score


def by_class(told: np.ndarray, right: np.ndarray, weight: float) -> list[float]:
    """By class: right / (right + weight * wrong)."""
    found = []
    for c in np.union1d(told, right):
        tp, fp, fn = ((told == a) & (right == b) for a, b in ((c, c), (c, right), (told, c)))
        wrong = (fp & (told == c) & (right != c)).sum() + (fn & (right == c) & (told != c)).sum()
        found.append(tp.sum() / (tp.sum() + weight * wrong))
    return found


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


def test_f1_is_the_mean_over_classes_and_of_two_that_of_the_second() -> None:
    told = SCORES.argmax(1)
    assert scored("f1", SCORES, LABELS).value == pytest.approx(np.mean(by_class(told, LABELS, 0.5)))
    two = SCORES[:, :2]
    assert scored("f1", two, LABELS % 2).value == pytest.approx(by_class(two.argmax(1), LABELS % 2, 0.5)[1])


def test_miou_counts_pixels_of_all_pictures_but_those_without_a_class() -> None:
    scores = RANDOM.normal(size=(6, 3, 5, 7)).astype(np.float32)
    labels = RANDOM.integers(0, 3, (6, 5, 7))
    labels[:, 0, :2] = 255
    counted = labels != 255
    expected = np.mean(by_class(scores.argmax(1)[counted], labels[counted], 1.0))
    assert scored("miou", scores, labels).value == pytest.approx(expected)
    assert scored("miou", scores.argmax(1), labels).value == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["top1", "f1"])
@pytest.mark.parametrize("outputs", [SCORES, SCORES.argmax(1)], ids=["scores", "integers"])
def test_rows_with_the_label_that_is_ignored_do_not_count(metric: Name, outputs: np.ndarray) -> None:
    ignored = RANDOM.random(60) < 0.3
    labels = np.where(ignored, -1, LABELS)
    assert scored(metric, outputs, labels).value == pytest.approx(
        scored(metric, outputs[~ignored], LABELS[~ignored]).value
    )
    check_classes(metric, "y", outputs, labels)


def test_pixels_with_the_label_that_is_ignored_do_not_count() -> None:
    told = np.array([[[0, 1], [2, 2]]])
    assert scored("miou", told, np.array([[[0, 1], [-1, 2]]])).value == 1.0


def test_what_the_parts_of_samples_say_together() -> None:
    """The jackknife: without a sample the metric is (n*all - part) / (n - 1)."""
    score = scored("f1", SCORES, LABELS)
    for i in (0, 17, 59):
        rest = np.delete(np.arange(60), i)
        expected = scored("f1", SCORES[rest], LABELS[rest]).value
        assert (60 * score.value - score.by_sample[i]) / 59 == pytest.approx(expected, abs=1e-9)


def test_cosine_of_vectors() -> None:
    a, b = RANDOM.normal(size=(2, 9, 16)).astype(np.float32)
    expected = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    score = scored("cosine", a, b)
    assert score.by_sample == pytest.approx(expected, rel=1e-5)
    assert scored("cosine", a, a).value == pytest.approx(1.0)
    assert scored("cosine", np.zeros((1, 4), "f"), np.zeros((1, 4), "f")).value == 1.0


def test_sequences_of_ids() -> None:
    assert [edits([1, 2, 3], right) for right in ([1, 2, 3], [1, 3], [9, 1, 2, 3], [3, 2, 1], [])] == [0, 1, 1, 2, 3]
    right = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    score = scored("wer", np.array([[1, 2, 4, -1], [5, 6, -1, -1]]), right)  # type: ignore[arg-type]
    assert score.value == pytest.approx(1 - 1 / 6)
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    assert scored("tokens", ids, np.array([[1, 2, 9], [4, -100, 6]])).value == pytest.approx(4 / 5)


def test_errors_of_numbers_are_higher_where_they_are_better() -> None:
    told, right = RANDOM.normal(size=(2, 7, 3, 4)).astype(np.float32)
    lost = (told - right).astype(float).reshape(7, -1)
    assert scored("mse", told, right).by_sample == pytest.approx(-(lost**2).mean(1), rel=1e-5)
    assert scored("mae", told, right).value == pytest.approx(-abs(lost).mean(), rel=1e-5)
    psnr = 10 * np.log10(abs(right).max() ** 2 / (lost**2).mean(1))
    assert scored("psnr", told, right).by_sample == pytest.approx(psnr, rel=1e-4)
    assert scored("psnr", right, right).value == 100
    assert scored("mse", told[:, 0, 0], right[:, 0, 0].astype(int)).value < 0  # a number a row, labels without a point


def test_the_user_names_the_output_behind_the_metric() -> None:
    assert [parsed(text) for text in ("auto", "miou:seg", "auto:a:0")] == [
        ("auto", None),
        ("miou", "seg"),
        ("auto", "a:0"),
    ]
    outputs = {"first": np.zeros((1, 10), np.float32), "second": np.zeros((1, 10), np.float32)}
    assert chosen("auto", outputs, np.zeros(1, np.int64)) == ("top1", "first")
    assert chosen("auto", outputs, np.zeros(1, np.int64), "second") == ("top1", "second")


@pytest.mark.parametrize(
    ("shape", "label", "expected"),
    [
        ((1, 1), np.zeros(1), "mse"),
        ((1, 10), np.zeros(1, np.int64), "top1"),
        ((1, 10, 1, 1), np.zeros(1, np.int64), "top1"),
        ((1, 3, 8, 8), np.zeros((1, 8, 8), np.int64), "miou"),
        ((1, 7, 30), np.zeros((1, 7), np.int64), "tokens"),
        ((1, 7, 30), np.zeros((1, 5), np.int64), "wer"),
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
    with pytest.raises(BadOption, match=r"`metric` miou reads scores \[N, classes, H, W\] or class numbers .* pixels"):
        chosen("miou", outputs, np.zeros(1, np.int64))
    with pytest.raises(
        BadOption, match=r"`metric` mae reads numbers \[rows, \.\.\.\], and labels of the same shape: the"
    ):
        chosen("mae", outputs, np.zeros((1, 9)))
    with pytest.raises(BadOption, match="label 10 is no class of output out, which has 10: count classes from 0"):
        check_classes("top1", "out", outputs["out"], np.array([10]))
