"""The price cache: a file in which runs leave what they have learned of prices, for the next model on the same engine.

And what each has found for its model, so that a later run of it in another mode begins there. The file holds a section
for each engine, version, chip, number of threads and numeric format. What a run begins with goes into its state file,
so that it is resumed as it began whatever has become of the cache meanwhile.
"""

from __future__ import annotations

import msgspec

from qdqtune.errors import OutputError, writing
from qdqtune.search.costs.priors import NOTHING, Prior, packed, unpacked
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.price_file import VERSION, Conditions, PriceCache, Section, read_cache, usual_place
from qdqtune.tuning.records import PricesRecord, StoredPlacement, TrialRecord
from qdqtune.tuning.run import Run
from qdqtune.types import Placement

MODELS = 32
"""Models whose placement is kept, those that were tuned last."""

EARLIER = "earlier run"
"""What the placement of one is called."""

SECTIONS = 16
"""Engines whose prices a file keeps, those that were used last."""


def known(run: Run) -> Prior:
    """The prices that the run begins with."""
    record = _record(run)
    return NOTHING if record is None else unpacked(record.prices)


def found_before(run: Run) -> dict[str, Placement]:
    """What an earlier run has shipped for the same model, in whichever mode: a seed, under a name for people."""
    record = _record(run)
    if record is None or record.found is None or not (placement := record.found.placement):
        return {}
    return {EARLIER: Placement.of(placement.edges & run.subject.possible, placement.compressed)}


def _record(run: Run) -> PricesRecord | None:
    """What the run begins with: as its state file has it, or as the cache does if nothing was measured yet."""
    record = run.store.get(PricesRecord)
    if record is None:
        if run.settings.price_cache is None or any(run.store.of(TrialRecord)):
            return None
        if (cache := read_cache(run.settings.price_cache)) is None:
            file = run.settings.price_cache
            other = "no price cache of this version (delete it, or name another with --price-cache)"
            why = "a folder, and --price-cache names a file" if file.is_dir() else other
            run.observer.note(f"{file} is {why}: the search goes on without")
            cache = PriceCache(VERSION)
        section = _section(cache, run)
        prior = NOTHING if section is None else unpacked(section.prices)
        found = None if section is None else section.models.get(run.subject.model.fingerprint)
        record = run.store.put(PricesRecord(prices=packed(_concerning(run, prior)), found=found))
    return record


def remember(run: Run, final: Placement, learned: Prior = NOTHING) -> None:
    """Leave for others what a run has learned that has found something faster, and for the same model what it ships:
    prices that have led a search nowhere would keep later ones from looking further. Where the usual place cannot be
    written, nobody minds."""
    if (path := run.settings.price_cache) is None or not final:
        return
    if (cache := read_cache(path)) is None:
        return
    old = _section(cache, run)
    before, models = (NOTHING, {}) if old is None else (unpacked(old.prices), dict(old.models))
    models.pop(run.subject.model.fingerprint, None)
    models[run.subject.model.fingerprint] = StoredPlacement.of(final)
    kept = Section(_conditions(run), packed(before.updated(learned)), dict(list(models.items())[-MODELS:]))
    sections = [*(section for section in cache.sections if section is not old), kept][-SECTIONS:]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as fresh:
            fresh.write_bytes(msgspec.json.encode(PriceCache(VERSION, tuple(sections))))
    except OutputError as error:
        if path != usual_place():
            run.observer.note(f"prices are not kept for other models: {error}")


def _concerning(run: Run, prior: Prior) -> Prior:
    """Of a prior, what is about operators that the model has."""
    own = {node.op for node in run.subject.shaped.nodes}
    kinds = {kind for kind, operators in prior.operators.items() if own.issuperset(operators.split(","))}
    shares = {key: share for key, share in prior.shares.items() if key[0] in kinds}
    operators = {kind: prior.operators[kind] for kind in kinds}
    return Prior(shares, operators, prior.conversions, prior.splits, prior.per_consumer)


def _section(cache: PriceCache, run: Run) -> Section | None:
    """The section for what the run measures under."""
    return next((section for section in cache.sections if section.conditions == _conditions(run)), None)


def _conditions(run: Run) -> Conditions:
    return Conditions(run.runner.describe(), run.settings.quant_type, run.subject.numbers)
