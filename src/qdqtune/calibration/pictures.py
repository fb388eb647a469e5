"""Pictures as inputs of a model, prepared as a preprocessor_config.json of Transformers says.

The steps and their order are those of Transformers' image processors: turn upright, resize, crop, scale, normalize,
change the order of channels. Other steps are refused: a function of the user can give arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qdqtune.calibration.inputs import InputSpec, listed
from qdqtune.errors import BadData, BadOption, one_line
from qdqtune.types import Array

SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""The files with the numbers; in the second one they are under the key `image_processor`."""

EXAMPLE = (
    '{"size": {"height": 224, "width": 224}, "rescale_factor": 0.00392156862745098, '
    '"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}'
)

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
"""Endings of the names of pictures."""

WITHOUT_EFFECT = frozenset({"do_convert_rgb", "do_pad", "do_reduce_labels", "do_convert_annotations"})
"""Steps that say nothing of one picture's numbers: channels are as the model wants them, padding is for pictures of
different sizes, the others are for labels."""

UNKNOWN_SIZES = ("keep_aspect_ratio", "ensure_multiple_of", "size_divisor", "crop_pct", "pad_size")
"""Other ways to resize, which are not done here."""

BILINEAR = 2
"""Pillow's number of the filter, which Transformers takes where a file names none."""

Sizes = Mapping[str, int | None]


class PictureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a preprocessor_config.json; None where it says nothing."""

    do_resize: bool | None = None
    size: dict[str, int | None] | int | None = None
    resample: int | None = None
    do_center_crop: bool | None = None
    crop_size: dict[str, int | None] | int | None = None
    do_rescale: bool | None = None
    rescale_factor: float | None = None
    do_normalize: bool | None = None
    image_mean: list[float] | float | None = None
    image_std: list[float] | float | None = None
    do_flip_channel_order: bool | None = None

    @property
    def is_normalized(self) -> bool:
        return self.do_normalize is not False

    @property
    def scale(self) -> float | None:
        """The factor of all values; None where they stay 0 to 255."""
        if self.do_rescale is False:
            return None
        return 1 / 255 if self.rescale_factor is None else self.rescale_factor

    @property
    def crop(self) -> tuple[int, int] | None:
        """Height and width of the middle that is kept; None to keep all."""
        if self.do_center_crop is False or self.crop_size is None:
            return None
        sizes = self.crop_size if isinstance(self.crop_size, dict) else {}
        if isinstance(self.crop_size, int):
            return self.crop_size, self.crop_size
        edge = sizes.get("shortest_edge")
        height, width = sizes.get("height") or edge, sizes.get("width") or edge
        return None if height is None or width is None else (height, width)


def read_settings(path: Path, content: Mapping[str, Any]) -> PictureSettings:
    """The settings in a file, whose JSON object is `content`."""
    if isinstance(nested := content.get("image_processor"), dict):
        content = nested
    try:
        found = msgspec.convert(content, PictureSettings)
    except msgspec.ValidationError as error:
        raise BadData(f"{path}: {one_line(error)}") from error
    known = {*PictureSettings.__struct_fields__, *WITHOUT_EFFECT}
    steps = [name for name, value in content.items() if name.startswith("do_") and value and name not in known]
    if other := [*steps, *(name for name in UNKNOWN_SIZES if content.get(name))]:
        raise BadData(f"{path} asks for {other[0]}, which is not done here: give arrays, as .npz or by a function")
    if found.is_normalized and (found.image_mean is None or found.image_std is None):
        raise BadData(f'{path} lacks image_mean or image_std: give both, or "do_normalize": false')
    if isinstance(found.size, int) and found.do_resize is not False:
        square, short = f'{{"height": {found.size}, "width": {found.size}}}', f'{{"shortest_edge": {found.size}}}'
        raise BadData(f"{path}: a size of {found.size} has two meanings: write {square} or {short}")
    return found


@dataclass(frozen=True)
class Pictures:
    """Makes the array of an input from pictures. `origin` names the settings in messages."""

    spec: InputSpec
    settings: PictureSettings
    origin: Path

    @property
    def batch(self) -> int:
        return self.spec.shape[0] or 1

    @property
    def _is_last(self) -> bool:
        return self.spec.shape[3] in (1, 3) and self.spec.shape[1] not in (1, 3)

    def arrays(self, pictures: Sequence[Path]) -> dict[str, Array]:
        """The input for pictures."""
        made = [self._array(path) for path in pictures]
        if other := next((one.shape for one in made if one.shape != made[0].shape), None):
            raise BadData(
                f"pictures of one batch have the sizes {made[0].shape} and {other}: let {self.origin} crop them"
            )
        return {self.spec.name: np.stack(made)}

    def _array(self, path: Path) -> Array:
        channels = self.spec.shape[3 if self._is_last else 1]
        values = np.asarray(self._cut(path, "L" if channels == 1 else "RGB"))
        values = values[:, :, None] if values.ndim == 2 else values
        if self.spec.dtype.kind in "iu" and (self.settings.scale is not None or self.settings.is_normalized):
            raise BadData(
                f"the model wants whole numbers ({self.spec}), and {self.origin} scales them: "
                'say "do_rescale": false and "do_normalize": false'
            )
        if self.settings.scale is not None:
            values = (values.astype(np.float64) * self.settings.scale).astype(np.float32)
        if self.settings.is_normalized:
            values = self._normalized(values.astype(np.float32))
        if self.settings.do_flip_channel_order:
            values = values[:, :, ::-1]
        return values.astype(self.spec.dtype) if self._is_last else values.transpose(2, 0, 1).astype(self.spec.dtype)

    def _cut(self, path: Path, mode: str) -> Any:
        """The picture upright, in the mode `L` or `RGB`, resized and cropped."""
        image = _pillow().Image
        try:
            with image.open(path) as opened:
                picture = _pillow().ImageOps.exif_transpose(opened).convert(mode)
        except (OSError, ValueError, SyntaxError, EOFError, image.DecompressionBombError) as error:
            raise BadData(f"cannot read the picture {path}: {one_line(error)}") from error
        if self.settings.do_resize is not False and isinstance(self.settings.size, dict):
            height, width = self._resized(picture.height, picture.width, self.settings.size)
            how = BILINEAR if self.settings.resample is None else self.settings.resample
            picture = picture.resize((max(width, 1), max(height, 1)), resample=how)
        crop = self.settings.crop
        if crop is None:
            return picture
        top, left = (picture.height - crop[0]) // 2, (picture.width - crop[1]) // 2
        return picture.crop((left, top, left + crop[1], top + crop[0]))

    def _resized(self, height: int, width: int, size: Sizes) -> tuple[int, int]:
        if (high := size.get("height")) and (wide := size.get("width")):
            return high, wide
        short, long = size.get("shortest_edge"), size.get("longest_edge")
        if short:
            least, most = min(height, width), max(height, width)
            exact = long * least / most if long and most / least * short > long else short
            sides = round(exact), int(exact * most / least)
            return sides if height <= width else sides[::-1]
        raise BadData(f"{self.origin}: the size {dict(size)} is neither height and width nor shortest_edge")

    def _normalized(self, values: Array) -> Array:
        try:
            mean = np.broadcast_to(np.asarray(self.settings.image_mean, np.float32), values.shape[-1:])
            deviation = np.broadcast_to(np.asarray(self.settings.image_std, np.float32), values.shape[-1:])
        except ValueError as error:
            count = values.shape[-1]
            raise BadData(f"{self.origin}: image_mean and image_std do not fit {count} channels") from error
        return (values - mean) / deviation


def pictures_for(
    specs: Sequence[InputSpec], find: Callable[[Sequence[str]], tuple[Path, Mapping[str, Any]] | None], origin: str
) -> Pictures:
    """Makes the inputs of a model from pictures; `find` gives the first file of some names with its JSON object."""
    fitting = [spec for spec in specs if len(spec.shape) == 4]
    fitting = [spec for spec in fitting if spec.name == "pixel_values"] or fitting
    if len(fitting) != 1:
        raise BadData(f"{origin} holds pictures, which fit an input of rank 4: the model has {listed(tuple(specs))}")
    if (found := find(SETTINGS)) is None:
        what = f"how are the pictures in {origin} scaled? Put a {SETTINGS[0]} beside the model or the pictures"
        raise BadData(f"{what}, like {EXAMPLE}")
    _pillow()
    return Pictures(fitting[0], read_settings(*found), found[0])


def _pillow() -> Any:
    """Pillow, with the modules that are used here."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise BadOption("reading pictures needs Pillow: pip install 'qdqtune[data]'") from error
    return PIL
