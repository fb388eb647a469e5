"""The demo's data: scikit-learn's handwritten digits, enlarged, in three parts that share no image.

`SIZE` and the split are fixed here: training, calibration and the accuracy that the demo prints see the same images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

INPUT_NAME = "image"
SIZE = 64
CALIBRATION_IMAGES = 48


@dataclass(frozen=True)
class Images:
    """Pictures of shape (n, 1, SIZE, SIZE), float32 in 0..1, and their digits, int64 of shape (n,)."""

    pixels: NDArray[np.float32]
    digits: NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Disjoint parts: `train` shapes the weights, `calibration` the scales, and `test` neither."""

    train: Images
    calibration: Images
    test: Images


@cache
def load() -> Split:
    """Return the 1797 digits as 1299 training, 48 calibration and 450 test images, every digit in proportion."""
    pixels, digits = load_digits(return_X_y=True)
    rest_pixels, test_pixels, rest, test = train_test_split(
        pixels, digits, test_size=0.25, random_state=0, stratify=digits
    )
    train_pixels, calibration_pixels, train, calibration = train_test_split(
        rest_pixels, rest, test_size=CALIBRATION_IMAGES, random_state=0, stratify=rest
    )
    return Split(
        Images(enlarge(train_pixels), train.astype(np.int64)),
        Images(enlarge(calibration_pixels), calibration.astype(np.int64)),
        Images(enlarge(test_pixels), test.astype(np.int64)),
    )


def enlarge(pixels: NDArray[np.float64]) -> NDArray[np.float32]:
    """Turn 8x8 images, a row of 64 grey levels in 0..16 each, into shape (n, 1, SIZE, SIZE) in 0..1, bilinearly."""
    small = pixels.reshape(-1, 1, 8, 8) / 16
    # order=1 with grid_mode treats a pixel as an area, as image libraries do when they resize
    large = ndimage.zoom(small, (1, 1, SIZE / 8, SIZE / 8), order=1, mode="nearest", grid_mode=True)
    return large.astype(np.float32)
