"""How good a range is: against percentiles of numpy, and by its squared error."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtune.calibration.scales import Range, dequantize, of_range, quantize
from qdqtune.types import NumericFormat

Array = npt.NDArray[Any]


def close(found: Range, values: Array, percentile: float, bin_width: float) -> None:
    """Both ends lie between the two values that numpy would interpolate, give or take a bin."""
    tails = [(100 - percentile) / 2, (100 + percentile) / 2]
    least, most = (np.percentile(values, tails, method=m) for m in ("lower", "higher"))
    ends = np.array([found.low, found.high])
    assert (least - 1.001 * bin_width <= ends).all()
    assert (ends <= most + 1.001 * bin_width).all()


def error(values: Array, tried: Range, numbers: NumericFormat) -> float:
    """Mean squared error of a range, by the definition."""
    how = of_range(tried, numbers)
    return float(np.square(values - dequantize(quantize(values, how), how)).mean())
