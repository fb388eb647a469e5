"""A finished run read back from its folder: what was tried, in order, and what came of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qdqtune.errors import BadOption, BadState, parsed_json, reading
from qdqtune.measurement.limits import Limits, wins
from qdqtune.measurement.timing import MOST_PAIRS, PAIRS, Plan
from qdqtune.placement.files import read_placement_file
from qdqtune.tuning.bench import trial_of
from qdqtune.tuning.folder import PLACEMENT, RUN, SUMMARY
from qdqtune.tuning.forms import DIARY, fits
from qdqtune.tuning.forms import SUMMARY as SUMMARY_FORM
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import Record, read_records, unpack_layers, unpack_placement, unpack_result
from qdqtune.types import Layer, Measurement, Placement, Trial


@dataclass(frozen=True)
class Left:
    """What a finished run has left: its summary, and what its state file holds."""

    folder: Path
    summary: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def limits(self) -> Limits:
        """What candidates had to hold."""
        told = self.summary
        return Limits(
            told.get("min_sqnr_db"), told.get("max_drop"), told.get("metric_before"), told.get("min_agreement")
        )

    @property
    def here(self) -> Mapping[str, Any]:
        """The times and the ratio of what ships at the number of threads that the search and its layers ran with."""
        rows, threads = self.summary.get("by_threads", ()), self.summary["engine"].get("threads")
        return next((row for row in rows if str(row["threads"]) == threads), self.summary)

    @property
    def float_ms(self) -> float:
        """What the float model took that pairs were placed in, as rounds have measured it: the user's file, or what
        rewrites have made of it."""
        gave = self.summary.get("rewrites", {}).get("gave")
        if gave is None:
            return float(self.here["baseline_ms"])
        has_pairs = self.summary.get("edges") or self.summary.get("weights")
        return float(gave * self.here["baseline_ms"] if has_pairs else self.here["final_ms"])

    @cached_property
    def float_layers(self) -> tuple[Layer, ...]:
        """The layers of the float build. Inferences that are profiled take longer than others: their times are shares
        of what rounds have measured, and add up to it."""
        layers = next((unpack_layers(r["layers"]) for r in self.records if r["key"] == "layers"), ())
        told = sum(layer.time_ms or 0.0 for layer in layers)
        if not told:
            return layers
        scale = self.float_ms / told
        return tuple(replace(x, time_ms=None if x.time_ms is None else scale * x.time_ms) for x in layers)

    @property
    def plan(self) -> Plan:
        """How candidates were judged: the fingerprint holds the plan as it prints itself."""
        try:
            call = ast.parse(self.fingerprint["rounds"], mode="eval").body
            keywords = call.keywords if isinstance(call, ast.Call) else []
            return Plan(**{k.arg: ast.literal_eval(k.value) for k in keywords if k.arg})
        except (KeyError, SyntaxError, TypeError, ValueError) as error:
            raise BadState(f"the state file of {self.folder} does not say how candidates were judged") from error


def read_left(folder: Path, state: Path | None = None) -> Left:
    """Read the summary and the state file, which `state` names where it lies elsewhere.

    Raises:
        BadOption: the folder holds no finished run.
        BadState: its state file is damaged, or missing.
    """
    summary = _json(folder / SUMMARY)
    if not summary:
        if not folder.is_dir():
            raise BadOption(f"there is no folder {folder}: name the output folder of a finished qdqtune tune")
        raise BadOption(f"{folder} holds no finished run: let qdqtune tune write to it, and come to its end")
    if not fits(summary, SUMMARY_FORM):
        raise BadOption(f"{folder / SUMMARY} is not what a run has written: tune again, or restore it")
    state = state or Path(summary.get("state_file") or folder / STATE)
    if not state.is_file():
        raise BadState(f"{folder} is explained by its state file, and {state} is not there: name it with --state-file")
    with reading(state, BadState):
        head, *records = read_records(state) or [{}]
    if head.get("key") != "run":
        raise BadState(f"{state} is no state file: name that of {folder} with --state-file")
    return Left(folder, summary, head["fingerprint"], tuple(records))


@dataclass(frozen=True)
class Finished:
    """A run that has ended. `told` is run.json, empty for runs of versions that wrote none."""

    left: Left
    told: Mapping[str, Any]
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

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.left.folder

    @property
    def summary(self) -> Mapping[str, Any]:
        """Its summary.json."""
        return self.left.summary


def read_run(folder: Path) -> Finished:
    """Read a finished run.

    Raises:
        BadOption: the folder holds none.
        BadState: its state file is damaged.
    """
    left, told = read_left(folder), _json(folder / RUN)
    if not fits(told, DIARY):
        raise BadOption(f"{folder / RUN} is not what a run has written: tune again, or restore it")
    records = {record["key"]: record for record in left.records}
    plan = left.plan
    proven = replace(plan, looks=tuple(told["plan"]["proof"])) if "plan" in told else plan
    shipped = left.summary["shipped"] == "tuned"
    final = read_placement_file(folder / PLACEMENT).placement if shipped else Placement()
    history = tuple(_history(records, told, final, plan, left.limits))
    kept = records.get(f"layers:{final.digest}", {}).get("layers")
    reported = (t.layers for t in reversed(history) if t.placement == final and t.layers)
    return Finished(
        left,
        told,
        plan,
        proven,
        history,
        final,
        tuple(_proof(records, final, left.summary)),
        left.float_layers,
        unpack_layers(kept) if kept else next(reported, ()),
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


def _history(
    records: Mapping[str, Record], told: Mapping[str, Any], final: Placement, plan: Plan, limits: Limits
) -> Iterator[Trial]:
    rows = told.get("trials") or [{"key": key} for key in records if key.startswith("trial:")]
    rows = [row for row in rows if row["key"] in records]
    known = {p.digest: p for row in rows if (p := unpack_placement(records[row["key"]]["placement"]))}
    known[Placement().digest] = Placement()
    followed = {records[row["key"]]["against"] for row in rows} | {final.digest}
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
        found = [records.get(f"{kind}:{final.digest}:{number}") for number in range(MOST_PAIRS)]
        measured = [m for record in found if record and isinstance(m := unpack_result(record), Measurement)]
        if len(measured) >= (1 if kind == "front" else PAIRS):  # where points stand together, one may do
            yield from measured
            return
