"""Splits of the library `datasets`, in the folders that `Dataset.save_to_disk` writes.

Their rows are read by pyarrow, on which `datasets` itself is built.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration.inputs import InputSpec, listed
from qdqtune.calibration.pictures import as_source
from qdqtune.calibration.texts import IDS
from qdqtune.errors import BadData, BadOption, one_line, parsed_json, reading
from qdqtune.types import Array

SPLIT, SPLITS, COLUMNS = "state.json", "dataset_dict.json", "dataset_info.json"
"""The files that name the tables of a split, the splits of a dataset, the columns of a split."""

TYPES = {"picture": "Image", "text": "string"}
"""The type of a column of pictures, and of texts."""

USUAL = {"picture": ("image", "img"), "text": ("text", "sentence")}
"""Names of columns that are taken where several have the type."""


def is_dataset(folder: Path) -> bool:
    """Whether a folder holds a split, or a dataset of several."""
    return (folder / SPLITS).is_file() or ((folder / SPLIT).is_file() and (folder / COLUMNS).is_file())


def tables(folder: Path) -> list[Path]:
    """The files of a split, in the order of its rows.

    Raises:
        BadData: the folder holds several splits, or is damaged.
    """
    if (folder / SPLITS).is_file():
        found = read_object(folder / SPLITS).get("splits")
        names = [str(name) for name in found] if isinstance(found, list) and found else ["train"]
        raise BadData(f"{folder} holds the splits {', '.join(names)}: name one, such as {folder / names[0]}")
    try:
        return [folder / str(one["filename"]) for one in read_object(folder / SPLIT)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise BadData(f"{folder / SPLIT} names no files: save the dataset again with save_to_disk") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        BadData: it holds none.
    """
    try:
        with reading(path, BadData):
            found = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadData(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadData(f"{path} holds no JSON object")
    return found


def columns_for(folder: Path, specs: Sequence[InputSpec]) -> dict[str, str]:
    """The columns of pictures and of texts by kind (`picture`, `text`), as far as the model takes them; empty where the
    columns are the inputs themselves.

    Raises:
        BadData: no column fits the model, or several do.
    """
    features = read_object(folder / COLUMNS).get("features")
    types = {name: _type(kind) for name, kind in features.items()} if isinstance(features, dict) else {}
    if {spec.name for spec in specs} <= types.keys():
        return {}
    wanted = ["picture"] if any(len(spec.shape) == 4 for spec in specs) else []
    wanted += ["text"] if any(spec.name == IDS for spec in specs) else []
    found = {kind: name for kind in wanted if (name := _only(folder, types, kind)) is not None}
    if not found:
        has = ", ".join(types) or "none that can be read"
        how = "name columns like these, or keep one of pictures or texts"
        raise BadData(f"{folder} has the columns {has}, the model has {listed(tuple(specs))}: {how}")
    return found


def _type(feature: Any) -> str:
    """The type of a column: Image, string, or another."""
    if not isinstance(feature, dict):
        return ""
    return str(feature.get("dtype") if feature.get("_type") == "Value" else feature.get("_type")).removeprefix("large_")


def _only(folder: Path, types: Mapping[str, str], kind: str) -> str | None:
    """The column of a kind, the usual one if there are several; None if there is none.

    Raises:
        BadData: there are several, and none is usual.
    """
    found = [name for name, own in types.items() if own == TYPES[kind]]
    usual = [name for name in USUAL[kind] if name in found]
    if len(found) > 1 and not usual:
        how = f"keep one with dataset.select_columns([{found[0]!r}]).save_to_disk(FOLDER)"
        raise BadData(f"{folder} has several columns of {kind}s ({', '.join(found)}): {how}")
    return next(iter(usual or found), None)


def count(folder: Path) -> int:
    """The number of rows of a split. Raises as `rows`."""
    return sum(1 for _ in _read(folder, (), ()))


def rows(folder: Path, columns: Mapping[str, str], numbers: Container[int]) -> Iterator[dict[str, Any]]:
    """The values of each row with one of these numbers by kind: a text, or a picture with its name for messages and
    what Pillow opens.

    Raises:
        BadData: a file is missing or damaged.
        BadOption: pyarrow is not installed.
    """
    for number, row in enumerate(_read(folder, list(columns.values()), numbers), 1):
        if row is None:
            continue
        values = {kind: row[name] for kind, name in columns.items()}
        if "picture" in values:
            values["picture"] = f"in row {number} of {folder}", as_source(values["picture"] or {}, folder)
        yield {kind: "" if value is None else value for kind, value in values.items()}


def samples(folder: Path, specs: tuple[InputSpec, ...], numbers: Container[int]) -> Iterator[dict[str, Array]]:
    """The rows with these numbers of a split whose columns are the inputs, in the types of these. A batch of one is
    added where it lacks.

    Raises:
        BadData: a row does not fit, or a file is missing or damaged.
        BadOption: pyarrow is not installed.
    """
    for number, row in enumerate(_read(folder, [spec.name for spec in specs], numbers), 1):
        if row is None:
            continue
        try:
            made = {spec.name: np.asarray(row[spec.name], None if spec.is_string else spec.dtype) for spec in specs}
        except (ValueError, TypeError, OverflowError) as error:
            raise BadData(f"row {number} of {folder} does not fit {listed(specs)}: {one_line(error)}") from error
        yield {s.name: made[s.name][None] if made[s.name].ndim == len(s.shape) - 1 else made[s.name] for s in specs}


def _read(folder: Path, columns: Sequence[str], numbers: Container[int]) -> Iterator[dict[str, Any] | None]:
    """The rows of a split, one after the other; None in the place of those whose numbers, from 0, are not asked for."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise BadOption("reading a dataset needs pyarrow: pip install 'qdqtune[data]'") from error
    number = 0
    for path in tables(folder):
        try:
            with reading(path, BadData), pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                for table in stream:
                    for place in range(table.num_rows):
                        is_wanted = number in numbers
                        yield table.select(columns).slice(place, 1).to_pylist()[0] if is_wanted else None
                        number += 1
        except (pyarrow.ArrowException, KeyError) as error:
            raise BadData(f"cannot read {path}, a file of a dataset: {one_line(error)}") from error
