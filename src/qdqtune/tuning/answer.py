"""What a finished run answered, kept so that the same command answers at once and ships nothing else.

The answer counts as long as every file that the run has left is as it left it. Limits and budgets are part of the
question; where the model's files and the results lie is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from qdqtune.errors import QdqtuneError, parsed_json
from qdqtune.graph.loading import files_of
from qdqtune.search.costs.explanation import UnitPrice
from qdqtune.system.checks import content_digest
from qdqtune.tuning.bench import job_of, remembered
from qdqtune.tuning.folder import LOGS, PARTS, PROGRESS, REGION_MODELS, REPORT, RUN, SUMMARY, pattern_cache_of
from qdqtune.tuning.modes.mode import GroupOutcome, Recorded
from qdqtune.tuning.records import (
    AnsweredTrial,
    AnswerRecord,
    Record,
    StoredPlacement,
    TrialRecord,
    is_transient,
    plain,
)
from qdqtune.tuning.result import Result
from qdqtune.tuning.run import Ready
from qdqtune.tuning.store import Store
from qdqtune.types import Placement, Proposal, Trial

PLACES = frozenset({"workers", "cores_per_worker", "ray"})
UNASKED = PLACES | {"output_dir", "state_file", "restart", "time_budget", "time_limit", "command", "price_cache"}
"""Settings that do not change what a finished run has answered. A time budget counts where it was given: one that was
too short may have left something to find."""


def remember(result: Result, ready: Ready) -> None:
    """Write what a run has answered to its state file; nothing where something would be tried again.

    Raises:
        OutputError: it cannot be written.
    """
    if any(map(is_transient, ready.store.of(Record))):  # it is not written
        return
    rows, (of, _) = result.recorded.rows, _questions(ready)
    record = AnswerRecord(
        of=of,
        shipped=result.shipped,
        placement=StoredPlacement.of(result.placement),
        ratio=result.ratio,
        notes=result.notes,
        trials=tuple(map(_packed, result.history)),
        summary=_lasting(result.summary),
        files=dict(_files(ready)),
        units=tuple(row for row in rows if isinstance(row, UnitPrice)),
        groups=tuple(row for row in rows if isinstance(row, GroupOutcome)),
    )
    if ready.store.get(AnswerRecord, of) != record:
        ready.store.put(record)


def recalled(ready: Ready) -> Result | None:
    """What the same command has answered before; None if it has not, or if its files are not as it left them."""
    found = (ready.store.get(AnswerRecord, of) for of in _questions(ready))
    if (record := next(filter(None, found), None)) is None:
        return None
    try:
        summary = parsed_json((ready.output.path / SUMMARY).read_text(encoding="utf-8"))
        files = dict(_files(ready))
    except (OSError, ValueError, QdqtuneError):
        return None
    if files != record.files or not isinstance(summary, dict) or _lasting(summary) != record.summary:
        return None
    history = _history(record.trials, ready.store)
    if history is None:
        return None
    ready.observer.stage("this run has finished before: nothing is measured again")
    recorded = Recorded(record.units or record.groups)
    return Result(record.shipped, record.placement.placement, record.ratio, summary, history, record.notes, recorded)


def _questions(ready: Ready) -> tuple[str, str]:
    """Digests of all settings that matter and of what they refer to: as was asked, and without a limit of time, as an
    answer that had no limit answers it as well."""
    settings = ready.settings
    asked = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in UNASKED}
    more = (path for path in (settings.qdq_baseline, settings.pattern_cache) if path is not None and path.is_file())
    asked |= {
        "deploy_threads": settings.thread_counts,
        "metric": ready.evaluation.digest if ready.evaluation else None,
        "files": content_digest([*files_of(settings.model), *more]),
    }
    bounded, free = (
        hashlib.sha256(json.dumps(plain({**asked, **limit}, "deterministic")).encode()).hexdigest()[:16]
        for limit in ({"time_budget": settings.time_budget}, {"time_budget": None})
    )
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
            yield name, "" if place in (REGION_MODELS, PARTS, PROGRESS) else content_digest([path])
    if (patterns := pattern_cache_of(ready.settings.state)).is_file():
        yield "pattern cache", content_digest([patterns])


def _lasting(summary: Mapping[str, Any]) -> str:
    """16 hex digits of all that summary.json holds, however long the run took."""
    kept = {name: isinstance(v, int | float) if name.endswith("seconds") else v for name, v in summary.items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _packed(trial: Trial) -> AnsweredTrial:
    proposal = trial.proposal
    return AnsweredTrial(
        job_of(trial.placement, trial.against),
        proposal.origin,
        proposal.pattern,
        proposal.predicted,
        proposal.wants_layers,
        trial.metric,
        trial.holds,
        trial.accepted,
    )


def _history(answered: tuple[AnsweredTrial, ...], store: Store) -> tuple[Trial, ...] | None:
    """The trials; None if the store does not have one."""
    placements = {Placement().digest: Placement()}
    trials = []
    for number, told in enumerate(answered, 1):
        record = store.get(TrialRecord, told.of)
        if record is None or record.against not in placements:
            return None
        placement = record.placement.placement
        placements[placement.digest] = placement
        proposal = Proposal(told.origin, placement, told.pattern, told.predicted, told.wants_layers)
        trial = remembered(number, proposal, placements[record.against], record)
        trials.append(replace(trial, metric=told.metric, holds=told.holds, accepted=told.accepted))
    return tuple(trials)
