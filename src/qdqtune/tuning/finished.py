"""A finished run read back from its folder: what was tried, in order, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdqtune.errors import BadOption, parsed_json, reading
from qdqtune.measurement.limits import Limits, wins
from qdqtune.measurement.timing import Plan
from qdqtune.placement.files import read_placement_file
from qdqtune.tuning.bench import trial_of
from qdqtune.tuning.folder import PLACEMENT, RUN, SUMMARY
from qdqtune.tuning.forms import DIARY, fits
from qdqtune.tuning.forms import SUMMARY as SUMMARY_FORM
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import Record, read_records, unpack_layers, unpack_placement, unpack_result
from qdqtune.types import Layer, Measurement, Placement, Trial


@dataclass(frozen=True)
class Finished:
    """A run that has ended. `told` is run.json, empty for runs of versions that wrote none."""

    folder: Path
    summary: Mapping[str, Any]
    told: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    plan: Plan
    proof_plan: Plan
    history: tuple[Trial, ...]
    final: Placement
    proof: tuple[Measurement, ...]
    """The rounds of what ships against the float model, a pair of builds each; empty where nothing is proven."""
    float_layers: tuple[Layer, ...]
    final_layers: tuple[Layer, ...]
    alone: Mapping[str, float]
    """What rounding each tensor alone does: power of the error over that of the output. Empty if it was not asked."""


def read_run(folder: Path) -> Finished:
    """Read a finished run.

    Raises:
        BadOption: the folder holds none.
        BadState: its state file is damaged.
    """
    summary, told = _json(folder / SUMMARY), _json(folder / RUN)
    if not summary:
        raise BadOption(f"{folder} holds no finished run: run tune first")
    for name, content, form in ((SUMMARY, summary, SUMMARY_FORM), (RUN, told, DIARY)):
        if not fits(content, form):
            raise BadOption(f"{folder / name} is not what a run has written: tune again, or restore it")
    state = Path(summary.get("state_file") or folder / STATE)
    if not state.is_file():
        raise BadOption(f"{folder} has lost its state file {state}, which holds what was measured")
    head, *rest = read_records(state)
    records = {record["key"]: record for record in rest}
    plan, proof_plan = _plans(told, head["fingerprint"])
    final = read_placement_file(folder / PLACEMENT).placement if summary["shipped"] == "tuned" else Placement()
    history = tuple(_history(records, told, final, plan, summary))
    return Finished(
        folder,
        summary,
        told,
        head["fingerprint"],
        plan,
        proof_plan,
        history,
        final,
        tuple(_proof(records, final, summary)),
        unpack_layers(records.get("layers", {}).get("layers", [])),
        _final_layers(records, history, final),
        next((dict(r["alone"]) for key, r in records.items() if key.startswith("noise:") and "failure" not in r), {}),
    )


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file of ours holds; nothing where there is none.

    Raises:
        BadOption: it is damaged.
    """
    if not path.exists():
        return {}
    try:
        with reading(path):
            content: dict[str, Any] = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadOption(f"{path} is damaged: it is no JSON") from error
    return content


def _plans(told: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> tuple[Plan, Plan]:
    """How candidates and the proof were judged. Versions that wrote no diary used the usual error."""
    if "plan" in told:
        how = told["plan"]
        plan = Plan(tuple(how["looks"]), how["error"], how["slot_seconds"], how["warmup"])
        return plan, replace(plan, looks=tuple(how["proof"]))
    looks = re.search(r"looks=\(([\d, ]+)\)", str(fingerprint.get("rounds", "")))
    plan = Plan(tuple(int(n) for n in re.findall(r"\d+", looks[1]))) if looks else Plan()
    return plan, plan


def _history(
    records: Mapping[str, Record], told: Mapping[str, Any], final: Placement, plan: Plan, summary: Mapping[str, Any]
) -> Iterator[Trial]:
    rows = told.get("trials") or [{"key": key} for key in records if key.startswith("trial:")]
    rows = [row for row in rows if row["key"] in records]
    known = {p.digest: p for row in rows if (p := unpack_placement(records[row["key"]]["placement"]))}
    known[Placement().digest] = Placement()
    followed = {records[row["key"]]["against"] for row in rows} | {final.digest}
    limits = Limits(summary.get("min_sqnr_db"), None, None, summary.get("min_agreement"))
    for number, row in enumerate(rows, 1):
        record = records[row["key"]]
        if record["against"] not in known:
            continue
        placement = unpack_placement(record["placement"])
        trial = trial_of(number, record, known[record["against"]])
        holds = row["holds"] if "holds" in row else limits.is_exact_enough(trial.accuracy)
        trial = replace(trial, holds=holds, metric=row.get("metric"))
        taken = row["accepted"] if "accepted" in row else placement.digest in followed and wins(trial, plan)
        yield replace(trial, accepted=taken)


def _proof(records: Mapping[str, Record], final: Placement, summary: Mapping[str, Any]) -> Iterator[Measurement]:
    if summary["shipped"] != "tuned":
        return
    kinds = ("proof", "given") if summary.get("ratio_to_given") is not None else ("given", "proof", "front")
    for kind in kinds:
        found = [records.get(f"{kind}:{final.digest}:{number}") for number in range(2)]
        measured = [m for record in found if record and isinstance(m := unpack_result(record), Measurement)]
        if len(measured) == len(found):
            yield from measured
            return


def _final_layers(records: Mapping[str, Record], history: Sequence[Trial], final: Placement) -> tuple[Layer, ...]:
    if kept := records.get(f"layers:{final.digest}", {}).get("layers"):
        return unpack_layers(kept)
    return next((t.layers for t in reversed(history) if t.placement == final and t.layers), ())
