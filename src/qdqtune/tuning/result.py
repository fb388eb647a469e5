"""The result of a run, and the files written at its end: summary.json, run.json, placement.yaml, the pattern cache."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from qdqtune.calibration.inputs import input_specs
from qdqtune.engines.fallback import fallback
from qdqtune.errors import BadOption, BadState, EngineRefused
from qdqtune.graph.inference import FIXING, waiting_for_sizes
from qdqtune.graph.loading import growth, load, nbytes
from qdqtune.graph.model import Model
from qdqtune.graph.operators import CONTROL_FLOW
from qdqtune.numerics.accuracy import concern
from qdqtune.numerics.scores import equal_share, too_few_to_tell
from qdqtune.placement import files
from qdqtune.placement.possible import wide_tensors, wide_weights
from qdqtune.placement.reading import count_pairs
from qdqtune.search import products_left_in_float, ratios_to_float
from qdqtune.search.regions import cache
from qdqtune.system.writing import named, write_json
from qdqtune.timing.ratios import Plan, Ratio, with_ratios
from qdqtune.tuning.contexts import tuned_for
from qdqtune.tuning.deploy import copy_companions, write_kit
from qdqtune.tuning.file_race import FEWEST_SINGLES, Tail
from qdqtune.tuning.finished import read_run
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT, RUN, SUMMARY, pattern_cache_of
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.proof import Proof, write_placement_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import UNDECIDED, advise, beside_rules, rows_by_threads, rows_by_workload, slower_workloads
from qdqtune.tuning.store import Caveat, Shipped, job_of, plain
from qdqtune.tuning.summary import FORMAT, Bits, LoggedTrial, RunLog
from qdqtune.types import Layer, Placement, Trial
from qdqtune.version import __version__

NOTICEABLE = 0.02
"""Nodes that take a smaller share of the time are not worth a note. Chosen, not measured."""


@dataclass(frozen=True)
class Result:
    """The placement that ships (empty without an improvement), summary.json, and every trial.

    `ratio` is the latency of the final model divided by float's, None if nothing faster was found. `shipped` says what
    optimized_final.onnx is: the tuned model, the float model, or a copy of the user's file.
    """

    shipped: Shipped
    placement: Placement
    ratio: Ratio | None
    summary: Mapping[str, Any]
    history: tuple[Trial, ...]
    notes: tuple[str, ...]

    @property
    def improved(self) -> bool:
        """Whether the shipped model is faster than the float model beyond noise."""
        return self.shipped == "tuned"

    @property
    def unmet(self) -> bool:
        """Whether candidates were or may be faster, but all of them miss the accuracy limits."""
        return self.summary["constraint_met"] is False


def conclude(
    run: Run,
    history: Sequence[Trial],
    proof: Proof,
    *,
    mode_notes: Sequence[str],
    front: Sequence[Mapping[str, Any]] | None,
    shortfall: str | None,
    log: RunLogWriter,
) -> Result:
    """Write the results of a run to its output folder. `history` includes trials of the front, and `front` its rows for
    summary.json, if asked for. `mode_notes` are the mode's notes, `shortfall` is a message if time was short."""
    settings, subject = run.settings, run.subject
    write_placement_of(proof.placement, settings.output_dir / PLACEMENT, run)
    schemes = cache.cache_of(
        subject.tuned,
        (proof.placement, proof.ratio.median if proof.ratio else 1.0),
        history,
        settings.plan,
        minimum_distance=settings.config.pattern_cache_minimum_distance,
        maximum_entries=settings.config.pattern_cache_max_entries_per_pattern,
    )
    files.write_yaml(pattern_cache_of(settings.state), cache.content_of(schemes), "record")
    summary = summary_of(history, proof, run) | ({} if front is None else {"front": front})
    final, given = settings.output_dir / FINAL, settings.model
    summary["file_bytes"] = {"baseline": nbytes(given), "final": nbytes(final)}
    left = list(filter(None, [settings.engine.facts.unwatched, growth(given, final)]))
    summary |= _percentiles(proof, run)
    is_built = any(trial.placement == proof.in_file for trial in history)
    built = proof.in_file if is_built else Placement()
    if settings.engine.facts.source:
        layers = run.bench.layers(built)
        found = fallback(load(final), layers)
        summary["fallback"] = asdict(found)
        left.append(found.in_words())
    else:
        layers = run.bench.layers(built, run.budget.lacks)  # kept in the state file for the report
    left += spent_without_pairs(subject.model, layers)
    summary["seconds"] = round(log.seconds, 3)
    facts = [*left, *subject.notes, *mode_notes, *proof.notes, *_doubts(history, proof, run, shortfall)]
    notes = advise(facts, is_cut_short=bool(subject.hurried))
    spent, most = 1 + len(history), 1 + run.budget.builds
    ended = f"the search ended as all {most} builds were spent"
    if spent < most:
        ended = f"the search ended after {spent} of {most} builds: nothing more is predicted to gain"
    write_json(settings.output_dir / SUMMARY, summary)
    write_json(settings.output_dir / RUN, log.content(history, run, notes, shortfall or ended))
    write_kit(run, summary)
    copy_companions(run)
    return Result(
        shipped=proof.shipped,
        placement=proof.placement,
        ratio=proof.ratio,
        summary=summary,
        history=tuple(history),
        notes=notes,
    )


