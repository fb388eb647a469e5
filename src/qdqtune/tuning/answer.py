"""What a finished run answered, kept so that the same command answers at once and ships nothing else.

The answer counts as long as every file that the run has left is as it left it. Limits and budgets are part of the
question; where the model's files and the results lie is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from qdqtune.errors import QdqtuneError
from qdqtune.graph.loading import files_of
from qdqtune.graph.stamps import content
from qdqtune.measurement.timing import Ratio
from qdqtune.search.costs.explanation import UnitPrice
from qdqtune.tuning.bench import job_key, remembered
from qdqtune.tuning.folder import LOGS, PARTS, PROGRESS, REGION_MODELS, REPORT, RUN, SUMMARY, pattern_cache_of
from qdqtune.tuning.forms import MAYBE_NUMBER, Form, ListOf, OneOf, fits
from qdqtune.tuning.modes.mode import Recorded
from qdqtune.tuning.result import Result
from qdqtune.tuning.run import Ready
from qdqtune.tuning.store import Record, Store, is_transient, pack_placement, unpack_placement
from qdqtune.tuning.subgraphs.outcomes import GroupOutcome
from qdqtune.types import Placement, Proposal, Trial

PLACES = frozenset({"workers", "cores_per_worker", "ray"})
UNASKED = PLACES | {"output_dir", "state_file", "restart", "time_budget", "time_limit", "command", "price_cache"}
"""Settings that a finished run does not hang on. A time budget counts where it was given: one that was too short may
have left something to find."""

ROWS = (UnitPrice, GroupOutcome)
"""What modes tell of their parts."""

FIELDS: Mapping[object, Form] = {
    "tuple[str, ...]": ListOf(str),
    "str": str,
    "bool": bool,
    "float": float,
    "float | None": MAYBE_NUMBER,
    "int | None": OneOf((int, None)),
    "str | None": OneOf((str, None)),
}
"""The forms of their fields, by annotation."""

TRIAL = ("metric", "holds", "accepted")
"""What a trial knows beyond what was measured and proposed."""


def remember(result: Result, ready: Ready) -> None:
    """Write what a run has answered to its state file; nothing where something would be tried again.

    Raises:
        OutputError: it cannot be written.
    """
    if any(map(is_transient, ready.store.records())):  # it is not written
        return
    rows = result.recorded.rows
    record: Record = {
        "shipped": result.shipped,
        "placement": pack_placement(result.placement),
        "ratio": None if result.ratio is None else asdict(result.ratio),
        "notes": list(result.notes),
        "trials": [_pack(trial) for trial in result.history],
        "rows": {type(rows[0]).__name__: [asdict(row) for row in rows]} if rows else {},
        "summary": _lasting(dict(result.summary)),
        "files": dict(_files(ready)),
    }
    key, _ = _keys(ready)
    if ready.store.get(key) != {"key": key, **json.loads(json.dumps(record))}:
        ready.store.put(key, record)


def recalled(ready: Ready) -> Result | None:
    """What the same command has answered before; None if it has not, or if its files are not as it left them."""
    record = next((known for key in _keys(ready) if (known := ready.store.get(key)) is not None), None)
    if record is None:
        return None
    try:
        summary = json.loads((ready.output.path / SUMMARY).read_text(encoding="utf-8"))
        files = dict(_files(ready))
    except (OSError, ValueError, RecursionError, QdqtuneError):
        return None
    if files != record["files"] or not isinstance(summary, dict) or _lasting(summary) != record["summary"]:
        return None
    history = _history(record["trials"], ready.store)
    if history is None:
        return None
    ready.observer.stage("this run has finished before: nothing is measured again")
    return Result(
        record["shipped"],
        unpack_placement(record["placement"]),
        None if record["ratio"] is None else Ratio(**record["ratio"]),
        summary,
        history,
        tuple(record["notes"]),
        Recorded(_rows(record["rows"])),
    )


def _keys(ready: Ready) -> tuple[str, str]:
    """The names of the question, all settings that matter and what they refer to: as it was asked, and without a limit
    of time, which answers it as well."""
    settings = ready.settings
    asked = [f"{f.name} {getattr(settings, f.name)!r}" for f in fields(settings) if f.name not in UNASKED]
    asked += [f"thread_counts {settings.thread_counts}"] if settings.deploy_threads is None else []
    more = (path for path in (settings.qdq_baseline, settings.pattern_cache) if path is not None and path.is_file())
    read = [*files_of(settings.model), *more]
    metric = ready.evaluation.digest if ready.evaluation else ""
    budget = [] if settings.time_budget is None else [f"time_budget {settings.time_budget!r}"]
    both = ("\n".join([*asked, *limit, metric, content(read)]) for limit in (budget, []))
    bounded, free = (f"finished:{hashlib.sha256(text.encode()).hexdigest()[:16]}" for text in both)
    return bounded, free


def _files(ready: Ready) -> Iterator[tuple[str, str]]:
    """What a run leaves, but for logs and what holds seconds: names, and what the files hold.

    Models that show parts of a run only have to be there: where their constants lie depends on the order of writing. So
    has the file of progress, which holds the lines of the state that were there when it was last written.

    Raises:
        BadModel: one cannot be read.
    """
    for name in sorted(ready.output.ours):
        path, place = ready.output.path / name, Path(name).parts[0]
        if path.is_file() and place not in (SUMMARY, RUN, REPORT, LOGS):
            yield name, "" if place in (REGION_MODELS, PARTS, PROGRESS) else content([path])
    if (patterns := pattern_cache_of(ready.settings.state)).is_file():
        yield "pattern cache", content([patterns])


def _lasting(summary: Mapping[str, Any]) -> str:
    """16 hex digits of all that summary.json holds, however long the run took."""
    kept = {name: fits(value, float) if name.endswith("seconds") else value for name, value in summary.items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _pack(trial: Trial) -> Record:
    proposal = {f.name: getattr(trial.proposal, f.name) for f in fields(Proposal) if f.name != "placement"}
    known = {name: getattr(trial, name) for name in TRIAL}
    return {"job": job_key("trial", trial.placement, trial.against), "proposal": proposal, **known}


def _history(packed: list[Record], store: Store) -> tuple[Trial, ...] | None:
    """The trials; None if the store does not have one."""
    placements = {Placement().digest: Placement()}
    trials = []
    for number, trial in enumerate(packed, 1):
        record = store.get(trial["job"])
        if record is None or record["against"] not in placements:
            return None
        proposal = Proposal(placement=unpack_placement(record["placement"]), **trial["proposal"])
        placements[proposal.placement.digest] = proposal.placement
        found = remembered(number, proposal, placements[record["against"]], record)
        trials.append(Trial(**{**vars(found), **{name: trial[name] for name in TRIAL}}))
    return tuple(trials)


def _rows(packed: Mapping[str, list[Record]]) -> tuple[UnitPrice, ...] | tuple[GroupOutcome, ...]:
    """What the mode told of its parts; nothing where another version told other things."""
    for kind in ROWS:
        form = {f.name: FIELDS.get(f.type, object) for f in fields(kind)}
        rows = packed.get(kind.__name__, [])
        if rows and all(row.keys() == form.keys() and fits(row, form) for row in rows):
            return tuple(_row(kind, row) for row in rows)
    return ()


def _row(kind: type[UnitPrice] | type[GroupOutcome], row: Record) -> Any:
    told: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return kind(**told)
