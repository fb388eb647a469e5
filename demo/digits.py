"""The demo's data: handwritten digits, enlarged, in three parts that share no image.

The images are scikit-learn's `load_digits`: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI
Machine Learning Repository, CC BY 4.0. `train.py` has split them and written `digits.npz`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

INPUT_NAME = "image"
SIZE = 64
FILE = Path(__file__).with_name("digits.npz")


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
    with np.load(FILE) as arrays:
        parts = {
            part: Images(enlarge(arrays[f"{part}_pixels"]), arrays[f"{part}_digits"].astype(np.int64))
            for part in ("train", "calibration", "test")
        }
    return Split(**parts)


def enlarge(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn 8x8 images, a row of 64 grey levels in 0..16 each, into shape (n, 1, SIZE, SIZE) in 0..1, bilinearly."""
    small = pixels.reshape(-1, 1, 8, 8) / 16
    # order=1 with grid_mode treats a pixel as an area, as image libraries do when they resize
    large = ndimage.zoom(small, (1, 1, SIZE / 8, SIZE / 8), order=1, mode="nearest", grid_mode=True)
    return large.astype(np.float32)
