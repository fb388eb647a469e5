"""What the records of a state file look like: one may be whole by its checksums, and hold what no run has written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from qdqtune.calibration.scales import Range
from qdqtune.types import Failure, LayerKind, Measurement


@dataclass(frozen=True)
class ListOf:
    """A list of values of one form."""

    item: Form


@dataclass(frozen=True)
class MapOf:
    """Names, all with values of one form."""

    value: Form


@dataclass(frozen=True)
class OneOf:
    """A value of any of these forms."""

    forms: tuple[Form, ...]


Form = type | None | str | tuple["Form", ...] | Mapping[str, "Form"] | ListOf | MapOf | OneOf
"""A type (float: any finite number), None, a word, a list of just these, the fields of a map (with "?" behind the name:
it may be missing; others may be there), or one of the above."""

MAYBE_NUMBER = OneOf((float, None))
EDGES = ListOf(OneOf(((str, str, int), (str, str, int, str))))
KIND = OneOf(get_args(LayerKind))
LAYERS = ListOf((str, ListOf(str), str, MAYBE_NUMBER, KIND))
STAGE = OneOf(get_args(get_type_hints(Failure)["stage"]))
FAILED: Mapping[str, Form] = {"failure": {"stage": STAGE, "reason": str, "log?": str}}
ROUNDS: Mapping[str, Form] = {"a": ListOf(float), "b": ListOf(float)}
SAMPLES: Mapping[str, Form] = {"samples": {**ROUNDS, "parts?": ListOf(ROUNDS)}}
RESULT = OneOf((SAMPLES, FAILED))
SHARES, RATIOS = ("agreement", "top1"), ("sqnr_db", "lowest_db", "highest_db")
MOST_DB = 10_000
"""More than any ratio of numbers: its power is none."""

ACCURACY: Mapping[str, Form] = {
    "sqnr_db": MAYBE_NUMBER,
    "accuracy?": OneOf(
        (
            {f"{name}?": MAYBE_NUMBER for name in (*RATIOS, *SHARES)} | {"samples?": int},
            None,
        )
    ),
}
PROVEN = OneOf(({**SAMPLES, "files?": (str, str)}, {**FAILED, "files?": (str, str)}))
PROPOSAL: Form = {"origin": str, "pattern": str, "predicted": MAYBE_NUMBER, "wants_layers": bool}

STANDING: Mapping[str, Form] = {
    "verdict": OneOf(("faster", "slower", "undecided")),
    **dict.fromkeys(("ratio", "baseline_ms", "final_ms"), float),
    **dict.fromkeys(("low", "high"), MAYBE_NUMBER),
}
BY_THREADS = ListOf({"threads": int, **STANDING})
"""How a result stands at each number of threads."""

NAMED: Mapping[str, Form] = {"name": str, "share": float}
BY_WORKLOAD = OneOf((ListOf({**NAMED, **STANDING}), ListOf(NAMED)))
"""How it stands on each of several workloads; without figures where nothing was proven."""

POINT: Form = {
    **dict.fromkeys(("ms", "ratio"), float),
    **dict.fromkeys(("low", "high", "sqnr_db", "agreement", "metric"), MAYBE_NUMBER),
    **dict.fromkeys(("name", "content?"), str),
    **dict.fromkeys(("pairs", "edges?"), int),
    "weights?": MapOf(int),
    "holds_limits": bool,
    "by_threads?": BY_THREADS,
    "workloads?": BY_WORKLOAD,
}
"""A row of the front in summary.json."""

TRIED: Form = {
    "name": str,
    "form": OneOf(("float", "pairs")),
    "ratio": MAYBE_NUMBER,
    **dict.fromkeys(("low?", "high?"), MAYBE_NUMBER),
    "kept": bool,
}
"""A rewrite that was measured."""

SUMMARY: Form = {
    **dict.fromkeys(("model", "mode"), str),
    "shipped": OneOf(("tuned", "baseline", "given")),
    **dict.fromkeys(("baseline_ms", "final_ms", "ratio", "seconds"), float),
    **dict.fromkeys(("ratio_low", "ratio_high", "output_sqnr_db"), MAYBE_NUMBER),
    **dict.fromkeys(("builds", "trials", "pairs", "seed"), int),
    **{f"{name}?": MAYBE_NUMBER for name in ("metric_before", "metric_after", "min_sqnr_db", "min_agreement")},
    "engine": MapOf(str),
    "versions": MapOf(str),
    "state_file?": OneOf((str, None)),
    "constraint_met?": OneOf((bool, None)),
    "front?": OneOf((ListOf(POINT), None)),
    "by_threads?": BY_THREADS,
    "rewrites?": {
        **dict.fromkeys(("gave?", "placement_gave?"), float),
        **{"names?": ListOf(str), "tried?": ListOf(TRIED)},
    },
    "workloads?": BY_WORKLOAD,
    "fastest_without_limits?": OneOf(({"ratio": float, "sqnr_db": MAYBE_NUMBER}, None)),
    "accuracy_samples?": int,
    "accuracy_held_out?": bool,
}
"""What is read of summary.json."""

DIARY: Form = {
    **dict.fromkeys(("begun?", "calibration?"), str),
    **dict.fromkeys(("command?", "notes?"), ListOf(str)),
    "settings?": MapOf(object),
    "machine?": {"cores": int, "load": ListOf(MAYBE_NUMBER), "system": str},
    "plan?": {"looks": ListOf(int), "proof": ListOf(int), "error": float, "slot_seconds": float, "warmup": int},
    "stages?": ListOf((str, float)),
    "seconds?": float,
    "trials?": ListOf(
        {
            **dict.fromkeys(("key", "origin"), str),
            **dict.fromkeys(("predicted?", "metric?", "seconds?"), MAYBE_NUMBER),
            **dict.fromkeys(("accepted?", "replayed?"), bool),
            "holds?": OneOf((bool, None)),
        }
    ),
}
"""What is read of run.json, which early versions did not write."""

PRICES: Mapping[str, Form] = {
    "units": ListOf((str, str, str, str, float)),
    "conversions": ListOf((str, str, float, float)),
    "splits": ListOf((str, ListOf(int), float)),
    "per_consumer": bool,
    "found?": OneOf((EDGES, None)),
}
"""What earlier runs have learned of prices, and the placement that one of them has found for the model at hand."""

FORMS: Mapping[str, Form] = {
    "run": {"version": int, "candidates?": int, "fingerprint": MapOf(object)},
    "ranges": {
        "activations": MapOf((float, float)),
        "weights": MapOf(ListOf(float)),
        "shifts?": MapOf(ListOf(float)),
        "method?": str,
        "is_given?": bool,
        "factors?": ListOf((str, str, int, ListOf(int), ListOf(int))),
    },
    "trial": {
        "origin": str,
        "pattern": str,
        "predicted?": MAYBE_NUMBER,
        "against": str,
        "placement": EDGES,
        **ACCURACY,
        "result": RESULT,
        "check": OneOf((RESULT, None)),
        "layers?": OneOf((LAYERS, None)),
    },
    "metric": OneOf(({"value": float}, FAILED, {"failure": str})),
    "layers": OneOf(({"layers": LAYERS}, FAILED)),
    "repeated": OneOf((ACCURACY, FAILED)),
    "rewrite": OneOf(({**SAMPLES, "builds": int}, {**FAILED, "builds": int})),
    "rewrites": {"tried": ListOf(TRIED), "builds": int, "notes": ListOf(str)},
    "batch": {"width": int, "learning?": int},
    "prices": PRICES,
    "noise": {"alone": MapOf(float)},
    "foretold": OneOf((ACCURACY, FAILED)),
    "given": PROVEN,
    "proof": PROVEN,
    "front": PROVEN,
    "seen": OneOf(({**ACCURACY, "layers?": LAYERS}, FAILED)),
    "part": OneOf(({"layers": LAYERS}, FAILED)),
    "part:": {"result": OneOf((RESULT, None)), "layers": LAYERS},
    "finished": {
        "shipped": OneOf(("tuned", "baseline", "given")),
        "placement": EDGES,
        "ratio": OneOf(({"median": float, "low": MAYBE_NUMBER, "high": MAYBE_NUMBER}, None)),
        "notes": ListOf(str),
        "trials": ListOf(
            {"job": str, "proposal": PROPOSAL, "metric": MAYBE_NUMBER, "holds": OneOf((bool, None)), "accepted": bool}
        ),
        "rows": MapOf(ListOf(MapOf(object))),
        "summary": str,
        "files": MapOf(str),
    },
}
"""What records hold besides their keys, by what stands in front of the first colon of these. "part:" are those of a
scheme of a part, whose keys have another colon."""


def rounds_of(samples: Mapping[str, Any]) -> Measurement:
    """The measurement that a record holds.

    Raises:
        ValueError: it holds none.
    """
    parts = tuple(rounds_of(part) for part in samples.get("parts", ()))
    return Measurement(tuple(samples["a"]), tuple(samples["b"]), parts)


def is_whole(record: object) -> bool:
    """Whether a record is one that a run may have written. Those of kinds that nobody knows are never asked for."""
    if not isinstance(record, dict) or not isinstance(key := record.get("key"), str):
        return False
    kind = key.partition(":")[0]
    if kind == "part" and key.count(":") > 1:
        kind = "part:"
    return kind not in FORMS or (fits(record, FORMS[kind]) and _makes_sense(kind, record))


def fits(value: Any, form: Form) -> bool:
    """Whether a value that JSON has given is of a form."""
    match form:
        case OneOf(forms):
            return any(fits(value, one) for one in forms)
        case ListOf(item):
            return isinstance(value, list) and all(fits(v, item) for v in value)
        case MapOf(inner):
            return isinstance(value, dict) and all(fits(v, inner) for v in value.values())
        case tuple():
            return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
        case Mapping():
            return isinstance(value, dict) and all(_holds(value, name, inner) for name, inner in form.items())
        case type():
            return _is_a(value, form)
    return bool(value == form)


def _holds(value: Mapping[str, Any], name: str, form: Form) -> bool:
    plain = name.removesuffix("?")
    return fits(value[plain], form) if plain in value else plain != name


def _is_a(value: object, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _makes_sense(kind: str, record: Mapping[str, Any]) -> bool:
    """Whether the values that records stand for can be made of them."""
    try:
        for part in (record, record.get("result"), record.get("check")):
            if isinstance(part, dict) and fits(part, SAMPLES):
                rounds_of(part["samples"])
        for ends in record["activations"].values() if kind == "ranges" else ():
            Range(*ends)
    except ValueError:
        return False
    if not fits(record, ACCURACY):
        return True
    known = record.get("accuracy") or {}
    ratios = (record["sqnr_db"], *(known.get(name) for name in RATIOS))
    if any(ratio is not None and abs(ratio) > MOST_DB for ratio in ratios):
        return False
    return all(known.get(share) is None or 0 <= known[share] <= 1 for share in SHARES)
