"""The proof: files that may ship, and points of a front, are timed against the user's file on fresh builds, under each
condition of the deployment. `shipping` decides what is compared next, and what ships."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.errors import BaselineFailed, EngineRefused, writing
from qdqtune.graph.loading import data_files, nbytes
from qdqtune.graph.saving import data_of
from qdqtune.numerics.scores import Score, equal_share
from qdqtune.placement import files
from qdqtune.placement.reading import count_pairs
from qdqtune.search import best_of, ratios_to_float
from qdqtune.search.front import TARGET_POINTS, Tradeoff, is_too_noisy, spread, unbeaten, undominated
from qdqtune.system.writing import atomic_write, rename_all
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import FEWEST_BUILDS, Ratio
from qdqtune.tuning import shipping
from qdqtune.tuning.bench import UNTIMED
from qdqtune.tuning.folder import BASELINE, FINAL, FRONT
from qdqtune.tuning.run import HOPED_RATIO, TOO_SHORT, Run
from qdqtune.tuning.shipping import Attempt, Compared, Finalists, first_faster, is_proven, notes_of, rows_by_threads
from qdqtune.tuning.store import Shipped, proof_key
from qdqtune.types import EQUAL_DB, Placement, Proposal, Trial, noise_of


@dataclass(frozen=True)
class Proof:
    """What ships ("tuned", "baseline", or "given": a copy of the user's file), and how it compares with the float
    model.

    `in_file` has the pairs and weight formats in the shipped file, the user's own included, `trial` the measurements of
    exactly this placement, if any. If the user's Q/DQ file ships, both are of that file, and `metric` is its user
    metric.

    `ratio` is the shipped file's latency divided by the float model's; `to_given` compares it with the user's file, if
    that has pairs or inputs that were fixed; `to_rewritten` compares it with the rewritten model without pairs. All are
    None without a proof. Seconds per inference are medians, None if not timed. `contexts` compares with float under
    each condition.
    """

    shipped: Shipped
    ratio: Ratio | None = None
    to_given: Ratio | None = None
    to_rewritten: Ratio | None = None
    float_seconds: float | None = None
    final_seconds: float | None = None
    notes: tuple[str, ...] = ()
    builds: int = 0
    contexts: tuple[Compared, ...] = ()
    in_file: Placement = field(default_factory=Placement)
    trial: Trial | None = None
    metric: Score | None = None

    @property
    def placement(self) -> Placement:
        """The placement of the tuned model; empty if that does not ship."""
        return self.in_file if self.shipped == "tuned" else Placement()

    @property
    def time_to_float(self) -> float | None:
        """Latency of what ships divided by that of the float model, proven or not; None if it was not timed."""
        if self.ratio is not None:
            return self.ratio.median
        if self.final_seconds is None or self.float_seconds is None:
            return None
        return self.final_seconds / self.float_seconds


def chosen_by_rule(history: Sequence[Trial], run: Run) -> Proof:
    """Write what ships from a simulator, where nothing is timed: the placement with the least estimated cost within the
    limits, or the float model."""
    placement = Placement() if run.settings.withholds_pairs else best_of(history)
    run.candidates.write_whole(placement, run.settings.output_dir / FINAL)
    run.given.check()
    shipped: Shipped = "tuned" if placement else "baseline"
    return Proof(shipped, in_file=placement, trial=trial_of(placement, history))


def prove(history: Sequence[Trial], run: Run) -> Proof:
    """Write the files that may ship, and race them against the user's file until one is proven faster.

    If the float model was rewritten, it takes part without pairs and may ship as well. If none is proven faster, the
    user's file ships, or the float model if the user's own pairs miss the limits.
    """
    settings, folder = run.settings, run.settings.output_dir
    given, metric = _given_file(run)
    pairs_hold = given is not None and given.holds is True
    queue = shipping.finalists(history, settings.plan, run.slower(history))
    may_rewrite = bool(run.subject.changes)
    if settings.withholds_pairs:  # rewrites are exact, and so is what the user asks for by name; half precision is not
        queue = shipping.Finalists()
        may_rewrite = may_rewrite and run.subject.precision in ("fp32", settings.precision)
    is_folded = bool(settings.fix_inputs) and not run.subject.rewrites.names  # what that gains is no gain of pairs
    field = Field(
        given=settings.model,
        has_other_float=settings.from_qdq or is_folded,
        beats_given=pairs_hold or is_folded,
        is_rewritten=may_rewrite,
    )
    raced = race_finished(queue, field, history, run)
    attempts, field, builds = raced.attempts, raced.field, raced.builds
    told = [
        note for attempt in attempts for note in notes_of(attempt, history, settings.model.name, run.subject.changes)
    ]
    notes = list(dict.fromkeys([*raced.notes, *told]))
    if given is not None and given.accuracy is not None and not pairs_hold:
        notes.append(f"{settings.model.name} does not hold the limits on accuracy: {run.limits.why_refused(given)}")
    won = shipping.shipped(attempts)
    if won is not None:
        if won.placement:
            file, final = unproven_file(won.placement, run), folder / FINAL
            both = [(data_of(file), data_of(final)), (file, final)]
            with writing(final):
                rename_all([(old, new) for old, new in both if old.exists()], file.with_name("replaced"))
        else:
            copy_model(folder / BASELINE, folder / FINAL)
            changes = run.subject.changes
            notes.append(f"no pair is worth its time here: what ships is the float model {changes}")
        return proof_of(won, notes, builds)
    if settings.from_qdq:
        is_given = pairs_hold
    elif is_folded:
        is_given = raced.given_to_float is not None and raced.given_to_float.ratio.verdict == "faster"
    else:
        is_given = field.given is not None
    copy_model(settings.model if is_given else folder / BASELINE, folder / FINAL)
    is_other = is_given and (field.has_other_float or bool(run.subject.changes))
    seconds = attempts[-1].to_float[0].a_seconds if attempts else run.bench.floats.seconds
    unproven = Proof(
        shipped="given" if is_other else "baseline",
        float_seconds=seconds,
        final_seconds=seconds,
        notes=tuple(notes),
        builds=builds,
    )
    if given is None or not is_other:
        return unproven
    own_seconds = None if raced.given_to_float is None else raced.given_to_float.ratio.median * seconds
    return replace(unproven, final_seconds=own_seconds, in_file=given.placement, trial=given, metric=metric)


@dataclass(frozen=True)
class Field:
    """The opponents of finalists: the user's file (`given`, None if the engine does not run it) and the float model as
    we write it.

    `has_other_float`: the float model is not the user's file, which has pairs or other inputs. `beats_given`: finalists
    must also be faster than the user's file. `is_rewritten`: the float model was rewritten or converted to another
    precision, and may ship without pairs.
    """

    given: Path | None
    has_other_float: bool = False
    beats_given: bool = False
    is_rewritten: bool = False


@dataclass(frozen=True)
class Raced:
    """The result of races between files, and the number of builds made. `given_to_float` compares the user's file with
    the float model if they differ; `field.given` is None if the engine does not run the user's file."""

    attempts: tuple[Attempt, ...]
    builds: int
    field: Field
    given_to_float: Compared | None = None
    notes: tuple[str, ...] = ()


def race_finished(queue: Finalists, field: Field, history: Sequence[Trial], run: Run) -> Raced:
    """Write the files of finalists and race them against the user's file and, if that differs, the float model. A file
    that the engine does not run even alone is left out.

    Raises:
        BaselineFailed: the engine fails on the files, and none of them is to blame.
    """
    attempts: list[Attempt] = []
    notes: list[str] = []
    builds, given_to_float, is_known = 0, None, not (field.is_rewritten or field.has_other_float)
    ratios = ratios_to_float(history, run.settings.plan)

    while True:
        placements = queue.next(attempts)
        ratio = max((ratios.get(placement, HOPED_RATIO) for placement in placements), default=HOPED_RATIO)
        if not run.budget.provable(1, ratio):
            run = replace(run, budget=run.budget.in_haste, racer=replace(run.racer, builds=FEWEST_BUILDS))
        asked, placements = placements, placements[: run.budget.provable(len(placements), ratio)]
        races_alone = not is_known and field.given is not None and run.budget.provable(1)
        if asked and not placements and not attempts:
            best = ratios.get(asked[0])
            speed = "" if best is None else f" ({1 / best:.2f}x the speed of float in the search)"
            notes.append(f"{TOO_SHORT} to prove the best candidate{speed}")
        if not (placements or races_alone):
            return Raced(tuple(attempts), builds, field, given_to_float, tuple(notes))
        try:
            raced = _raced(placements, field, run)
        except EngineRefused as refused:
            run.given.check()
            is_over = refused.is_transient and run.budget.lacks(0.0)
            placement_of = {unproven_file(placement, run): placement for placement in placements}
            opponents = [] if field.given is None else [field.given]
            failed = {} if is_over else run.racer.refused([*placement_of, *opponents])
            is_given_lost = any(failed.pop(file, None) is not None for file in opponents)
            if is_given_lost and refused.is_transient:  # nothing runs now: the next session tries again
                failed, is_given_lost = {}, False
            for file, failure in failed.items():
                edges = f"a candidate of {len(placement_of[file])} edges"
                notes.append(f"{edges} did not run as a finished file: {failure.reason}")
            lost = [placement_of[file] for file in failed]
            queue = replace(queue, placements=tuple(p for p in queue.placements if p not in lost))
            if failed:
                continue
            if not is_given_lost:
                raise BaselineFailed(f"the engine failed on the finished files: {refused}") from refused
            name = run.settings.model.name
            notes.append(f"the engine does not run {name} as it is, so it was not compared: {refused}")
            field = replace(field, given=None)
            continue
        run.given.check()
        is_known = True
        builds, given_to_float = builds + raced.builds, raced.given_to_float or given_to_float
        judged = [_within_limits(attempt, history, run) for attempt in raced.attempts]
        is_near = any(attempt.verdict in ("ships", "misses the limits") for attempt in judged)
        floats = _float_file(run) if is_near else None
        if floats is not None and not floats.holds:  # outputs with pairs were compared with those of this model
            told = f"without its pairs {_float_limits(run).why_refused(floats)}"
            judged = [one if one.missed is not None else replace(one, missed=told) for one in judged]
            queue = Finalists()
        attempts += judged


def _raced(placements: Sequence[Placement], field: Field, run: Run) -> Raced:
    """Race the files of placements, at least the first ones that fit into memory together. Raises EngineRefused if the
    engine fails on one of the files."""
    opponents = [] if field.given is None else [field.given]
    if not opponents or field.has_other_float or field.is_rewritten:
        opponents.append(run.settings.output_dir / BASELINE)
    given, baseline = 0, len(opponents) - 1  # the same where there is one opponent
    floats = baseline if field.has_other_float else given
    fitting = run.racer.together(opponents, [unproven_file(placement, run) for placement in placements])
    finalists = range(len(opponents), len(opponents) + len(fitting))
    comparisons = [(a, finalist) for finalist in finalists for a in range(len(opponents))]
    if given != baseline:
        comparisons.append((given, baseline))
    race = run.racer.race([*opponents, *fitting], comparisons, "final")

    def to_float(placement: Placement, place: int) -> tuple[Compared, ...]:
        """How the file compares with float, here or in an earlier session; kept if it is proven faster."""
        key = proof_key(placement)
        earlier = run.store.get(key, tuple[Compared, ...])
        best = shipping.narrower(race.compared(floats, place), earlier)
        return run.store.put(key, best) if is_proven(best) and best != earlier else best

    places = dict(zip(placements, finalists, strict=False))
    attempts = [
        Attempt(
            placement,
            to_float(placement, finalist),
            to_given=race.compared(given, finalist) if given != floats else (),
            must_beat_given=field.beats_given,
            to_rewritten=race.compared(baseline, finalist) if field.is_rewritten and baseline != floats else (),
            to_rivals={other: race.compared(at, finalist) for other, at in places.items() if at != finalist},
            nbytes=nbytes(unproven_file(placement, run)),
        )
        for placement, finalist in places.items()
    ]
    if field.is_rewritten and floats != baseline:
        attempts.append(Attempt(Placement(), to_float(Placement(), baseline)))
    given_to_float = race.compared(baseline, given)[0] if given != baseline else None
    return Raced(tuple(attempts), race.builds, field, given_to_float)


def _given_file(run: Run) -> tuple[Trial | None, Score | None]:
    """The accuracy of the user's own Q/DQ file as a trial judged by the limits, and the user's metric of it; both None
    for a float model. No trial of the search stands for that file, as its pairs may be placed where ours cannot."""
    settings, own = run.settings, run.subject.imported
    if own is None or not settings.from_qdq:
        return None, None
    untimed = Trial(0, Proposal("imported", own.placement), Placement(), UNTIMED)
    try:
        accuracy, metric = run.bench.given_file(settings.model, fixed_inputs(settings.model, settings.fix_inputs))
    except EngineRefused:
        return replace(untimed, holds=False), None
    trial = replace(untimed, accuracy=accuracy, holds=run.limits.on_outputs(accuracy))
    if metric is None:
        return replace(trial, holds=trial.holds is True), None
    return run.limits.with_metric(trial, lambda _: metric), metric


def _float_file(run: Run) -> Trial | None:
    """The accuracy of the float model in half precision, if the user did not ask for that, as a judged trial; else
    None. The user's metric cannot show it, since the metric to compare with was computed in half precision too."""
    settings = run.settings
    if run.subject.precision in ("fp32", settings.precision):
        return None
    untimed = Trial(0, Proposal("half precision", Placement()), Placement(), UNTIMED)
    fixed = fixed_inputs(settings.model, settings.fix_inputs)
    try:
        accuracy = run.bench.float_file(settings.output_dir / BASELINE, settings.model, fixed)
    except EngineRefused:
        return replace(untimed, holds=False)
    return replace(untimed, accuracy=accuracy, holds=_float_limits(run).is_exact_enough(accuracy))


def _float_limits(run: Run) -> Limits:
    return run.settings.floor if run.settings.has_metric else run.limits


def _within_limits(attempt: Attempt, history: Sequence[Trial], run: Run) -> Attempt:
    """The attempt; marked as missing the limits if it might ship and misses them, or its accuracy was not measured. The
    user's metric is computed here for candidates that were not faster in the search."""
    if attempt.verdict not in ("ships", "pairs do not pay"):
        return attempt
    trial = trial_of(attempt.placement, history) if attempt.placement else _float_file(run)
    if trial is None:
        return replace(attempt, missed="its accuracy was not measured") if attempt.placement else attempt
    trial = run.limits.with_metric(trial, run.bench.metric)
    if trial.holds:
        return replace(attempt, trial=trial)
    limits = run.limits if attempt.placement else _float_limits(run)
    return replace(attempt, trial=trial, missed=limits.why_refused(trial) or "")


def trial_of(placement: Placement, history: Sequence[Trial]) -> Trial | None:
    """The trial of a placement that has an accuracy; None if there is none."""
    return next((t for t in history if t.placement == placement and t.accuracy is not None), None)


def proof_of(won: Attempt, notes: Sequence[str], builds: int) -> Proof:
    """The proof of a tuned file, with the figures of the condition that is shown first."""
    best = first_faster(won.to_float)
    return Proof(
        shipped="tuned",
        ratio=best.ratio,
        to_given=won.to_given[won.to_float.index(best)].ratio if won.to_given else None,
        to_rewritten=won.to_rewritten[won.to_float.index(best)].ratio if won.to_rewritten else None,
        float_seconds=best.a_seconds,
        final_seconds=best.b_seconds,
        notes=tuple(notes),
        builds=builds,
        contexts=won.to_float,
        in_file=won.placement,
        trial=won.trial,
    )


def unproven_file(placement: Placement, run: Run) -> Path:
    """The file of a placement that may ship, written at the first call. It moves to the output folder once it ships."""
    path = run.candidates.folder / placement.digest / FINAL
    if not path.exists():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        run.candidates.write_whole(placement, path)
    return path


def copy_model(source: Path, target: Path) -> None:
    """Copy a model and its external data to another folder or name.

    Raises:
        OutputError: it cannot be written.
    """
    with atomic_write(target) as fresh:
        shutil.copyfile(source, fresh)
        for place in data_files(source):
            data, copy = target.parent / place, fresh.parent / place
            if not (data.exists() and data.samefile(source.parent / place)):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.parent / place, copy)


