"""Layer information and profiles that TensorRT wrote, in tests/data/tensorrt."""

import gzip
from pathlib import Path

from qdqtune.engines.tensorrt.report import read_report
from qdqtune.types import Layer

DATA = Path(__file__).parent / "data" / "tensorrt"


EXPORTS = sorted(path.name.removesuffix(".graph.json.gz") for path in DATA.glob("*.graph.json.gz"))


def text_of(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.gz").read_bytes()).decode()


def report_of(name: str) -> tuple[Layer, ...]:
    return read_report(text_of(f"{name}.graph.json"), text_of(f"{name}.profile.json"))
