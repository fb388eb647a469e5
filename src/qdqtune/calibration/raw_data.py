"""Calibration data that are no arrays yet: a folder of pictures, a file of texts, a split of `datasets` on disk.

The files that say how to make arrays of them (preprocessor_config.json, tokenizer.json) lie beside the data, or else
beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from qdqtune.calibration import dataset_folders, pictures, texts
from qdqtune.calibration.inputs import InputSpec
from qdqtune.errors import BadData, reading
from qdqtune.graph.model_folder import first_beside
from qdqtune.system.checks import below
from qdqtune.types import Array

TEXT_ENDING = ".txt"

SETTINGS = (pictures.SETTINGS, (texts.TOKENIZER,), (texts.TOKENIZER_SETTINGS,), (texts.MODEL_SETTINGS,))
"""The files that say how to make arrays; of several in one entry the first is taken."""


def raw_files(source: Path) -> list[Path]:
    """The files of raw data in order; empty if the source holds none.

    Raises:
        BadData: a dataset is damaged, or has several splits.
    """
    if source.suffix == TEXT_ENDING and source.is_file():
        return [source]
    if not source.is_dir():
        return []
    if dataset_folders.is_dataset(source):
        return [source / dataset_folders.COLUMNS, *dataset_folders.tables(source)]
    found = (path for path in below(source) if path.suffix.lower() in pictures.ENDINGS and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(source).parts))


def settings_files(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The files that say how to make arrays of raw data: those beside the data, or else in `folders` of the model."""
    places = _places(source, folders)
    return [path for names in SETTINGS if (path := first_beside(names, places)) is not None]


def raw_samples(
    source: Path,
    files: Sequence[Path],
    specs: tuple[InputSpec, ...],
    folders: Sequence[Path],
    limit: int | None,
) -> Callable[[], Iterator[dict[str, Array]]]:
    """A function that gives the samples in raw data for the inputs `specs`. `files` are those of `raw_files`, `folders`
    those of the model.

    A sample has as many pictures or texts as the batch of the model, one if that is dynamic; what is left over at the
    end is not used. With a `limit` on samples, pictures are taken at even distances: folders sort them by class.

    Raises:
        BadData: the model takes no such data, or a file that says how to make arrays of them is missing or damaged
            (partly raised by the iterator).
        BadOption: a library is not installed.
    """
    places = _places(source, folders)

    def find(names: Sequence[str]) -> tuple[Path, Mapping[str, Any]] | None:
        path = first_beside(names, places)
        return None if path is None else (path, dataset_folders.read_object(path))

    kinds: Sequence[str]
    rows: Callable[[], Iterator[dict[str, Any]]]
    if dataset_folders.is_dataset(source):
        columns = dataset_folders.columns_for(source, specs)
        if not columns:
            return lambda: dataset_folders.samples(source, specs)
        kinds, rows = tuple(columns), lambda: dataset_folders.rows(source, columns)
    elif source.is_file():
        kinds, rows = ["text"], lambda: ({"text": line} for line in _lines(source))
    else:
        kinds, rows = ["picture"], lambda: ({"picture": (str(path), path)} for path in _spread(files, most))
    makers: dict[str, pictures.Pictures | texts.Texts] = {}
    for kind in kinds:
        open_maker = pictures.pictures_for if kind == "picture" else texts.texts_for
        makers[kind] = open_maker(specs, find, str(source))
    batch = makers[kinds[0]].batch
    most = len(files) if limit is None else min(limit * batch, len(files))

    def produce() -> Iterator[dict[str, Array]]:
        left = iter(rows())
        while group := list(islice(left, batch)):
            if len(group) == batch:
                made = [maker.arrays([row[kind] for row in group]) for kind, maker in makers.items()]
                yield {name: array for arrays in made for name, array in arrays.items()}

    return produce


def _places(source: Path, folders: Sequence[Path]) -> list[Path]:
    return [source if source.is_dir() else source.parent, *folders]


def _spread(files: Sequence[Path], count: int) -> Iterator[Path]:
    """So many of the files, at even distances."""
    return (files[len(files) * number // count] for number in range(count))


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file that are not empty."""
    try:
        with reading(path, BadData), path.open(encoding="utf-8") as file:
            yield from filter(None, map(str.strip, file))
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is no text in UTF-8") from error