def write_placement_of(placement: Placement, path: Path, run: Run) -> None:
    settings = run.settings
    engine, calibration = settings.engine.name, settings.calibration.chosen(run.subject.ranges)
    how = calibration, run.subject.rewrites, settings.portable
    recorded = files.PlacementFile(placement, settings.quant_type, engine, settings.fix_inputs, *how)
    files.write_placement(path, recorded, settings.model.name)


# ---------------------------------------------------------------- the points of a front


def prove_front(history: Sequence[Trial], run: Run) -> tuple[Proof, list[dict[str, Any]]]:
    """Race a file for each point of the front against the user's file, and name those that are proven faster and not
    beaten by another point. If none may ship, `prove` decides what does. Returns the proof, and a row of summary.json
    for each point, the fastest first."""
    folder = run.settings.output_dir / FRONT
    placements = _promising(history, run)
    queue = Finalists(placements, len(placements), are_points=True)
    raced = race_finished(queue, Field(run.settings.model), history, run)
    proven: dict[Placement, Attempt] = {}
    for attempt in raced.attempts:
        if is_proven(attempt.to_float):
            if run.settings.has_metric:
                assert attempt.trial is not None  # it may ship
                try:
                    metric = run.bench.metric(attempt.placement).value
                    attempt = replace(attempt, trial=replace(attempt.trial, metric=metric))
                except EngineRefused as refused:
                    attempt = replace(attempt, missed=attempt.missed or str(refused))
            proven[attempt.placement] = attempt
    tradeoffs = {p: Tradeoff(a.ratio.median, a.trial.exactness) for p, a in proven.items() if a.trial is not None}
    points = [proven[placement] for placement in unbeaten(tradeoffs)]
    with writing(folder):
        folder.mkdir(exist_ok=True)
    rows, models, stems = [], dict[Placement, Path](), Counter[str]()
    for point in points:
        placement, trial, shown = point.placement, point.trial, first_faster(point.to_float)
        assert trial is not None  # a point was measured
        stem = "exact" if trial.exactness == EQUAL_DB else f"{trial.exactness:.0f}db"
        stems[stem] += 1
        name = stem if stems[stem] == 1 else f"{stem}-{stems[stem]}"
        models[placement] = _named(placement, name, run)
        row = {
            "name": name,
            "file": f"{FRONT}/{models[placement].name}",
            "ratio": shown.ratio.median,
            "low": shown.ratio.low,
            "high": shown.ratio.high,
            "sqnr_db": trial.sqnr_db,
            "agreement": equal_share(trial.accuracy),
            "metric": trial.metric,
            "pairs": count_pairs(placement),
            "weights": dict(Counter(weight_format.name for weight_format in placement.weight_formats.values())),
            "baseline_ms": shown.a_seconds * 1e3,
            "ms": shown.b_seconds * 1e3,
            "holds_limits": point.missed is None,
            "by_threads": rows_by_threads(point.to_float),
        }
        rows.append(row)
    if not points:
        run.output.clear(FRONT)
    notes = raced.notes
    if len(points) < TARGET_POINTS:
        count = f"{len(points)} point{'s' * (len(points) != 1)}"
        tried = f"{len(placements)} candidate{'s' * (len(placements) != 1)}"
        short = "`time_budget`" if run.budget.is_late else f"`builds` {run.settings.builds}"
        notes = (*notes, f"the front has {count} of {tried}: {short} has no room for others: give more")
    if (won := shipping.shipped(points)) is not None:
        run.given.check()
        copy_model(models[won.placement], run.settings.output_dir / FINAL)
        proof = proof_of(won, notes, raced.builds)
    else:
        proof = prove(history, run)
        told = "what ships is no point of the front: it was proven as without `front`, on more pairs of builds"
        apart = (told,) if proof.shipped == "tuned" else ()
        notes = tuple(dict.fromkeys([*proof.notes, *notes, *apart]))
        proof = replace(proof, builds=proof.builds + raced.builds, notes=notes)
    for row, point in zip(rows, points, strict=True):
        row["shipped"] = point.placement == proof.placement
    return proof, rows


def _promising(history: Sequence[Trial], run: Run) -> tuple[Placement, ...]:
    """The placements of the search that may become points of the front, the best among them, as time allows."""
    most = run.limits.max_noise
    points = undominated(history, run.settings.plan)
    able = {p: point for p, point in points.items() if not is_too_noisy(noise_of(point.db), most)}
    best = [p for p in able if p == best_of(history)]
    others = {p: point for p, point in able.items() if p not in best}
    placements = (*best, *spread(others, run.budget.points - len(best)))
    return placements[: run.budget.provable(len(placements))]


def _named(placement: Placement, name: str, run: Run) -> Path:
    """Move a raced placement's file to the front's folder, under `name`, and write its placement beside it."""
    raced, file = unproven_file(placement, run), run.output.claim(run.settings.output_dir / FRONT / f"{name}.onnx")
    if data_of(raced).exists():  # its constants lie in a file named after it: both are written again
        run.output.claim(data_of(file))
        run.candidates.write_whole(placement, file)
    else:
        with writing(file):
            raced.replace(file)
    write_placement_of(placement, run.output.claim(file.with_suffix(".yaml")), run)
    return file
