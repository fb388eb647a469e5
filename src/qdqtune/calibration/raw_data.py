"""Makes arrays of calibration data that are files of another kind: a folder of pictures, or a file of texts.

The files that say how (preprocessor_config.json, tokenizer.json) lie beside the data, or else beside the model.
Pictures are prepared by the steps of Transformers' image processors; settings with other steps are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from qdqtune.calibration.inputs import PICTURE, InputSpec, listed
from qdqtune.calibration.user_code import user_errors
from qdqtune.errors import BadData, BadOption, one_line, reading
from qdqtune.graph.model_folder import first_beside
from qdqtune.system.checks import below
from qdqtune.types import Array

T = TypeVar("T")

TEXT_ENDING = ".txt"

PICTURE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

CHANNELS = frozenset({1, 3, None})
"""Channels that an input for pictures may have, gray or RGB; None is open."""

PICTURE_SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""The files with the numbers for pictures; in the second one they are under the key `image_processor`."""

TOKENIZER, TOKENIZER_SETTINGS, MODEL_SETTINGS = ("tokenizer.json",), ("tokenizer_config.json",), ("config.json",)

SETTINGS = (PICTURE_SETTINGS, TOKENIZER, TOKENIZER_SETTINGS, MODEL_SETTINGS)
"""The files that say how to make arrays; of several in one entry the first is taken."""

Maker = Callable[[Sequence[Any]], dict[str, Array]]
"""Makes the inputs for one batch of pictures or texts."""


def raw_files(source: Path) -> list[Path]:
    """The picture or text files of a source, in order; empty if there are none."""
    if source.suffix == TEXT_ENDING and source.is_file():
        return [source]
    if not source.is_dir():
        return []
    found = (path for path in below(source) if path.suffix.lower() in PICTURE_ENDINGS and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(source).parts))


