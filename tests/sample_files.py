"""Models of some inputs, samples of them in files and as lists, and errors of one line."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.errors import BadData, InputError
from qdqtune.graph.model import Model
from qdqtune.types import Array


def model(inputs: str = "float[1,3] x") -> Model:
    first = inputs.split(",")[0 if "[" not in inputs else -1].split()[-1]
    return build(f"net ({inputs}) => (float[A] y) {{ y = Cast <to=1> ({first}) }}")


def saved(folder: Path, **arrays: Array) -> str:
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def cache_of_scales(path: Path, scales: Mapping[str, float], *more: str) -> Path:
    """A calibration cache as TensorRT writes it."""
    lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items()]
    path.write_text("\n".join(["TRT-8510-EntropyCalibration2", *lines, *more]))
    return path


def lists(samples: Samples) -> list[dict[str, Any]]:
    return [{name: array.tolist() for name, array in sample.items()} for sample in samples]


def one_line(error: pytest.ExceptionInfo[InputError]) -> None:
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def refused(message: str, source: object, net: Model, kind: type[InputError] = BadData) -> None:
    """Samples are refused in one line."""
    with pytest.raises(kind, match=message) as error:
        open_samples(str(source), net, folders=()).first(99)
    one_line(error)