def earlier_result(run: Run, proof: Proof, shortfall: str | None) -> Result | None:
    """The result of an earlier session, if this one ran out of time before it proved anything as fast; else None.
    Writes the earlier model again; all other files stay.

    Of two proven results, the one whose interval (time relative to float) has the lower upper end ships: medians of
    sessions with few rounds would favour the luckier one.
    """
    settings, folder = run.settings, run.settings.output_dir
    is_judged = not settings.withholds_pairs and not (settings.has_metric and run.limits.before is None)
    if shortfall is None or settings.front or not is_judged or not (folder / SUMMARY).is_file():
        return None
    try:
        earlier = read_run(folder)
        summary, trial, history = earlier.summary, earlier.trial, earlier.history
        notes = [note for note in earlier.log.notes if note != earlier.log.ended]
    except (BadOption, BadState):  # somebody has changed or removed its files
        return None
    ratio, is_own = summary["ratio"], summary["shipped"] == "tuned" and "front" not in summary
    if not is_own or trial is None or ratio is None:
        return None
    before, now = ratio, proof.time_to_float or 1.0
    if proof.ratio is not None:
        before, now = summary["ratio_high"] or 1.0, proof.ratio.high or 1.0
    if before >= now:
        return None
    trial = replace(trial, holds=run.limits.on_outputs(trial.accuracy))
    if not run.limits.with_metric(trial, run.bench.metric).holds:
        return None
    run.candidates.write_whole(trial.placement, folder / FINAL)
    told = "what ships is what an earlier session has proven: in its time this one has proven nothing as fast"
    return Result(
        shipped="tuned",
        placement=trial.placement,
        ratio=Ratio(ratio, summary["ratio_low"], summary["ratio_high"]),
        summary=plain(summary),
        history=history,
        notes=advise([*notes, shortfall, told], is_cut_short=bool(run.subject.hurried)),
    )


def _doubts(history: Sequence[Trial], proof: Proof, run: Run, shortfall: str | None) -> Iterator[str]:
    settings, standings = run.settings, proof.contexts
    machine = settings.machine
    if machine.where:
        chip = run.runner.describe().get("device", "unknown")
        yield f"built, run and timed on {machine.where} ({chip}, {machine.cores} cores), calibrated here"
    shipped = None if proof.trial is None or not settings.has_samples else proof.trial.accuracy
    yield from slower_workloads(standings, run.subject.mix)
    doubts = [None if shipped is None else concern(shipped), shortfall]
    if shipped is not None and run.limits.min_agreement is not None:
        doubts.append(too_few_to_tell(shipped, run.limits.min_agreement))
    for trial in history:
        if left := products_left_in_float(trial, run.subject.shaped, settings.plan):
            ratio = ratios_to_float(history, settings.plan).get(trial.placement)
            slower = f" ({1 / ratio:.2f}x the speed of float)" if ratio else ""
            doubts.append(
                f"the engine ran all {left} products with pairs of candidate {trial.number} in float"
                f"{slower}: it has no 8-bit kernels for them, so no other pairs were tried"
            )
            break
    if settings.is_timed and proof.ratio is None:
        doubts.append(best_undecided(history, settings.plan))
    if proof.shipped == "tuned" and run.subject.rules_placement:
        doubts.append(beside_rules(proof.in_file, run.subject.rules_placement, history, settings.plan))
    yield from filter(None, doubts)


def spent_without_pairs(model: Model, layers: Sequence[Layer]) -> Iterator[str]:
    """Notes if nodes with bodies, or nodes that would be constants with fixed sizes, take a noticeable part of the
    time."""
    bodies = {node.name: node.op for node in model.nodes if node.op in CONTROL_FLOW}
    constant = {node.name for node in waiting_for_sizes(model)}
    whole = sum(layer.time_ms or 0.0 for layer in layers)
    for names, on in (
        (set(bodies), f"in the bodies of {', '.join(sorted(set(bodies.values())))}, where no pair can be"),
        (constant, f"on nodes that read constants and sizes alone: {FIXING}"),
    ):
        spent = sum(layer.time_ms or 0.0 for layer in layers if layer.nodes and names.issuperset(layer.nodes))
        if spent > NOTICEABLE * whole:
            yield f"{spent:.3g} of {whole:.3g} ms are spent {on}"


