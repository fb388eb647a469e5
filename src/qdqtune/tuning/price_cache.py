"""The price cache: a file in which runs leave the prices that they learned, for other models on the same engine.

It also keeps the placement that was found for each model, so that a later run of the model in another mode begins with
it. The file has a section for each combination of engine, version, chip, number of threads and numeric format. A run
copies what it begins with to its state file, so that changes of the cache make no difference when it is resumed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from qdqtune.errors import OutputError, writing
from qdqtune.search.costs.priors import NO_PRIOR, Prices, Prior, packed, unpacked
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.records import PricesRecord, StoredPlacement, TrialRecord
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import Subject
from qdqtune.types import NumericFormat, Placement

VERSION = 1

MODELS = 32
"""Models whose placement a section keeps, those that were tuned last. Chosen, not measured."""

SECTIONS = 16
"""Sections that a file keeps, those that were used last. Chosen, not measured."""

EARLIER = "earlier run"
"""The origin of a placement that comes from the cache, as users read it."""


class PriceConditions(msgspec.Struct, frozen=True):
    """What prices depend on besides the fusion groups themselves."""

    engine: dict[str, str]
    quant_type: str
    numeric_format: NumericFormat


class Section(msgspec.Struct, frozen=True):
    """What runs under the same conditions have learned; `models` are placements by fingerprint, the latest last."""

    conditions: PriceConditions
    prices: Prices
    models: dict[str, StoredPlacement]


class PriceCache(msgspec.Struct, frozen=True):
    """The content of the file; the section that was used last comes last."""

    version: int
    sections: tuple[Section, ...] = ()

    def section(self, conditions: PriceConditions) -> Section | None:
        """The section for these conditions, if there is one."""
        return next((section for section in self.sections if section.conditions == conditions), None)


def usual_path() -> Path:
    """The cache that is used where the user names none: in the user's cache folder, as freedesktop.org defines it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "qdqtune" / "prices.json"


def read_cache(path: Path) -> PriceCache | None:
    """The cache, empty where there is no file; None if the file is no price cache, or cannot be read."""
    try:
        cache = msgspec.json.decode(path.read_bytes(), type=PriceCache)
    except (FileNotFoundError, NotADirectoryError):
        return PriceCache(VERSION)
    except (OSError, ValueError, RecursionError):
        return None
    return cache if cache.version == VERSION else None


@dataclass(frozen=True)
class Earlier:
    """What a run takes from earlier ones: prices, and by origin the placement that was found for the same model."""

    prices: Prior = NO_PRIOR
    found: Mapping[str, Placement] = field(default_factory=dict)


def earlier(
    path: Path | None, conditions: PriceConditions, subject: Subject, store: Store, note: Callable[[str], None]
) -> Earlier:
    """What a run begins with: from its state file, or from the cache if nothing was measured yet. `note` tells the user
    of a file that cannot be used."""
    record = store.get(PricesRecord)
    if record is None:
        if path is None or any(store.of(TrialRecord)):
            return Earlier()
        if (cache := read_cache(path)) is None:
            other = "no price cache of this version (delete it, or name another with `price_cache`)"
            why = "a folder, and `price_cache` names a file" if path.is_dir() else other
            note(f"{path} is {why}: the search goes on without")
            cache = PriceCache(VERSION)
        section = cache.section(conditions)
        prices = NO_PRIOR if section is None else _with_operators_of(subject, unpacked(section.prices))
        known = None if section is None else section.models.get(subject.model.fingerprint)
        record = store.put(PricesRecord(prices=packed(prices), found=known))
    found = Placement() if record.found is None else record.found.placement
    edges = found.edges & subject.possible
    seeds = {EARLIER: Placement.of(edges, found.weight_only, found.wide & edges)} if found else {}
    return Earlier(unpacked(record.prices), seeds)


def add(
    path: Path | None,
    conditions: PriceConditions,
    model: str,
    final: Placement,
    learned: Prior,
    note: Callable[[str], None],
) -> None:
    """Add the placement that ships for a model (by fingerprint) and the prices that its search has learned.

    Nothing is added if no placement ships: prices that led a search nowhere would keep later ones from looking further.
    If a file that the user has named cannot be written, `note` says so.
    """
    if path is None or not final or (cache := read_cache(path)) is None:
        return
    old = cache.section(conditions)
    before, models = (NO_PRIOR, {}) if old is None else (unpacked(old.prices), dict(old.models))
    models.pop(model, None)
    models[model] = StoredPlacement.of(final)
    section = Section(conditions, packed(before.updated(learned)), dict(list(models.items())[-MODELS:]))
    sections = [*(other for other in cache.sections if other is not old), section][-SECTIONS:]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as fresh:
            fresh.write_bytes(msgspec.json.encode(PriceCache(VERSION, tuple(sections))))
    except OutputError as error:
        if path != usual_path():
            note(f"prices are not kept for other models: {error}")


def _with_operators_of(subject: Subject, prior: Prior) -> Prior:
    """The prices of fusion groups whose operators the model has."""
    own = {node.op for node in subject.shaped.nodes}
    operators = {kind: names for kind, names in prior.operators.items() if own.issuperset(names.split(","))}
    shares = {key: share for key, share in prior.shares.items() if key[0] in operators}
    return Prior(shares, operators, prior.conversions, prior.splits, prior.per_consumer)
