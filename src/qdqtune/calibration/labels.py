"""Files of labels: what is right for each calibration sample, in the order of the samples."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration.inputs import InputSpec
from qdqtune.calibration.samples import LABELS, read_arrays
from qdqtune.errors import BadData, one_line, parsed_json
from qdqtune.types import Array, Sample

FORMS = ".npz, .npy, .json, .csv or .txt"

COLUMNS = (LABELS, "label")
"""Names of the array of labels in an .npz, of the list in a .json, and of the column in a .csv."""


def read_labels(path: Path) -> tuple[Array, ...]:
    """The labels in a file, one array a label: a number has shape (), a vector its own.

    A .npy, and the array `labels` of an .npz (or its only one), have the labels along the first axis. A .json holds a
    list, or labels by name in the order of the samples; a .csv has them in the column `label`, or else in the last
    one; a .txt has one a line, or several numbers a line where a label is a vector.

    Raises:
        BadData: the file is missing or unreadable, or holds something else than numbers.
    """
    if not path.is_file():
        raise BadData(f"labels {path} not found")
    ending = path.suffix.lower()
    if ending in (".npz", ".npy"):
        found = _of_arrays(path)
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise BadData(f"cannot read labels {path}: {one_line(error)}") from error
        if ending == ".json":
            found = _of_json(text, path)
        elif ending == ".csv":
            found = _of_csv(text, path)
        elif ending == ".txt":
            lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
            found = [line[0] if len(line) == 1 else line for line in lines]
            if any(isinstance(label, list) for label in found):  # a vector of one number is a vector
                found = [label if isinstance(label, list) else [label] for label in found]
        else:
            raise BadData(f"labels {path} are in no form that is read: give {FORMS}")
    labels = tuple(_label(label, path) for label in found)
    if not labels:
        raise BadData(f"{path} holds no label")
    if labels[0].shape == (1,) and all(label.shape == (1,) for label in labels):
        labels = tuple(label.reshape(()) for label in labels)
    if len({label.ndim for label in labels}) > 1:
        raise BadData(f"{path}: some labels are numbers and others lists: give one form for all")
    return labels


def holds_inputs(path: Path, specs: Sequence[InputSpec]) -> bool:
    """Whether a file of labels is an .npz that holds the arrays of inputs, too.

    Raises:
        BadData: the file is missing or unreadable.
    """
    return path.suffix.lower() == ".npz" and all(spec.name in read_arrays(path) for spec in specs)


def paired(labels: Sequence[Array], samples: int, first: Sample, origin: str) -> tuple[Array, ...]:
    """The labels of each sample, with its rows (its batch) along the first axis.

    Raises:
        BadData: there is not one label for each sample, or each row of a sample.
    """
    rows = next((array.shape[0] for array in first.values() if array.ndim), 1)
    if rows == 1 and len(labels) == samples:
        return tuple(label[None] for label in labels)
    if len(labels) == samples * rows:
        return tuple(np.stack(labels[i * rows : (i + 1) * rows]) for i in range(samples))
    if len(labels) == samples and all(label.shape[:1] == (rows,) for label in labels):
        return tuple(labels)
    many = f"more than {len(labels)}" if samples > len(labels) else str(samples)
    each = "sample" if rows == 1 else f"sample, or for each of its {rows} rows"
    raise BadData(
        f"{len(labels)} labels for {many} samples of {origin}: `labels` has one for each {each}, in the same order"
    )


def _of_arrays(path: Path) -> Sequence[Any]:
    arrays = read_arrays(path, (InputSpec(LABELS, np.dtype(np.float32), ()),))
    name = next((name for name in COLUMNS if name in arrays), next(iter(arrays)) if len(arrays) == 1 else None)
    if name is None:
        raise BadData(f"{path} has no array '{LABELS}'; it holds {', '.join(map(repr, arrays))}")
    array = arrays[name]
    if not array.ndim:
        raise BadData(f"{path}: '{name}' is one number: give an array with a label for each sample")
    return list(array)


def _of_json(text: str, path: Path) -> Sequence[Any]:
    try:
        found = parsed_json(text)
    except (ValueError, json.JSONDecodeError) as error:
        raise BadData(f"cannot read labels {path} as JSON: {one_line(error)}") from error
    if isinstance(found, Mapping):
        lists = [value for value in found.values() if isinstance(value, list)]
        named = next((found[name] for name in COLUMNS if isinstance(found.get(name), list)), None)
        found = named if named is not None else lists[0] if len(found) == len(lists) == 1 else list(found.values())
    if not isinstance(found, list):
        raise BadData(f"{path} holds no list: give a JSON list with a label for each sample")
    return found


def _of_csv(text: str, path: Path) -> Sequence[Any]:
    rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    if not rows:
        return []
    header = [cell.strip().lower() for cell in rows[0]]
    column = next((header.index(name) for name in COLUMNS if name in header), -1)
    if column >= 0 or not _is_number(rows[0][-1]):
        rows = rows[1:]
    if short := [row for row in rows if len(row) <= column]:
        raise BadData(f"{path}: the row {','.join(short[0])!r} has no label")
    return [row[column] for row in rows]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _label(label: Any, path: Path) -> Array:
    try:
        array = np.asarray(label)
        if array.dtype.kind in "US":
            array = array.astype(np.float64)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadData(f"{path}: a label holds NaN or infinite values")
    if array.dtype.kind not in "biuf":
        raise BadData(f"{path}: label {str(label)[:40]!r} is no number: give class numbers, counted from 0, not names")
    if array.dtype.kind == "f" and (array == array.astype(np.int64)).all() and not isinstance(label, np.ndarray):
        array = array.astype(np.int64)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