def summary_of(history: Sequence[Trial], proof: Proof, run: Run) -> dict[str, Any]:
    """The content of summary.json, without the front and the seconds of the run."""
    settings, subject, final, tuned = run.settings, run.subject, proof.in_file, proof.ratio
    accuracy = None if proof.trial is None else proof.trial.accuracy
    description, is_judged, is_tuned = run.runner.describe(), settings.has_samples, proof.shipped == "tuned"
    is_changed = is_tuned and (bool(final) or subject.precision != "fp32")  # its outputs may differ from the user's
    bits = Bits(
        tensors=len({edge.tensor for edge in final.edges} - subject.shaped.constants.keys()),
        tensors_16=len(wide_tensors(subject.shaped, final)),
        weights_16=len(wide_weights(subject.shaped, final)),
    )
    rewrites: dict[str, Any] = {"folded": subject.rewrites.folded, "names": list(subject.rewrites.names)}
    is_only_rewritten = subject.precision == "fp32" and not settings.fix_inputs  # else these gave a part
    if subject.rewrites.names and tuned is not None and is_only_rewritten:
        by_placement = proof.to_rewritten.median if proof.to_rewritten else 1.0
        rewrites |= {"gave": tuned.median / by_placement, "placement_gave": by_placement}
    fed = subject.mix[0].inputs if settings.is_timed and len(subject.mix) == 1 else {}
    open_inputs = [spec.name for spec in input_specs(subject.model) if None in spec.shape and spec.name in fed]
    summary = {
        "format": FORMAT,
        "model": named(str(settings.model)),
        "engine": description | ({"machine": settings.machine.where} if settings.machine.where else {}),
        "tuned_for": tuned_for(settings.thread_counts, is_default=settings.threads is None),
        "mode": settings.mode,
        "state_file": None if settings.state_file is None else str(settings.state.absolute()),
        "rewrites": rewrites,
        "shipped": proof.shipped,
        "timed": settings.is_timed,
        **({"timed_at": {name: list(fed[name].shape) for name in open_inputs}} if open_inputs else {}),
        "accuracy": "measured" if is_judged else "not measured",
        "unchecked": is_changed and not is_judged and not settings.has_metric,
        "baseline_ms": None if proof.float_seconds is None else proof.float_seconds * 1e3,
        "final_ms": None if proof.final_seconds is None else proof.final_seconds * 1e3,
        "ratio": proof.time_to_float,
        "ratio_low": tuned.low if tuned else None,
        "ratio_high": tuned.high if tuned else None,
        "ratio_to_given": proof.to_given.median if tuned and proof.to_given else None,
        "by_threads": rows_by_threads(proof.contexts),
        **({"workloads": rows_by_workload(proof.contexts, subject.mix)} if len(subject.mix) > 1 else {}),
        "builds": 1 + len(history),
        "proof_builds": proof.builds,
        "trials": len(history),
        "pairs": count_pairs(final),
        **({"weights": dict(Counter(s.name for s in final.weight_formats.values()))} if final.weight_only else {}),
        **({} if subject.numbers.wide is None else {"bits": bits}),
        "edges": len(final),
        "output_sqnr_db": None if accuracy is None or not is_judged else accuracy.sqnr_db,
        "output_accuracy": None if accuracy is None or not is_judged else asdict(accuracy),
        "fastest_without_limits": _fastest(history, proof, run) if settings.is_timed else None,
        "accuracy_samples": len(subject.accuracy) if is_judged else 0,
        "accuracy_held_out": subject.prepared.is_held_out,
        **({"calibration_cut_short": list(subject.hurried)} if subject.hurried else {}),
        "scores": run.bench.floats.scores.as_json(),
        "scores_told": run.bench.floats.scores.told,
        "seed": settings.seed,
        "versions": {
            "qdqtune": __version__,
            "onnx": version("onnx"),
            "python": platform.python_version(),
            settings.engine.name: description.get("version", ""),
        },
    }
    metric = run.limits.before
    if proof.shipped == "given" and settings.from_qdq:
        metric = proof.metric
    elif settings.has_metric and final:
        try:
            metric = run.bench.metric(final)
        except EngineRefused:
            metric = None
    return summary | run.limits.summary(history, settings.plan, metric, is_tuned=is_tuned)


