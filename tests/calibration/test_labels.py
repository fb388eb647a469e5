"""Files of labels: every form that is promised, and one clear line for everything else."""

from pathlib import Path

import numpy as np
import pytest

from qdqtune.errors import BadData
from qdqtune.numerics.metrics import paired, read_labels

SAMPLE = {"x": np.zeros((1, 3), np.float32)}
PAIR = {"x": np.zeros((2, 3), np.float32)}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "3\n1\n4\n"),
        ("l.csv", "3\n1\n4\n"),
        ("l.csv", "file,label\na.png,3\nb.png,1\nc.png,4\n"),
        ("l.csv", "Label,file\n3,a.png\n1,b.png\n\n4,c.png\n"),
        ("l.csv", "a.png,3\nb.png,1\nc.png,4\n"),
    ],
)
def test_class_numbers_in_text(tmp_path: Path, name: str, text: str) -> None:
    found = read_labels(written(tmp_path, name, text))
    assert (found.tolist(), found.dtype) == ([3, 1, 4], np.int64)


@pytest.mark.parametrize("values", [np.array([3, 1, 4], np.uint8), np.array([[3.0], [1.0], [4.0]], np.float32)])
def test_class_numbers_in_arrays(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "l.npy", values)
    np.savez(tmp_path / "one.npz", anything=values)
    np.savez(tmp_path / "both.npz", x=np.zeros((3, 3)), labels=values)
    for name in ("l.npy", "one.npz", "both.npz"):
        assert read_labels(tmp_path / name).tolist() == [3, 1, 4]


def test_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.full((2, 4), 0.5, np.float32))
    assert read_labels(tmp_path / "v.npy").shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.txt", "cat\ndog\n", "labels are numbers from 0 or vectors of one size, not names: .*'cat'"),
        ("l.txt", "0.5\nnan\n", "l.txt: a label holds NaN or infinite values"),
        ("l.txt", "", "holds no label"),
        ("l.csv", "x,label\n1,2\n3\n", "the row '3' has no label"),
        ("l.json", "[1, 2]", "give .npz, .npy, .csv or .txt"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(BadData, match=message) as error:
        read_labels(path)
    assert "\n" not in str(error.value)


def test_arrays_without_labels_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(BadData, match="has no array 'labels'; it holds 'x', 'y'"):
        read_labels(tmp_path / "l.npz")
    for array, message in (np.array(3), "holds no label"), (np.array([1j]), "not names"):
        np.save(tmp_path / "l.npy", array)
        with pytest.raises(BadData, match=message):
            read_labels(tmp_path / "l.npy")
    with pytest.raises(BadData, match="not found"):
        read_labels(tmp_path / "nowhere.npy")


def test_labels_are_paired_with_samples_and_their_rows() -> None:
    labels = np.arange(4)
    assert paired(labels, 4, SAMPLE, "d").tolist() == [[0], [1], [2], [3]]
    assert paired(labels, 2, PAIR, "d").tolist() == [[0, 1], [2, 3]]
    rows = np.stack([labels, labels], 1)
    assert paired(rows, 4, PAIR, "d").tolist() == rows.tolist()
    with pytest.raises(BadData, match="4 labels for 3 samples of d: `labels` has one for each sample, in the same"):
        paired(labels, 3, SAMPLE, "d")
    with pytest.raises(BadData, match=r"4 labels for more than 4 samples of d: .* or for each of its 2 rows"):
        paired(labels, 5, PAIR, "d")
