"""The price cache: a file in which runs leave what they have learned of prices, for the next model on the same engine.

And what each has found for its model, so that a later run of it in another mode begins there. The file holds a section
for each engine, version, chip, number of threads and numeric format. What a run begins with goes into its state file,
so that it is resumed as it began whatever has become of the cache meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqtune.errors import OutputError, parsed_json, writing
from qdqtune.graph.outputs import appearing
from qdqtune.search.costs.priors import NOTHING, Prior, packed, unpacked
from qdqtune.tuning.forms import EDGES, PRICES, Form, ListOf, MapOf, fits
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import Record, pack_placement, unpack_placement
from qdqtune.tuning.subject import fingerprint
from qdqtune.types import Placement

VERSION = 1
FORM: Form = {"version": int, "sections": ListOf({"of": str, "told": str, "models": MapOf(EDGES), **PRICES})}

RECORD = "prices"
"""The record of what a run began with."""

DECIMALS = 5

MODELS = 32
"""Models whose placement is kept, those that were tuned last."""

EARLIER = "earlier run"
"""What the placement of one is called."""

SECTIONS = 16
"""Engines whose prices a file keeps, those that were used last."""


def usual_place() -> Path:
    """Where the cache lies that nobody has named: among the user's caches, as freedesktop.org has them."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "qdqtune" / "prices.json"


def known(run: Run) -> Prior:
    """The prices that the run begins with."""
    record = _record(run)
    return NOTHING if record is None else unpacked(record)


def found_before(run: Run) -> dict[str, Placement]:
    """What an earlier run has shipped for the same model, in whichever mode: a seed, under a name for people."""
    packed_placement = (_record(run) or {}).get("found")
    if not packed_placement:
        return {}
    placement = unpack_placement(packed_placement)
    return {EARLIER: Placement.of(placement.edges & run.subject.possible, placement.compressed)}


def _record(run: Run) -> Record | None:
    """What the run begins with: as its state file has it, or as the cache does if nothing was measured yet."""
    record = run.store.get(RECORD)
    if record is None:
        has_begun = any(r["key"].startswith("trial:") for r in run.store.records())
        if run.settings.price_cache is None or has_begun:
            return None
        if (sections := _sections(run)) is None:
            file = run.settings.price_cache
            other = "no price cache of this version (delete it, or name another with --price-cache)"
            why = "a folder, and --price-cache names a file" if file.is_dir() else other
            run.observer.note(f"{file} is {why}: the search goes on without")
        of, _ = _of(run)
        section = next((section for section in sections or () if section["of"] == of), None)
        prior = NOTHING if section is None else unpacked(section)
        found = None if section is None else section["models"].get(run.subject.model.fingerprint)
        record = run.store.put(RECORD, {**packed(_concerning(run, prior)), "found": found})
    return record


def remember(run: Run, final: Placement, learned: Prior = NOTHING) -> None:
    """Leave for others what a run has learned, and for the same model what it ships. Where the usual place cannot be
    written, nobody minds."""
    if (path := run.settings.price_cache) is None or not (learned or final):
        return
    if (sections := _sections(run)) is None:
        return
    of, told = _of(run)
    old = next((section for section in sections if section["of"] == of), None)
    before, models = (NOTHING, {}) if old is None else (unpacked(old), dict(old["models"]))
    if final:
        models.pop(run.subject.model.fingerprint, None)
        models[run.subject.model.fingerprint] = pack_placement(final)
    kept = {"models": dict(list(models.items())[-MODELS:]), **_rounded(packed(before.updated(learned)))}
    sections = [*(s for s in sections if s["of"] != of), {"of": of, "told": told, **kept}][-SECTIONS:]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as fresh:
            fresh.write_text(json.dumps({"version": VERSION, "sections": sections}), encoding="utf-8")
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


def _sections(run: Run) -> list[dict[str, Any]] | None:
    """The sections of the cache; None if the file is none of ours, or cannot be read."""
    path = run.settings.price_cache
    assert path is not None  # nobody asks without one
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError):
        return None
    if not fits(content, FORM) or content["version"] != VERSION:
        return None
    sections: list[dict[str, Any]] = content["sections"]
    return sections


def _of(run: Run) -> tuple[str, str]:
    """What prices hang on beside the units themselves: as a digest, and in words."""
    signed = fingerprint(run.settings, run.subject, run.runner.describe())
    names = [name for name in signed if name.startswith("engine ")] + ["quant type", "numeric format"]
    told = ", ".join(f"{name.removeprefix('engine ')} {signed[name]}" for name in names)
    return hashlib.sha256(told.encode()).hexdigest()[:16], told


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as exact as they are worth writing."""
    return {
        name: [[round(v, DECIMALS) if isinstance(v, float) else v for v in row] for row in rows]
        if isinstance(rows, list)
        else rows
        for name, rows in values.items()
    }