def _percentiles(proof: Proof, run: Run) -> dict[str, Any]:
    """The entry of summary.json with percentiles of single inferences of the float and the tuned model, measured once,
    or why there are none. Empty if another file ships, and for several numbers of threads."""
    settings, floats, caveat = run.settings, run.bench.floats, Caveat()
    if proof.shipped != "tuned" or not settings.is_timed or len(run.racer.views) > 1:
        return {}

    def measured() -> tuple[tuple[Tail, ...], ...]:
        if run.racer.lacks(2 * floats.build_seconds + 2 * FEWEST_SINGLES * floats.seconds):
            caveat.is_hurried = True
            return ()
        has_other_float = settings.from_qdq or settings.fix_inputs
        before = settings.output_dir / BASELINE if has_other_float else settings.model
        return run.racer.tails([before, settings.output_dir / FINAL], caveat)

    key = f"tails:{proof.placement.digest}"
    tails = run.store.memo(key, tuple[tuple[Tail, ...], ...], measured, caveat)
    of_files = {name: tail for name, (tail,) in zip(("baseline", "final"), tails, strict=False)}
    if caveat.is_hurried:
        return {"percentiles_missing": "no time was left"}
    if not of_files:
        is_apart = run.runner.starts_processes
        why = "the engine times its models by itself" if is_apart else "a hundred inferences take too long"
        return {"percentiles_missing": why}
    return {"percentiles_ms": {file: asdict(tail) for file, tail in of_files.items()}}


def _fastest(history: Sequence[Trial], proof: Proof, run: Run) -> dict[str, Any] | None:
    """The row of summary.json about the fastest candidate that misses the limits, if it is faster than what ships and
    than all that meet them; else None. Without samples no pairs ship, so that all candidates count as missing the
    limits."""
    ratios, is_withheld = ratios_to_float(history, run.settings.plan), run.settings.withholds_pairs
    able = [t for t in history if t.placement in ratios and t.placement]
    missing = able if is_withheld else [t for t in able if t.holds is False]
    holding = [ratios[t.placement] for t in able if t.holds and not is_withheld]
    fastest = min(missing, key=lambda t: ratios[t.placement], default=None)
    ships = ratios.get(proof.placement) if proof.shipped == "tuned" and proof.trial is not None else None
    if fastest is None or ratios[fastest.placement] >= min([ships or proof.time_to_float or 1.0, *holding]):
        return None
    row = {"ratio": ratios[fastest.placement], "sqnr_db": None, "agreement": None}
    if is_withheld:
        missed = "accuracy was not measured, so nothing with pairs ships: give `calibration_data`, or `min_sqnr` none"
        return row | {"missed": f"{missed} to ship it unchecked"}
    close = {"sqnr_db": fastest.sqnr_db, "agreement": equal_share(fastest.accuracy)}
    return row | close | {"missed": run.limits.why_refused(fastest)}


def best_undecided(history: Sequence[Trial], plan: Plan) -> str | None:
    """If no candidate was accepted but one seemed faster: how fast it was; else None."""
    floats, able = ratios_to_float(history, plan), [t for t in history if t.holds is not False]
    seeming = [(trial, measured.scaled(floats[trial.against])) for trial, measured in with_ratios(able, plan)]
    trial, ratio = min(seeming, key=lambda pair: pair[1].median, default=(None, None))
    if trial is None or ratio is None or ratio.median >= 1 or any(t.accepted for t in history):
        return None
    return f"the best candidate, number {trial.number}, was {ratio.speedup} the speed of float; {UNDECIDED}"


# ---------------------------------------------------------------- run.json


class RunLogWriter(Silent):
    """Records when each trial ended, in seconds since this observer was made."""

    def __init__(self) -> None:
        self._begun, self._clock = datetime.now(UTC), time.monotonic()
        self._times: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._clock

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self._times[trial.number] = round(self.seconds, 2)

    def content(self, history: Sequence[Trial], run: Run, notes: tuple[str, ...], ended: str) -> Mapping[str, Any]:
        settings = run.settings
        log = RunLog(
            begun=self._begun.isoformat(timespec="seconds"),
            command=settings.command,
            calibration_data=settings.calibration_data,
            engine=settings.engine,
            calibration=f"{settings.calibration.method} on {run.subject.prepared.samples.origin}",
            machine=settings.machine,
            plan=settings.plan,
            proof=settings.proof,
            trials=tuple(
                LoggedTrial(
                    of=job_of(trial),
                    accepted=trial.accepted,
                    holds=trial.holds,
                    metric=trial.metric,
                    seconds=self._times.get(trial.number),
                )
                for trial in history
            ),
            notes=notes,
            seconds=round(self.seconds, 2),
            ended=ended,
        )
        values: Mapping[str, Any] = plain(log)
        return values
