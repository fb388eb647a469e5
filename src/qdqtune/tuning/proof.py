"""The proof: files that may ship are compared with the user's own on fresh builds, in each context.

`shipping` decides what is compared next, and what ships.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qdqtune.calibration.inputs import fixed_inputs
from qdqtune.errors import BaselineFailed, EngineRefused, Failure, rewording, writing
from qdqtune.graph.loading import data_files, load
from qdqtune.graph.saving import data_of
from qdqtune.numerics.label_metrics import Score
from qdqtune.search import best_of
from qdqtune.system.writing import atomic_write, rename_all
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning import shipping
from qdqtune.tuning.comparison import Comparer, ComparisonRequest
from qdqtune.tuning.contexts import Context, open_contexts
from qdqtune.tuning.folder import BASELINE, FINAL
from qdqtune.tuning.records import Shipped
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import (
    CHANGES_ALONE,
    Attempt,
    Compared,
    InContext,
    Terms,
    first_faster,
    is_slower,
    notes_of,
)
from qdqtune.types import Placement, Proposal, Trial


@dataclass(frozen=True)
class Proof:
    """What ships ("tuned", "baseline", or "given": a copy of the user's file), and how it compares.

    `placement` is that of the tuned model, else empty. `in_file` are the pairs and weight formats of the file that
    ships, those of the user included; `trial` is what was measured of exactly these, None if nothing was. Where the
    user's Q/DQ file ships, that was measured on the file itself, and `metric` is the user's metric of it.

    `ratio` is the final file's to the float model, `to_given` that to the user's file where this has pairs already, or
    inputs that were fixed; both None where nothing is proven. Seconds per inference are medians, those of the final
    file None if nobody has timed it; both None where nothing is timed. `contexts` has the comparison with the float
    model in each context.
    """

    shipped: Shipped
    placement: Placement
    ratio: Ratio | None = None
    to_given: Ratio | None = None
    float_seconds: float | None = None
    final_seconds: float | None = None
    notes: tuple[str, ...] = ()
    builds: int = 0
    contexts: tuple[Compared, ...] = ()
    in_file: Placement = field(default_factory=Placement)
    trial: Trial | None = None
    metric: Score | None = None

    @property
    def candidate(self) -> Trial | None:
        """The trial of the search whose placement ships; None if none does."""
        return self.trial if self.shipped == "tuned" else None

    @property
    def time_to_float(self) -> float | None:
        """The time of what ships over that of the float model, proven or not; None if nobody has timed it."""
        if self.ratio is not None:
            return self.ratio.median
        if self.final_seconds is None or self.float_seconds is None:
            return None
        return self.final_seconds / self.float_seconds


def chosen_by_rule(history: Sequence[Trial], run: Run) -> Proof:
    """What ships where nothing is timed: the cheapest placement by rule that holds the limits, or the float model."""
    folder, placement = run.settings.output_dir, best_of(history)
    if run.settings.withholds_pairs:
        placement = Placement()
    run.candidates.write_whole(Placement(), folder / BASELINE)
    run.candidates.write_whole(placement, folder / FINAL)
    run.given.check()
    trial = _trial_of(placement, history)
    shipped: Shipped = "tuned" if placement else "baseline"
    return Proof(shipped, placement, in_file=placement, trial=trial)


def prove(history: Sequence[Trial], run: Run) -> Proof:
    """Write the files that may ship, and compare them as they lie on disk, until one proves itself.

    First come the placements of the search, then the float model as we write it, which can prove itself only where it
    was rewritten. If no file does, that float model ships anyway, or the user's file where that is faster."""
    settings, folder = run.settings, run.settings.output_dir
    run.candidates.write_whole(Placement(), folder / BASELINE)
    given, metric = _given_file(run)
    pairs_hold = given is not None and given.holds is True
    is_rewritten = bool(run.subject.changes)
    terms = Terms(pairs_hold or _is_folded(run), is_rewritten, run.found.ratio)
    is_bounded = settings.time_budget is not None
    slower, tries_float = run.slower(history), not _is_folded(run)
    queue = shipping.finalists(history, settings.plan, is_bounded=is_bounded, tries_float=tries_float, slower=slower)
    if settings.withholds_pairs:  # rewrites are exact, and so is what the user asks for by name; half precision is not
        is_exact = run.subject.precision in ("fp32", settings.precision)
        queue = shipping.Finalists(tries_float=tries_float and is_exact)
    if run.budget.lacks_proof(history, settings.plan):
        queue = shipping.Finalists(tries_float=False)
    attempts: list[Attempt] = []
    with open_contexts(settings.thread_counts, run.runner, run.subject.mix) as contexts:
        while True:
            lacks_time = run.budget.lacks(attempts[-1].seconds if attempts else 0.0)
            if (placement := shipping.next_finalist(queue, attempts, lacks_time=lacks_time)) is None:
                break
            attempts.append(_within_limits(_attempt(placement, contexts, run, terms), history, run))
            if attempts[-1].verdict not in ("ships", "pairs do not pay"):
                shutil.rmtree(_unproven(placement, run).parent)  # a whole model, which is not needed any more
    told = settings.model.name, run.subject.changes
    notes = list(dict.fromkeys(note for attempt in attempts for note in notes_of(attempt, *told)))
    if given is not None and given.accuracy is not None and not pairs_hold:
        notes.append(f"{settings.model.name} does not hold the limits on accuracy: {run.limits.why_refused(given)}")
    builds = sum(attempt.builds for attempt in attempts)
    if (won := shipping.shipped(attempts)) is not None:
        _move(_unproven(won.placement, run), folder / FINAL)
        notes += [] if won.placement else [CHANGES_ALONE.format(run.subject.changes)]
        trial = _trial_of(won.placement, history)
        return _proof(won, trial, tuple(notes), builds, has_given=settings.from_qdq or _is_folded(run))
    is_given = shipping.keeps_given(attempts, terms, from_qdq=settings.from_qdq, pairs_hold=pairs_hold)
    copy_model(settings.model if is_given else folder / BASELINE, folder / FINAL)
    seconds = attempts[-1].to_float[0].a_seconds if attempts else run.bench.floats.seconds
    unproven = Proof("given" if is_given else "baseline", Placement(), notes=tuple(notes), builds=builds)
    if not is_given:
        return replace(unproven, float_seconds=seconds, final_seconds=seconds)
    ratio = shipping.given_to_float(attempts)
    if given is None:
        if not attempts:  # the float build is that of the rewritten model
            seconds /= run.found.ratio
        return replace(unproven, float_seconds=seconds, final_seconds=seconds * (ratio or 1.0))
    own_seconds = None if ratio is None else ratio * seconds
    return replace(
        unproven,
        float_seconds=seconds,
        final_seconds=own_seconds,
        in_file=given.placement,
        trial=given,
        metric=metric,
    )


def _given_file(run: Run) -> tuple[Trial | None, Score | None]:
    """What the user's own file with pairs does to the outputs, judged by the limits, and the user's metric of it; both
    None for a float model. Pairs may have no counterpart in the float model, so that no candidate is the same."""
    settings, own = run.settings, run.subject.imported
    if own is None or not settings.from_qdq:
        return None, None
    untimed = Trial(0, Proposal("imported", own.placement), Placement(), Failure("run", "not timed"))
    try:
        accuracy, metric = run.bench.given_file(settings.model, fixed_inputs(settings.model, settings.fix_inputs))
    except EngineRefused:
        return replace(untimed, holds=False), None
    trial = replace(untimed, accuracy=accuracy, holds=run.limits.on_outputs(accuracy))
    if metric is None:
        return replace(trial, holds=trial.holds is True), None
    return run.limits.with_metric(trial, lambda _: metric), metric


def _within_limits(attempt: Attempt, history: Sequence[Trial], run: Run) -> Attempt:
    """The attempt, refused if it might ship and misses the limits: the search computes the user's metric only of
    candidates that were faster there."""
    trial = _trial_of(attempt.placement, history)
    if trial is None or attempt.verdict not in ("ships", "pairs do not pay"):
        return attempt
    trial = run.limits.with_metric(trial, run.bench.metric)
    return shipping.within_limits(attempt, trial, run.limits.why_refused(trial))


def _trial_of(placement: Placement, history: Sequence[Trial]) -> Trial | None:
    return next((t for t in history if t.placement == placement and t.accuracy is not None), None)


def _proof(won: Attempt, trial: Trial | None, notes: tuple[str, ...], builds: int, *, has_given: bool) -> Proof:
    """The proof of what ships; `has_given` if its ratio to the user's file is another one than that to float."""
    best = first_faster(won.to_float)
    return Proof(
        shipped="tuned",
        placement=won.placement,
        ratio=best.ratio,
        to_given=won.contexts[won.to_float.index(best)].to_given if has_given else None,
        float_seconds=best.a_seconds,
        final_seconds=best.b_seconds,
        notes=notes,
        builds=builds,
        contexts=won.to_float,
        in_file=won.placement,
        trial=trial,
    )


def _attempt(placement: Placement, contexts: Sequence[Context], run: Run, terms: Terms) -> Attempt:
    """Compare the file of a placement in one context after the other, until it is slower in one, or there is no time
    for another one in which it might win. A float model that is the user's is compared in the first only."""
    begun, found = time.monotonic(), list[InContext]()
    _unproven(placement, run)
    for number, context in enumerate(contexts if placement or terms.is_rewritten else contexts[:1]):
        is_won = any(one.to_float.ratio.verdict == "faster" for one in found)
        if number and not is_won and run.budget.lacks((time.monotonic() - begun) / number):
            break
        found.append(_compared(placement, run, context, is_won=is_won))
        if is_slower(found[-1].to_float):
            break
    seconds = time.monotonic() - begun
    run.given.check()
    verdict = shipping.verdict_of(placement, found, terms)
    attempt = Attempt(placement, tuple(found), verdict, seconds=seconds)
    if not shipping.may_owe_it_to_rewrites(attempt, terms) or run.budget.lacks(seconds):
        return attempt
    context = contexts[attempt.to_float.index(first_faster(attempt.to_float))]
    files = run.settings.output_dir / BASELINE, _unproven(placement, run)
    with rewording(*FAILED):
        alone = Comparer.of(run).compare(ComparisonRequest(f"alone:{placement.digest}", *files, context))
    return shipping.with_comparison_without_pairs(attempt, alone)


def _compared(placement: Placement, run: Run, context: Context, *, is_won: bool) -> InContext:
    """Compare the file of a placement with the user's own; and with the float model as we write it where the user's is
    another: it has pairs, its inputs were not fixed, or the engine does not run it. `is_won`: in another context it was
    faster, and here it need only be not slower."""
    settings, final, comparer = run.settings, _unproven(placement, run), Comparer.of(run)
    asked = ComparisonRequest(f"given:{placement.digest}", settings.model, final, context)
    given: Compared | Failure
    try:
        given = comparer.compare(asked, only_not_slower=is_won)
    except EngineRefused as refused:
        given = refused.failure
    else:
        if not settings.from_qdq and not _is_folded(run):
            return InContext(given)
    asked = replace(asked, key=f"proof:{placement.digest}", a=settings.output_dir / BASELINE)
    with rewording(*FAILED):
        return InContext(given, comparer.compare(asked, only_not_slower=is_won))


FAILED = "the engine failed on the finished files", BaselineFailed


def _is_folded(run: Run) -> bool:
    """Whether the search's float model is the user's with inputs fixed, and no other rewrite. What that gains must not
    be reported as a gain of the pairs."""
    return bool(run.settings.fix_inputs) and not run.subject.rewrites.names


def _unproven(placement: Placement, run: Run) -> Path:
    """The file of a placement that may ship, written once. It moves to the output folder when it has proven itself."""
    path = run.candidates.folder / placement.digest / FINAL
    if not path.exists():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        run.candidates.write_whole(placement, path)
    return path


def _move(source: Path, target: Path) -> None:
    with writing(target):
        both = [(data_of(source), data_of(target)), (source, target)]
        rename_all([(old, new) for old, new in both if old.exists()], source.with_name("replaced"))


def copy_model(source: Path, target: Path) -> None:
    """Copy a model to another folder or name, and the external data that it refers to. The copy is loaded before it
    gets its name.

    Raises:
        BadModel: it cannot be loaded.
        OutputError: it cannot be written.
    """
    data = data_files(source)
    missing = [
        p for p in data if not ((target.parent / p).exists() and (target.parent / p).samefile(source.parent / p))
    ]
    with atomic_write(target) as fresh:
        shutil.copyfile(source, fresh)
        for place in missing:
            copy = fresh.parent / place
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / place, copy)
        if len(missing) == len(data):  # else the others lie beside the target
            load(fresh)
