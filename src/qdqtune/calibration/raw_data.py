"""Calibration data that are no arrays yet: a folder of pictures, or a file of texts.

The files that say how to make arrays of them (preprocessor_config.json, tokenizer.json) lie beside the data, or else
beside the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration import pictures
from qdqtune.calibration.inputs import InputSpec, listed
from qdqtune.calibration.user_code import user_errors
from qdqtune.errors import BadData, BadOption, parsed_json, reading
from qdqtune.graph.model_folder import first_beside
from qdqtune.system.checks import below
from qdqtune.types import Array

TEXT_ENDING = ".txt"

TOKENIZER, TOKENIZER_SETTINGS, MODEL_SETTINGS = "tokenizer.json", "tokenizer_config.json", "config.json"

SETTINGS = (pictures.SETTINGS, (TOKENIZER,), (TOKENIZER_SETTINGS,), (MODEL_SETTINGS,))
"""The files that say how to make arrays; of several in one entry the first is taken."""


def raw_files(source: Path) -> list[Path]:
    """The files of raw data in order; empty if the source holds none."""
    if source.suffix == TEXT_ENDING and source.is_file():
        return [source]
    if not source.is_dir():
        return []
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
    end is not used. With a `limit` on samples, see `spread_rows`; the function takes the number of `others`."""
    places = _places(source, folders)

    def find(names: Sequence[str]) -> tuple[Path, Mapping[str, Any]] | None:
        path = first_beside(names, places)
        return None if path is None else (path, read_object(path))

    maker = texts_for(specs, find, str(source)) if source.is_file() else pictures.pictures_for(specs, find, str(source))

    def produce(others: int | None) -> Iterator[dict[str, Array]]:
        items: Sequence[Any] = _lines(source) if isinstance(maker, Texts) else files
        numbers = spread_rows(lambda: len(items), limit and limit * maker.batch, others and others * maker.batch)
        chosen = [item for number, item in enumerate(items) if number in numbers]
        for start in range(0, len(chosen) - maker.batch + 1, maker.batch):
            yield maker.arrays(chosen[start : start + maker.batch])

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


def _lines(path: Path) -> list[str]:
    try:
        with reading(path, BadData):
            return list(filter(None, map(str.strip, path.read_text(encoding="utf-8").split("\n"))))
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
    number of tokens that tokenizer_config.json or config.json names."""
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        with reading(path, BadData):
            found = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadData(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadData(f"{path} holds no JSON object")
    return found
