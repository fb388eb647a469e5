"""Calibration data that are no arrays yet: a folder of pictures, a file of texts, a split of `datasets` on disk.

The files that say how to make arrays of them (preprocessor_config.json, tokenizer.json) lie beside the data, or else
beside the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache, partial
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
) -> Callable[[int | None], Iterator[dict[str, Array]]]:
    """A function that gives the samples in raw data for the inputs `specs`. `files` are those of `raw_files`, `folders`
    those of the model.

    A sample has as many pictures or texts as the batch of the model, one if that is dynamic; what is left over at the
    end is not used. With a `limit` on samples, see `spread_rows`; the function takes the number of `others`.

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
    rows: Callable[[Container[int]], Iterator[dict[str, Any]]]
    count: Callable[[], int]
    if dataset_folders.is_dataset(source):
        columns = dataset_folders.columns_for(source, specs)
        if not columns:
            total = cache(partial(dataset_folders.count, source))
            return lambda others: dataset_folders.samples(source, specs, spread_rows(total, limit, others))
        kinds, count = tuple(columns), partial(dataset_folders.count, source)
        rows = partial(dataset_folders.rows, source, columns)
    elif source.is_file():
        kinds, count, rows = ["text"], lambda: sum(1 for _ in _lines(source)), partial(_texts, source)
    else:
        kinds, count, rows = ["picture"], lambda: len(files), partial(_pictures, files)
    makers: dict[str, pictures.Pictures | texts.Texts] = {}
    for kind in kinds:
        open_maker = pictures.pictures_for if kind == "picture" else texts.texts_for
        makers[kind] = open_maker(specs, find, str(source))
    batch, total = makers[kinds[0]].batch, cache(count)

    def produce(others: int | None) -> Iterator[dict[str, Array]]:
        left = rows(spread_rows(total, limit and limit * batch, others and others * batch))
        while group := list(islice(left, batch)):
            if len(group) == batch:
                made = [maker.arrays([row[kind] for row in group]) for kind, maker in makers.items()]
                yield {name: array for arrays in made for name, array in arrays.items()}

    return produce


def _places(source: Path, folders: Sequence[Path]) -> list[Path]:
    return [source if source.is_dir() else source.parent, *folders]


def spread_rows(total: Callable[[], int], count: int | None, others: int | None = None) -> Container[int]:
    """The numbers of at most `count` of so many rows, at even distances, as data are often sorted by class; with
    `others` those of at most so many of the rows that are left by these, at even distances as well."""
    if count is None:
        return range(sys.maxsize)
    rows = total()
    taken = frozenset(_spread(range(rows), count))
    return taken if others is None else frozenset(_spread([n for n in range(rows) if n not in taken], others))


def _spread(numbers: Sequence[int], count: int) -> Sequence[int]:
    if len(numbers) <= count:
        return numbers
    return [numbers[len(numbers) * place // count] for place in range(count)]


def _texts(path: Path, numbers: Container[int]) -> Iterator[dict[str, Any]]:
    return ({"text": line} for number, line in enumerate(_lines(path)) if number in numbers)


def _pictures(files: Sequence[Path], numbers: Container[int]) -> Iterator[dict[str, Any]]:
    return ({"picture": (str(path), path)} for number, path in enumerate(files) if number in numbers)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file that are not empty."""
    try:
        with reading(path, BadData), path.open(encoding="utf-8") as file:
            yield from filter(None, map(str.strip, file))
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is no text in UTF-8") from error
