"""Calibration data that are no arrays yet: a folder of pictures, a file of texts, a split of `datasets` on disk.

The files that say how to make arrays of them (preprocessor_config.json, tokenizer.json) lie beside the data, or else
beside the model. Splits are folders that `Dataset.save_to_disk` writes; their rows are read by pyarrow, on which
`datasets` itself is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration import pictures
from qdqtune.calibration.inputs import InputSpec, listed
from qdqtune.calibration.pictures import as_source
from qdqtune.calibration.user_code import user_errors
from qdqtune.errors import BadData, BadOption, one_line, parsed_json, reading
from qdqtune.graph.model_folder import first_beside
from qdqtune.system.checks import below
from qdqtune.types import Array

TEXT_ENDING = ".txt"

TOKENIZER, TOKENIZER_SETTINGS, MODEL_SETTINGS = "tokenizer.json", "tokenizer_config.json", "config.json"

SETTINGS = (pictures.SETTINGS, (TOKENIZER,), (TOKENIZER_SETTINGS,), (MODEL_SETTINGS,))
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
    if is_dataset(source):
        return [source / COLUMNS, *tables_of(source)]
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
        return None if path is None else (path, read_object(path))

    kinds: Sequence[str]
    rows: Callable[[Container[int]], Iterator[dict[str, Any]]]
    count: Callable[[], int]
    if is_dataset(source):
        columns = columns_for(source, specs)
        if not columns:
            total = cache(partial(row_count, source))
            return lambda others: row_samples(source, specs, spread_rows(total, limit, others))
        kinds, count = tuple(columns), partial(row_count, source)
        rows = partial(column_rows, source, columns)
    elif source.is_file():
        kinds, count, rows = ["text"], lambda: sum(1 for _ in _lines(source)), partial(_texts, source)
    else:
        kinds, count, rows = ["picture"], lambda: len(files), partial(_pictures, files)
    makers: dict[str, pictures.Pictures | Texts] = {}
    for kind in kinds:
        open_maker = pictures.pictures_for if kind == "picture" else texts_for
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
    try:
        with reading(path, BadData), path.open(encoding="utf-8") as file:
            yield from filter(None, map(str.strip, file))
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is no text in UTF-8") from error


IDS, MASK, TYPES, POSITIONS, PAST = "input_ids", "attention_mask", "token_type_ids", "position_ids", "past_key_values."

OTHER_NAMES = {"input_mask": MASK, "segment_ids": TYPES}
"""What some exporters name these inputs."""

USUAL_TOKENS, MOST_TOKENS = 512, 10**6
"""Texts are cut at so many tokens where nothing says how many the model takes. Transformers writes numbers above
`MOST_TOKENS` for no limit. Chosen, not measured."""


@dataclass(frozen=True)
class Texts:
    """Makes the inputs of a model from texts. `ids` is its input of token ids."""

    specs: tuple[InputSpec, ...]
    ids: InputSpec
    tokenizer: Any

    @property
    def batch(self) -> int:
        return self.ids.shape[0] or 1

    def arrays(self, texts: Sequence[str]) -> dict[str, Array]:
        """The inputs for texts of one sample; inputs that no text gives are left out."""
        found = self.tokenizer.encode_batch(list(texts))
        mask = np.array([one.attention_mask for one in found])
        values: dict[str, Array] = {
            IDS: np.array([one.ids for one in found]),
            MASK: mask,
            TYPES: np.array([one.type_ids for one in found]),
            POSITIONS: np.where(mask == 0, 1, mask.cumsum(1) - 1),  # as Transformers counts in generation
        }
        made = {spec.name: values.get(OTHER_NAMES.get(spec.name, spec.name)) for spec in self.specs}
        for spec in self.specs:
            if spec.name.startswith(PAST):  # keys or values before the first token: none
                made[spec.name] = np.zeros((len(texts), *(size or 0 for size in spec.shape[1:])))
        return {spec.name: array.astype(spec.dtype) for spec in self.specs if (array := made[spec.name]) is not None}


def texts_for(
    specs: Sequence[InputSpec], find: Callable[[Sequence[str]], tuple[Path, Mapping[str, Any]] | None], origin: str
) -> Texts:
    """What makes the inputs of a model from texts; `find` gives the first file of some names with its JSON object.

    Texts are cut and padded to the length of the model's inputs. Where that is dynamic, they keep their own up to the
    number of tokens that tokenizer_config.json or config.json names.

    Raises:
        BadData: the model has no input for token ids, or there is no tokenizer.
        BadOption: tokenizers is not installed.
    """
    ids = next((spec for spec in specs if spec.name == IDS and len(spec.shape) == 2), None)
    if ids is None:
        raise BadData(f"{origin} holds texts, which need an input {IDS}: the model has {listed(tuple(specs))}")
    if (found := find([TOKENIZER])) is None:
        how = "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise BadData(f"{origin} holds texts: put their {TOKENIZER} beside the model or the texts ({how})")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadOption("reading texts needs tokenizers: pip install 'qdqtune[data]'") from error
    settings, model = ((find([name]) or (None, {}))[1] for name in (TOKENIZER_SETTINGS, MODEL_SETTINGS))
    with user_errors(f"cannot use the tokenizer {found[0]}", BadData):  # the library raises nothing narrower
        tokenizer = Tokenizer.from_file(str(found[0]))
        length = ids.shape[1]
        tokenizer.enable_truncation(length or _most_tokens(tokenizer, settings, model))
        pad = _pad_token(tokenizer, settings, model)
        side = "left" if settings.get("padding_side") == "left" else "right"
        tokenizer.enable_padding(direction=side, pad_id=pad, pad_token=tokenizer.id_to_token(pad) or "", length=length)
    return Texts(tuple(specs), ids, tokenizer)


def _most_tokens(tokenizer: Any, settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The largest number of tokens that the model takes, as far as files tell."""
    own = (tokenizer.truncation or {}).get("max_length")
    told = (settings.get("model_max_length"), model.get("max_position_embeddings"), own)
    return next((int(n) for n in told if isinstance(n, int | float) and 0 < n < MOST_TOKENS), USUAL_TOKENS)