def settings_files(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The preprocessor or tokenizer files for raw data: those beside the data, or else in the model's `folders`."""
    places = _places(source, folders)
    return [path for path in (first_beside(names, places) for names in SETTINGS) if path is not None]


def raw_samples(
    source: Path, files: Sequence[Path], specs: tuple[InputSpec, ...], folders: Sequence[Path], limit: int | None
) -> Callable[[int | None], Iterator[dict[str, Array]]]:
    """A function that yields samples for the inputs `specs`, from the `files` of `raw_files`; `folders` are those of
    the model. A sample has as many pictures or texts as the batch size of the model (1 if dynamic); an incomplete last
    sample is dropped. `limit` is `count` in `spread`, and the argument of the function is `others` there."""
    places = _places(source, folders)
    spec, make = texts_for(specs, places, source) if source.is_file() else pictures_for(specs, places, source)
    batch = spec.shape[0] or 1

    def produce(others: int | None) -> Iterator[dict[str, Array]]:
        items: Sequence[Any] = files
        if source.is_file():
            try:
                with reading(source, BadData):
                    lines = source.read_text(encoding="utf-8").split("\n")
            except UnicodeDecodeError as error:
                raise BadData(f"{source} is no text in UTF-8") from error
            items = list(filter(None, map(str.strip, lines)))
        items = list(spread(items, len(items), limit and limit * batch, others and others * batch))
        for start in range(0, len(items) - batch + 1, batch):
            yield make(items[start : start + batch])

    return produce


def _places(source: Path, folders: Sequence[Path]) -> list[Path]:
    return [source if source.is_dir() else source.parent, *folders]


def spread(items: Iterable[T], total: int, count: int | None, others: int | None = None) -> Iterator[T]:
    """At most `count` of `total` items, or all, at even distances, since data are often sorted by class. With `others`:
    at most so many of the remaining items instead, also at even distances."""
    if count is None:
        return iter(items)
    numbers: Sequence[int] = range(total)
    taken = {total * place // count for place in range(count)} if count < total else set(numbers)
    if others is not None:
        numbers = [number for number in numbers if number not in taken]
        taken = {numbers[len(numbers) * place // others] for place in range(others)} if numbers else set()
    return (item for number, item in enumerate(items) if number in taken)


def _read_object(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with reading(path, BadData):
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadData(f"{path} is no JSON object: {error}") from error


# ---- pictures

WITHOUT_EFFECT = frozenset({"do_convert_rgb", "do_pad", "do_reduce_labels", "do_convert_annotations"})
"""Steps that do not change the numbers of a single picture: channels follow from the model's input, padding is for
pictures of different sizes, the others are for labels."""

UNKNOWN_SIZES = ("keep_aspect_ratio", "ensure_multiple_of", "size_divisor", "crop_pct", "pad_size")
"""Ways to resize that are not supported."""

BILINEAR = 2
"""Pillow's number of the filter that Transformers uses by default."""


class PictureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a preprocessor_config.json, with the defaults of Transformers."""

    do_resize: bool = True
    size: dict[str, int | None] | int | None = None
    resample: int = BILINEAR
    do_center_crop: bool = True
    crop_size: dict[str, int | None] | int | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: list[float] | float | None = None
    image_std: list[float] | float | None = None
    do_flip_channel_order: bool = False


def _picture_settings(path: Path) -> PictureSettings:
    content = _read_object(path)
    nested = content.get("image_processor")
    content = nested if isinstance(nested, dict) else content
    content = {name: value for name, value in content.items() if value is not None}
    try:
        settings = msgspec.convert(content, PictureSettings)
    except msgspec.ValidationError as error:
        raise BadData(f"{path}: {one_line(error)}") from error
    done = {*PictureSettings.__struct_fields__, *WITHOUT_EFFECT}
    steps = [name for name, value in content.items() if name.startswith("do_") and value and name not in done]
    if other := [*steps, *filter(content.get, UNKNOWN_SIZES)]:
        raise BadData(f"{path} asks for {other[0]}, which is not done here: give arrays, as .npz or by a function")
    if settings.do_normalize and (settings.image_mean is None or settings.image_std is None):
        raise BadData(f'{path} lacks image_mean or image_std: give both, or "do_normalize": false')
    if isinstance(settings.size, int) and settings.do_resize:
        raise BadData(f"{path}: a size of one number has two meanings: give height and width, or shortest_edge")
    return settings


def pictures_for(specs: Sequence[InputSpec], places: Sequence[Path], source: Path) -> tuple[InputSpec, Maker]:
    """The input that takes pictures, and a function that makes its array of files; settings lie in one of `places`."""
    fitting = [s for s in specs if len(s.shape) == 4 and not CHANNELS.isdisjoint((s.shape[1], s.shape[3]))]
    fitting = [spec for spec in fitting if spec.name == "pixel_values"] or fitting
    if len(fitting) != 1:
        wanted = "which fit an input of rank 4 with 1 or 3 channels"
        raise BadData(f"{source} holds pictures, {wanted}: the model has {listed(tuple(specs))}")
    (spec,), origin = fitting, first_beside(PICTURE_SETTINGS, places)
    is_last = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    if origin is None:
        height, width = (size or PICTURE for size in (spec.shape[1:3] if is_last else spec.shape[2:]))
        size = f'{{"height": {height}, "width": {width}}}'
        like = f'{{"size": {size}, "rescale_factor": 0.00392, "do_normalize": false}}'
        raise BadData(
            f"how are the pictures in {source} scaled? Put a {PICTURE_SETTINGS[0]} beside the model or the pictures, "
            f"like {like} for values from 0 to 1; with image_mean and image_std if the model was trained so"
        )
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise BadOption("reading pictures needs Pillow: pip install 'qdqtune[data]'") from error
    settings = _picture_settings(origin)
    mode = "L" if spec.shape[3 if is_last else 1] == 1 else "RGB"
    if spec.dtype.kind in "iu" and (settings.do_rescale or settings.do_normalize):
        hint = 'say "do_rescale": false and "do_normalize": false'
        raise BadData(f"the model wants whole numbers ({spec}), and {origin} scales them: {hint}")
    if settings.do_normalize:
        channels = 1 if mode == "L" else 3
        numbers = (np.asarray(each, np.float32) for each in (settings.image_mean, settings.image_std))
        try:
            mean, deviation = (np.broadcast_to(each, channels) for each in numbers)
        except ValueError as error:
            raise BadData(f"{origin}: image_mean and image_std do not fit {channels} channels") from error

    def array_of(path: Path) -> Array:
        try:
            with Image.open(path) as opened:
                picture = ImageOps.exif_transpose(opened).convert(mode)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise BadData(f"cannot read the picture {path}: {one_line(error)}") from error
        if settings.do_resize and isinstance(settings.size, dict):
            height, width = _resized(picture.height, picture.width, settings.size, origin)
            picture = picture.resize((max(width, 1), max(height, 1)), resample=settings.resample)
        crop = {"shortest_edge": settings.crop_size} if isinstance(settings.crop_size, int) else settings.crop_size
        if crop is not None and settings.do_center_crop:
            high, wide = (crop.get(side) or crop.get("shortest_edge") for side in ("height", "width"))
            if high is not None and wide is not None:
                top, left = (picture.height - high) // 2, (picture.width - wide) // 2
                picture = picture.crop((left, top, left + wide, top + high))
        values = np.asarray(picture)
        values = values[:, :, None] if values.ndim == 2 else values
        if settings.do_rescale:
            values = (values.astype(np.float64) * settings.rescale_factor).astype(np.float32)
        if settings.do_normalize:
            values = (values.astype(np.float32) - mean) / deviation
        if settings.do_flip_channel_order:
            values = values[:, :, ::-1]
        return (values if is_last else values.transpose(2, 0, 1)).astype(spec.dtype)

    def make(paths: Sequence[Path]) -> dict[str, Array]:
        arrays = [array_of(path) for path in paths]
        if other := next((one.shape for one in arrays if one.shape != arrays[0].shape), None):
            raise BadData(f"pictures of one batch have the sizes {arrays[0].shape} and {other}: let {origin} crop them")
        return {spec.name: np.stack(arrays)}

    return spec, make


def _resized(height: int, width: int, size: Mapping[str, int | None], origin: Path) -> tuple[int, int]:
    high, wide = size.get("height"), size.get("width")
    if high and wide:
        return high, wide
    short, long = size.get("shortest_edge"), size.get("longest_edge")
    if not short:
        raise BadData(f"{origin}: the size {dict(size)} is neither height and width nor shortest_edge")
    least, most = min(height, width), max(height, width)
    exact = long * least / most if long and most / least * short > long else short
    sides = round(exact), int(exact * most / least)
    return sides if height <= width else sides[::-1]


# ---- texts

IDS, MASK, TYPES, POSITIONS, PAST = "input_ids", "attention_mask", "token_type_ids", "position_ids", "past_key_values."

OTHER_NAMES = {"input_mask": MASK, "segment_ids": TYPES}
"""Names that some exporters give these inputs."""

USUAL_TOKENS, MOST_TOKENS = 512, 10**6
"""Texts are cut at `USUAL_TOKENS` if no file names the model's limit. Transformers writes numbers above `MOST_TOKENS`
for no limit. Chosen, not measured."""


def texts_for(specs: Sequence[InputSpec], places: Sequence[Path], source: Path) -> tuple[InputSpec, Maker]:
    """The input of a model that takes token ids, and a function that makes the text inputs (ids, mask ...) of texts;
    the tokenizer lies in one of the folders `places`.

    Texts are cut and padded to the length of the model's inputs. If that is dynamic, they keep their length, up to the
    number of tokens that tokenizer_config.json or config.json names."""
    ids = next((spec for spec in specs if spec.name == IDS and len(spec.shape) == 2), None)
    if ids is None:
        raise BadData(f"{source} holds texts, which need an input {IDS}: the model has {listed(tuple(specs))}")
    path = first_beside(TOKENIZER, places)
    if path is None:
        how = "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise BadData(f"{source} holds texts: put their {TOKENIZER[0]} beside the model or the texts ({how})")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadOption("reading texts needs tokenizers: pip install 'qdqtune[data]'") from error
    settings, model = (_read_object(first_beside(names, places)) for names in (TOKENIZER_SETTINGS, MODEL_SETTINGS))
    with user_errors(f"cannot use the tokenizer {path}", BadData):  # the library raises nothing narrower
        tokenizer = Tokenizer.from_file(str(path))
        length = ids.shape[1]
        of_tokenizer = (tokenizer.truncation or {}).get("max_length")
        lengths = settings.get("model_max_length"), model.get("max_position_embeddings"), of_tokenizer
        most = (int(n) for n in lengths if isinstance(n, int | float) and 0 < n < MOST_TOKENS)
        tokenizer.enable_truncation(length or next(most, USUAL_TOKENS))
        named = settings.get("pad_token")
        text = named.get("content") if isinstance(named, dict) else named
        token = tokenizer.token_to_id(text) if isinstance(text, str) else None
        tokens = token, model.get("pad_token_id"), (tokenizer.padding or {}).get("pad_id")
        pad = next((n for n in tokens if isinstance(n, int) and n >= 0), 0)
        side = "left" if settings.get("padding_side") == "left" else "right"
        tokenizer.enable_padding(direction=side, pad_id=pad, pad_token=tokenizer.id_to_token(pad) or "", length=length)

    def make(texts: Sequence[str]) -> dict[str, Array]:
        found = tokenizer.encode_batch(list(texts))
        mask = np.array([one.attention_mask for one in found])
        values: dict[str, Array] = {
            IDS: np.array([one.ids for one in found]),
            MASK: mask,
            TYPES: np.array([one.type_ids for one in found]),
            POSITIONS: np.where(mask == 0, 1, mask.cumsum(1) - 1),  # as Transformers counts in generation
        }
        for spec in specs:
            if spec.name.startswith(PAST):  # keys or values before the first token: none
                values[spec.name] = np.zeros((len(texts), *(size or 0 for size in spec.shape[1:])))
        names = {spec: OTHER_NAMES.get(spec.name, spec.name) for spec in specs}
        return {spec.name: values[name].astype(spec.dtype) for spec, name in names.items() if name in values}

    return ids, make
