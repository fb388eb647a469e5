"""The file of a price cache: where it usually lies, and what it holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from qdqtune.search.costs.priors import Prices
from qdqtune.tuning.records import StoredPlacement
from qdqtune.types import NumericFormat

VERSION = 1


class Conditions(msgspec.Struct, frozen=True):
    """What prices depend on beside the units themselves."""

    engine: dict[str, str]
    quant_type: str
    numeric_format: NumericFormat


class Section(msgspec.Struct, frozen=True):
    """What runs under the same conditions have learned; `models` are placements by fingerprint, the latest last."""

    conditions: Conditions
    prices: Prices
    models: dict[str, StoredPlacement]


class PriceCache(msgspec.Struct, frozen=True):
    """The file; the section that was used last is the last."""

    version: int
    sections: tuple[Section, ...] = ()


def usual_place() -> Path:
    """Where the cache lies that nobody has named: among the user's caches, as freedesktop.org has them."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "qdqtune" / "prices.json"


def read_cache(path: Path) -> PriceCache | None:
    """The cache, empty where there is no file; None if the file is none of ours, or cannot be read."""
    try:
        cache = msgspec.json.decode(path.read_bytes(), type=PriceCache)
    except (FileNotFoundError, NotADirectoryError):
        return PriceCache(VERSION)
    except (OSError, ValueError, RecursionError):
        return None
    return cache if cache.version == VERSION else None
