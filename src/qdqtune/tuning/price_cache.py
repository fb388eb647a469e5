"""The price cache: a file in which runs leave what they have learned of prices, for the next model on the same engine.

It holds a section for each engine, version, chip, number of threads and numeric format. What a run begins with goes
into its state file, so that it is resumed as it began whatever has become of the cache meanwhile.
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
from qdqtune.tuning.forms import PRICES, Form, ListOf, fits
from qdqtune.tuning.run import Run
from qdqtune.tuning.subject import fingerprint

VERSION = 1
FORM: Form = {"version": int, "sections": ListOf({"of": str, "told": str, **PRICES})}

RECORD = "prices"
"""The record of what a run began with."""

DECIMALS = 5

SECTIONS = 16
"""Engines whose prices a file keeps, those that were used last."""


def usual_place() -> Path:
    """Where the cache lies that nobody has named: among the user's caches, as freedesktop.org has them."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "qdqtune" / "prices.json"


def known(run: Run) -> Prior:
    """What the run begins with: as its state file has it, or as the cache does if nothing was measured yet."""
    record = run.store.get(RECORD)
    if record is None:
        has_begun = any(r["key"].startswith("trial:") for r in run.store.records())
        if run.settings.price_cache is None or has_begun:
            return NOTHING
        if (sections := _sections(run)) is None:
            run.observer.note(
                f"{run.settings.price_cache} is no price cache of this version: the search goes on without"
            )
        of, _ = _of(run)
        prior = next((unpacked(section) for section in sections or () if section["of"] == of), NOTHING)
        record = run.store.put(RECORD, packed(_concerning(run, prior)))
    return unpacked(record)


def remember(run: Run, learned: Prior) -> None:
    """Leave what a run has learned for others. Where the usual place cannot be written, nobody minds."""
    if (path := run.settings.price_cache) is None or not learned:
        return
    if (sections := _sections(run)) is None:
        return
    of, told = _of(run)
    before = next((unpacked(s) for s in sections if s["of"] == of), NOTHING)
    own = {"of": of, "told": told, **_rounded(packed(before.updated(learned)))}
    kept = [*(s for s in sections if s["of"] != of), own][-SECTIONS:]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as fresh:
            fresh.write_text(json.dumps({"version": VERSION, "sections": kept}), encoding="utf-8")
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