def _pad_token(tokenizer: Any, settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The id that fills a sequence; 0 where no file names one."""
    told = settings.get("pad_token")
    text = told.get("content") if isinstance(told, dict) else told
    known = tokenizer.token_to_id(text) if isinstance(text, str) else None
    told = (known, model.get("pad_token_id"), (tokenizer.padding or {}).get("pad_id"))
    return next((n for n in told if isinstance(n, int) and n >= 0), 0)


SPLIT, SPLITS, COLUMNS = "state.json", "dataset_dict.json", "dataset_info.json"
"""The files that name the tables of a split, the splits of a dataset, the columns of a split."""

COLUMN_TYPES = {"picture": "Image", "text": "string"}
"""The type of a column of pictures, and of texts."""

USUAL_COLUMNS = {"picture": ("image", "img"), "text": ("text", "sentence")}
"""Names of columns that are taken where several have the type."""


def is_dataset(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or ((folder / SPLIT).is_file() and (folder / COLUMNS).is_file())


def tables_of(folder: Path) -> list[Path]:
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
    found = [name for name, own in types.items() if own == COLUMN_TYPES[kind]]
    usual = [name for name in USUAL_COLUMNS[kind] if name in found]
    if len(found) > 1 and not usual:
        how = f"keep one with dataset.select_columns([{found[0]!r}]).save_to_disk(FOLDER)"
        raise BadData(f"{folder} has several columns of {kind}s ({', '.join(found)}): {how}")
    return next(iter(usual or found), None)


def row_count(folder: Path) -> int:
    """The number of rows of a split. Raises as `column_rows`."""
    return sum(1 for _ in _read(folder, (), ()))


def column_rows(folder: Path, columns: Mapping[str, str], numbers: Container[int]) -> Iterator[dict[str, Any]]:
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


def row_samples(folder: Path, specs: tuple[InputSpec, ...], numbers: Container[int]) -> Iterator[dict[str, Array]]:
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
    for path in tables_of(folder):
        try:
            with reading(path, BadData), pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                for table in stream:
                    for place in range(table.num_rows):
                        is_wanted = number in numbers
                        yield table.select(columns).slice(place, 1).to_pylist()[0] if is_wanted else None
                        number += 1
        except (pyarrow.ArrowException, KeyError) as error:
            raise BadData(f"cannot read {path}, a file of a dataset: {one_line(error)}") from error
